"""Methods: how a step of each combines its computation and its traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from decentfn.timing import Clock, Cluster, Exchange, clock
from decentfn.timing.network import Network, messages_of
from decentfn.topologies import Certificate, Topology, complete, one_peer_exp_directed

_FORWARD, _FIRST, _BUCKET = 1 / 3, 2**20, 25 * 2**20
"""Share of the forward pass in a step's computation; bytes of gradients that travel together, when they are there."""
PARTS = 4
"""Parts of the parameters, which streaming DiLoCo averages one after another."""
_MOMENTS = 2
"""Copies of the parameters in Adam's state."""
_SAMPLED = 64


@dataclass(frozen=True)
class Prediction:
    """Predicted step of one method. Times are in seconds, sizes in bytes, both means over the steps."""

    method: str
    """Name of the algorithm in `df`, or "DDP" or "HSDP"."""
    topology: str
    """Registered name of the schedule; "all-reduce", or "every H steps" for DiLoCo."""
    seconds: float
    """Time of a step, computation and messages."""
    exchange: float
    """Time of the messages alone."""
    between: float
    """Bytes per step through the busiest interface between nodes, in its busier direction."""
    inside: float
    """Bytes per step between a process and the others of its node, likewise; a sharded worker's gathers included."""
    gap: float | None
    """Spectral gap per step of mixing uncompressed; 1 is the exact mean in every step, None: random, or none."""
    noise_spread: float | None
    """`Certificate.noise_spread`, how far the noise of gradients drives workers apart; 0 if all are equal."""
    memory: float
    """Bytes of a process: parameters, gradients, Adam's moments, the method's own copies, inboxes, and the copy that a
    sharded module keeps. Activations, gathered layers and the copy that a `Saver` writes come in addition."""
    checkpoint: float
    """Bytes of one checkpoint of all workers."""
    bottleneck: str
    """What makes the step longer: "computation" alone, "links between nodes" or "links inside nodes"."""


@dataclass(frozen=True)
class Work:
    """Computation and payload of a worker's step.

    Args:
        parameters: number of parameters.
        seconds: forward and backward pass and update, without messages between workers.
        nbytes: bytes of a parameter.
        wire: bytes of a parameter in a message.
    """

    parameters: int
    seconds: float
    nbytes: float
    wire: float


def ddp(work: Work, cluster: Cluster) -> Prediction:
    """All-reduce of gradients over all processes, bucket by bucket, each when it is full; each process holds all."""
    both = cluster.num_workers, cluster.workers_per_node
    members, local = (count * cluster.processes_per_worker for count in both)
    return hsdp(work, replace(cluster, num_workers=members, workers_per_node=local, processes_per_worker=1), "DDP")


def hsdp(work: Work, cluster: Cluster, method: str = "HSDP") -> Prediction:
    """Parameters sharded in a node: gathered twice and gradients scattered there, and averaged over the nodes."""
    made = complete(cluster.num_workers)
    return _predicted(method, "all-reduce", work, cluster, made, gap=1.0, noise_spread=0.0, buckets=_buckets(work))


def _buckets(work: Work) -> list[tuple[float, float, float]]:
    """Return what leaves from DDP's first bucket on, and from its second: begins, share of the payload, parts."""
    size, found = work.parameters * work.nbytes, list[tuple[float, float, float]]()
    for before, bucket in ((0, _FIRST), (_FIRST, _BUCKET)):
        if before < size:
            begins = _FORWARD + (1 - _FORWARD) * min(1.0, (before + bucket) / size)
            found.append((begins, 1 - before / size, max(1.0, (size - before) / bucket) if before else 1.0))
    return found


def gossip(
    work: Work, cluster: Cluster, topology: Topology, facts: Certificate, *, is_compressed: bool = False
) -> Prediction:
    """adapt_while_communicate: parameters travel during the forward and backward passes.

    If compressed, deep_squeeze, which any schedule suits: a message is known after the update, so nothing hides it.
    """
    name, inboxes = topology.name, max(1, topology.degree)
    mixing: dict[str, Any] = {"gap": facts.gap_per_step, "noise_spread": facts.noise_spread}
    if not is_compressed:
        return _predicted("adapt_while_communicate", name, work, cluster, topology, inboxes=inboxes, **mixing)
    inboxes = max(inboxes, math.ceil(of_schedule(topology, cluster, to_each=True).sent))
    how: dict[str, Any] = {"begins": 1, "inboxes": inboxes, "memory": 1, "to_each": True}
    return _predicted("deep_squeeze", name, work, cluster, topology, **how, **mixing)


def diloco(work: Work, cluster: Cluster, inner_steps: int, parts: int = 1) -> Prediction:
    """An all-reduce of the parameters after every H steps, which nothing hides.

    In parts it is streaming_diloco: an all-reduce of one every H / P steps, during a step's computation.
    """
    name, made = f"every {inner_steps} steps", complete(cluster.num_workers)
    method, begins = ("diloco", 1) if parts == 1 else ("streaming_diloco", 0)
    parts = min(parts, inner_steps)
    work, every = replace(work, wire=work.wire / parts), inner_steps / parts
    return _predicted(method, name, work, cluster, made, begins=begins, every=every, inboxes=1, memory=2)


