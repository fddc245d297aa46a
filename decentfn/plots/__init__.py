"""Plots of topologies. They need matplotlib (`pip install matplotlib`), loaded on first use.

Every function returns a `matplotlib.figure.Figure`; write it with `figure.savefig("plot.png", dpi=150)`, or show it in
a notebook. No window is opened, and pyplot's state does not change.
"""

from decentfn.plots.graphs import graph, matrix, topology

__all__ = ["graph", "matrix", "topology"]
