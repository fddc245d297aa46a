"""Command that plans a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from tyro.conf import arg

from decentfn.cli.tables import is_terminal, show
from decentfn.planning import Cluster, Link
from decentfn.planning import plan as planned
from decentfn.plots.links import step_times


def plan(
    num_workers: Annotated[int, arg(aliases=["-n"])],
    *,
    parameters: float,
    compute_ms: float,
    gbit: float,
    latency_ms: float = 0.1,
    inside_gbit: float | None = None,
    workers_per_node: int = 1,
    processes_per_worker: int = 1,
    wire: Literal["float32", "bfloat16"] = "float32",
    sent: float = 1.0,
    inner_steps: int = 64,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Predict a step of DDP, HSDP, DiLoCo and of gossip on each topology.

    Of topologies that differ in nothing here, one is shown.

    Args:
        num_workers: N.
        parameters: number of parameters, such as 1e9; they are float32.
        compute_ms: forward and backward pass and update of a worker, without messages.
        gbit: rate of a node's interface, Gbit/s.
        latency_ms: time of an empty message between nodes.
        inside_gbit: rate of a process's link inside its node, Gbit/s.
        workers_per_node: L; 1 if a worker is a node.
        processes_per_worker: S, which share a worker's parameters.
        wire: dtype of messages.
        sent: share of a payload that a compressor sends.
        inner_steps: H of DiLoCo.
        json: print JSON, of all methods.
        plot: draw step times against the rate of the nodes' interfaces into this file.
    """
    cluster = Cluster(
        num_workers,
        Link(gbit, latency_ms),
        None if inside_gbit is None else Link(inside_gbit, 0.01),
        workers_per_node,
        processes_per_worker,
    )
    options = {"compute_seconds": compute_ms / 1e3, "wire_dtype": getattr(torch, wire), "sent": sent}
    made = planned(cluster, round(parameters), inner_steps=inner_steps, **options)
    distinct = {(p.method, p.seconds, p.between, p.gap): p for p in reversed(made.predictions)}
    shown = made.predictions if json else sorted(distinct.values(), key=made.predictions.index)
    rows = [
        {
            "method": p.method,
            "topology": p.topology,
            "step ms": p.seconds * 1e3,
            "exchange ms": p.exchange * 1e3,
            "MB between nodes": p.between / 1e6,
            "MB inside": p.inside / 1e6,
            "gap/step": p.gap,
            "GB per process": p.memory / 1e9,
            "checkpoint GB": p.checkpoint / 1e9,
            "limited by": p.bottleneck.removeprefix("links "),
        }
        for p in shown
    ]
    show(rows, as_json=json)
    if is_terminal():
        print(f"\n{made.reason}")
    if plot is not None:
        step_times(cluster, round(parameters), inner_steps=inner_steps, **options).savefig(plot, dpi=150)