def asynchronous(work: Work, cluster: Cluster) -> Prediction:
    """asynchronous_gradient_push: nobody waits; what the links do not carry in a step is not sent."""
    made = one_peer_exp_directed(cluster.num_workers)
    its = _predicted("asynchronous_gradient_push", made.name, work, cluster, made, inboxes=1)
    sent, own = work.seconds / max(work.seconds, its.exchange), replace(its, bottleneck="computation")
    return replace(own, seconds=work.seconds, between=its.between * sent, inside=its.inside * sent)


def _predicted(
    method: str,
    name: str,
    work: Work,
    cluster: Cluster,
    topology: Topology,
    *,
    gap: float | None = None,
    noise_spread: float | None = None,
    begins: float = 0,
    buckets: Sequence[tuple[float, float, float]] = (),
    every: float = 1,
    inboxes: int = 0,
    memory: int = 0,
    to_each: bool = False,
) -> Prediction:
    """Predict a step of equal workers that all wait for the busiest interface, whose messages leave after the share `begins` of the computation.

    `inboxes` payloads arrive. `memory` counts the algorithm's copies of the parameters, which checkpoints have, too.
    The schedule is used in every `every`-th step.
    """
    has_replicas, shards = method not in ("DDP", "HSDP"), cluster.processes_per_worker
    module = int(has_replicas and shards > 1)  # the copy of a module whose shards are copied into at each step
    payload, own = work.parameters * work.wire, work.parameters * work.nbytes
    timed, steps = clock(work.seconds, cluster), sampled(topology)
    sends = [
        Exchange(topology, payload * share, from_, to_each=to_each, parts=parts)
        for from_, share, parts in buckets or [(begins, 1.0, 1.0)]
    ]
    traffic = of_schedule(topology, cluster, to_each=to_each)
    between, inside = timed.exchange(sends[0], steps)
    exchange = max(between, inside) / every
    ends = [[float(timed.timeline(its, 1, first=t).end.max()) for t in steps] for its in sends]
    if len(sends) > 1:
        hidden = _hidden(timed, *sends, steps=steps)
        ends[0] = [end - hidden for end in ends[0]]
    alone = fmean(max(of_step) for of_step in zip(*ends, strict=True))
    seconds = work.seconds + float(alone - work.seconds) / every
    is_hidden = exchange <= work.seconds * 1e-3 or seconds <= work.seconds * 1.001
    slowest = "links between nodes" if between >= inside else "links inside nodes"
    kept = (_MOMENTS + memory) * work.parameters * max(4, work.nbytes)  # in float32 beside narrow parameters
    held = (2 + module) * own + kept  # 2: parameters and gradients
    return Prediction(
        method=method,
        topology=name,
        seconds=seconds,
        exchange=exchange,
        between=traffic.between * payload / every,
        inside=(traffic.inside * payload / every + 3 * (shards - 1) * own) / shards,  # gathered twice, scattered once
        gap=gap,
        noise_spread=noise_spread,
        memory=(held + inboxes * payload) / shards,
        checkpoint=(own + kept) * (cluster.num_workers if has_replicas else 1),
        bottleneck="computation" if is_hidden else slowest,
    )


def _hidden(timed: Clock, both: Exchange, second: Exchange, *, steps: Sequence[int]) -> float:
    """Return the seconds of latencies that pass while the other one's bytes travel, of two all-reduces at a time (gloo's)."""
    small = min(both.nbytes - second.nbytes, second.nbytes)
    empty, all_ = (max(timed.exchange(replace(both, nbytes=nbytes), steps)) for nbytes in (0.0, small))
    last = empty / max(1, 2 * both.topology.num_workers - 1)  # latency, which nothing hides
    alone = (second.begins - both.begins) * float(timed.seconds(0).max())
    return max(0.0, min(empty - last, all_ - empty) - alone)


class Payloads(NamedTuple):
    """Mean over the steps of a schedule, in payloads (one payload: the parameters of a worker)."""

    sent: float
    """Payloads that a worker sends in a step, on average."""
    between: float
    """Payloads through the busiest interface between nodes, in its busier direction."""
    inside: float
    """Payloads between a worker and others of its node, in its busier direction, of the busiest worker."""


def sampled(topology: Topology) -> range:
    """Return the steps of a schedule's first period, or some of a random one."""
    return topology.cycle or range(_SAMPLED)


def of_schedule(topology: Topology, cluster: Cluster, *, to_each: bool = False) -> Payloads:
    """Return the traffic of a topology's steps; averages in groups are ring all-reduces, or messages `to_each` other one."""
    network, rounds = Network(cluster), list[tuple[float, float, float]]()
    for t in sampled(topology):
        m = messages_of(topology, t, network.node, to_each=to_each)
        both = [np.bincount(at, m.payloads, len(network.out)) for at in network.interfaces(m, network.node)]
        between, inside = np.split(np.maximum(*both), [cluster.nodes])
        rounds.append((float(m.payloads.sum()) / len(inside), float(between.max()), float(inside.max())))
    return Payloads(*map(fmean, zip(*rounds, strict=True)))
