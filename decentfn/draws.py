"""Draws that every worker can repeat: functions of (seed, t, stream, worker), evaluated inside the graph.

A `torch.Generator` does not trace, so numbers come from a counter-based integer hash: what is drawn in step t depends
on nothing that was drawn before, the same on every machine, eager or compiled, on CPU or GPU. All arithmetic is int64
on values below 2^63, so nothing overflows. Good for schedules and compressors; not for cryptography.

`t` and `worker` may be tensors (0-d int64); under `vmap` t is unbatched and `worker` may be batched.

PyTorch's own generators, which a loss draws from, are seeded in the same spirit: `worker_seed`, `torch_draws`.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.numbers import checks_numbers
from decentfn.scalars import moved, once
from decentfn.torch_private import lowering

_32_BITS = 0xFFFFFFFF
# Odd and below 2^31: times a number below 2^32, the product stays below 2^63.
_MULTIPLIERS = ((16, 0x7FEB352D), (15, 0x21F0AAAD), (15, 0x31848BAB))
_PI = (
    "243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89452821E638D01377BE5466CF34E90C6C"
    "C0AC29B7C97C50DD3F84D5B5B54709179216D5D98979FB1BD1310BA698DFB5AC2FFD72DBD01ADFB7B8E1AFED6A267E96"
)
_STARTS = [[int(_PI[48 * key + 8 * word :][:8], 16) for word in range(6)] for key in range(4)]
"""For each half of each key, a number to start each word from: the digits of π."""


def bits(
    seed: int, t: int | Tensor, stream: int, shape: Sequence[int], *, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """32 random bits in each entry.

    Args:
        seed: any integer; its low 64 bits count.
        t: the step, >= 0.
        stream: tells apart what is drawn for different purposes in one step.
        shape: of the result; fewer than 2^32 entries.
        worker: the worker that draws, where each draws its own; leave it out for draws that all share.
        device: where the result lives (default: CPU, or `worker`'s device).

    Returns:
        `shape` int64, uniform in [0, 2^32).

    >>> bits(0, 7, 0, (3,)).tolist() == bits(0, torch.tensor(7), 0, (3,)).tolist()
    True
    """
    first, second = _keys(seed, t, stream, worker, 1).unbind()
    return _hash(_index(shape, worker, device), first, second)


def uniform(
    seed: int, t: int | Tensor, stream: int, shape: Sequence[int], *, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """`shape` float64, uniform in [0, 1), with 53 random bits. Arguments as for `bits`."""
    return (_wide(seed, t, stream, shape, worker, device) >> 10).to(torch.float64) * 2.0**-53


def sign(
    seed: int, t: int | Tensor, stream: int, shape: Sequence[int], *, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """`shape` float64, -1 or 1 with equal probability. Arguments as for `bits`."""
    drawn = bits(seed, t, stream, shape, worker=worker, device=device)
    return ((drawn >> 31) * 2 - 1).to(torch.float64)


def integers(
    seed: int,
    t: int | Tensor,
    stream: int,
    shape: Sequence[int],
    bound: int,
    *,
    worker: int | Tensor = 0,
    device: object = None,
) -> Tensor:
    """`shape` int64, uniform in [0, bound) to within bound / 2^32; 1 <= bound < 2^31. Other arguments as for `bits`."""
    if not 1 <= bound < 2**31:
        raise ValueError(f"draws.integers(bound={bound}): the bound lies in [1, 2^31).")
    return (bits(seed, t, stream, shape, worker=worker, device=device) * bound) >> 32


def permutation(
    seed: int, t: int | Tensor, n: int, *, stream: int = 0, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """A random permutation of 0..n-1, `[n]` int64: the order of n draws of 63 bits. Arguments as for `bits`."""
    return torch.argsort(_wide(seed, t, stream, (n,), worker, device), stable=True)


# -- PyTorch's generators -------------------------------------------------------------------------------------------


@checks_numbers
def worker_seed(seed: int, worker: int, t: int = 0) -> int:
    """A seed for what one worker draws by itself (augmentation, the order of its samples), of a seed that all share.

    Args:
        seed: any integer.
        worker: the worker's number.
        t: the step, where every step has a generator of its own: then no generator's state needs saving.

    Returns:
        An integer in [0, 2^63) for `torch.Generator().manual_seed`; other arguments, however near, give unrelated draws.

    >>> draw = torch.Generator().manual_seed(worker_seed(0, worker=3, t=7))
    """
    return _mixed(seed, t, worker)


class _Base(threading.local):
    seed: int | None = None
    """Torch's outside of `torch_draws`, or None."""
    kept: tuple[torch.Generator, ...] = ()
    """The generators that are put back at the end of one outside."""


_base = _Base()


class torch_draws:
    """Within, PyTorch's default generators draw by (torch's seed, t, worker, part); afterwards they are as they were before.

    So where every rank has said `torch.manual_seed(0)`, ranks and steps draw differently, and the same in every run.
    One within another draws by the seed that was torch's outside both, and the outer one goes on from there.
    """

    __slots__ = ("_before", "_key", "_outer")

    def __init__(self, t: int | Tensor, worker: int, part: int = 0) -> None:
        self._key = int(t), worker, part, 1  # 1: never what `worker_seed` gives

    def __enter__(self) -> None:
        self._outer = _base.seed, _base.kept
        base = torch.default_generator.initial_seed() if _base.seed is None else _base.seed
        seed = _mixed(base, *self._key)
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._before = [(g, g.get_state()) for g in generators if g not in _base.kept]
        for generator in generators:
            generator.manual_seed(seed)
        _base.seed, _base.kept = base, (*_base.kept, *[g for g, _ in self._before])

    def __exit__(self, *error: object) -> None:
        _base.seed, _base.kept = self._outer
        for generator, state in self._before:
            generator.set_state(state)


def _mixed(*numbers: int) -> int:
    """One seed of several numbers (splitmix64)."""
    z = 0
    for number in numbers:
        z = (z + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        z ^= z >> 31
    return z >> 1


# -- the hash -------------------------------------------------------------------------------------------------------


def _scrambled(x: Any, constant: Callable[[int], Any], shifted: Callable[[Any, Any], Any]) -> Any:
    """A permutation of the 32-bit numbers in which each bit of `x` moves every bit (xorshift, multiply)."""
    for shift, multiplier in _MULTIPLIERS:
        x = ((x ^ shifted(x, constant(shift))) * constant(multiplier)) & constant(_32_BITS)
    return x ^ shifted(x, constant(14))


# An operator of its own: Inductor would compute x twice for every x ^ (x >> s), so compiling took 2^(all of them).
_library = torch.library.Library("decentfn", "FRAGMENT")
_library.define("scramble(Tensor x) -> Tensor")
_library.impl("scramble", lambda x: _scrambled(x, int, operator.rshift), "CompositeExplicitAutograd")
lowering.register_fake("decentfn::scramble", torch.empty_like, _library)
torch.library.register_vmap(
    "decentfn::scramble", lambda info, in_dims, x: (torch.ops.decentfn.scramble(x), in_dims[0]), lib=_library
)
lowering.lower_as_pointwise(torch.ops.decentfn.scramble, _scrambled)


def _scramble(x: Tensor) -> Tensor:
    return torch.ops.decentfn.scramble(x)


def _keys(seed: int, t: int | Tensor, stream: int, worker: int | Tensor, count: int) -> Tensor:
    """`[2 count]` int64: so many independent keys for (seed, stream, worker, t), each of two 32-bit halves.

    Computed once, not once per entry that is drawn. Integers enter as operands of tensors only: Dynamo may make
    symbols of them, and a hash of symbols grows without end.
    """
    where = worker.device if isinstance(worker, Tensor) else t.device if isinstance(t, Tensor) else "cpu"
    words = (seed & _32_BITS, seed >> 32 & _32_BITS, stream & _32_BITS, worker, t & _32_BITS, t >> 32 & _32_BITS)
    starts = moved(torch.tensor(_STARTS)[: 2 * count], where).unbind(1)
    mixed = torch.stack([start ^ word for start, word in zip(starts, words, strict=True)])
    return once(_scramble(_scramble(mixed).sum(0) & _32_BITS))


def _hash(index: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return _scramble((_scramble(index ^ first) + second) & _32_BITS)


def _wide(
    seed: int, t: int | Tensor, stream: int, shape: Sequence[int], worker: int | Tensor, device: object
) -> Tensor:
    """`shape` int64 of 63 random bits."""
    index = _index(shape, worker, device)
    keys = _keys(seed, t, stream, worker, 2).unbind()
    return (_hash(index, keys[0], keys[1]) << 31) | (_hash(index, keys[2], keys[3]) >> 1)


def _index(shape: Sequence[int], worker: int | Tensor, device: object) -> Tensor:
    where = device if device is not None else worker.device if isinstance(worker, Tensor) else "cpu"
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count, dtype=torch.int64, device=where).view(tuple(shape))  # type: ignore[arg-type]
