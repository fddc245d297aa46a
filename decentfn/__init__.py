"""decentfn: decentralized data-parallel training for PyTorch, in functional style.

>>> import decentfn as df

The main functions, the algorithms and the common optimizers are here. Everything else is in submodules:
`df.topologies`, `df.draws` (random numbers of custom topologies), `df.transforms`, `df.schedules`, `df.compressors`,
`df.data`, `df.checkpoint`, `df.logs`, `df.profiling`, `df.errors`, `df.kit` (building blocks of an algorithm),
`df.planning`, `df.testing` and `df.plots`.
"""

from decentfn import algorithms, compressors, errors, kit, planning, plots, testing, timing, topologies, train, wrappers
from decentfn.algorithms import *
from decentfn.comm.fingerprint import broadcast
from decentfn.core import draws
from decentfn.elastic.survival import join, survive
from decentfn.engine.compilation import compile
from decentfn.engine.donation import donate
from decentfn.engine.simulation import simulate, stack, worker
from decentfn.engine.sweeping import stack_runs, sweep
from decentfn.gradient import accumulate, autograd, dynamic_loss_scale, functional
from decentfn.kit import Algorithm, Metrics, Options, State
from decentfn.optim import schedules, transforms
from decentfn.optim.transforms import Transform, adam, adamw, chain, clip_by_global_norm, from_torch, sgd
from decentfn.planning import plan
from decentfn.timing import clock
from decentfn.topologies import Topology, mixing_matrix, register_topology, topology
from decentfn.train import checkpoint, data, init, logs, preemption, profiling
from decentfn.train import consensus as _consensus
from decentfn.train.changes import learning_rate, resize, set_learning_rate, with_params
from decentfn.train.checkpoint.exchange import load_state_dict, state_dict
from decentfn.train.consensus import *
from decentfn.train.evaluation import evaluate, evaluate_replicas
from decentfn.train.own_steps import settle, trace
from decentfn.wrappers import *

__version__ = "0.2.0.dev0"

__all__ = [
    "Algorithm",
    "Metrics",
    "Options",
    "State",
    "Topology",
    "Transform",
    "accumulate",
    "adam",
    "adamw",
    "algorithms",
    "autograd",
    "broadcast",
    "chain",
    "clip_by_global_norm",
    "clock",
    "compile",
    "compressors",
    "donate",
    "draws",
    "dynamic_loss_scale",
    "errors",
    "evaluate",
    "evaluate_replicas",
    "from_torch",
    "functional",
    "join",
    "kit",
    "learning_rate",
    "load_state_dict",
    "mixing_matrix",
    "plan",
    "planning",
    "plots",
    "profiling",
    "register_topology",
    "resize",
    "schedules",
    "set_learning_rate",
    "settle",
    "sgd",
    "simulate",
    "stack",
    "stack_runs",
    "state_dict",
    "survive",
    "sweep",
    "testing",
    "timing",
    "topologies",
    "topology",
    "trace",
    "transforms",
    "with_params",
    "worker",
]
__all__ += algorithms.__all__
__all__ += train.__all__
__all__ += _consensus.__all__
__all__ += wrappers.__all__
