"""Building blocks of an algorithm. Every file in `decentfn.algorithms` uses them, and yours can, too.

from decentfn import kit

@kit.algorithm
def my_algorithm(loss_fn, optimizer, topology, **options):
    worker = kit.Worker(loss_fn, optimizer, topology, **options)

    def step(state, batch, t):
        x = state.params
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, x)
        return kit.State(worker.mix(kit.add(x, u), t), local), g.metrics

    return worker.algorithm(step)
"""

from decentfn.comm.collectives import rests
from decentfn.comm.gossip import Posted, collect, difference, is_active, mix_context, repaired, unless_bad
from decentfn.comm.gossip.push_sum import first_weight, pack, unpack
from decentfn.compressors import Compressor
from decentfn.core import PyTree, once
from decentfn.core.buckets import (
    Buckets,
    Plan,
    add,
    cast_like,
    copy_wide,
    divide,
    each,
    global_norm,
    scale,
    where,
    wide,
    widen,
    with_own,
    zeros_like,
)
from decentfn.gradient import Gradient, LossFn, Weight
from decentfn.kit.decorator import algorithm
from decentfn.kit.options import Options
from decentfn.kit.preconditions import (
    as_input,
    as_weight,
    at,
    reciprocal,
    require_compressor,
    require_contraction,
    require_doubly_stochastic,
    require_fractions,
    require_positive,
    require_rate,
    require_settling,
    require_static,
    require_static_symmetric,
    require_whole,
)
from decentfn.kit.state import Local, Metrics, State, restarting, zeroed
from decentfn.kit.step import Algorithm, Step
from decentfn.kit.worker import Worker
from decentfn.topologies import Topology

__all__ = [
    "Algorithm",
    "Buckets",
    "Compressor",
    "Gradient",
    "Local",
    "LossFn",
    "Metrics",
    "Options",
    "Plan",
    "Posted",
    "PyTree",
    "State",
    "Step",
    "Topology",
    "Weight",
    "Worker",
    "add",
    "algorithm",
    "as_input",
    "as_weight",
    "at",
    "cast_like",
    "collect",
    "copy_wide",
    "difference",
    "divide",
    "each",
    "first_weight",
    "global_norm",
    "is_active",
    "mix_context",
    "once",
    "pack",
    "reciprocal",
    "repaired",
    "require_compressor",
    "require_contraction",
    "require_doubly_stochastic",
    "require_fractions",
    "require_positive",
    "require_rate",
    "require_settling",
    "require_static",
    "require_static_symmetric",
    "require_whole",
    "restarting",
    "rests",
    "scale",
    "unless_bad",
    "unpack",
    "where",
    "wide",
    "widen",
    "with_own",
    "zeroed",
    "zeros_like",
]
