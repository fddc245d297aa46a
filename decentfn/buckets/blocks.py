"""Elementwise arithmetic put off until the end of an eager step, and then done block by block, in the cache.

One after another, the operators of a step write every intermediate value of a bucket to memory and read it again. Put
off, they are a list of functions; all of them are called on the first block of every vector, then on the second, ...
What comes out is bit for bit the same. Only long vectors on the CPU wait: on a GPU a block would be too little work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.torch_private import functorch
from decentfn.torch_private.profiler import is_profiled, nothing, span

BLOCK = 2**17
"""Elements of a block: it is in the cache from one call to the next, and calls cost little beside the work on it."""


class Call(NamedTuple):
    """A function, elementwise, of vectors of one length, that returns another one and writes over the first of them."""

    function: Callable[..., Tensor]
    inputs: Sequence[Part]
    writes: int
    """How many of the inputs it writes over: in a step's eyes copies, which become results beside what it returns."""


class Deferred:
    """A vector that a call returns, or the n-th that it writes over (`result` 0, n); `value` once it was computed."""

    __slots__ = ("call", "numel", "result", "value")

    def __init__(self, call: Call, result: int, numel: int) -> None:
        self.call: Call | None = call  # None once the value is there
        self.result = result
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
        return Deferred(Call(function, parts, 0), 0, numel)
    return function(*evaluated(parts))


def over_blocks(function: Callable[..., Tensor], results: Sequence[Part], *parts: Part) -> tuple[Part, ...]:
    """These results; where they are put off, `function` of the parts computes them all: what it returns, and what it writes over.

    Args:
        function: of blocks of the parts, elementwise. It returns new memory, and writes over the first of them.
        results: what it computes, by other arithmetic: what it returns, and what it leaves in the parts that it writes over.
        parts: what it reads.
    """
    if not all(isinstance(result, Deferred) and result.value is None for result in results):
        return tuple(results)
    call = Call(function, parts, len(results) - 1)
    return tuple(Deferred(call, index, result.numel) for index, result in enumerate(results))  # type: ignore[union-attr]


def _waits(part: Part, numel: int) -> bool:
    return part.numel == numel if isinstance(part, Deferred) else part.numel() == numel and is_long(part)


def is_long(x: Tensor) -> bool:
    """Whether this is a vector that is worked on block by block in an eager step, on the CPU and of one worker."""
    if type(x) is not Tensor or x.dim() != 1 or x.numel() <= BLOCK or x.device.type != "cpu":
        return False
    return not functorch.is_batched(x) and not functorch.is_differentiated(x)


def evaluated(parts: Iterable[Part]) -> tuple[Tensor, ...]:
    """The vectors; what was put off is computed now."""
    parts = tuple(parts)
    if Deferred not in map(type, parts):
        return parts  # type: ignore[return-value]
    _evaluate([part for part in parts if isinstance(part, Deferred)])
    return tuple(_known(part) for part in parts)  # type: ignore[misc]


def layouts(parts: Sequence[Part]) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each vector. What is put off stays so: of it the first element alone is computed, from copies."""
    parts = list(map(_known, parts))
    sources, calls = _order([part for part in parts if isinstance(part, Deferred)])
    firsts: dict[object, Tensor] = {_key(x): x[:1].clone() for x in sources}
    for call in calls:
        given = [firsts[_key(_known(part))] for part in call.inputs]
        firsts[id(call), 0] = call.function(*given)
        firsts |= {(id(call), 1 + i): given[i] for i in range(call.writes)}
    return [
        (torch.Size([part.numel]), firsts[_key(part)].dtype) if isinstance(part, Deferred) else (part.shape, part.dtype)
        for part in parts
    ]


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


def _order(wanted: Sequence[Deferred]) -> tuple[list[Tensor], list[Call]]:
    """The vectors that are read, and the calls that compute what is wanted, each after what it needs."""
    sources: dict[int, Tensor] = {}
    calls: dict[int, Call] = {}
    for part in wanted:
        _visit(part, sources, calls)
    return list(sources.values()), list(calls.values())


def _visit(part: Part, sources: dict[int, Tensor], calls: dict[int, Call]) -> None:
    """A function of the module: one within `_order` would refer to itself, and keep all vectors until a garbage collection."""
    part = _known(part)
    if isinstance(part, Tensor):
        sources[id(part)] = part
    elif part.call is not None and id(part.call) not in calls:
        for needed in part.call.inputs:
            _visit(needed, sources, calls)
        calls[id(part.call)] = part.call


class _Step(NamedTuple):
    """A call, by the slots of a block's values."""

    function: Callable[..., Tensor]
    reads: Sequence[int]
    returned: int
    over: range  # what it leaves in the first of those that it reads
    done: list[int]  # what nobody reads after it


