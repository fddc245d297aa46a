"""Checks of the numbers that users pass, driven by the annotations of the function that takes them; values in messages."""

from __future__ import annotations

import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, wraps
from itertools import zip_longest
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
T = TypeVar("T")

Rule = Callable[[str, str, Any], object]
"""`(call, name, value)`: raises ValueError for a value out of its range."""

MOST_WORKERS = 2**20
"""Largest number of workers in a topology, and the limit of other counts that are enumerated."""


def _of_torch_optim(value: Any) -> str | None:
    """Return what to do instead of passing an argument of torch.optim; None for any other value."""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return (
            f"found torch's {type(value).__name__}; a schedule here is a function of the count of updates, such as "
            "df.schedules.cosine(0.1, 1000); df.from_torch(make_optimizer, make_scheduler) takes torch's."
        )
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    if inspect.isgenerator(value) or isinstance(first, (torch.Tensor, dict)):
        return "found parameters, which init(params) takes; give the optimizer its rate alone, as df.sgd(0.1) does."
    return None


def real(call: str, name: str, value: Any) -> float:
    """Return a finite real number as a Python number, or raise a ValueError that names the call."""
    if isinstance(value, torch.Tensor):
        raise ValueError(
            f"{call}({name}={brief(value)}): {name} is one number for the whole run; later changes of the tensor "
            f"would be ignored; pass float({name}), or a function of t if one is accepted."
        )
    if not isinstance(value, Real) or isinstance(value, bool):
        hint = _of_torch_optim(value) or f"found {type(value).__name__}."
        raise ValueError(f"{call}({name}={brief(value)}): {name} is a number; {hint}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    require(math.isfinite(number), call, f"{name} is a finite number.", **{name: value})
    return value if type(value) is int and abs(value) < 2**53 else number


def whole_number(call: str, name: str, value: Any) -> int:
    """Return an integer (or a 0-d integer tensor) as a Python int, or raise a ValueError that names the call."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    require(is_integer, call, f"{name} is an integer; found {type(value).__name__}.", **{name: value})
    return int(value)


def at_least(call: str, name: str, value: Any, least: int) -> int:
    """Return an integer that is no smaller than `least`, or raise ValueError."""
    number = whole_number(call, name, value)
    require(number >= least, call, f"{name} is an integer >= {least}.", **{name: value})
    return number


def require_at_most(call: str, most: int, **counts: int) -> None:
    """Raise ValueError unless each count is in [1, most]."""
    for name, count in counts.items():
        require(1 <= count <= most, call, f"{name} is an integer >= 1, at most {most}.", **{name: count})


def require(holds: bool, call: str, rule: str, /, **values: Any) -> None:
    """Raise ValueError unless `holds`; the message is the call with these arguments, then the rule."""
    if not holds:
        given = ", ".join(f"{name}={brief(value)}" for name, value in values.items())
        raise ValueError(f"{call}({given}): {rule}" if given else f"{call}: {rule}")


def require_numbers_on_cpu(call: str) -> None:
    """Raise ValueError unless torch's default device is the CPU, where schedules and step numbers are made."""
    device = torch.empty(0).device
    rule = (
        f"torch's default device is {device}, and schedules and step numbers are made on the CPU, so that no GPU waits for them; call "
        "torch.set_default_device(None), or leave `with torch.device(...)`, and move the model by model.to(device)."
    )
    require(device.type == "cpu", call, rule)


def array(name: str, what: str, values: object, dtype: type = np.float64) -> np.ndarray:
    """Return a copy of `values` as an array of `dtype`, or raise a ValueError that names the invalid values."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: the {what} {brief(values)} are no array of numbers ({error}).") from None
    if dtype is np.int64 and not (numbers == numbers.astype(dtype)).all():
        raise ValueError(f"{name}: the {what} {brief(values)} are not all integers.")
    return numbers.astype(dtype)


def bind(function: Callable[..., Any], signature: inspect.Signature, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Bind arguments to a function's signature, with annotated numbers and booleans converted to Python's types.

    Raises:
        TypeError, ValueError: an argument, which is named, does not fit.
    """
    unknown = [name for name in kwargs if name not in signature.parameters]
    if unknown and inspect.Parameter.VAR_KEYWORD not in [p.kind for p in signature.parameters.values()]:
        known = list(signature.parameters)
        if known[0] == "learning_rate" and args and (hint := _of_torch_optim(args[0])):
            raise TypeError(f"{function.__name__}({brief(args[0])}, {unknown[0]}=...): {hint}")
        raise TypeError(no_such_argument(function.__name__, unknown[0], known))
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        function(*args, **kwargs)
        raise
    for name, value in bound.arguments.items():
        p = signature.parameters[name]
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            bound.arguments[name] = _plain(function.__name__, name, _kinds_in(str(p.annotation)), value)
    return bound


def no_such_argument(call: str, name: str, known: Sequence[str]) -> str:
    """Return the message about an unknown argument, with the known ones and the most similar one."""
    near = "".join(f"write {match}=; " for match in get_close_matches(name, known, n=1))
    return f"{call}({name}=...): there is no such argument; {near}there are {', '.join(known)}."


def checks_numbers(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: its `int`, `float`, `bool` and `torch.dtype` arguments are checked, and become Python's types."""
    return checks_arguments({})(function)


def checks_arguments(rules: Mapping[str, Rule]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate as `checks_numbers` does; arguments whose names have a rule are checked by it, too."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if torch.compiler.is_dynamo_compiling():  # which warns of @cache
                return function(*args, **kwargs)
            bound = bind(function, signature, args, kwargs)
            require_by(rules, function.__name__, bound.arguments)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def require_by(rules: Mapping[str, Rule], call: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError unless the arguments of a call whose names have a rule keep it."""
    for name, value in arguments.items():
        if name in rules:
            rules[name](call, name, value)


def rule_of(holds: Callable[[Any], bool], text: str) -> Rule:
    """Return the rule of an argument `name`: unless its value `holds`, `name text` is raised as ValueError."""
    return lambda call, name, value: require(holds(value), call, f"{name} {text}", **{name: value})


@cache
def _kinds_in(annotation: str) -> frozenset[str]:
    kinds = {part.strip() for part in re.sub(r"\[.*\]", "", annotation).split("|")}
    return frozenset(kinds | {"float", "Callable"} if "Scalar" in kinds else kinds)


def _plain(call: str, name: str, kinds: frozenset[str], value: Any) -> Any:
    if "torch.dtype" in kinds and not (value is None and "None" in kinds):
        require(isinstance(value, torch.dtype), call, f"{name} is a torch.dtype.", **{name: value})
    numbers = kinds & {"int", "float", "bool"}
    if not numbers or (value is None and "None" in kinds) or (callable(value) and "Callable" in kinds):
        return value
    is_number = isinstance(value, (Real, torch.Tensor)) and not ("Sequence" in kinds and getattr(value, "ndim", 0))
    if not is_number and kinds - {"int", "float", "bool", "None", "Callable"}:
        return value  # other accepted types are checked by the function
    if "bool" in kinds:
        require(type(value).__name__ in ("bool", "bool_"), call, f"{name} is True or False.", **{name: value})
        return bool(value)
    if "int" not in kinds:
        return real(call, name, value)
    number = whole_number(call, name, value)
    is_exact = name == "seed" or abs(number) < 2**53  # only a seed's low bits are used
    require(is_exact, call, f"{name} is an integer below 2^53.", **{name: value})
    return number


# -- messages: values and errors in them, and warnings at the user's line ----------------------------------------------

log = logging.getLogger("decentfn")
_LONGEST, _LONGEST_ERROR = 60, 300


def brief(value: object) -> str:
    """Return a value's repr on one line without addresses, truncated if it is long, such as a module's.

    >>> brief("ring"), brief(list(range(100)))
    ("'ring'", '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16...')
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def brief_error(error: BaseException) -> str:
    r"""Return an error's type and the first line of its message, with the next line if the first ends in a colon.

    >>> brief_error(KeyError("labels"))
    "KeyError: 'labels'"
    >>> brief_error(RuntimeError("the backend raised:\nValueError: no kernel\n\nand a page more"))
    'RuntimeError: the backend raised: ValueError: no kernel'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    first = first if len(first) <= _LONGEST_ERROR else f"{first[: _LONGEST_ERROR - 3]}..."
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, Any]:
    """Return the first elements in which two unequal lists differ; "nothing" is where one has ended."""
    return next(pair for pair in zip_longest(one, other, fillvalue="nothing") if pair[0] != pair[1])


def warn(message: str) -> None:
    """Warn with the line of the user's call, the first that is neither in this package nor in a decorator."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] in ("decentfn", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
