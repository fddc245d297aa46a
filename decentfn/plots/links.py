"""Plot of step times against the rate of the links between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from decentfn.planning import Cluster, plan
from decentfn.plots.paper import label, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def step_times(cluster: Cluster, model: Any, *, axes: Axes | None = None, **options: Any) -> Figure:
    """Plot the predicted time of a step of DDP, HSDP, DiLoCo and the recommended gossip against the links' rate.

    Args:
        cluster: the workers; rates from a hundredth to a hundred times its own are drawn.
        model: the number of parameters, or a module.
        axes: axes to draw into; None makes a figure.
        options: as for `df.plan`.
    """
    figure, axes = place("step_times", axes, 6.0, 3.6)
    made = plan(cluster, model, **options)
    best, options["topologies"] = made.recommended, made.topology and [made.topology]
    names = ["DDP", "HSDP", "diloco"]
    rates = cluster.between.gbit_per_s * np.logspace(-2, 2, 41)
    lines: dict[str, list[float]] = {}
    for rate in rates:
        at = plan(replace(cluster, between=replace(cluster.between, gbit_per_s=float(rate))), model, **options)
        for p in at.predictions:
            if p.method in names or (p.method, p.topology) == (best.method, best.topology):
                lines.setdefault(p.method if p.method in names else f"gossip, {p.topology}", []).append(p.seconds)
    for name, seconds in lines.items():
        axes.plot(rates, seconds, label=name)
    label(axes, "seconds per step")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("links between nodes, Gbit/s")
    axes.legend(frameon=False)
    return figure
