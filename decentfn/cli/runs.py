"""Commands about runs before and after them: topologies by name and compared, plans, reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import Positional, arg

from decentfn import plots
from decentfn.cli.tables import show, show_facts
from decentfn.core.arguments import MOST_WORKERS, require
from decentfn.planning import Cluster, Link, Prediction
from decentfn.planning import plan as planned
from decentfn.plots.report import page
from decentfn.topologies import Topology, certificate, mixing_matrix
from decentfn.topologies import topology as by_name
from decentfn.topologies.registry import of_size

Workers = Annotated[int, arg(aliases=["-n"])]


def topology(
    name: Positional[str],
    num_workers: Workers,
    *,
    local_world_size: int | None = None,
    matrices: bool = False,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Show a topology's certificate.

    Args:
        name: the registered name.
        num_workers: N.
        local_world_size: workers of a node, for hierarchical families.
        matrices: print the mixing matrix of each step of a period, too.
        json: print JSON.
        plot: draw the graphs into this file.
    """
    options: dict[str, Any] = {} if local_world_size is None else {"local_world_size": local_world_size}
    try:
        made = by_name(name, num_workers, **options)
    except TypeError as error:  # an option that it does not have, or one that is missing
        raise ValueError(str(error)) from None
    facts = _facts(made)
    if matrices:
        facts |= {f"W({t})": mixing_matrix(made, t).tolist() for t in made.cycle or range(1)}
    show_facts(facts, as_json=json)
    if plot is not None:
        plots.topology(made).savefig(plot, dpi=150)


def topologies(num_workers: Workers, *, local_world_size: int | None = None, json: bool = False) -> None:
    """Compare all topologies of N workers.

    Args:
        num_workers: N.
        local_world_size: workers of a node, for hierarchical families; None leaves those out that need it.
        json: print JSON.
    """
    found = of_size(num_workers, local_world_size)
    require(len(found) > 0, "topologies", f"none has so many; 1 to {MOST_WORKERS}.", num_workers=num_workers)
    rows = [_facts(made) | {"name": name} for name, made in found.items()]
    show(rows, as_json=json)


def _facts(made: Topology) -> dict[str, Any]:
    c = certificate(made)
    return {
        "name": c.name,
        "workers": c.num_workers,
        "period": c.period or "random",
        "degree": c.degree,
        "payloads/step": c.payloads_per_step,
        "exact after": c.steps_to_consensus,
        "gap": c.spectral_gap,
        "gap/step": c.gap_per_step,
        "contraction": c.expected_contraction,
        "noise spread": c.noise_spread,
        "doubly stochastic": c.is_doubly_stochastic,
        "symmetric": c.is_symmetric,
    }


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
        show_facts(said | {"predictions": [_row(p) for p in made.predictions]}, as_json=True)
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


def report(runs: Positional[tuple[Path, ...]], *, out: Path = Path("report.html")) -> None:
    """Write one HTML file that shows runs from their logs, and timelines of workers.

    Args:
        runs: directories with logs (*.jsonl) or with traces and timelines (trace*.json, timeline*.json), or such files.
        out: the file, for a browser; it needs no network.
    """
    if not runs:
        raise ValueError("report: name a run's directory or log, `decentfn report runs/a`.")
    out.write_text(page(runs), encoding="utf-8")
    print(out)
