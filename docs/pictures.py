"""Make the pictures of the docs again, from the code and from real runs.

python docs/pictures.py                writes docs/pictures/*.png; about a minute
python docs/pictures.py overview       only that one
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8F98"


# -- the timeline of a step ---------------------------------------------------------------------------------------------


def _bar(axes: Any, start: float, end: float, y: float, color: str, text: str) -> None:
    shape = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((start + 0.03, y - 0.3), end - start - 0.06, 0.6, boxstyle=shape, color=color, lw=0))
    axes.text(
        (start + end) / 2,
        y,
        text,
        ha="center",
        va="center",
        color="white",
        fontsize=9.5,
        rotation=90 * (text == "wait"),
    )


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: str) -> None:
    style = f"angle,{bend},rad=3"
    axes.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=10, color=ORANGE, shrinkA=0, shrinkB=0
        )
    )


def posts_and_waits() -> Figure:
    """One step of adapt while communicate: what the worker computes, and what travels meanwhile."""
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    axes = figure.add_subplot()
    top, ends = 2.6, 7.4
    _bar(axes, 0.0, 0.7, top, ORANGE, "post")
    _bar(axes, 0.7, 3.4, top, BLUE, "forward")
    _bar(axes, 3.4, ends, top, BLUE, "backward")
    for bucket, arrival in enumerate((2.7, 4.7, 6.7)):
        y, wait = 1.4 - 0.68 * bucket, ends + 1.35 * bucket
        _bar(axes, 0.95, arrival, y, GREY, f"bucket {bucket}")
        _bar(axes, wait, wait + 0.3, top, ORANGE, "wait")
        _bar(axes, wait + 0.3, wait + 1.35, top, GREEN, f"bucket {bucket}")
        _arrow(axes, (0.5 - 0.15 * bucket, top - 0.32), (0.97, y), "angleA=-90,angleB=0")
        _arrow(axes, (arrival, y), (wait + 0.15, top - 0.34), "angleA=0,angleB=90")
    for x, text, color in (
        (0.35, "send and receive\nare started first", ORANGE),
        (4.05, "the gradient, at this worker's own parameters", BLUE),
        (9.43, "last, bucket by bucket: wait,\nthen mix and update in one kernel", GREEN),
    ):
        axes.text(x, top + 0.45, text, ha="center", va="bottom", fontsize=9.5, color=color)
    axes.text(-0.75, top, "a worker\ncomputes", ha="right", va="center", fontsize=10)
    axes.text(-0.75, 0.72, "messages\ntravel", ha="right", va="center", fontsize=10)
    axes.annotate("", (11.5, -0.55), (0, -0.55), arrowprops={"arrowstyle": "-|>", "color": "0.35", "lw": 1})
    axes.text(11.5, -0.68, "time in one step (not to scale)", ha="right", va="top", fontsize=9, color="0.35")
    axes.set(xlim=(-1.9, 11.6), ylim=(-1.0, 3.65))
    axes.axis("off")
    return figure


PICTURES = {make.__name__: make for make in (posts_and_waits,)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(FOLDER / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()
