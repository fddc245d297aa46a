"""What the operators of this process have sent and waited for, counted where somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from decentfn.comm.collectives.membership import world


@dataclass
class Communication:
    """What one process has exchanged with others inside steps; what its own workers say to each other is not counted."""

    messages: int = 0
    """That it has sent, one for each bucket and neighbour; a mean over a group is none."""
    bytes_sent: int = 0
    """In messages, and 2(r-1)/r payloads for each mean over a group of r processes."""
    bytes_received: int = 0
    """The same of what comes in."""
    seconds_waited: float = 0.0
    """In which this process stood still because something had not arrived: the part of the communication that no
    computation hides. On a GPU the stream waits, and the process does not: there it is about 0."""


@contextmanager
def communication() -> Iterator[Communication]:
    """Count what this process exchanges from here to the end of the block; the numbers can be read at any time.

    Enter it after `df.init()`, around steps as they are, compiled or not: nothing in them changes, and nothing is counted
    where nobody asks. One block may stand in another. In one process (`df.simulate`) nothing travels, and all is 0.

    >>> import decentfn as df
    >>> with df.profiling.communication() as counted:
    ...     pass  # state, metrics = step(state, batch, t)
    >>> counted
    Communication(messages=0, bytes_sent=0, bytes_received=0, seconds_waited=0.0)
    """
    here, counted = world(), Communication()
    here.counters = (*here.counters, counted)
    try:
        yield counted
    finally:
        here.counters = tuple(other for other in here.counters if other is not counted)
