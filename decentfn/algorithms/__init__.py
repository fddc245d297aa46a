"""Algorithms: one paper a file, each a function `(loss_fn, optimizer, topology, ...) -> Algorithm(init, step)`."""

from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.adapt_while_communicate import adapt_while_communicate
from decentfn.algorithms.all_reduce import all_reduce
from decentfn.algorithms.worker import Algorithm, Metrics, Options

__all__ = [
    "Algorithm",
    "Metrics",
    "Options",
    "adapt_then_combine",
    "adapt_while_communicate",
    "all_reduce",
]
