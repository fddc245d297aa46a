"""Buckets that travel: gossip's posts and collects, with the plan that says what lies in them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from decentfn import gossip
from decentfn.buckets import Buckets, Plan


class Posted(NamedTuple):
    """Buckets on their way to the neighbours, and the neighbours' to us."""

    messages: gossip.Posted
    plan: Plan


def collect(posted: Posted, gamma: float | Tensor = 1.0) -> Buckets:
    """Wait for what was posted and mix: `(1 - γ) x + γ W x`, each bucket as soon as its own messages are in.

    Args:
        posted: from `Worker.post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
    """
    return Buckets(gossip.collect(posted.messages, gamma), posted.plan)


def difference(posted: Posted, gamma: float | Tensor = 1.0) -> Buckets:
    """Wait for what was posted and return what mixing adds, `γ (W - I) x`, in float32 or wider; its mean over workers is 0.

    What is summed up over many steps must not gather the roundings of x: add this, and not `W x - x`.

    Args:
        posted: from `Worker.post`.
        gamma: γ in [0, 1], a number or a 0-d tensor.
    """
    return Buckets(gossip.difference(posted.messages, gamma), posted.plan)
