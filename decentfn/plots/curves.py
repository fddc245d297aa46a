"""Plots of runs: losses and consensus distance."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from decentfn.core.formatting import brief
from decentfn.core.numbers import require
from decentfn.plots import paper
from decentfn.train import logs

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


def run(log: str | os.PathLike[str] | Iterable[Mapping[str, Any]]) -> Figure:
    """Plot a run's log: the loss, and the consensus distance if it is logged.

    Args:
        log: a file of JSON lines, as `examples/train_lm.py` writes it, or a list of dictionaries. Lines with a `step`
            and a `loss` are used: a number, or a list with one per worker, as is `losses`, which comes first;
            `consensus_distance` adds a second panel.
    """
    lines = [line for line in _read(log) if isinstance(line, Mapping) and "step" in line and "loss" in line]
    form = '{"step": 0, "loss": [5.1, 5.3], "consensus_distance": 0.1}'
    rule = f"no line has a step and a loss; lines look like {form}."
    require(len(lines) > 0, f"df.plots.run({brief(log)})", rule)
    steps = [line["step"] for line in lines]
    apart = [line["consensus_distance"] for line in lines if "consensus_distance" in line]
    both = len(apart) == len(lines)
    figure = paper.blank("run", 9 if both else 6, 3.4)
    panels = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
    losses = [line.get("losses", line["loss"]) for line in lines]
    training_curves(losses, steps=steps, axes=panels[0])
    if both:
        consensus(apart, steps=steps, axes=panels[1])
    return figure


def _read(log: Any) -> list[Any]:
    if isinstance(log, (str, os.PathLike)):
        return logs.read(log)
    is_list = isinstance(log, Iterable) and not isinstance(log, Mapping)
    require(is_list, f"df.plots.run({brief(log)})", "a path, or a list of dictionaries, one per line of the log.")
    return list(log)


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
