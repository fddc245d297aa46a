"""Schedules whose messages are lost or late: `lossy` draws lost links, `cut` is told of them, `arrivals` draws delays.

    W'[i, j] = W[i, j] (1 - lost[i, j]);    W'[j, j] = W[j, j] + Σ_i W[i, j] lost[i, j]        (j ≠ i)

lost[i, j]: 1 if the message of sender j to receiver i is lost in this step. The sender keeps its weight, so columns
still sum to 1 and mixing conserves the mean (with push-sum, the mass). If a symmetric round loses both directions of a
link, each end keeps what it would have given to the other, and rows sum to 1, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decentfn.core import checks_arguments, draws, require
from decentfn.topologies.combine import combination, later
from decentfn.topologies.drawn import from_rounds
from decentfn.topologies.rounds import RULES, Round, Topology, is_symmetric

_LOST, _LATE = 0x6C6F7374, 0x6C617465
"""Streams of the draws of links."""


@combination
def lossy(topology: Topology, probability: float, *, both_ways: bool = True, seed: int = 0) -> Topology:
    """Lose each link of a schedule with this probability in every step, the same on every worker.

    A lost message is not sent, and its sender keeps the weight. Cost per step and worker: (1 - probability) messages
    for each of `topology`.

    Args:
        topology: a schedule of messages, without group averages.
        probability: in [0, 1].
        both_ways: True loses a link in both directions together, and the schedule stays doubly stochastic if it was;
            its rounds must be symmetric then, or declared for push-sum. False loses each message alone; the result
            needs push-sum.
        seed: any integer; the lost links are a function of (seed, t).

    Raises:
        ValueError: group averages, a probability outside [0, 1], or one-way messages with `both_ways`.

    Source: Koloskova et al., ICML 2020 (convergence of decentralized SGD on random W, by its expected contraction).

    >>> from decentfn.topologies import certificate, static_ring
    >>> facts = certificate(lossy(static_ring(8), 0.25))
    >>> facts.is_doubly_stochastic, round(facts.messages_per_step, 1)
    (True, 1.5)
    """
    _require_links("lossy", topology, both_ways)

    def lost(t: Tensor, sources: Tensor) -> Tensor:
        return _drawn(seed, int(t), _LOST, sources, both_ways) < probability

    name = f"lossy({topology.name}, {probability:g}{'' if both_ways else ', both_ways=False'}, seed={seed})"
    return _losing(name, topology, lost, both_ways)


@combination
def arrivals(topology: Topology, age: int, least: int, most: int, seed: int) -> Topology:
    """Return the messages of step t - age that arrive in step t, if each takes from `least` to `most` steps.

    A delay is a function of (seed, step of sending, link). The weights of others stay with the sender.
    """
    _require_links("arrivals", topology, both_ways=False)

    def not_now(t: Tensor, sources: Tensor) -> Tensor:
        delay = least + (_drawn(seed, max(int(t) - age, 0), _LATE, sources, False) * (most - least + 1)).long()
        return delay != age

    return _losing(f"arrivals({topology.name}, {age} of {least}..{most}, {seed})", later(age, topology), not_now, False)


@checks_arguments(RULES)
def cut(topology: Topology, lost: Callable[[int], Tensor], *, both_ways: bool = True) -> Topology:
    """Leave out the links that a function of the step names: an outage, a partition, or a worker that is away.

    A lost message is not sent, and its sender keeps the weight. A worker whose links are all lost trains alone. `certificate`
    samples the result like a random schedule, in steps 0 to 63 (0 to 511 for the contraction), and sees no later outage;
    `mixing_matrix(topology, t)` is W of any step.

    Args:
        topology: a schedule of messages, without group averages.
        lost: t -> `[N, N]` bool, True at `[i, j]` if receiver i does not hear sender j in step t; a function of t alone.
        both_ways: as in `lossy`; True loses a link in both directions if either is named.

    Raises:
        ValueError: group averages, another shape or dtype, values that differ when asked twice, or one-way messages
            with `both_ways`.

    >>> from decentfn.topologies import mixing_matrix, static_ring
    >>> def away(t):
    ...     lost = torch.zeros(4, 4, dtype=torch.bool)
    ...     if 100 <= t < 200:
    ...         lost[2] = True
    ...     return lost
    >>> mixing_matrix(cut(static_ring(4), away), 100)[2].tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    _require_links("cut", topology, both_ways)
    require(callable(lost), "cut", "lost is a function of t that returns [N, N] bool.", lost=lost)
    n, me = topology.num_workers, torch.arange(topology.num_workers)[:, None]

    def named(t: Tensor, sources: Tensor) -> Tensor:
        mask = lost(int(t))
        is_mask = isinstance(mask, Tensor) and mask.shape == (n, n) and mask.dtype == torch.bool
        require(is_mask, "cut", f"lost(t) is [{n}, {n}] bool: receivers, senders.", lost=mask)
        return (mask | mask.T if both_ways else mask)[me, sources]

    return _losing(f"cut({topology.name})", topology, named, both_ways)


def _drawn(seed: int, t: int, stream: int, sources: Tensor, both_ways: bool) -> Tensor:
    """Draw a number in [0, 1) for each message, `[N, K]` float64; both directions of a link share it with `both_ways`."""
    n = len(sources)
    me = torch.arange(n)[:, None]
    ends = (torch.minimum(me, sources), torch.maximum(me, sources)) if both_ways else (me, sources)
    link = (ends[0] * n + ends[1]).flatten() % 2**32
    return draws.uniform(seed, t, stream, (), worker=link).view_as(sources)


def _losing(name: str, topology: Topology, lost: Callable[[Tensor, Tensor], Tensor], both_ways: bool) -> Topology:
    """Return the schedule without the links of `lost`: `t`, senders `[N, K]` int64 -> `[N, K]` bool."""

    def round_of(t: Tensor) -> Round:
        this = topology.round(t)
        sources, destinations, weights, active = this.sources, this.destinations, this.weights, this.is_active
        gone = lost(t, sources.clamp(min=0)) & (sources >= 0)
        theirs = weights[:, 1:] * gone
        kept = torch.zeros_like(weights[:, 0]).index_add_(0, sources.clamp(min=0).flatten(), theirs.flatten())
        weights = torch.cat([weights[:, :1] + kept[:, None], weights[:, 1:] - theirs], dim=1)
        unsent = gone.gather(0, destinations.clamp(min=0))
        return Round(sources.masked_fill(gone, -1), destinations.masked_fill(unsent, -1), weights, is_active=active)

    return from_rounds(
        name, topology.num_workers, round_of, period=None, needs_push_sum=topology.needs_push_sum or not both_ways
    )


def _require_links(call: str, topology: Topology, both_ways: bool) -> None:
    rule = "a group average has no links to lose; use a schedule of messages, such as 'static-exp' or 'base'."
    require(not topology.has_groups, call, rule, topology=topology)
    if both_ways and not topology.needs_push_sum:
        rule = "its messages go one way, so a lost one leaves rows that do not sum to 1; both_ways=False, for push-sum."
        require(all(is_symmetric(topology, t) for t in topology.steps()), call, rule, topology=topology)
