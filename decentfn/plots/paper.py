"""Figure, axes and colors of all plots."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from decentfn.core.arguments import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors of Okabe and Ito, which color-blind readers can distinguish."""
BLUE, GRAY = COLORS[0], "#8A8F98"


def blank(call: str, width: float, height: float) -> Figure:
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


def place(call: str, axes: Any, width: float, height: float) -> tuple[Figure, Axes]:
    """Return the figure and axes to draw on: the user's, or new ones."""
    figure = blank(call, width, height)
    if axes is None:
        return figure, figure.add_subplot()
    from matplotlib.axes import Axes

    rule = "axes are one matplotlib Axes, figure.add_subplot(); leave them out for a figure of its own."
    require(isinstance(axes, Axes), f"df.plots.{call}", rule, axes=axes)
    return axes.get_figure(root=True) or figure, axes
