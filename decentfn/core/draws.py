"""Draws that every worker can repeat: functions of (seed, t, stream, worker), one operator in a graph.

A `torch.Generator` does not trace, so numbers come from a counter-based integer hash. The draws of step t do not depend
on earlier draws; they are the same on every machine, eager or compiled, on CPU or GPU. All arithmetic is int64 on
values below 2^63, so nothing overflows. Suitable for schedules and compressors; not for cryptography.

`t` and `worker` may be tensors (0-d int64); under `vmap` t is unbatched and `worker` may be batched.

`worker_seed` and `torch_draws` seed PyTorch's own generators, from which a loss draws, in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from decentfn.core.arguments import checks_numbers, require
from decentfn.core.context import context
from decentfn.core.scalars import number_on, of_step, operator

__all__ = ["bits", "integers", "permutation", "sign", "uniform"]

_32_BITS = 0xFFFFFFFF
# Odd and below 2^31: times a number below 2^32, the product stays below 2^63.
_MULTIPLIERS = ((16, 0x7FEB352D), (15, 0x21F0AAAD), (15, 0x31848BAB))
_PI = (
    "243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89452821E638D01377BE5466CF34E90C6C"
    "C0AC29B7C97C50DD3F84D5B5B54709179216D5D98979FB1BD1310BA698DFB5AC2FFD72DBD01ADFB7B8E1AFED6A267E96"
)
_STARTS = [[int(_PI[48 * key + 8 * word :][:8], 16) for word in range(6)] for key in range(4)]
"""Start value of each word, for each half of each key: the digits of π."""


def bits(
    seed: int, t: int | Tensor, stream: int, shape: Sequence[int], *, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """Draw 32 random bits per entry.

    Args:
        seed: any integer; only its low 64 bits are used.
        t: the step, >= 0.
        stream: separates draws for different purposes in one step.
        shape: of the result; fewer than 2^32 entries.
        worker: the worker that draws, if each draws its own; leave it out for draws shared by all workers.
        device: where the result lives (default: CPU, or `worker`'s device).

    Returns:
        `shape` int64, uniform in [0, 2^32).

    >>> bits(0, 7, 0, (3,)).tolist() == bits(0, torch.tensor(7), 0, (3,)).tolist()
    True
    """
    return _draw(seed, t, stream, shape, worker, device, is_wide=False)


def uniform(
    seed: int, t: int | Tensor, stream: int, shape: Sequence[int], *, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """Draw `shape` float64, uniform in [0, 1), with 53 random bits. Arguments as for `bits`."""
    return (_draw(seed, t, stream, shape, worker, device, is_wide=True) >> 10).to(torch.float64) * 2.0**-53


def sign(
    seed: int, t: int | Tensor, stream: int, shape: Sequence[int], *, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """Draw `shape` float64, -1 or 1 with equal probability. Arguments as for `bits`."""
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
    """Draw `shape` int64, uniform in [0, bound) to within bound / 2^32; 1 <= bound < 2^31. The rest as for `bits`."""
    require(1 <= bound < 2**31, "draws.integers", "the bound is in [1, 2^31).", bound=bound)
    return (bits(seed, t, stream, shape, worker=worker, device=device) * bound) >> 32


def permutation(
    seed: int, t: int | Tensor, n: int, *, stream: int = 0, worker: int | Tensor = 0, device: object = None
) -> Tensor:
    """A random permutation of 0..n-1, `[n]` int64: the order of n draws of 63 bits. Arguments as for `bits`."""
    return torch.argsort(_draw(seed, t, stream, (n,), worker, device, is_wide=True), stable=True)


# -- PyTorch's generators -------------------------------------------------------------------------------------------


@checks_numbers
def worker_seed(seed: int, worker: int, t: int = 0) -> int:
    """Derive a worker's seed for its own draws (augmentation, sample order) from a seed shared by all workers.

    Args:
        seed: any integer.
        worker: the worker's number.
        t: the step, if every step has its own generator; then no generator state needs saving.

    Returns:
        An integer in [0, 2^63) for `torch.Generator().manual_seed`; close arguments, too, give unrelated draws. PyTorch's
        CPU generator reads its low 32 bits (2.13), so of 10,000 generators two draw the same numbers with a chance of 1 %.

    >>> draw = torch.Generator().manual_seed(worker_seed(0, worker=3, t=7))
    """
    return hashed(seed, t, worker)


@contextmanager
def torch_draws(t: int, worker: int, part: int = 0) -> Iterator[None]:
    """Seed PyTorch's default generators by (torch's seed, t, worker, part) inside, and restore them on exit.

    A nested context uses torch's seed from outside both; the outer one resumes after it.
    """
    outer = context.seed, context.generators
    base = torch.default_generator.initial_seed() if context.seed is None else context.seed
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = {}
    for generator in generators:
        if generator not in context.generators:
            before[generator] = generator.get_state()
    for generator in generators:  # after all are read, which one may refuse
        generator.manual_seed(hashed(base, t, worker, part, 1))  # 1: differs from every key of `worker_seed`
    context.seed, context.generators = base, (*context.generators, *before)
    try:
        yield
    finally:
        context.seed, context.generators = outer
        for generator, state in before.items():
            generator.set_state(state)


def hashed(*numbers: int) -> int:
    """Hash several numbers into one seed (splitmix64)."""
    z = 0
    for number in numbers:
        z = (z + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        z ^= z >> 31
    return z >> 1


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random number generators, by name; `device`: the parameters'."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    _, words, normal = random.getstate()
    found["python"] = _with_normal(words, float("nan") if normal is None else normal)
    legacy: Any = np.random.get_state()
    if isinstance(legacy, tuple) and legacy[0] == "MT19937":
        _, words, position, has_normal, normal = legacy
        found["numpy"] = _with_normal([*words.tolist(), position, has_normal], normal)
    return found


def set_generator_states(found: dict[str, Tensor], device: torch.device) -> None:
    """Set the states of generators that were found."""
    torch.set_rng_state(found["cpu"])
    if "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
    words, normal = _without_normal(found["python"])
    random.setstate((3, tuple(words), None if normal != normal else normal))
    if "numpy" in found:
        (*words, position, has_normal), normal = _without_normal(found["numpy"])
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_normal, normal))


def _with_normal(words: tuple[int, ...] | list[int], normal: float) -> Tensor:
    return torch.tensor([*words, torch.tensor(normal, dtype=torch.float64).view(torch.int64).item()])


def _without_normal(state: Tensor) -> tuple[list[int], float]:
    return state[:-1].tolist(), state[-1].view(torch.float64).item()


# -- the hash -------------------------------------------------------------------------------------------------------


def _draw(
    seed: int,
    t: int | Tensor,
    stream: int,
    shape: Sequence[int],
    worker: int | Tensor,
    device: object,
    *,
    is_wide: bool,
) -> Tensor:
    """Return `shape` int64 of 32 random bits, or 63 if `is_wide`."""
    seed = (seed + 2**63) % 2**64 - 2**63  # the low 64 bits, signed, as an operator takes them
    if not isinstance(worker, Tensor):
        worker = torch.full((), worker, dtype=torch.int64, device=cast(Any, device))
    step = t if isinstance(t, Tensor) else None
    return _draw_operator(seed, step, 0 if step is not None else t, stream, list(shape), worker, is_wide)


def _kernel(
    seed: int, t: Tensor | None, at: int, stream: int, shape: Sequence[int], worker: Tensor, is_wide: bool
) -> Tensor:
    """Draw for one worker (`worker` 0-d) or for N workers (`worker` `[N]`, draws `[N, *shape]`)."""
    step: Any = at
    if t is not None:
        step = int(t) if context.inputs is None else of_step(number_on, t, worker.device)
    number = int(worker) if worker.dim() == 0 and worker.device.type == "cpu" else worker
    words = (seed & _32_BITS, seed >> 32 & _32_BITS, stream & _32_BITS, number, step & _32_BITS, step >> 32 & _32_BITS)
    keys: list[Any] = []
    for starts in _STARTS[: 4 if is_wide else 2]:
        key = sum(_scramble(start ^ word) for start, word in zip(starts, words, strict=True)) & _32_BITS
        key = _scramble(key)
        keys.append(key.view((*key.shape, *[1] * len(shape))) if isinstance(key, Tensor) else key)
    index = torch.arange(prod(shape), device=worker.device).view(tuple(shape))
    if not is_wide:
        return _hash(index, keys[0], keys[1])
    return (_hash(index, keys[0], keys[1]) << 31) | (_hash(index, keys[2], keys[3]) >> 1)


def _scramble(x: Any) -> Any:
    """Permute the 32-bit numbers so that each bit of `x` affects every bit (xorshift, multiply)."""
    for shift, multiplier in _MULTIPLIERS:
        x = ((x ^ (x >> shift)) * multiplier) & _32_BITS
    return x ^ (x >> 14)


def _hash(index: Tensor, first: Any, second: Any) -> Tensor:
    return _scramble((_scramble(index ^ first) + second) & _32_BITS)


_draw_operator = operator(
    "draw(int seed, Tensor? t, int at, int stream, int[] shape, Tensor worker, bool is_wide) -> Tensor",
    _kernel,
    lambda seed, t, at, stream, shape, worker, is_wide: worker.new_empty((*worker.shape, *shape), dtype=torch.int64),
    lambda info, in_dims, seed, t, at, stream, shape, worker, is_wide: (
        _draw_operator(seed, t, at, stream, shape, worker.movedim(in_dims[5], 0), is_wide),
        0,
    ),
)


_numpy = np.random.MT19937(0)


def _waiting_normal(kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read, or write, the normal number that NumPy's generator keeps for its next call; its bits are slow to read."""
    generator: Any = np.random.mtrand._rand
    bits, generator._bit_generator = generator._bit_generator, SimpleNamespace(state={"bit_generator": "", "state": {}})
    try:
        return generator.get_state(legacy=False) if kept is None else generator.set_state(kept)
    finally:
        generator._bit_generator = bits


@contextmanager
def drawing_by(seed: int) -> Iterator[None]:
    """Context in which the CPU generators of torch, NumPy and Python begin from this seed."""
    # The state of NumPy's generator is slow: the batch draws from another, which drops a normal number that waits.
    own = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    torch_own, kept, before = torch.default_generator.get_state(), _waiting_normal(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.set_bit_generator(_numpy)  # pyright: ignore[reportAttributeAccessIssue]
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_own)
        np.random.set_bit_generator(own)  # pyright: ignore[reportAttributeAccessIssue]
        if kept["has_gauss"]:
            _waiting_normal(kept)
        random.setstate(before)
