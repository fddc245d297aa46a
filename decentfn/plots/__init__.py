"""Pictures of topologies and runs. They need matplotlib (`pip install 'decentfn[plots]'`), loaded by the first picture.

Every function returns a `matplotlib.figure.Figure`: `figure.savefig("picture.png", dpi=150)` writes it, a notebook shows it.
Nothing opens a window, and pyplot's state stays as it is.
"""

from decentfn.plots.curves import consensus, run, training_curves
from decentfn.plots.graphs import graph, matrix, topology

__all__ = ["consensus", "graph", "matrix", "run", "topology", "training_curves"]
