"""decentfn: decentralized data-parallel training for PyTorch, in functional style.

>>> import decentfn as df
"""

from decentfn.algorithms import *  # noqa: F403
from decentfn.algorithms import __all__ as _algorithms
from decentfn.buckets import Buckets, Plan
from decentfn.compilation import compile
from decentfn.consensus import consensus_distance, consensus_mean, distance_to_consensus, params
from decentfn.functional import functional
from decentfn.runtime import init
from decentfn.simulation import simulate, stack, worker
from decentfn.topologies import *  # noqa: F403
from decentfn.topologies import __all__ as _topologies

__version__ = "0.1.0"

__all__ = [
    *_algorithms,
    *_topologies,
    "Buckets",
    "Plan",
    "compile",
    "consensus_distance",
    "consensus_mean",
    "distance_to_consensus",
    "functional",
    "init",
    "params",
    "simulate",
    "stack",
    "worker",
]