def _run(wanted: Sequence[Deferred], places: Sequence[Tensor | None]) -> None:
    """Compute vectors of one length, block by block, into their places, or into new memory where there is none."""
    sources, calls = _order(wanted)
    keys = [_key(source) for source in sources] + [(id(call), i) for call in calls for i in range(1 + call.writes)]
    slots = {key: slot for slot, key in enumerate(keys)}
    results = [slots[_key(part)] for part in wanted]
    steps = []
    for call in calls:
        reads, first = [slots[_key(_known(part))] for part in call.inputs], slots[id(call), 0]
        steps.append(_Step(call.function, reads, first, range(first + 1, first + 1 + call.writes), []))
    last_use = {slot: step for step in steps for slot in step.reads}
    for slot, step in last_use.items():
        if slot not in results:
            step.done.append(slot)
    to_come = [None] * (len(keys) - len(sources))
    written = {_memory(place) for place in places if place is not None}
    targets: list[Tensor] = []
    pieces: list[Sequence[Tensor]] = []
    homes: dict[int, int] = {}  # of what a step writes over, the slot -> the result in whose place it does that
    shown: list[int] = []
    for index, blocks in enumerate(zip(*(x.split(BLOCK) for x in sources), strict=True)):
        values: list[Any] = [*blocks, *to_come]
        for step in steps:
            given = [values[slot] for slot in step.reads]
            for i, slot in enumerate(step.over):
                if index == 0 and (home := _home(step, i, values, results, places)) is not None:
                    homes[slot] = home
                # Of the first block in a copy: should a function raise, nothing is written yet.
                in_place = index > 0 and slot in homes
                given[i] = pieces[homes[slot]][index].copy_(given[i]) if in_place else given[i].clone()
                values[slot] = given[i]
            values[step.returned] = step.function(*given)
            for slot in step.done:
                values[slot] = None
        out = [values[slot] for slot in results]
        if index == 0:
            targets = [
                block.new_empty(part.numel) if place is None else place
                for part, place, block in zip(wanted, places, out, strict=True)
            ]
            pieces = [target.split(BLOCK) for target in targets]
            # What a function returned as it is may show a place, which the block of another result is written to.
            shown = [i for i, block in enumerate(out) if _memory(block) in written]
        for i in shown:
            out[i] = out[i].clone()
        for block, of_one in zip(out, pieces, strict=True):
            of_one[index].copy_(block)  # nothing, where it was written there
    for part, target in zip(wanted, targets, strict=True):
        part.value, part.call = target, None


def _home(
    step: _Step, i: int, values: Sequence[Any], results: Sequence[int], places: Sequence[Tensor | None]
) -> int | None:
    """The result in whose place a step may write over its i-th input: in new memory, or where nobody reads any more."""
    read, slot = step.reads[i], step.over[i]
    if results.count(slot) != 1:
        return None
    place = places[home := results.index(slot)]
    if place is None:
        return home
    is_last = read in step.done and step.reads.count(read) == 1
    others = [value for other, value in enumerate(values) if other != read and value is not None]
    return home if is_last and all(_memory(value) != _memory(place) for value in others) else None


def _key(part: Part) -> object:
    return (id(part.call), part.result) if isinstance(part, Deferred) else id(part)


def _known(part: Part) -> Part:
    return part.value if isinstance(part, Deferred) and part.value is not None else part
