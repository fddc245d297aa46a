"""Push-sum: the weight that corrects column-stochastic mixing is sent in the same message as the values it divides.

    x⁺ = A x;   w⁺ = A w;   z = x / w        (Kempe, Dobra, Gehrke, FOCS 2003)

A: column-stochastic; x: biased sums; w: a worker's weight, w⁰ = 1, Σ w = N; z: the de-biased value. The algorithms'
states store z and w; x = w z.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from decentfn.comm.gossip.guarding import unless_bad
from decentfn.core.buckets import Buckets, Plan, add, loose, scale


def first_weight(x: Buckets) -> Tensor:
    """Return `w⁰ = 1`, 0-d, in the dtype of the bucket that carries it."""
    return torch.ones((), dtype=x[_carrier(x)].dtype, device=x[_carrier(x)].device)


def pack(x: Buckets, w: Tensor) -> Buckets:
    """Append `w` to the widest shared vector of `x`: it needs no separate message and is mixed as x is."""
    tensors = list(x)
    index = _carrier(x)
    tensors[index] = torch.cat([tensors[index], w.view(1)])
    return loose(tensors, x.plan.buckets)


def unpack(packed: Iterable[Tensor], plan: Plan) -> tuple[Buckets, Tensor]:
    """Split `pack(x, w)` into `(x, w)`."""
    tensors = list(packed)
    index = next(
        i for i, (p, bucket) in enumerate(zip(tensors, plan.buckets, strict=True)) if p.shape[0] > bucket.numel
    )
    tensors[index], w = tensors[index][:-1], tensors[index][-1]
    return Buckets(tensors, plan), w.clone()


def moved(z: Buckets, w: Tensor, u: Buckets) -> Buckets:
    """Return `pack(w z + u, w)`; in a guarded step without u if a sum overflows, so that all mass is kept."""
    x = scale(z, w)
    return unless_bad(pack(add(x, u), w), lambda: pack(x, w))


def _carrier(x: Buckets) -> int:
    sizes = [bucket.dtype.itemsize * bucket.is_shared for bucket in x.plan.buckets]
    return sizes.index(max(sizes))
