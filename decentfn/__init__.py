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
from decentfn.schedules import *  # noqa: F403
from decentfn.schedules import __all__ as _schedules
from decentfn.topologies import (
    Certificate,
    Edge,
    Topology,
    alternate,
    certificate,
    consensus_steps,
    every,
    from_draw,
    from_groups,
    from_matrices,
    from_permutations,
    mixing_matrix,
    pga,
    register_topology,
    spectral_gap,
    topology,
    topology_names,
)
from decentfn.transforms import *  # noqa: F403
from decentfn.transforms import __all__ as _transforms

__version__ = "0.1.0"

__all__ = [
    *_algorithms,
    *_schedules,
    *_transforms,
    "Buckets",
    "Certificate",
    "Edge",
    "Plan",
    "Topology",
    "alternate",
    "certificate",
    "compile",
    "consensus_distance",
    "consensus_mean",
    "consensus_steps",
    "distance_to_consensus",
    "every",
    "from_draw",
    "from_groups",
    "from_matrices",
    "from_permutations",
    "functional",
    "init",
    "mixing_matrix",
    "params",
    "pga",
    "register_topology",
    "simulate",
    "spectral_gap",
    "stack",
    "topology",
    "topology_names",
    "worker",
]
