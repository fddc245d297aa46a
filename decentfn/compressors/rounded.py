"""Compressors that send all values of a bucket with fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from decentfn.compressors import wire
from decentfn.compressors.compressor import RULES, Compressor, Fields, Key, packed
from decentfn.core.arguments import checks_arguments, require
from decentfn.core.buckets import BucketPlan, wide


def identity() -> Compressor:
    """Send the bucket unchanged: D values. δ = 1."""
    return packed(
        "identity()",
        lambda plan: [(plan.numel, plan.dtype)],
        lambda x, plan, key: [x],
        lambda plan, values: values,
        lambda plan: 1.0,
        is_unbiased=True,
    )


def cast(dtype: torch.dtype) -> Compressor:
    """Round every value to `dtype`. Sent: D values of it. δ = 1 - ε²/4, ε the dtype's eps, if no value overflows.

    Args:
        dtype: a floating dtype; bfloat16 has float32's range, float16 overflows at 65,504.
    """
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    require(is_float, "cast", "values are floating point; use torch.bfloat16, or quantize(bits=8).", dtype=dtype)
    return packed(
        f"cast({dtype})",
        lambda plan: [(plan.numel, dtype)],
        lambda x, plan, key: [x.to(dtype)],
        lambda plan, values: values.to(plan.dtype),
        lambda plan: 1.0 - (torch.finfo(dtype).eps / 2) ** 2,
    )


@checks_arguments(RULES)
def sign(chunk: int | None = 1024) -> Compressor:
    """Send the signs (0 counts as positive) and the mean of abs(x) of each chunk.

    Sent: 1 bit per value and a scale per chunk. δ = ‖x‖₁² / (c ‖x‖₂²) of a chunk of c values, which is >= 1/c and, for
    Gaussian values, 2/π.

    Args:
        chunk: values that share a scale, >= 1; None is the whole bucket.
    Source: Bernstein et al., ICML 2018; with its scale, Karimireddy et al., ICML 2019.
    """

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> tuple[Tensor, Tensor]:
        rows = wire.rows(x, chunk)
        last = rows.shape[0] * rows.shape[1] - x.shape[0]
        counts = pad(torch.full_like(rows[1:, 0], rows.shape[1]), (0, 1), value=rows.shape[1] - last)
        scales = rows.abs().sum(1) / counts[: rows.shape[0]]
        return scales.to(wide(plan.dtype)), wire.pack((x >= 0).to(torch.uint8), 1)

    def decode(plan: BucketPlan, scales: Tensor, bits: Tensor) -> Tensor:
        signs = wire.unpack(bits, plan.numel, 1).to(scales.dtype) * 2 - 1
        return wire.scaled(signs, scales, chunk, plan)

    return packed(
        f"sign({chunk})",
        lambda plan: wire.chunked(plan, chunk, 1),
        encode,
        decode,
        lambda plan: 1 / max(1, wire.grid(plan, chunk)[1]),
    )


@checks_arguments(RULES)
def quantize(bits: int = 8, *, chunk: int | None = None, stochastic: bool = False, seed: int = 0) -> Compressor:
    """Round to 2L + 1 levels between ±max abs(x) of a chunk, L = 2^(bits-1) - 1, to the nearest or stochastically.

    Sent: `bits` per value and a scale per chunk. With chunks of c values, rounding to the nearest has
    δ = 4L²/(4L² + c - 1); stochastic rounding is unbiased with variance ω <= (c - 1)/(4L²), and δ = 1 - ω if positive.

    Args:
        bits: 8 or 4 (or 2: three levels).
        chunk: values that share a scale, >= 1; None is 256 for 8 bits, else 64.
        stochastic: round up with a probability equal to the distance to the level below.
        seed: seed of stochastic rounding.
    """
    require(bits in (2, 4, 8), "quantize", "bits per value are 8, 4 or 2.", bits=bits)
    length = chunk or (256 if bits == 8 else 64)
    levels = 2 ** (bits - 1) - 1

    def excess(plan: BucketPlan) -> float:
        return max(0, wire.grid(plan, length)[1] - 1) / (4 * levels**2)

    def delta(plan: BucketPlan) -> float | None:
        return _from_variance(excess(plan)) if stochastic else 1 / (1 + excess(plan))

    name = f"quantize(bits={bits}, chunk={length}, stochastic={stochastic}, seed={seed})"
    drawn_by = seed if stochastic else None
    return _rounding(name, bits, levels, length, lambda rows: rows.abs().amax(1), delta, drawn_by)


@checks_arguments(RULES)
def qsgd(levels: int = 7, *, chunk: int | None = 512, seed: int = 0) -> Compressor:
    """Round x s/‖x‖₂ of a chunk stochastically to integers in [-s, s]; unbiased.

    Sent: 2 bits per value for s = 1, 4 for s <= 7, 8 for s <= 127, and a norm per chunk. With chunks of c values the
    variance is ω <= min(c/s², √c/s); δ = 1 - ω if positive.

    Args:
        levels: s, 1 to 127.
        chunk: values that share a norm, >= 1; None is the whole bucket.
        seed: seed of the draws.
    Source: Alistarh et al., NeurIPS 2017 (with fixed-length codes).
    """
    bits = 2 if levels == 1 else 4 if levels <= 7 else 8

    def delta(plan: BucketPlan) -> float | None:
        width = wire.grid(plan, chunk)[1]
        return _from_variance(min(width / levels**2, math.sqrt(width) / levels))

    name = f"qsgd(levels={levels}, chunk={chunk}, seed={seed})"
    return _rounding(name, bits, levels, chunk, lambda rows: (rows * rows).sum(1).sqrt(), delta, seed)


def _rounding(
    name: str,
    bits: int,
    levels: int,
    chunk: int | None,
    scale: Callable[[Tensor], Tensor],
    delta: Callable[[BucketPlan], float | None],
    seed: int | None,
) -> Compressor:
    """Send integers in [-levels, levels] and scales; round stochastically with a seed, else to the nearest."""

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> tuple[Tensor, Tensor]:
        rows = wire.rows(x, chunk)
        scales = scale(rows).to(wide(plan.dtype))
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).to(rows.dtype)
        values = (rows / divisors[:, None] * levels).reshape(-1)[: x.shape[0]]
        if seed is None:
            rounded = values.round()
        else:
            u = wire.uniform(seed, key.t, key.bucket, (x.shape[0],), key.worker)
            rounded = (values.to(torch.float64) + u).floor()
        return scales, wire.pack((rounded.clamp(-levels, levels) + levels).to(torch.uint8), bits)

    def decode(plan: BucketPlan, scales: Tensor, values: Tensor) -> Tensor:
        integers = wire.unpack(values, plan.numel, bits).to(scales.dtype) - levels
        return wire.scaled(integers, scales / levels, chunk, plan)

    def fields(plan: BucketPlan) -> Fields:
        return wire.chunked(plan, chunk, bits)

    return packed(name, fields, encode, decode, delta, is_unbiased=seed is not None)


def _from_variance(omega: float) -> float | None:
    return 1 - omega if omega < 1 else None
