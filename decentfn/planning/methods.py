"""Methods: how a step of each combines its computation and its traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def ddp(work: Work, cluster: Cluster) -> Prediction:
    """All-reduce of gradients over all processes, hidden behind a part of the backward pass; each process holds all."""
    traffic = of_all_reduce(cluster.num_workers * cluster.processes_per_worker, cluster)
    if cluster.processes_per_worker > 1:
        traffic = traffic._replace(inside=traffic.sent)
    return _predicted("DDP", "all-reduce", work, cluster, traffic, 1.0, hides=_HIDES)


def hsdp(work: Work, cluster: Cluster) -> Prediction:
    """Parameters sharded in a node: gathered twice and gradients scattered there, and averaged over the nodes."""
    traffic = of_all_reduce(cluster.num_workers, cluster)
    return _predicted("HSDP", "all-reduce", work, cluster, traffic, 1.0, hides=_HIDES)


def gossip(work: Work, cluster: Cluster, topology: Topology) -> Prediction:
    """adapt_while_communicate: parameters travel during the forward and backward passes."""
    traffic, gap = of_schedule(topology, cluster), certificate(topology).gap_per_step
    inboxes = max(1, topology.degree)
    return _predicted("adapt_while_communicate", topology.name, work, cluster, traffic, gap, hides=1.0, inboxes=inboxes)


def compressed(work: Work, cluster: Cluster, topology: Topology) -> Prediction:
    """deep_squeeze, which any schedule suits: a message is known after the update, so nothing hides it."""
    traffic, gap = of_messages(topology, cluster), certificate(topology).gap_per_step
    inboxes = max(topology.degree, math.ceil(traffic.sent))
    return _predicted("deep_squeeze", topology.name, work, cluster, traffic, gap, hides=0.0, inboxes=inboxes, memory=1)


def diloco(work: Work, cluster: Cluster, inner_steps: int) -> Prediction:
    """An all-reduce of the parameters after every H steps, which nothing hides."""
    traffic = Traffic(*(x / inner_steps for x in of_all_reduce(cluster.num_workers, cluster)))
    name = f"every {inner_steps} steps"
    return _predicted("diloco", name, work, cluster, traffic, None, hides=0.0, inboxes=1, memory=2)


def _predicted(
    method: str,
    topology: str,
    work: Work,
    cluster: Cluster,
    traffic: Traffic,
    gap: float | None,
    *,
    hides: float,
    inboxes: int = 0,
    memory: int = 0,
) -> Prediction:
    """Predict a step in which `hides` of the computation hides messages, and `inboxes` payloads arrive.

    `memory` counts the algorithm's copies of the parameters, which checkpoints have, too.
    """
    has_replicas = method not in ("DDP", "HSDP")
    shards = 1 if method == "DDP" else cluster.processes_per_worker  # a process has 1/shards of a worker's payload
    module = int(has_replicas and shards > 1)  # the copy of a module whose shards are copied into at each step
    payload, own = work.parameters * work.wire, work.parameters * work.nbytes
    between = cluster.between.seconds(traffic.between * payload, traffic.rounds) if traffic.between else 0.0
    inside = 0.0
    if cluster.inside is not None and traffic.inside:
        inside = cluster.inside.seconds(traffic.inside / shards * payload, traffic.rounds)
    exchange = max(between, inside)
    seconds = work.seconds * (1 - hides) + max(work.seconds * hides, exchange)
    is_hidden = exchange <= work.seconds * 1e-3 or seconds <= work.seconds * 1.001
    slowest = "links between nodes" if between >= inside else "links inside nodes"
    kept = (_MOMENTS + memory) * work.parameters * max(4, work.nbytes)  # in float32 beside narrow parameters
    held = (2 + module) * own + kept  # 2: parameters and gradients
    return Prediction(
        method=method,
        topology=topology,
        seconds=seconds,
        exchange=exchange,
        between=traffic.between * payload,
        inside=traffic.inside * payload / shards + 3 * (shards - 1) / shards * own,  # gathered twice, scattered once
        gap=gap,
        memory=(held + inboxes * payload) / shards,
        checkpoint=(own + kept) * (cluster.num_workers if has_replicas else 1),
        bottleneck="computation" if is_hidden else slowest,
    )
