"""`plan`: all methods on one cluster, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from decentfn.core import at_least, checks_numbers, require
from decentfn.planning.methods import PARTS, Prediction, Work, asynchronous, ddp, diloco, gossip, hsdp
from decentfn.planning.order import renumbered, reordered, slowest_link
from decentfn.timing.cluster import Cluster
from decentfn.topologies import Certificate, Topology, certificate, complete
from decentfn.topologies.registry import of_size

_Certified = list[tuple[Topology, Certificate]]
_MOST_PARAMETERS = 10**18
_ENOUGH = 0.05
"""Spectral gap per step below which a schedule hardly mixes."""
_WORTH = 0.95
"""Share of a step's time that another way must save at least is 1 minus this."""


class Recommendation(NamedTuple):
    """Predictions for one cluster."""

    predictions: list[Prediction]
    """All methods, the fastest first."""
    recommended: Prediction
    """The fastest that mixes: a gap per step of at least 0.05. Of equally fast ones, the one that mixes best."""
    topology: Topology | None
    """The recommended schedule; None if it is an all-reduce."""
    reason: str
    """Why it is recommended, in sentences: "it is the fastest that ..."."""
    links: str = ""
    """Of unequal links, the slowest that it uses, and the orders of nodes and workers that are faster, in sentences."""
    reordered: Prediction | None = None
    """What is fastest in another order of workers, if that is faster by 5 %."""
    order: Topology | None = None
    """Its schedule, relabeled, to train with."""


@checks_numbers
def plan(
    cluster: Cluster,
    model: int | nn.Module,
    *,
    compute_seconds: float,
    dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    sent: float = 1.0,
    inner_steps: int = 64,
    topologies: Sequence[Topology] | None = None,
) -> Recommendation:
    """Predict a step of DDP, HSDP, (streaming) DiLoCo, asynchronous gradient push, and of gossip on each topology.

    Links are shared fairly and nothing else uses them; a step's computation is the same on all workers. Messages of
    `adapt_while_communicate` and `streaming_diloco` travel during the computation, DDP's when a bucket of 25 MB is full, and
    DiLoCo's after it; a step is that of `df.clock`. With `sent` below 1, gossip is `deep_squeeze`: its compressed messages follow the computation, and a group
    of r, such as `complete`, sends r - 1 of them per worker, since they cannot be averaged on their way. Schedules that
    `deep_squeeze` refuses are left out. The others do not compress.

    Args:
        cluster: the workers and their links.
        model: the number of trained parameters, or a module, whose frozen ones are not counted: they are not sent, and
            `memory` and `checkpoint` are without them.
        compute_seconds: forward and backward pass and update of one worker, measured without messages between workers (of a
            sharded worker, with its gathers), > 0.
        dtype: of the parameters; None: the module's own, or float32.
        wire_dtype: of a message that is not compressed; None: `dtype`.
        sent: share of the parameters' bytes that a compressor sends, in (0, 1]; 0.02 for `top_k(0.01)`, whose places
            take as many bytes as its float32 values.
        inner_steps: H of DiLoCo.
        topologies: schedules to compare, of the cluster's number of workers; None: all registered ones of that size.

    Raises:
        ValueError: a number out of its range, or a topology of another size.

    >>> import decentfn as df
    >>> four = df.planning.Cluster(4, between=df.planning.Link(gbit_per_s=1))
    >>> made = df.planning.plan(four, 10_000_000, compute_seconds=0.1)
    >>> made.recommended.topology, round(made.recommended.seconds, 2)
    ('base', 0.34)
    """
    rule = "a df.planning.Cluster; df.planning.Cluster.measured(path) reads the file of `decentfn links`."
    require(isinstance(cluster, Cluster), "plan", rule, cluster=cluster)
    nbytes = (dtype or torch.float32).itemsize
    if isinstance(model, nn.Module):
        trained = [p for p in model.parameters() if p.requires_grad]
        model = sum(p.numel() for p in trained)
        nbytes = nbytes if dtype else sum(p.numel() * p.itemsize for p in trained) / max(1, model)
    parameters = at_least("plan", "model", model, 1)
    require(parameters <= _MOST_PARAMETERS, "plan", "at most 10^18 parameters.", model=model)
    rule = "steps between two averages, at least 1."
    require(1 <= inner_steps <= _MOST_PARAMETERS, "plan", rule, inner_steps=inner_steps)
    require(0 < compute_seconds < 1e9, "plan", "seconds of a step's computation, > 0.", compute_seconds=compute_seconds)
    require(0 < sent <= 1, "plan", "the share of bytes that are sent, in (0, 1].", sent=sent)
    for made in topologies or ():
        rule = f"a df.Topology of {cluster.num_workers} workers, as the cluster has."
        is_one = isinstance(made, Topology) and made.num_workers == cluster.num_workers
        require(is_one, "plan", rule, topologies=made)
    work = Work(parameters, compute_seconds, nbytes, wire_dtype.itemsize if wire_dtype else nbytes)
    schedules = cache(partial(_certified, topologies))
    rows = _ranked(work, cluster, sent, inner_steps, schedules)
    best, schedule = _best(rows)
    found = [p for p, _ in rows]
    reason, limited = _reason(best, found, work), best.bottleneck == "links between nodes"
    if limited and topologies is None:
        ways = _other_ways(work, cluster, sent)
        faster = {
            way: _best(_ranked(*these, sent, inner_steps, schedules))[0].seconds / best.seconds for way, these in ways
        }
        said = [f"{share:.2f} with {way}" for way, share in faster.items() if share < _WORTH]
        reason += f" Of this step's time remain {', '.join(said)}." if said else ""
    made = Recommendation(found, best, schedule, reason)
    if cluster.links is None or cluster.nodes == 1:
        return made
    nbytes, to_each = work.parameters * (work.wire if sent == 1 else work.nbytes * sent), sent < 1
    all_reduce = complete(cluster.num_workers)
    told = slowest_link(cluster, schedule or all_reduce, nbytes, to_each=to_each and schedule is not None)
    other, ranks = renumbered(cluster, nbytes)
    now, then = next(p.seconds for p in found if p.method == "DDP"), ddp(work, other).seconds
    if then < _WORTH * now:
        told += f" An all-reduce is a ring of ranks: with nodes in the order {ranks} DDP takes {then * 1e3:.0f} ms."
    mixing = [its for p, its in rows if its is not None and (p.gap or 0) >= _ENOUGH] if limited else []
    if orders := reordered(cluster, mixing, nbytes, to_each=to_each):
        faster, order = _best(_ranked(work, cluster, sent, inner_steps, partial(_certified, [*orders])))
        if order is not None and faster.seconds < _WORTH * best.seconds:
            told += f" With `{orders[order]}` {faster.method} takes {faster.seconds * 1e3:.0f} ms."
            made = made._replace(reordered=faster, order=order)
    return made._replace(links=told)


