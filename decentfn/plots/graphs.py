"""Plots of topologies: each phase as a graph and as a mixing matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from decentfn import topologies
from decentfn.core import as_step, brief, require
from decentfn.topologies.rounds import require_topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors of Okabe and Ito, which color-blind readers can distinguish."""
BLUE, GRAY = COLORS[0], "#8A8F98"
_MOST_WORKERS, _MOST_PHASES, _COLUMNS = 256, 12, 4
_NUMBERED, _WITH_VALUES = 32, 8
"""Most workers with numbers in the graph, and with weights in the matrix."""


def topology(topology: topologies.Topology, phases: Sequence[int] | None = None) -> Figure:
    """Plot a schedule's phases, each as a graph with the mixing matrix below.

    Args:
        topology: a topology of at most 256 workers.
        phases: the steps t to show, at most 12; by default the period's first 12 phases, or 4 steps if random.

    >>> import decentfn as df
    >>> figure = df.plots.topology(df.topology("one-peer-exp", 8))
    >>> len(figure.axes)  # three graphs, three matrices
    6
    """
    _check("topology", topology)
    known = topology.period or 4
    shown = (topology.cycle or range(known))[:_MOST_PHASES] if phases is None else phases
    is_list = isinstance(shown, Sequence) and not isinstance(shown, str) and 1 <= len(shown) <= _MOST_PHASES
    period = "no period" if topology.period is None else f"a period of {known}"
    rule = f"a list of 1 to {_MOST_PHASES} steps, phases=[0, 1]; {topology.name!r} has {period}."
    require(is_list, "df.plots.topology", rule, phases=phases)
    steps = [_step("topology", t) for t in shown]
    columns, blocks = min(len(steps), _COLUMNS), math.ceil(len(steps) / _COLUMNS)
    figure = _blank("topology", max(2.5 * columns, 3.4), 4.9 * blocks + 0.5)
    rows = figure.subplots(2 * blocks, columns, squeeze=False)
    largest = max(float(topologies.mixing_matrix(topology, t).max()) for t in steps)
    for place, (above, below) in enumerate(zip(rows[::2].flat, rows[1::2].flat, strict=True)):
        if place < len(steps):
            _graph(topology, steps[place], above)
            _matrix(topology, steps[place], below, largest)
        else:
            above.remove()
            below.remove()
    kind = "random" if topology.period is None else f"{_count(known, 'phase')}"
    figure.suptitle(f"{topology.name}, {_count(topology.num_workers, 'worker')}, {kind}")
    return figure


def graph(topology: topologies.Topology, t: int, axes: Axes | None = None) -> Figure:
    """Plot the workers of step `t` on a circle, with lines for mutual links and arrows for directed ones.

    Groups that average have a colored background.

    Args:
        topology: a topology of at most 256 workers.
        t: the step.
        axes: axes to draw on; by default those of a new figure.
    """
    _check("graph", topology)
    step = _step("graph", t)
    figure, axes = _place("graph", axes, 3.4, 3.6)
    _graph(topology, step, axes)
    return figure


def matrix(topology: topologies.Topology, t: int, axes: Axes | None = None) -> Figure:
    """Plot the mixing matrix of step `t`, `df.mixing_matrix(topology, t)`: row i holds the weights that worker i gives.

    Args:
        topology: a topology of any size.
        t: the step.
        axes: axes to draw on; by default those of a new figure.
    """
    _check("matrix", topology, most=None)
    step, is_mine = _step("matrix", t), axes is None
    figure, axes = _place("matrix", axes, 3.8, 3.4)
    _matrix(topology, step, axes, None)
    if is_mine and topology.num_workers > _WITH_VALUES:
        bar = figure.colorbar(axes.images[0], ax=axes, label="weight")
        bar.ax.set_ylim(0, float(topologies.mixing_matrix(topology, step).max()))
    return figure


def _check(call: str, topology: Any, most: int | None = _MOST_WORKERS) -> None:
    require_topology(f"df.plots.{call}", topology)
    rule = f"a graph of more than {most} workers cannot be read; draw the same schedule with fewer, or df.plots.matrix."
    require(most is None or topology.num_workers <= most, f"df.plots.{call}({topology!r})", rule)


