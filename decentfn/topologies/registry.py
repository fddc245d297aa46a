"""Topologies by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar

from decentfn.core import (
    MOST_WORKERS,
    brief,
    checks_arguments,
    require,
    require_at_most,
    require_numbers_on_cpu,
    rule_of,
    whole_number,
)
from decentfn.topologies.rounds import Topology, noted

_registry: dict[str, Callable[..., Topology]] = {}
_is_count = rule_of(lambda x: x is None or 1 <= x <= MOST_WORKERS, f"is an integer >= 1, at most {MOST_WORKERS}.")
RULES = dict.fromkeys(("k", "p", "M"), _is_count) | {"eta": rule_of(lambda eta: 0 < eta <= 1, "lies in (0, 1].")}
"""Rules of the options of this library's topologies, by their names; `register_topology` checks them."""
Function = TypeVar("Function", bound=Callable[..., Topology])


def register_topology(name: str) -> Callable[[Function], Function]:
    """Decorate a function `(num_workers, **options) -> Topology` so that `topology(name, ...)` finds it.

    Raises:
        ValueError: the name is taken by another function.

    >>> @register_topology("pairs")
    ... def pairs(num_workers):
    ...     from decentfn.topologies import Edge, from_groups
    ...     edges = [Edge([i, i + 1]) for i in range(0, num_workers, 2)]
    ...     return from_groups("pairs", [edges], num_workers)
    >>> topology("pairs", num_workers=4).degree
    1
    """
    rule = 'the name comes first: @register_topology("mine").'
    require(isinstance(name, str), f"register_topology({brief(name)})", rule)

    def register(function: Function) -> Function:
        known, call = _registry.get(name), function.__name__
        names = [*inspect.signature(function).parameters][1:]
        is_own = function.__module__.startswith("decentfn.topologies.")
        checked = checks_arguments(RULES if is_own else {})(function)
        if known is not None and known.__qualname__ != function.__qualname__:
            raise ValueError(
                f"register_topology({name!r}): the name belongs to {known.__module__}.{known.__qualname__}; choose "
                "another."
            )

        @wraps(function)
        def make(num_workers: int, *args: Any, **options: Any) -> Topology:
            num_workers = whole_number(call, "num_workers", num_workers)
            require_at_most(call, MOST_WORKERS, num_workers=num_workers)
            require_numbers_on_cpu(call)
            made = checked(num_workers, *args, **options)
            rule = f"the function returned {brief(made)}; expected a topology of num_workers={num_workers}."
            is_right = isinstance(made, Topology) and made.num_workers == num_workers
            require(is_right, f"topology({name!r}, {num_workers})", rule)
            return noted(made, family=partial(topology, name, **dict(zip(names, args, strict=False)), **options))

        _registry[name] = make
        return make  # pyright: ignore[reportReturnType]

    return register


def topology_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_registry)


def of_size(num_workers: int, local_world_size: int | None = None) -> dict[str, Topology]:
    """Make every registered topology of this size, by name; families of nodes only with `local_world_size`."""
    found: dict[str, Topology] = {}
    for name in topology_names():
        takes_nodes = "local_world_size" in inspect.signature(_registry[name]).parameters
        options = {"local_world_size": local_world_size} if takes_nodes and local_world_size is not None else {}
        with suppress(TypeError, ValueError):  # another option is missing, or there is none of this size
            found[name] = topology(name, num_workers, **options)
    return found


def topology(name: str, num_workers: int, **options: Any) -> Topology:
    """Make the topology registered as `name`.

    Args:
        name: one of `topology_names()`.
        num_workers: N, at least 1. For N = 1 every name gives the identity.
        options: the named topology's own keyword arguments.

    Raises:
        ValueError: an unknown name, or a size that the topology does not support.
        TypeError: an unknown option, or a missing required one.
    """
    rule = "the name comes first, then the number of workers: df.topology('ring', 4)."
    require(isinstance(name, str), f"topology({brief(name)}, {brief(num_workers)})", rule)
    if name not in _registry:
        near = difflib.get_close_matches(name, _registry, n=3, cutoff=0.5) or topology_names()
        raise ValueError(
            f"topology({name!r}): no such topology; nearest: {', '.join(near)}. register_topology(name) adds your own."
        )
    return _registry[name](num_workers, **options)
