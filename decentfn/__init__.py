"""decentfn: decentralized data-parallel training for PyTorch, in functional style.

>>> import decentfn as df
"""

from decentfn import algorithms, compressors, schedules, topologies, transforms
from decentfn.algorithms import *  # noqa: F403
from decentfn.buckets import Buckets, Plan
from decentfn.compilation import compile
from decentfn.consensus import consensus_distance, consensus_mean, distance_to_consensus, params
from decentfn.functional import functional
from decentfn.runtime import init
from decentfn.schedules import cosine_with_warmup
from decentfn.simulation import simulate, stack, worker
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

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "Certificate",
    "Edge",
    "Plan",
    "Topology",
    "algorithms",
    "alternate",
    "certificate",
    "compile",
    "compressors",
    "consensus_distance",
    "consensus_mean",
    "consensus_steps",
    "cosine_with_warmup",
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
    "schedules",
    "simulate",
    "spectral_gap",
    "stack",
    "topologies",
    "topology",
    "topology_names",
    "transforms",
    "worker",
]
__all__ += algorithms.__all__
__all__ += transforms.__all__
