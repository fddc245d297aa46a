"""Two-level schedules: averages inside the nodes, combined with a schedule across nodes."""

from __future__ import annotations

from dataclasses import replace

from decentfn.core.arguments import require
from decentfn.topologies.combine import across, alternate, blocks
from decentfn.topologies.construct import from_groups
from decentfn.topologies.registry import register_topology, topology
from decentfn.topologies.rounds import Edge, Topology, require_topology


@register_topology("hierarchical")
def hierarchical(
    num_workers: int, *, local_world_size: int, inner: str | Topology = "complete", outer: str | Topology = "base"
) -> Topology:
    """Mix inside each node in even steps and across nodes in odd steps.

    Step 2k is round k of `inner` on the L workers of each node. Step 2k+1 is round k of `outer` on the N/L nodes,
    between workers at the same place. With `inner="complete"` two steps make `W_nodes ⊗ (1/L) 11ᵀ`. The levels
    alternate because the second needs the result of the first, so one step cannot post both.
    Cost per step and worker: half of `inner`'s plus half of `outer`'s; "complete" is an all-reduce inside the node.

    Args:
        num_workers: N, a multiple of local_world_size.
        local_world_size: L, workers per node (torchrun's LOCAL_WORLD_SIZE); consecutive workers share a node.
        inner: a name, or a topology of L workers.
        outer: a name, or a topology of N/L workers.

    >>> hierarchical(8, local_world_size=4, outer="one-peer-exp").period
    2
    """
    n, size = num_workers, local_world_size
    call = _require_nodes("hierarchical", n, size)
    within, between = _level(call, "inner", inner, size), _level(call, "outer", outer, n // size)
    levels = [] if size == 1 and n > 1 else [blocks(within, n // size)]
    levels += [] if size == n else [across(between, size)]
    return replace(alternate(*levels), name="hierarchical")


@register_topology("alternating-exp-ring")
def alternating_exp_ring(num_workers: int, *, local_world_size: int) -> Topology:
    """Alternate exponential rounds across nodes of `local_world_size` workers with averages inside the nodes.

    A round across nodes takes two steps, in which alternating pairs of nodes average either over both nodes or inside
    each node. Groups of up to 2L workers average by an all-reduce.

    Args:
        num_workers: N = nodes x local_world_size, the number of nodes a power of two.
        local_world_size: L, workers per node (torchrun's LOCAL_WORLD_SIZE), at least 1.

    Source: Wang et al., ICLR 2025 (Decent-DP).
    """
    n, size = num_workers, local_world_size
    call, nodes = _require_nodes("alternating_exp_ring", n, size), n // size
    rule = f"{nodes} nodes, but rounds across nodes pair a, a XOR 2^k: a power of two is needed."
    require(nodes & (nodes - 1) == 0, call, rule)
    if nodes == 1:
        return from_groups("alternating-exp-ring", [[Edge(range(n))]], n)

    def node(a: int) -> list[int]:
        return list(range(a * size, (a + 1) * size))

    phases: list[list[Edge]] = []
    swapped = False
    for k in range(nodes.bit_length() - 1):
        first, second = [], []
        for a in (a for a in range(nodes) if not a >> k & 1):
            b = a ^ (1 << k)
            apart, joined = [Edge(node(a)), Edge(node(b))], [Edge(node(a) + node(b))]
            first += joined if swapped else apart
            second += apart if swapped else joined
            swapped = not swapped
        phases += [first, second]
    return from_groups("alternating-exp-ring", phases, n)


def _require_nodes(function: str, n: int, size: int) -> str:
    call = f"{function}(num_workers={n}, local_world_size={size})"
    require(size >= 1 and n % size == 0, call, "N must be a multiple of local_world_size >= 1.")
    return call


def _level(call: str, which: str, schedule: str | Topology, size: int) -> Topology:
    made = topology(schedule, size) if isinstance(schedule, str) else schedule
    require_topology(f"{call}, {which}", made)
    require(made.num_workers == size, call, f"{which} has {made.num_workers} workers; that level has {size}.")
    return made