def _other_ways(work: Work, cluster: Cluster, sent: float) -> list[tuple[str, tuple[Work, Cluster]]]:
    """Return what relieves the links between nodes without another method."""
    processes = cluster.workers_per_node * cluster.processes_per_worker
    node = replace(cluster, num_workers=cluster.nodes, workers_per_node=1, processes_per_worker=processes)
    narrow, ways = replace(work, wire=2), list[tuple[str, tuple[Work, Cluster]]]()
    if cluster.workers_per_node > 1:
        ways.append(("each node as a worker (`fully_shard`)", (work, node)))
    if work.wire > 2 and sent == 1:
        ways.append(("wire_dtype=torch.bfloat16", (narrow, cluster)))
    return [*ways, ("both", (narrow, node))] if len(ways) == 2 else ways


def _certified(given: Sequence[Topology] | None, n: int, local: int) -> _Certified:
    """Return the given schedules, or else all of this size, with what they guarantee."""
    made = given or [made for made in of_size(n, local).values() if not made.needs_push_sum]
    return [(its, certificate(its)) for its in made]


def _ranked(
    work: Work, cluster: Cluster, sent: float, inner_steps: int, schedules: Callable[[int, int], _Certified]
) -> list[tuple[Prediction, Topology | None]]:
    """Predict all methods, the fastest first."""
    found = [ddp(work, cluster), *(diloco(work, cluster, inner_steps, parts) for parts in (1, PARTS))]
    found.append(asynchronous(work, cluster))
    if cluster.processes_per_worker > 1:
        found.append(hsdp(work, cluster))
    certified = schedules(cluster.num_workers, cluster.workers_per_node)
    if sent == 1:
        predict = partial(gossip, work, cluster)
    else:
        predict = partial(gossip, replace(work, wire=work.nbytes * sent), cluster, is_compressed=True)
        certified = [its for its in certified if its[0].groups is None or its[0].draw is None]
    rows = [*((p, None) for p in found), *((predict(made, facts), made) for made, facts in certified)]
    rows.sort(key=lambda row: (row[0].seconds, *_mixing(row[0]), row[0].between, row[0].topology != "base"))
    return rows


def _mixing(p: Prediction) -> tuple[float, float]:
    """Return the noise spread, infinite if there is none, and the gap, negative: the best mixing is the smallest."""
    return float("inf") if p.noise_spread is None else p.noise_spread, -(p.gap or 0)


def _best(rows: Sequence[tuple[Prediction, Topology | None]]) -> tuple[Prediction, Topology | None]:
    return next((p, made) for p, made in rows if p.gap is not None and p.gap >= _ENOUGH)  # DDP has a gap of 1


def _reason(best: Prediction, found: Sequence[Prediction], work: Work) -> str:
    is_hidden = best.bottleneck == "computation"
    limit = "messages are hidden" if is_hidden else f"limited by {best.bottleneck}"
    told = [
        f"it is the fastest that mixes in every step (gap per step of at least {_ENOUGH}): "
        f"{best.seconds * 1e3:.0f} ms, {work.seconds * 1e3:.0f} of them computation; {limit}."
    ]
    for p in found:
        if p.method in ("DDP", "HSDP", "diloco") and p is not best:
            on, drifts = (
                (f" ({p.topology})", ", but its workers drift apart in between") if p.method == "diloco" else ("", "")
            )
            told.append(f"{p.method}{on} takes {p.seconds / best.seconds:.2f} times as long{drifts}.")
    return " ".join(told)
