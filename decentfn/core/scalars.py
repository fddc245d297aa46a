"""Step numbers, the definition of operators, numbers that compiled code reads, and two operators that store a result."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from decentfn.core.arguments import brief, require_numbers_on_cpu
from decentfn.core.context import context
from decentfn.core.handles import by_handle, handle_of
from decentfn.torch_private import functorch

_library = torch.library.Library("decentfn", "FRAGMENT")

kernels: dict[Any, Any] = {}
"""Kernel of each operator that `operator` has defined."""


BUFFERS = (torch.Tag.flexible_layout,)
"""Tags of an operator that compiled code calls with its own buffers: by default Inductor makes a copy for each call."""


def operator(schema: str, kernel: Any, fake: Any, vmap: Any, tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Define an operator of this library by its kernel for every device, its fake kernel, and its `vmap` rule.

    In place of a rule, it may be the names of the arguments that have a row for each worker: the operator is then called
    once, with all rows first, and so are its results. If it has an argument `workers`, that is 0 for one worker alone.
    """
    name, _, rest = schema.partition("(")
    _library.define(schema, tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"decentfn::{name}", fake, lib=_library)
    defined = getattr(torch.ops.decentfn, name).default
    names = [argument.split()[-1] for argument in rest[: rest.index(")")].split(",")]
    rule = _of_all_workers(defined, names, vmap) if isinstance(vmap, tuple) else vmap
    functorch.add_rule(name, rule, _library)
    kernels[defined] = kernel
    return defined


def _of_all_workers(operator: Any, names: list[str], with_rows: tuple[str, ...]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
        def rows(x: Any, dim: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [rows(one, its_dim) for one, its_dim in zip(x, dim, strict=True)]
            return None if x is None else functorch.with_workers_first(x, dim, info.batch_size)

        its = {name: rows(x, dim) for name, x, dim in zip(names, given, in_dims, strict=True) if name in with_rows}
        its |= {"workers": info.batch_size} if "workers" in names else {}
        out = operator(*(dict(zip(names, given, strict=True)) | its).values())
        return out, [0] * len(out) if isinstance(out, list) else 0

    return rule


def as_step(t: int | Tensor) -> Tensor:
    """Convert a user's step number to 0-d int64 on the CPU; raise ValueError unless it is one integer, >= 0."""
    if isinstance(t, torch.Tensor):
        if t.dim() == 0 and not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool):
            step = t.to("cpu", torch.int64)
            if functorch.has_no_value(step) or step >= 0:
                return step
    elif isinstance(t, (int, Integral)) and not isinstance(t, bool) and 0 <= int(t) < 2**63:
        step = torch.scalar_tensor(int(t), dtype=torch.int64)  # two thirds of the time of `torch.tensor`
        if not step.is_cpu:
            require_numbers_on_cpu(f"step(state, batch, t={t})")
        return step
    raise ValueError(
        f"step(state, batch, t={brief(t)}): the third argument numbers the steps, from 0; pass an int, or a 0-d tensor of integers."
    )


def of_step(function: Callable[[Tensor, torch.device], Tensor], t: Tensor, device: torch.device) -> Tensor:
    """Return `function(t, device)`. Kernels call it: a recorded step does not run their Python code again, but reads from memory."""
    return function(t, device) if context.inputs is None else context.inputs.read(function, t, device)


def number_on(t: Tensor, device: torch.device) -> Tensor:
    """Return t, 0-d int64, on a device."""
    return torch.scalar_tensor(int(t), dtype=torch.int64, device=device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy `x` from the CPU to a device without waiting; in kernels only, as Inductor would reuse the memory."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


_once = operator(
    "once(Tensor x) -> Tensor", torch.clone, torch.empty_like, lambda info, in_dims, x: (once(x), in_dims[0])
)


def once(x: Tensor) -> Tensor:
    """Return `x`, which compiled code stores: Inductor would compute a scalar (a power, a look-up) again for every element."""
    return _once(x) if torch.compiler.is_dynamo_compiling() else x


rounded = operator(
    "rounded(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: x.to(dtype, copy=True),
    lambda x, dtype: torch.empty_like(x, dtype=dtype),
    lambda info, in_dims, x, dtype: (rounded(x, dtype), in_dims[0]),
)
"""Operator `(x, dtype)` -> `x` in a narrower dtype: every reader gets the same numbers, also in compiled code.

Otherwise Inductor would use the unrounded values if it finds them in a register.
"""


class Numbers:
    """Numbers of a configuration, an input of compiled code: Python numbers would be constants of its graph."""

    def __init__(self, *values: float) -> None:
        self._values = torch.tensor(values, dtype=torch.float64)
        self._there = dict[torch.device, Tensor]()
        self._handle = handle_of(self)

    def __repr__(self) -> str:
        return f"Numbers{tuple(self._values.tolist())}"

    def on(self, token: Tensor) -> tuple[Tensor, ...]:
        """Return the numbers, each 0-d float64 on the token's device; compute with them, as they may be views."""
        return self.vector(token).unbind()

    def vector(self, token: Tensor) -> Tensor:
        """Return the numbers as a vector, float64 on the token's device; compute with it, it is not a copy."""
        is_here = token.device.type == "cpu"
        return self._values if is_here else _numbers(token, self._handle, len(self._values))

    def there(self, device: torch.device) -> Tensor:
        """Return the numbers on a device."""
        if device not in self._there:
            self._there[device] = sent(self._values, device)
        return self._there[device]


_numbers = operator(
    "numbers(Tensor token, Tensor handle, int count) -> Tensor",
    lambda token, handle, count: by_handle(handle).there(token.device).clone(),
    lambda token, handle, count: token.new_empty((count,), dtype=torch.float64),
    lambda info, in_dims, token, handle, count: (_numbers(token.select(in_dims[0], 0), handle, count), None),
)
