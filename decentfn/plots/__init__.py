"""Plots of topologies and runs. They need matplotlib (`pip install matplotlib`), loaded on first use.

Every function returns a `matplotlib.figure.Figure`; write it with `figure.savefig("plot.png", dpi=150)`, or show it in
a notebook. No window is opened, and pyplot's state does not change.
"""

from decentfn.plots.curves import consensus, training_curves
from decentfn.plots.graphs import graph, matrix, topology
from decentfn.plots.links import step_times

__all__ = ["consensus", "graph", "matrix", "step_times", "topology", "training_curves"]
