"""CECA's messages."""

from __future__ import annotations

from decentfn.topologies.construct import from_shifts
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Topology


@register_topology("ceca")
def ceca(num_workers: int) -> Topology:
    """The messages of CECA: in each round a worker receives from one at a distance, weight 1/2: `(I + P^s)/2`.

    Of the bits of N-1, most significant first, with e = 0: the round of a bit receives from i-(e+bit), and e ← 2e + bit.
    CECA itself updates two buffers by these messages and holds the exact mean after ⌈log2 N⌉ rounds; one buffer, as all
    algorithms here keep, does so where N is a power of two.
    Cost per step and worker: one message.

    Args:
        num_workers: N >= 1.

    Returns:
        Topology of period ⌈log2 N⌉, doubly stochastic, not symmetric.

    Source: Ding et al., 2023.

    >>> ceca(5).period
    3
    """
    shifts, e = [], 0
    for bit in map(int, f"{num_workers - 1:b}" if num_workers > 1 else ""):
        shifts.append(e + bit)
        e = 2 * e + bit
    return from_shifts("ceca", [{shift: 0.5} for shift in shifts] or [{0: 0.5}], num_workers)
