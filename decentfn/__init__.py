"""decentfn: decentralized data-parallel training for PyTorch, in functional style.

>>> import decentfn as df
"""

from decentfn import algorithms, compressors, kit, schedules, testing, topologies, transforms
from decentfn.algorithms import *  # noqa: F403
from decentfn.buckets import Buckets, Plan
from decentfn.compilation import compile
from decentfn.consensus import (
    buffers,
    consensus_buffers,
    consensus_distance,
    consensus_mean,
    distance_to_consensus,
    params,
    with_params,
)
from decentfn.gradient import accumulate, add_module_prefix, dynamic_loss_scale, functional, strip_module_prefix
from decentfn.kit import Algorithm, Metrics, Options, State
from decentfn.noise import worker_seed
from decentfn.replicas import broadcast
from decentfn.run import Shards, dirichlet_shards, fixed_shards, init, shards
from decentfn.schedules import cosine_with_warmup, gamma_from_learning_rate
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
from decentfn.wrappers import average_buffers, ema, ema_params, ema_state

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Buckets",
    "Certificate",
    "Edge",
    "Metrics",
    "Options",
    "Plan",
    "Shards",
    "State",
    "Topology",
    "accumulate",
    "add_module_prefix",
    "algorithms",
    "alternate",
    "average_buffers",
    "broadcast",
    "buffers",
    "certificate",
    "compile",
    "compressors",
    "consensus_buffers",
    "consensus_distance",
    "consensus_mean",
    "consensus_steps",
    "cosine_with_warmup",
    "dirichlet_shards",
    "distance_to_consensus",
    "dynamic_loss_scale",
    "ema",
    "ema_params",
    "ema_state",
    "every",
    "fixed_shards",
    "from_draw",
    "from_groups",
    "from_matrices",
    "from_permutations",
    "functional",
    "gamma_from_learning_rate",
    "init",
    "kit",
    "mixing_matrix",
    "params",
    "pga",
    "register_topology",
    "schedules",
    "shards",
    "simulate",
    "spectral_gap",
    "stack",
    "strip_module_prefix",
    "testing",
    "topologies",
    "topology",
    "topology_names",
    "transforms",
    "with_params",
    "worker",
    "worker_seed",
]
__all__ += algorithms.__all__
__all__ += transforms.__all__
