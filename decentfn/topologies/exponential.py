"""Exponential graphs: neighbors at distances that are powers of two or of p + 1; CECA; pairs that differ in one bit."""

from __future__ import annotations

from decentfn.core.arguments import require
from decentfn.topologies.construct import from_groups, from_shifts
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Edge, Topology


def _digits(n: int, base: int) -> int:
    count, reach = 0, 1
    while reach < n:
        count, reach = count + 1, reach * base
    return count


@register_topology("static-exp")
def static_exp(num_workers: int) -> Topology:
    """Receive from the workers at distances 1, 2, 4, ... 2^(τ-1) in every step, τ = ⌈log2 N⌉, all weights 1/(τ+1).

    Spectral gap 2/(1 + τ) for even N. Cost per step and worker: τ messages.

    Source: Ying et al., NeurIPS 2021.

    >>> static_exp(16).degree
    4
    """
    tau = _digits(num_workers, 2)
    return from_shifts("static-exp", [{2**k: 1 / (1 + tau) for k in range(tau)}], num_workers)


@register_topology("one-peer-exp-directed")
def one_peer_exp_directed(num_workers: int) -> Topology:
    """Average with one peer at distance 2^k, cycling over k: `W = (I + P^(2^k)) / 2`.

    ⌈log2 N⌉ rounds, which give the exact mean when N is a power of two. Cost per step and worker: one message.

    Args:
        num_workers: N >= 1; the exact mean needs a power of two.

    Source: Ying et al., NeurIPS 2021.

    >>> one_peer_exp_directed(8).period
    3
    """
    rounds = [{2**k: 0.5} for k in range(_digits(num_workers, 2))]
    return from_shifts("one-peer-exp-directed", rounds, num_workers)


@register_topology("p-peer-exp")
def p_peer_exp(num_workers: int, *, p: int = 2) -> Topology:
    """Average with p peers at distances j (p+1)^k, j = 1..p, cycling over k; weights 1/(p+1).

    Exact after k rounds when N = (p+1)^k. Distances that agree modulo N are one message.
    Cost per step and worker: p messages.

    Args:
        num_workers: N >= 1; the exact mean needs a power of p + 1.
        p: peers per step, at least 1; `p=1` is one-peer-exp-directed.
    """
    base = p + 1
    rounds = [{j * base**k: 1 / base for j in range(1, base)} for k in range(_digits(num_workers, base))]
    return from_shifts("p-peer-exp", rounds, num_workers)


@register_topology("ceca")
def ceca(num_workers: int) -> Topology:
    """Use CECA's messages: in each round receive from the worker at one distance, weight 1/2: `(I + P^s)/2`.

    Round by round over the bits of N-1, most significant first, from e = 0: receive from i-(e+bit), then e ← 2e + bit.
    CECA itself updates two buffers with these messages and holds the exact mean after ⌈log2 N⌉ rounds. With one buffer,
    as in all algorithms here, this holds if N is a power of two.
    Cost per step and worker: one message.

    Source: Ding et al., 2023.

    >>> ceca(5).period
    3
    """
    shifts, e = [], 0
    for bit in map(int, f"{num_workers - 1:b}" if num_workers > 1 else ""):
        shifts.append(e + bit)
        e = 2 * e + bit
    return from_shifts("ceca", [{shift: 0.5} for shift in shifts] or [{0: 0.5}], num_workers)


@register_topology("one-peer-hypercube")
@register_topology("one-peer-exp")
def one_peer_exp(num_workers: int) -> Topology:
    """Pair `i` with `i XOR 2^k` in phase k, weight 1/2 (the one-peer hypercube).

    Cost per step and worker: one message. Exact consensus after log2(N) steps.

    Args:
        num_workers: N, a power of two.

    Source: Wang et al., ICLR 2025 (Decent-DP).

    >>> one_peer_exp(8).period
    3
    """
    n, rule = num_workers, "pairs i, i XOR 2^k need a power of two; use 'base' or 'one-peer-exp-directed'."
    require(n & (n - 1) == 0, "one_peer_exp", rule, num_workers=n)
    bits = [1 << k for k in range(n.bit_length() - 1)]
    phases = [[Edge([i, i ^ bit]) for i in range(n) if not i & bit] for bit in bits]
    return from_groups("one-peer-exp", phases or [[Edge([0])]], n)
