"""CECA: the exact mean in ⌈log2 N⌉ steps for any number of workers, one message a step, with a second buffer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.topologies.construct import from_shifts
from decentfn.topologies.registry import register_topology
from decentfn.topologies.topology import Topology


class CecaRounds(NamedTuple):
    """The consensus iteration of CECA in its two-port form, round by round.

    Worker i holds `a_i`, the mean over the e+1 workers i-e..i, and `b_i`, the mean over i-e..i-1, itself left out.
    In round p it sends `a` or `b` and hears one message h, of worker `sources[p, i, 0]`:
    `(a, b) ← coefficients[p] @ (a, b, h)`.
    """

    sources: Tensor  # [P, N, 1] int64
    sends_a: Tensor  # [P] bool: a is what travels, otherwise b
    coefficients: Tensor  # [P, 2, 3] float64


def ceca_rounds(num_workers: int) -> CecaRounds:
    """What an algorithm needs to run CECA: whom each round hears, which buffer travels and how both are updated.

    The bits of N-1, most significant first, and e = 0. Bit 1: a travels from i-(e+1); `a ← (a + h)/2`,
    `b ← (e b + (e+1) h)/(2e+1)`. Bit 0: b travels from i-e; `a ← ((e+1) a + e h)/(2e+1)`, `b ← (b + h)/2`.
    Then e ← 2e + bit. After the last bit e = N-1 and a is the mean over everyone.

    Args:
        num_workers: N >= 1; N = 1 has one round, in which nothing changes.

    Source: Ding et al., 2023.

    >>> rounds = ceca_rounds(5)
    >>> rounds.sends_a.tolist(), rounds.sources[:, 4, 0].tolist()
    ([True, False, False], [3, 3, 2])
    """
    n, e = num_workers, 0
    worker = torch.arange(n)
    sources, sends_a, coefficients = [], [], []
    for bit in map(int, f"{n - 1:b}") if n > 1 else []:
        sources.append((worker - (e + bit)) % n)
        sends_a.append(bool(bit))
        whole = 2 * e + 1
        if bit:
            coefficients.append([[0.5, 0.0, 0.5], [0.0, e / whole, (e + 1) / whole]])
        else:
            coefficients.append([[(e + 1) / whole, 0.0, e / whole], [0.0, 0.5, 0.5]])
        e = 2 * e + bit
    if not sources:
        sources, sends_a, coefficients = [worker], [True], [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]
    return CecaRounds(
        torch.stack(sources)[..., None], torch.tensor(sends_a), torch.tensor(coefficients, dtype=torch.float64)
    )


def ceca_consensus(x: Tensor) -> Tensor:
    """Run one period of CECA's consensus iteration on stacked vectors.

    Args:
        x: `[N, D]`, a row per worker.

    Returns:
        `[N, D]`: the mean of the rows, in every row.
    """
    rounds = ceca_rounds(x.shape[0])
    a, b = x, torch.zeros_like(x)
    for sources, sends_a, coefficients in zip(*rounds, strict=True):
        heard = (a if sends_a else b)[sources[:, 0]]
        a, b = torch.einsum("cb,bnd->cnd", coefficients.to(x.dtype), torch.stack([a, b, heard]))
    return a


@register_topology("ceca")
def ceca(num_workers: int) -> Topology:
    """The messages of CECA: whom each round hears, weight 1/2, which is how the buffer that travels is averaged.

    In each round the buffer that is sent mixes as `(I + P^s)/2`, a doubly stochastic matrix: that is this topology,
    and what an algorithm with CECA's two buffers plans its messages by. The other buffer follows `ceca_rounds`, which
    no single mixing matrix can say; so the exact mean after ⌈log2 N⌉ rounds is CECA's, not that of an algorithm that
    uses this topology with one buffer (unless N is a power of two).
    Cost per step and worker: one message.

    Args:
        num_workers: N >= 1.

    Returns:
        Topology of period ⌈log2 N⌉, doubly stochastic, not symmetric.

    Source: Ding et al., 2023.

    >>> ceca(5).period
    3
    """
    sources = ceca_rounds(num_workers).sources[:, 0, 0]
    return from_shifts("ceca", [{-int(source): 0.5} for source in sources], num_workers)
