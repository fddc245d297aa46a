"""Pairs that change from step to step, at random or by a shift, and random samples of the workers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from decentfn.core import checks_numbers, draws, require
from decentfn.topologies.construct import alone
from decentfn.topologies.drawn import from_draw, from_rounds
from decentfn.topologies.registry import register_topology
from decentfn.topologies.rounds import Round, Topology, noted


def pair_weights(partner: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return sources, destinations and weights of a round of pairs: `partner` `[N]`, its own inverse, at `weight`."""
    heard = torch.where(partner == torch.arange(partner.shape[0]), 0.0, weight).to(torch.float64)
    return partner[:, None], partner[:, None], torch.stack([1.0 - heard, heard], dim=1)


@register_topology("random-matching")
def random_matching(num_workers: int, *, seed: int = 0) -> Topology:
    """Average in new random pairs in every step, weight 1/2; one worker of an odd number is idle.

    In expectation a step contracts the squared disagreement by 1/2 for large N.
    Cost per step and worker: one message. A function of (seed, t), the same on every worker.

    Args:
        num_workers: N >= 1.
        seed: any integer.
    """
    n = num_workers
    place = torch.arange(n)
    other = torch.where((place ^ 1) < n, place ^ 1, place)

    def draw(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = draws.permutation(seed, t, n)
        return pair_weights(torch.zeros_like(order).scatter(0, order, order.index_select(0, other)), 0.5)

    return from_draw("random-matching", n, draw)


@checks_numbers
def sampled(num_workers: int, participants: int, *, seed: int = 0) -> Topology:
    """Average among m random workers in every step (sampled participation); the others keep their values and nobody waits.

    In expectation a step contracts the squared disagreement by 1 - (m-1)/(N-1).
    Cost per step: m-1 messages of each participant. A function of (seed, t), the same on every worker. The m of a round
    every H steps are those of `df.topologies.every(H, sampled(N, m))`, and of outer methods on it: `gasloc`'s mean follows
    DiLoCo. Where all workers take the same outer step, `decoupled_diloco(arrives=...)` draws who counts.

    Args:
        num_workers: N >= 1.
        participants: m, from 2 to N (1 if N is 1).
        seed: any integer.
    """
    n, m = num_workers, participants
    rule = f"from 2 to all {n} workers take part in a round."
    require(min(2, n) <= m <= n, "sampled", rule, participants=m)
    place, ahead = torch.arange(m)[:, None], torch.arange(1, m)

    def draw(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        these, alone = draws.permutation(seed, t, n)[:m], torch.arange(n)[:, None].expand(n, m - 1)
        weights = torch.zeros(n, m, dtype=torch.float64)
        weights[:, 0] = 1.0
        weights[these] = 1 / m
        heard, told = (alone.index_copy(0, these, these[(place + step) % m]) for step in (ahead, -ahead))
        return heard, told, weights

    return noted(from_draw(f"sampled({m})", n, draw), family=partial(sampled, participants=m, seed=seed))


@register_topology("shift-one")
def shift_one(num_workers: int) -> Topology:
    """Pair worker i of the lower half with N/2 + (i + t) mod N/2, weight 1/2.

    Cost per step and worker: one message. Period N/2.

    Args:
        num_workers: N, even (or 1).

    Source: Bagua, the "shift_one" peer selection of its decentralized algorithm.
    """
    n, half = num_workers, num_workers // 2
    if n == 1:
        return alone("shift-one")
    rule = "the lower half pairs with the upper, so N must be even; use 'random-matching'."
    require(n % 2 == 0, "shift_one", rule, num_workers=n)
    worker = torch.arange(n)

    def round_of(t: Tensor) -> Round:
        partner = torch.where(worker < half, half + (worker + t) % half, (worker - half - t) % half)
        return Round(*pair_weights(partner, 0.5))

    return from_rounds("shift-one", n, round_of, period=half)
