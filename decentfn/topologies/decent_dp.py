"""The four schedules of Decent-DP, under its users' names, with its groups and weights."""

from __future__ import annotations

from decentfn.topologies.construct import from_groups
from decentfn.topologies.registry import register_topology
from decentfn.topologies.topology import Edge, Topology


def _power_of_two(n: int) -> bool:
    return n >= 1 and n & (n - 1) == 0


@register_topology("complete")
def complete(num_workers: int) -> Topology:
    """Average with everyone, weight 1/N: `W = J`.

    Cost per step and worker: an all-reduce, 2(N-1)/N payloads; no messages.

    Args:
        num_workers: N >= 1.

    >>> complete(8).period
    1
    """
    return from_groups("complete", [[Edge(range(num_workers))]], num_workers)


@register_topology("ring")
def ring(num_workers: int) -> Topology:
    """Average with the right neighbour, then with the left: (0 1)(2 3)..., then (0 N-1)(1 2)...; weight 1/2.

    Cost per step and worker: one message. Period 2 (1 for N = 2).

    Args:
        num_workers: N, even (or 1).

    Raises:
        ValueError: N is odd.

    Source: Wang et al., ICLR 2025 (Decent-DP).
    """
    n = num_workers
    if n == 1:
        return from_groups("ring", [[Edge([0])]], 1)
    if n % 2:
        raise ValueError(
            f"ring(num_workers={n}): its rounds are pairs of neighbours, so N must be even; use 'static-ring' or 'base'."
        )
    right = [Edge([i, i + 1]) for i in range(0, n, 2)]
    left = [Edge(sorted([i, (i - 1) % n])) for i in range(0, n, 2)]
    return from_groups("ring", [right] if n == 2 else [right, left], n)


@register_topology("one-peer-hypercube")
@register_topology("one-peer-exp")
def one_peer_exp(num_workers: int) -> Topology:
    """Pair `i` with `i XOR 2^k` in phase k, weight 1/2: the one-peer hypercube.

    Cost per step and worker: one message. Exact consensus after log2(N) steps.

    Args:
        num_workers: N, a power of two.

    Raises:
        ValueError: N is not a power of two.

    Source: Wang et al., ICLR 2025 (Decent-DP).

    >>> one_peer_exp(8).period
    3
    """
    n = num_workers
    if not _power_of_two(n):
        raise ValueError(
            f"one_peer_exp(num_workers={n}): pairs i, i XOR 2^k need a power of two; use 'base' or 'one-peer-exp-directed'."
        )
    phases = [
        [Edge([i, i ^ bit]) for i in range(n) if not i & bit] for bit in (1 << k for k in range(n.bit_length() - 1))
    ]
    return from_groups("one-peer-exp", phases or [[Edge([0])]], n)


@register_topology("alternating-exp-ring")
def alternating_exp_ring(num_workers: int, *, local_world_size: int) -> Topology:
    """Exponential rounds across nodes of `local_world_size` workers, alternating with averages inside the nodes.

    Each round across nodes spans two steps, in which alternating pairs of nodes swap an average inside each node
    and one over both nodes. Groups of 2L workers are averaged by an all-reduce.

    Args:
        num_workers: N = nodes x local_world_size, the number of nodes a power of two.
        local_world_size: L, workers per node (torchrun's LOCAL_WORLD_SIZE), at least 1.

    Raises:
        ValueError: N is not a multiple of L, or N / L is not a power of two.

    Source: Wang et al., ICLR 2025 (Decent-DP).
    """
    n, size = num_workers, local_world_size
    call = f"alternating_exp_ring(num_workers={n}, local_world_size={size})"
    if size < 1 or n % size:
        raise ValueError(f"{call}: N must be a multiple of local_world_size >= 1.")
    nodes = n // size
    if not _power_of_two(nodes):
        raise ValueError(f"{call}: {nodes} nodes, but rounds across nodes pair a, a XOR 2^k: a power of two is needed.")
    if nodes == 1:
        return from_groups("alternating-exp-ring", [[Edge(range(n))]], n)

    def node(a: int) -> list[int]:
        return list(range(a * size, (a + 1) * size))

    phases: list[list[Edge]] = []
    swapped = False
    for k in range(nodes.bit_length() - 1):
        first: list[Edge] = []
        second: list[Edge] = []
        for a in (a for a in range(nodes) if not a >> k & 1):
            b = a ^ (1 << k)
            apart, joined = [Edge(node(a)), Edge(node(b))], [Edge(node(a) + node(b))]
            first += joined if swapped else apart
            second += apart if swapped else joined
            swapped = not swapped
        phases += [first, second]
    return from_groups("alternating-exp-ring", phases, n)
