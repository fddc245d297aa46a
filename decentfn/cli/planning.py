"""Command that plans a run."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import arg

from decentfn.cli.tables import show
from decentfn.core.arguments import require
from decentfn.planning import Cluster, Link, Prediction
from decentfn.planning import plan as planned


def _count(text: str) -> int:
    """Read a number that may end in K, M or B, thousands, millions or billions."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper())
    try:
        return round(float(text)) if scale is None else round(scale * float(text[:-1]))
    except (ValueError, OverflowError):
        raise ValueError(f"plan --parameters {text}: expected a number, such as 100M, 7B or 1e9.") from None


def plan(
    num_workers: Annotated[int | None, arg(aliases=["-n"])] = None,
    *,
    parameters: str,
    compute_ms: float,
    gbit: float | None = None,
    links: Path | None = None,
    latency_ms: float = 0.1,
    inside_gbit: float | None = None,
    workers_per_node: int = 1,
    processes_per_worker: int = 1,
    wire: Literal["float32", "bfloat16"] = "float32",
    sent: float = 1.0,
    inner_steps: int = 64,
    json: bool = False,
) -> None:
    """Predict a step of DDP, HSDP, DiLoCo and of gossip on each topology, and recommend one.

    Of topologies that differ in nothing here, one is shown.

    Args:
        num_workers: N.
        parameters: number of parameters, such as 100M, 7B or 1e9; they are float32.
        compute_ms: forward and backward pass and update of a worker, without messages.
        gbit: rate of a node's interface, Gbit/s.
        links: file of `decentfn links`, in place of the numbers of workers, nodes and links.
        latency_ms: time of an empty message between nodes.
        inside_gbit: rate of a process's link inside its node, Gbit/s; needed where a node has several processes.
        workers_per_node: L; 1 if a worker is a node.
        processes_per_worker: S, which share a worker's parameters; 8 if a worker is a node of 8 GPUs.
        wire: dtype of messages that are not compressed.
        sent: share of the parameters' bytes that a compressor sends; 0.02 for top_k(0.01), values and places.
        inner_steps: H of DiLoCo.
        json: print JSON: predictions of all methods, the recommended one, and the reason.
    """
    if links is not None:
        given = {"num_workers": num_workers, "gbit": gbit, "inside_gbit": inside_gbit}
        require(set(given.values()) == {None}, "plan", "--links has these numbers; leave them out.", **given)
        cluster = Cluster.measured(links, processes_per_worker)
    elif num_workers is None or gbit is None:
        raise ValueError("plan: add --num-workers and --gbit, or --links links.json, which `decentfn links` writes.")
    else:
        several = {"workers_per_node": workers_per_node, "processes_per_worker": processes_per_worker}
        rule = "a node has several processes; add --inside-gbit, the rate between them, such as 400."
        require(inside_gbit is not None or max(several.values()) == 1, "plan", rule, **several)
        inside = None if inside_gbit is None else Link(inside_gbit, 0.01)
        cluster = Cluster(num_workers, Link(gbit, latency_ms), inside, workers_per_node, processes_per_worker)
    options = {"wire_dtype": getattr(torch, wire), "sent": sent, "inner_steps": inner_steps}
    made = planned(cluster, _count(parameters), compute_seconds=compute_ms / 1e3, **options)
    if json:
        said = {"recommended": _row(made.recommended), "reason": made.reason, "links": made.links}
        said |= {"reordered": _row(made.reordered)} if made.reordered else {}
        print(json_format.dumps(said | {"predictions": [_row(p) for p in made.predictions]}, indent=1))
    else:
        distinct = {(p.method, p.seconds, p.between, p.gap): p for p in reversed(made.predictions)}
        show([_row(p) for p in sorted(distinct.values(), key=made.predictions.index)])
        print(f"\nrecommended: {made.recommended.method} on {made.recommended.topology}, because {made.reason}")
        print(made.links, end="\n" if made.links else "")
        print("gap/step: share of the workers' disagreement that a step removes at least; 1: all are equal after it")


def _row(p: Prediction) -> dict[str, Any]:
    return {
        "method": p.method,
        "topology": p.topology,
        "step ms": p.seconds * 1e3,
        "exchange ms": p.exchange * 1e3,
        "busiest node MB": p.between / 1e6,
        "MB inside": p.inside / 1e6,
        "gap/step": p.gap,
        "noise spread": p.noise_spread,
        "GB per process": p.memory / 1e9,
        "checkpoint GB": p.checkpoint / 1e9,
        "limited by": p.bottleneck.removeprefix("links "),
    }
