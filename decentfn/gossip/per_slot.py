"""A message of its own for each neighbour: `exchange` starts them, `arrived` waits for those of the neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import collectives
from decentfn.gossip import guarding


class Exchange(NamedTuple):
    """Messages on their way, one for each slot."""

    own: Sequence[Tensor]  # [K, D] each, as they travel
    inboxes: Sequence[Tensor]  # [K, D] each, in flight
    flags: guarding.Flags | None  # in a guarded step, which of the messages are good


def exchange(x: Sequence[Tensor], peers: Tensor, t: Tensor) -> Exchange:
    """Start to send `x[b][k]` to the listener of slot k, for each tensor `[K, D]`; `peers` as in `collectives.exchange`."""
    good = guarding.judged(x) if guarding.is_guarded() else None
    inboxes = [collectives.exchange(message, peers, t, per_slot=True, good=good) for message in x]
    return Exchange(x, inboxes, None if good is None else guarding.post_flags(good, peers, None, t))


def arrived(posted: Exchange, otherwise: Sequence[Tensor]) -> list[Tensor]:
    """Wait for the messages `[K, D]`, each in its own dtype; `otherwise` in the place of bad ones."""
    inboxes = [collectives.wait(inbox) for inbox in posted.inboxes]
    if posted.flags is None or posted.flags.inbox is None:
        return inboxes
    good = collectives.wait(posted.flags.inbox) > 0
    return [torch.where(good, inbox, old.to(inbox.dtype)) for inbox, old in zip(inboxes, otherwise, strict=True)]
