"""decentfn: decentralized data-parallel training for PyTorch, in functional style.

>>> import decentfn as df

The main functions, the algorithms and the common optimizers are here. Everything else is in submodules:
`df.topologies`, `df.draws` (random numbers of custom topologies), `df.transforms`, `df.schedules`, `df.compressors`,
`df.data`, `df.checkpoint`, `df.logs`, `df.profiling`, `df.errors`, `df.kit` (building blocks of an algorithm),
`df.planning`, `df.testing` and `df.plots`.
"""

from decentfn import algorithms, compressors, errors, kit, planning, plots, testing, timing, topologies, train, wrappers
from decentfn.algorithms.a2cid2 import a2cid2
from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.adapt_while_communicate import adapt_while_communicate
from decentfn.algorithms.all_reduce import all_reduce
from decentfn.algorithms.asynchronous_diloco import asynchronous_diloco
from decentfn.algorithms.asynchronous_gradient_push import asynchronous_gradient_push
from decentfn.algorithms.beer import beer
from decentfn.algorithms.choco_sgd import choco_sgd
from decentfn.algorithms.clipped_gossip import clipped_gossip
from decentfn.algorithms.d2 import d2
from decentfn.algorithms.decentlam import decentlam
from decentfn.algorithms.decoupled_diloco import decoupled_diloco
from decentfn.algorithms.deep_squeeze import deep_squeeze
from decentfn.algorithms.demo import demo
from decentfn.algorithms.demuon import demuon
from decentfn.algorithms.diloco import diloco
from decentfn.algorithms.exact_diffusion import exact_diffusion
from decentfn.algorithms.extra import extra
from decentfn.algorithms.factored_gossip_diloco import factored_gossip_diloco
from decentfn.algorithms.gasloc import gasloc
from decentfn.algorithms.gradient_tracking import gradient_tracking
from decentfn.algorithms.k_gt import k_gt
from decentfn.algorithms.led import led
from decentfn.algorithms.momentum_tracking import momentum_tracking
from decentfn.algorithms.motef import motef
from decentfn.algorithms.nids import nids
from decentfn.algorithms.noloco import noloco
from decentfn.algorithms.power_gossip import power_gossip
from decentfn.algorithms.push_diging import push_diging
from decentfn.algorithms.quasi_global_adam import quasi_global_adam
from decentfn.algorithms.quasi_global_momentum import quasi_global_momentum
from decentfn.algorithms.relay_sgd import relay_sgd
from decentfn.algorithms.slowmo import slowmo
from decentfn.algorithms.sparse_loco import sparse_loco
from decentfn.algorithms.sparta import sparta
from decentfn.algorithms.stochastic_gradient_push import stochastic_gradient_push
from decentfn.algorithms.streaming_diloco import streaming_diloco
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
from decentfn.train.changes import learning_rate, resize, set_learning_rate, with_params
from decentfn.train.checkpoint.exchange import load_state_dict, state_dict
from decentfn.train.consensus import (
    buffers,
    check_replicas,
    consensus_buffers,
    consensus_distance,
    consensus_mean,
    distance_in_steps,
    distance_to_consensus,
    gather,
    mean,
    params,
)
from decentfn.train.evaluation import evaluate, evaluate_replicas
from decentfn.train.own_steps import settle, trace
from decentfn.wrappers import average_buffers, ema, ema_params, ema_state, guard, mix_state

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
    "buffers",
    "chain",
    "check_replicas",
    "clip_by_global_norm",
    "clock",
    "compile",
    "compressors",
    "consensus_buffers",
    "consensus_distance",
    "consensus_mean",
    "distance_in_steps",
    "distance_to_consensus",
    "donate",
    "draws",
    "dynamic_loss_scale",
    "errors",
    "evaluate",
    "evaluate_replicas",
    "from_torch",
    "functional",
    "gather",
    "join",
    "kit",
    "learning_rate",
    "load_state_dict",
    "mean",
    "mixing_matrix",
    "params",
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
__all__ += wrappers.__all__
