"""Methods: how a step of each combines its computation and its traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from decentfn.planning.cluster import Cluster
from decentfn.planning.traffic import Traffic, of_all_reduce, of_messages, of_schedule
from decentfn.topologies import Topology, certificate

_HIDES = 1 / 3
"""Share of a step's computation behind which DDP's messages travel: they start when its first bucket is full."""
_MOMENTS = 2
"""Copies of the parameters in Adam's state."""


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


class _Copies(NamedTuple):
    """Copies of the parameters beside them, their gradients and Adam's moments."""

    inboxes: int = 0
    """Payloads that arrive."""
    memory: int = 0
    """Of the algorithm; checkpoints have them, too."""
    module: int = 0
    """Of a module whose shards are copied into at each step."""


def ddp(work: Work, cluster: Cluster) -> Prediction:
    """All-reduce of gradients over all processes, hidden behind a part of the backward pass; each process holds all."""
    processes = cluster.num_workers * cluster.processes_per_worker
    traffic = of_all_reduce(processes, cluster)
    if cluster.processes_per_worker > 1:
        traffic = traffic._replace(inside=traffic.sent)
    payload = work.parameters * work.wire
    time, slowest = _exchange(traffic, payload, cluster, share=1)
    seconds = _partly_hidden(work, time)
    return _prediction("DDP", "all-reduce", work, cluster, traffic, time, seconds, slowest, _Copies(), 1.0, shards=1)


def _partly_hidden(work: Work, time: float) -> float:
    return work.seconds * (1 - _HIDES) + max(work.seconds * _HIDES, time)


def hsdp(work: Work, cluster: Cluster) -> Prediction:
    """Parameters sharded in a node: gathered twice and gradients scattered there, and averaged over the nodes."""
    size, traffic = cluster.processes_per_worker, of_all_reduce(cluster.num_workers, cluster)
    time, slowest = _exchange(traffic, work.parameters * work.wire, cluster, share=size)
    seconds, copies = _partly_hidden(work, time), _Copies()
    return _prediction("HSDP", "all-reduce", work, cluster, traffic, time, seconds, slowest, copies, 1.0, shards=size)


def gossip(work: Work, cluster: Cluster, topology: Topology) -> Prediction:
    """adapt_while_communicate: parameters travel during the forward and backward passes."""
    traffic = of_schedule(topology, cluster)
    size = cluster.processes_per_worker
    time, slowest = _exchange(traffic, work.parameters * work.wire, cluster, share=size)
    gap = certificate(topology).gap_per_step
    copies = _Copies(inboxes=max(1, topology.degree), module=int(size > 1))
    seconds = max(work.seconds, time)
    name = "adapt_while_communicate"
    return _prediction(name, topology.name, work, cluster, traffic, time, seconds, slowest, copies, gap, shards=size)


def compressed(work: Work, cluster: Cluster, topology: Topology) -> Prediction:
    """deep_squeeze, which any schedule suits: a message is known after the update, so nothing hides it."""
    traffic = of_messages(topology, cluster)
    size = cluster.processes_per_worker
    time, slowest = _exchange(traffic, work.parameters * work.wire, cluster, share=size)
    gap = certificate(topology).gap_per_step
    copies = _Copies(inboxes=max(topology.degree, math.ceil(traffic.sent)), memory=1, module=int(size > 1))
    seconds, name = work.seconds + time, "deep_squeeze"
    return _prediction(name, topology.name, work, cluster, traffic, time, seconds, slowest, copies, gap, shards=size)


def diloco(work: Work, cluster: Cluster, inner_steps: int) -> Prediction:
    """An all-reduce of the parameters after every H steps, which nothing hides."""
    traffic = Traffic(*(x / inner_steps for x in of_all_reduce(cluster.num_workers, cluster)))
    size, name = cluster.processes_per_worker, f"every {inner_steps} steps"
    time, slowest = _exchange(traffic, work.parameters * work.wire, cluster, share=size)
    seconds, copies = work.seconds + time, _Copies(inboxes=1, memory=2, module=int(size > 1))
    return _prediction("diloco", name, work, cluster, traffic, time, seconds, slowest, copies, None, shards=size)


def _exchange(traffic: Traffic, payload: float, cluster: Cluster, *, share: int) -> tuple[float, str]:
    """Return the time of a step's messages, and what takes it; a process has 1/share of a worker's payload."""
    between = cluster.between.seconds(traffic.between * payload, traffic.rounds) if traffic.between else 0.0
    inside = 0.0
    if cluster.inside is not None and traffic.inside:
        inside = cluster.inside.seconds(traffic.inside / share * payload, traffic.rounds)
    return max(between, inside), "links between nodes" if between >= inside else "links inside nodes"


def _prediction(
    method: str,
    topology: str,
    work: Work,
    cluster: Cluster,
    traffic: Traffic,
    time: float,
    seconds: float,
    slowest: str,
    copies: _Copies,
    gap: float | None,
    shards: int,
) -> Prediction:
    held = 2 + _MOMENTS + copies.memory + copies.module  # 2: parameters and gradients
    payload, own = work.parameters * work.wire, work.parameters * work.nbytes
    saved = (1 + _MOMENTS + copies.memory) * own
    return Prediction(
        method=method,
        topology=topology,
        seconds=seconds,
        exchange=time,
        between=traffic.between * payload,
        inside=traffic.inside * payload / shards + 3 * (shards - 1) / shards * own,  # gathered twice, scattered once
        gap=gap,
        memory=(held * own + copies.inboxes * payload) / shards,
        checkpoint=saved * (cluster.num_workers if method not in ("DDP", "HSDP") else 1),
        bottleneck="computation" if time <= work.seconds * 1e-3 or seconds <= work.seconds * 1.001 else slowest,
    )
