"""Compressors that send few values of a bucket and their places."""

from __future__ import annotations

import torch
from torch import Tensor

from decentfn.compressors import wire
from decentfn.compressors.compressor import RULES, Compressor, Fields, Key, packed
from decentfn.core import checks_arguments, draws, once, require
from decentfn.core.buckets import BucketPlan, wide


@checks_arguments(RULES)
def top_k(fraction: float = 0.01, *, k: int | None = None) -> Compressor:
    """Send the k values of a bucket that are largest in magnitude. δ = k/D.

    Sent: k values and k places (1, 2 or 4 bytes each, depending on the bucket's size).

    Args:
        fraction: k/D, in (0, 1]; at least one value is sent.
        k: the number of values, >= 1, instead of a fraction (at most the whole bucket).
    """

    def fields(plan: BucketPlan) -> Fields:
        count = _count(plan, fraction, k)
        return [(count, plan.dtype), (count, wire.place_dtype(plan.numel))]

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> tuple[Tensor, Tensor]:
        places = wire.largest(x, _count(plan, fraction, k))
        return x.gather(0, places), places.to(wire.place_dtype(plan.numel))

    def decode(plan: BucketPlan, values: Tensor, places: Tensor) -> Tensor:
        return wire.placed(values, places, plan.numel)

    name = f"top_k({fraction})" if k is None else f"top_k(k={k})"
    return packed(name, fields, encode, decode, lambda plan: _share(plan, fraction, k))


@checks_arguments(RULES)
def chunk_top_k(k: int = 64, *, chunk: int = 4096, bits: int | None = None) -> Compressor:
    """Send the k values of each chunk that are largest in magnitude. δ = k/chunk, with 2 bits 1/(9 chunk).

    Sent per chunk: k places (1 or 2 bytes each), and k values or, with 2 bits, k codes and a scale. A code is a sign and
    one of two magnitudes, 1 and 3 (nearest in units of half the mean magnitude); the scale is their least-squares fit.

    Args:
        k: values per chunk, >= 1.
        chunk: values of a chunk, >= 1; the last one of a bucket may be smaller.
        bits: 2, or None to send the values as they are.
    Source: SparseLoCo, Sarfi et al., 2025 (with a simpler code book).
    """
    require(bits in (None, 2), "chunk_top_k", "bits per value are 2, or None for whole values.", bits=bits)

    def sizes(plan: BucketPlan) -> tuple[int, int, int]:
        chunks, width = wire.grid(plan, chunk)
        return chunks, width, min(k, width)

    def fields(plan: BucketPlan) -> Fields:
        chunks, width, count = sizes(plan)
        places = (chunks * count, wire.place_dtype(width))
        if bits is None:
            return [places, (chunks * count, plan.dtype)]
        return [places, (chunks, wide(plan.dtype)), (-(-chunks * count // 4), torch.uint8)]

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> list[Tensor]:
        _, width, count = sizes(plan)
        rows = wire.rows(x, chunk)
        places = rows.abs().topk(count, dim=1, sorted=False).indices
        values, places = rows.gather(1, places), places.to(wire.place_dtype(width))
        if bits is None:
            return [places, values.to(plan.dtype)]
        # Zeros after a last chunk of fewer than k values have no part in its scale; of zeros, topk may take these alone.
        real = wire.rows(torch.ones_like(x), chunk).gather(1, places.long())
        size, counts = values.abs(), real.sum(1, keepdim=True).clamp(min=1)
        codes = 2 * (size > size.sum(1, keepdim=True) / counts) + (values > 0)
        levels = _level(codes).to(values.dtype) * real
        scales = (values * levels).sum(1) / (levels * levels).sum(1).clamp(min=1)
        return [places, scales.to(wide(plan.dtype)), wire.pack(codes.reshape(-1).to(torch.uint8), 2)]

    def decode(plan: BucketPlan, places: Tensor, *message: Tensor) -> Tensor:
        chunks, width, count = sizes(plan)
        places = places.reshape(chunks, count)
        if bits is None:
            values = message[0].reshape(chunks, count)
        else:
            codes = wire.unpack(message[1], chunks * count, 2).reshape(chunks, count)
            values = (_level(codes).to(message[0].dtype) * message[0][:, None]).to(plan.dtype)
        return wire.placed(values, places, width).reshape(-1)[: plan.numel]

    def delta(plan: BucketPlan) -> float:
        _, width, count = sizes(plan)
        return (count if bits is None else 1 / 9) / max(1, width)

    return packed(f"chunk_top_k({k}, chunk={chunk}, bits={bits})", fields, encode, decode, delta)


def _level(codes: Tensor) -> Tensor:
    """Return -1, 1, -3 or 3 for the codes 0 to 3."""
    return (2 * (codes & 1).to(torch.int8) - 1) * (1 + (codes & 2).to(torch.int8))


@checks_arguments(RULES)
def random_k(fraction: float = 0.01, *, k: int | None = None, seed: int = 0) -> Compressor:
    """Send k random values of a bucket. δ = k/D (scaled by D/k it would be unbiased, but not a contraction).

    The places are one of each of k strata of the bucket, rotated by a random offset, so every value is sent with
    probability k/D. Sent: k values and the 8 bytes from which the places are drawn.

    Args:
        fraction: k/D, in (0, 1]; at least one value is sent.
        k: the number of values, >= 1, instead of a fraction (at most the whole bucket).
        seed: seed of the draws.
    """

    def fields(plan: BucketPlan) -> Fields:
        return [(1, torch.int64), (_count(plan, fraction, k), plan.dtype)]

    def places(drawn: Tensor, plan: BucketPlan) -> Tensor:
        return spread(seed, 0, 0, _count(plan, fraction, k), plan.numel, drawn.view(()))

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> tuple[Tensor, Tensor]:
        drawn = once(draws.bits(seed, key.t, key.bucket, (1,), worker=key.worker))
        return drawn, x.gather(0, places(drawn, plan))

    def decode(plan: BucketPlan, drawn: Tensor, values: Tensor) -> Tensor:
        return wire.placed(values, places(drawn, plan), plan.numel)

    name = f"random_k({fraction}, seed={seed})" if k is None else f"random_k(k={k}, seed={seed})"
    return packed(name, fields, encode, decode, lambda plan: _share(plan, fraction, k))


def spread(seed: int, t: Tensor | int, stream: int, count: int, numel: int, worker: Tensor) -> Tensor:
    """Draw `count` different places of `numel`, int64: one of each of `count` strata, all rotated by a random offset."""
    u = wire.uniform(seed, t, stream, (count + 1,), worker)
    edges = torch.arange(count + 1, device=u.device) * numel // max(1, count)
    offsets = (u[1:] * (edges[1:] - edges[:-1])).long()
    return (edges[:-1] + offsets + (u[:1] * numel).long()) % max(1, numel)


def _count(plan: BucketPlan, fraction: float, k: int | None) -> int:
    return min(plan.numel, k if k is not None else max(1, round(fraction * plan.numel)))


def _share(plan: BucketPlan, fraction: float, k: int | None) -> float:
    return _count(plan, fraction, k) / plan.numel if plan.numel else 1.0
