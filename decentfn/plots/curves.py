"""Plots of runs: losses and consensus distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from decentfn.core.arguments import require
from decentfn.plots import paper

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def training_curves(
    values: Any, *, steps: Any = None, name: str = "loss", axes: Axes | None = None, color: str = paper.BLUE
) -> Figure:
    """Plot a thin line for every worker and a thick one for their mean.

    Args:
        values: `[T, N]`, a row per step: `torch.stack` of `metrics.loss`, a list of lists, an array. `[T]`: one worker.
        steps: `[T]`, the steps of the rows; by default 0, 1, 2, ...
        name: label of the axis, with the unit if any.
        axes: axes to draw on; by default those of a new figure.
        color: color of the mean; the workers' lines are paler.
    """
    rows = _numbers("training_curves", "values", values, "[T] or [T, N]")
    rows = rows[:, None] if rows.ndim == 1 else rows
    at = _steps("training_curves", steps, len(rows))
    figure, axes = paper.place("training_curves", axes, 6, 3.6)
    are_many = rows.shape[1] > 1
    if are_many:
        axes.plot(at, rows, color=color, linewidth=0.7, alpha=0.35)
        axes.lines[-1].set_label(f"each of {rows.shape[1]} workers")
    axes.plot(at, rows.mean(1), color=color, linewidth=2.2, label="their mean" if are_many else None)
    paper.label(axes, name)
    if are_many:
        axes.legend(frameon=False)
    return figure


def consensus(distances: Any, *, steps: Any = None, axes: Axes | None = None) -> Figure:
    """Plot the consensus distance, `df.consensus_distance(state)`, on a logarithmic scale.

    Args:
        distances: `[T]`, one per step; or a mapping from names to such curves. A curve ends where the distance is 0.
        steps: `[T]`, the steps; by default 0, 1, 2, ...
        axes: axes to draw on; by default those of a new figure.
    """
    named = distances if isinstance(distances, Mapping) else {None: distances}
    require(len(named) > 0, "df.plots.consensus({})", "there is no curve to draw; give at least one, {'ring': [...]}.")
    curves = {name: _numbers("consensus", "distances", curve, "[T]") for name, curve in named.items()}
    places = {name: _steps("consensus", steps, len(curve)) for name, curve in curves.items()}
    figure, axes = paper.place("consensus", axes, 6, 3.6)
    for number, (name, curve) in enumerate(curves.items()):
        shown, color = np.where(curve > 0, curve, np.nan), paper.COLORS[number % len(paper.COLORS)]
        axes.plot(places[name], shown, color=color, linewidth=2, label=None if name is None else str(name))
    axes.set_yscale("log")
    paper.label(axes, "distance from the mean\n(root mean square over workers)")
    if None not in curves:
        axes.legend(frameon=False)
    return figure


def _numbers(call: str, what: str, values: Any, shapes: str) -> np.ndarray:
    def plain(x: Any) -> Any:
        return x.detach().cpu().double() if hasattr(x, "detach") else x

    found = np.empty(0)
    with suppress(TypeError, ValueError):
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        found = np.asarray([plain(row) for row in values] if is_list else plain(values), dtype=np.float64)
    is_right = found.size > 0 and found.ndim in ((1, 2) if "N" in shapes else (1,))
    require(is_right, f"df.plots.{call}", f"expected numbers {shapes}, a row for every step.", **{what: values})
    return found


def _steps(call: str, steps: Any, length: int) -> np.ndarray:
    if steps is None:
        return np.arange(length)
    at = _numbers(call, "steps", steps, "[T]")
    are_right = len(at) == length and bool(np.isfinite(at).all())
    require(are_right, f"df.plots.{call}", f"{length} rows need {length} steps, there are {len(at)}.", steps=steps)
    return at
