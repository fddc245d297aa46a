"""A message of its own for each neighbour: `exchange` starts them, `arrived` waits for those of the neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn import collectives
from decentfn.gossip import guarding


class Exchange(NamedTuple):
    """In-flight messages, one for each slot."""

    own: Sequence[Tensor]  # [K, D] each, as they travel
    messages: Sequence[collectives.Flight]
    flags: guarding.Flags | None  # in a guarded step, which of the messages are good

    @property
    def numbers(self) -> list[Tensor]:
        """The flights' numbers."""
        return [flight.number for flight in self.messages]


def exchange(x: Sequence[Tensor], row: collectives.Row) -> Exchange:
    """Start to send `x[b][k]` to the listener of slot k in this round, for each tensor `[K, D]`."""
    good = guarding.judged(x) if guarding.is_guarded() else None
    messages = [collectives.exchange(message, row, per_slot=True, good=good) for message in x]
    return Exchange(x, messages, None if good is None else guarding.post_flags(good, row))


def arrived(posted: Exchange, otherwise: Sequence[Tensor], after: Sequence[Tensor] = ()) -> list[Tensor]:
    """Wait for the messages `[K, D]`, each in its own dtype; `otherwise` in the place of bad ones."""
    inboxes = [collectives.wait(message, (*posted.numbers, *after)) for message in posted.messages]
    if posted.flags is None or posted.flags.inbox is None:
        return inboxes
    good = collectives.wait(posted.flags.inbox) > 0
    return [torch.where(good, inbox, old.to(inbox.dtype)) for inbox, old in zip(inboxes, otherwise, strict=True)]