def _step(call: str, t: Any) -> int:
    try:
        return int(as_step(t))
    except ValueError:
        raise ValueError(f"df.plots.{call}(t={brief(t)}): a step is an integer, from 0.") from None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _links(topology: topologies.Topology, t: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return mutual and directed links, (sender, receiver)."""
    this = topology.round(t)
    i, k = ((this.sources >= 0) & (this.weights[:, 1:] != 0)).nonzero().T
    heard = {(j, i) for j, i in zip(this.sources[i, k].tolist(), i.tolist(), strict=True) if j != i}
    mutual = {(j, i) for j, i in heard if (i, j) in heard}
    return sorted((j, i) for j, i in mutual if j < i), sorted(heard - mutual)


def _groups(topology: topologies.Topology, t: int) -> list[list[int]]:
    """Return the groups of two workers or more that average."""
    this, members = topology.round(t), topology.peers(t).members
    if members is None or this.mean_weights is None:
        return []
    distinct = {id(group): group for group, weight in zip(members, this.mean_weights, strict=True) if weight}
    return [group for group in distinct.values() if len(group) > 1]


def _graph(topology: topologies.Topology, t: int, axes: Axes) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle, FancyArrowPatch, Polygon

    n = topology.num_workers
    angles = [math.pi / 2 - 2 * math.pi * i / n for i in range(n)]  # worker 0 on top, then clockwise
    at = [(math.cos(a), math.sin(a)) for a in angles] if n > 1 else [(0.0, 0.0)]
    radius = min(0.16, 1.9 / n) if n <= _NUMBERED else 1.6 / n
    both, single = _links(topology, t)
    groups = _groups(topology, t)
    colors = [BLUE] * n
    for number, group in enumerate(groups):
        color = COLORS[number % len(COLORS)]
        ground = {"facecolor": color, "edgecolor": color, "linewidth": 8, "joinstyle": "round", "alpha": 0.22}
        axes.add_patch(Polygon([at[i] for i in group], **ground))
        for i in group:
            colors[i] = color
    width = 1.6 if len(both) + len(single) <= 64 else 0.7
    axes.add_collection(LineCollection([(at[i], at[j]) for i, j in both], colors=GRAY, linewidths=width))
    points = 72 * 2.2 / 2.5  # of a unit in the picture, about
    shape = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.08", "mutation_scale": 10 if n <= _NUMBERED else 5}
    look = {"linewidth": width, "color": GRAY, "shrinkA": radius * points, "shrinkB": radius * points}
    for j, i in single:
        axes.add_patch(FancyArrowPatch(at[j], at[i], **shape, **look))
    for i, (x, y) in enumerate(at):
        axes.add_patch(Circle((x, y), radius, facecolor=colors[i], edgecolor="white", linewidth=0.8, zorder=3))
        if n <= _NUMBERED:
            size = 9 if n <= 12 else 7 if n <= 20 else 5.5
            axes.text(x, y, str(i), ha="center", va="center_baseline", color="white", fontsize=size, zorder=4)
        elif i % (n // 8) == 0:
            axes.text(1.14 * x, 1.14 * y, str(i), ha="center", va="center", fontsize=7, color="0.35")
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.axis("off")
    name = f"step {t}" if topology.period is None or topology.start else f"phase {t % topology.period}"
    axes.set_title(f"{name}\n{_described(both, single, groups, n)}", fontsize=10)


def _described(both: list[Any], single: list[Any], groups: list[list[int]], n: int) -> str:
    parts = []
    if groups:
        sizes = {len(group) for group in groups}
        size = str(sizes.pop()) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
        parts.append("all average" if len(groups[0]) == n else f"{_count(len(groups), 'group')} of {size}")
    if both or single:
        parts.append(_count(2 * len(both) + len(single), "message"))
    return ", ".join(parts) or "nobody sends"


def _matrix(topology: topologies.Topology, t: int, axes: Axes, largest: float | None) -> None:
    weights = topologies.mixing_matrix(topology, t).numpy()
    n = topology.num_workers
    most = largest or float(weights.max())
    shown = np.ma.masked_equal(weights, 0.0)  # only zeros are white
    axes.imshow(shown, cmap="Blues", vmin=-0.3 * most, vmax=1.25 * most, interpolation="nearest")
    axes.set_xlabel("hears worker j", fontsize=9)
    axes.set_ylabel("worker i", fontsize=9)
    every = max(1, math.ceil(n / 8))
    axes.set_xticks(range(0, n, every))
    axes.set_yticks(range(0, n, every))
    axes.tick_params(labelsize=8, length=2)
    axes.spines[:].set_color("0.7")
    if n <= _WITH_VALUES:
        for i, j in zip(*weights.nonzero(), strict=True):
            value = float(weights[i, j])
            ink = "white" if value > most / 2 else "black"
            axes.text(j, i, _fraction(value), ha="center", va="center_baseline", fontsize=7.5, color=ink)


def _fraction(weight: float) -> str:
    near = Fraction(weight).limit_denominator(64)
    return str(near) if abs(near - weight) < 1e-9 else f"{weight:.2f}"


def _blank(call: str, width: float, height: float) -> Figure:
    """Make an empty figure without a window; sizes in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"df.plots.{call}: pictures need matplotlib, which is not installed: pip install matplotlib."
        ) from None
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = partial(_png, figure)  # notebooks call it; matplotlib sets their pictures up in pyplot alone
    return figure


def _png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _place(call: str, axes: Any, width: float, height: float) -> tuple[Figure, Axes]:
    """Return the figure and axes to draw on: the user's, or new ones."""
    figure = _blank(call, width, height)
    if axes is None:
        return figure, figure.add_subplot()
    from matplotlib.axes import Axes

    rule = "axes are one matplotlib Axes, figure.add_subplot(); leave them out for a figure of its own."
    require(isinstance(axes, Axes), f"df.plots.{call}", rule, axes=axes)
    return axes.get_figure(root=True) or figure, axes
