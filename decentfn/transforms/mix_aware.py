"""Optimizers that also see the mix that their update is added to: what arrived, from whom, with which weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from decentfn.buckets import Plan


class MixContext(NamedTuple):
    """One worker's view of the mix of this step: `x̃ = weights[0] x + Σ_k weights[1 + k] inbox_k + mean_weight mean`."""

    inboxes: tuple[
        Tensor, ...
    ]  # per bucket [K, D] in the wire's dtype: slot k's message, zeros where nothing was sent; () if K = 0
    sources: Tensor  # [K] int64, whom slot k's message is from; -1 is nobody, the own number a message to oneself
    weights: Tensor  # [K+1] float64, own weight first
    means: tuple[Tensor, ...]  # per bucket [D]: the mean over this worker's group, itself included; () without groups
    members: Tensor | None  # [N] bool, who is in this worker's group; None without groups
    mean_weight: Tensor | None  # 0-d float64, the weight of the group's mean
    plan: Plan  # which leaf lies where in a bucket
