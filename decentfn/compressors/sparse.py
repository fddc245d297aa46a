"""Compressors that send few values of a bucket and their places."""

from __future__ import annotations

import torch
from torch import Tensor

from decentfn.compressors import wire
from decentfn.compressors.compressor import Compressor, Fields, Key, packed
from decentfn.core import draws
from decentfn.core.buckets import BucketPlan
from decentfn.core.numbers import checks_numbers, require
from decentfn.core.scalars import once


@checks_numbers
def top_k(fraction: float = 0.01, *, k: int | None = None) -> Compressor:
    """Send the k values of a bucket that are largest in magnitude. δ = k/D.

    Sent: k values and k places (1, 2 or 4 bytes each, depending on the bucket's size).

    Args:
        fraction: k/D, in (0, 1]; at least one value is sent.
        k: the number of values, >= 1, instead of a fraction (at most the whole bucket).
    """
    _require_k("top_k", fraction, k)

    def fields(plan: BucketPlan) -> Fields:
        count = _count(plan, fraction, k)
        return [(count, plan.dtype), (count, wire.place_dtype(plan.numel))]

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> tuple[Tensor, Tensor]:
        places = x.abs().topk(_count(plan, fraction, k), sorted=False).indices
        return x.gather(0, places), places.to(wire.place_dtype(plan.numel))

    def decode(plan: BucketPlan, values: Tensor, places: Tensor) -> Tensor:
        return wire.placed(values, places, plan.numel)

    name = f"top_k({fraction})" if k is None else f"top_k(k={k})"
    return packed(name, fields, encode, decode, lambda plan: _share(plan, fraction, k))


@checks_numbers
def random_k(fraction: float = 0.01, *, k: int | None = None, seed: int = 0) -> Compressor:
    """Send k random values of a bucket. δ = k/D (scaled by D/k it would be unbiased, but not a contraction).

    The places are one of each of k strata of the bucket, rotated by a random offset, so every value is sent with
    probability k/D. Sent: k values and the 8 bytes from which the places are drawn.

    Args:
        fraction: k/D, in (0, 1]; at least one value is sent.
        k: the number of values, >= 1, instead of a fraction (at most the whole bucket).
        seed: seed of the draws.
    """
    _require_k("random_k", fraction, k)

    def fields(plan: BucketPlan) -> Fields:
        return [(1, torch.int64), (_count(plan, fraction, k), plan.dtype)]

    def places(drawn: Tensor, plan: BucketPlan) -> Tensor:
        count = _count(plan, fraction, k)
        u = wire.uniform(seed, 0, 0, (count + 1,), drawn.view(()))
        edges = torch.arange(count + 1, device=drawn.device) * plan.numel // max(1, count)
        offsets = (u[1:] * (edges[1:] - edges[:-1])).long()
        return (edges[:-1] + offsets + (u[:1] * plan.numel).long()) % max(1, plan.numel)

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> tuple[Tensor, Tensor]:
        drawn = once(draws.bits(seed, key.t, key.bucket, (1,), worker=key.worker))
        return drawn, x.gather(0, places(drawn, plan))

    def decode(plan: BucketPlan, drawn: Tensor, values: Tensor) -> Tensor:
        return wire.placed(values, places(drawn, plan), plan.numel)

    name = f"random_k({fraction}, seed={seed})" if k is None else f"random_k(k={k}, seed={seed})"
    return packed(name, fields, encode, decode, lambda plan: _share(plan, fraction, k))


def _count(plan: BucketPlan, fraction: float, k: int | None) -> int:
    return min(plan.numel, k if k is not None else max(1, round(fraction * plan.numel)))


def _share(plan: BucketPlan, fraction: float, k: int | None) -> float:
    return _count(plan, fraction, k) / plan.numel if plan.numel else 1.0


def _require_k(call: str, fraction: float, k: int | None) -> None:
    rule = f"k is an integer >= 1; or pass a fraction of the bucket, {call}(0.01)."
    require(k is None or k >= 1, call, rule, k=k)
    rule = f"the fraction lies in (0, 1]; for a number of values write {call}(k=...)."
    require(0 < fraction <= 1, call, rule, fraction=fraction)
