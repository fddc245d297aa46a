"""Elementwise arithmetic put off until the end of an eager step, and then done block by block, in the cache.

One after another, the operators of a step write every intermediate value of a bucket to memory and read it again. Put
off, they are a list of functions; all of them are called on the first block of every vector, then on the second, ...
What comes out is bit for bit the same. Only long vectors on the CPU wait: on a GPU a block would be too little work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decentfn.torch_private import functorch
from decentfn.torch_private.profiler import is_profiled, nothing, span

BLOCK = 2**16
"""Elements of a block: a dozen of them fit into a core's cache, and the calls cost little beside the work on them."""


class Deferred:
    """A vector that is a function, elementwise, of vectors of its length; `value` once it was computed."""

    __slots__ = ("function", "inputs", "numel", "value")

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Part], numel: int) -> None:
        self.function = function
        self.inputs = inputs
        self.numel = numel
        self.value: Tensor | None = None


Part = Tensor | Deferred
"""The vector of a bucket, computed or put off."""


class _Thread(threading.local):
    is_deferring = False


_thread = _Thread()


@contextmanager
def deferring() -> Iterator[bool]:
    """Within, `defer` puts off; whether this is the outermost one, whose end must compute what is still put off."""
    outermost = not _thread.is_deferring
    _thread.is_deferring = True
    try:
        yield outermost
    finally:
        _thread.is_deferring = not outermost


def defer(function: Callable[..., Tensor], *parts: Part) -> Part:
    """`function` of these vectors, each element of it a function of theirs in its place; put off where that pays."""
    if torch.compiler.is_compiling() or not _thread.is_deferring:
        return function(*evaluated(parts))
    numel = parts[0].numel if isinstance(parts[0], Deferred) else parts[0].numel()
    if all(_waits(part, numel) for part in parts):
        return Deferred(function, parts, numel)
    return function(*evaluated(parts))


def _waits(part: Part, numel: int) -> bool:
    if isinstance(part, Deferred):
        return part.numel == numel
    is_long = type(part) is Tensor and part.dim() == 1 and part.numel() == numel > BLOCK and part.device.type == "cpu"
    return is_long and not functorch.is_batched(part) and not functorch.is_differentiated(part)


def evaluated(parts: Iterable[Part]) -> tuple[Tensor, ...]:
    """The vectors; what was put off is computed now."""
    parts = tuple(parts)
    if Deferred not in map(type, parts):
        return parts  # type: ignore[return-value]
    _evaluate([part for part in parts if isinstance(part, Deferred)])
    return tuple(_known(part) for part in parts)  # type: ignore[misc]


def write_over(old: Sequence[Tensor], new: Sequence[Part]) -> None:
    """Write every new vector over the old one in its place, of the same shape and dtype; no two of the old share memory.

    What was put off is written block by block, and never stands in other memory.
    """
    own = {_memory(x) for x in old}
    pairs = [
        (x, y.clone() if isinstance(y, Tensor) and y is not x and _memory(y) in own else y)
        for x, y in zip(old, new, strict=True)
    ]
    _evaluate([y for _, y in pairs if isinstance(y, Deferred)], [x for x, y in pairs if isinstance(y, Deferred)])
    for x, y in pairs:
        if (y := _known(y)) is not x:
            x.copy_(y)  # type: ignore[arg-type]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _evaluate(wanted: Sequence[Deferred], places: Sequence[Tensor] = ()) -> None:
    """Compute what is wanted, into these places where they are given; what has memory in common, together."""
    groups: list[tuple[set[int], list[tuple[Deferred, Tensor | None]]]] = []
    for index, deferred in enumerate(wanted):
        if deferred.value is not None:
            continue
        place = places[index] if places else None
        members = [(deferred, place)]
        memory = {_memory(x) for x in _order([deferred])[0]} | (set() if place is None else {_memory(place)})
        for group in [group for group in groups if group[0] & memory]:
            groups.remove(group)
            memory |= group[0]
            members = group[1] + members
        groups.append((memory, members))
    for _, members in groups:
        if _is_block_by_block(members):
            with span("update of", members[0][0].numel, "values") if is_profiled() else nothing:
                _run([deferred for deferred, _ in members], [place for _, place in members])
        else:
            for deferred, _ in members:
                _run([deferred], [None])


def _is_block_by_block(members: Sequence[tuple[Deferred, Tensor | None]]) -> bool:
    """Whether a block of every place may be written once all that is wanted of it is known."""
    if len({deferred.numel for deferred, _ in members}) > 1:
        return False
    places = {_memory(place): place for _, place in members if place is not None}
    sources = _order([deferred for deferred, _ in members])[0]
    return all(
        (place := places.get(_memory(x))) is None or (x.data_ptr(), x.stride()) == (place.data_ptr(), place.stride())
        for x in sources
    )


def _order(wanted: Sequence[Deferred]) -> tuple[list[Tensor], list[Deferred]]:
    """The vectors that are read, and what is computed of them, each after what it needs."""
    sources: dict[int, Tensor] = {}
    computed: dict[int, Deferred] = {}

    def visit(part: Part) -> None:
        part = _known(part)
        if isinstance(part, Tensor):
            sources[id(part)] = part
        elif id(part) not in computed:
            for needed in part.inputs:
                visit(needed)
            computed[id(part)] = part

    for part in wanted:
        visit(part)
    return list(sources.values()), list(computed.values())


def _run(wanted: Sequence[Deferred], places: Sequence[Tensor | None]) -> None:
    """Compute vectors of one length, block by block, into their places, or into new memory where there is none."""
    sources, computed = _order(wanted)
    slots = {id(part): slot for slot, part in enumerate([*sources, *computed])}
    calls = [(part.function, [slots[id(_known(needed))] for needed in part.inputs]) for part in computed]
    results = [slots[id(part)] for part in wanted]
    last_use = {slot: index for index, (_, inputs) in enumerate(calls) for slot in inputs}
    done_with = [
        [slot for slot in set(inputs) if last_use[slot] == i and slot not in results]
        for i, (_, inputs) in enumerate(calls)
    ]
    written = {_memory(place) for place in places if place is not None}
    targets: list[Tensor] = []
    pieces: list[Sequence[Tensor]] = []
    for index, values in enumerate(zip(*(x.split(BLOCK) for x in sources), strict=True)):
        values = list(values)
        for (function, inputs), done in zip(calls, done_with, strict=True):
            values.append(function(*[values[slot] for slot in inputs]))
            for slot in done:
                values[slot] = None
        # What a function returned as it is may show a place, which the block of another result is written to.
        blocks = [values[slot] for slot in results]
        blocks = [block.clone() if written and _memory(block) in written else block for block in blocks]
        if not targets:
            targets = [
                place if place is not None else block.new_empty(part.numel)
                for part, place, block in zip(wanted, places, blocks, strict=True)
            ]
            pieces = [target.split(BLOCK) for target in targets]
        for piece, block in zip(pieces, blocks, strict=True):
            piece[index].copy_(block)
    for part, target in zip(wanted, targets, strict=True):
        part.value, part.inputs = target, ()


def _known(part: Part) -> Part:
    return part.value if isinstance(part, Deferred) and part.value is not None else part
