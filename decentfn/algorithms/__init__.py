"""Algorithms: one paper a file, each a function `(loss_fn, optimizer, topology, ...) -> Algorithm(init, step)`."""

from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.algorithms.adapt_while_communicate import adapt_while_communicate
from decentfn.algorithms.all_reduce import all_reduce
from decentfn.algorithms.choco_sgd import choco_sgd
from decentfn.algorithms.d2 import d2
from decentfn.algorithms.decentlam import decentlam
from decentfn.algorithms.deep_squeeze import deep_squeeze
from decentfn.algorithms.demo import demo
from decentfn.algorithms.diloco import diloco
from decentfn.algorithms.exact_diffusion import exact_diffusion
from decentfn.algorithms.extra import extra
from decentfn.algorithms.gradient_tracking import gradient_tracking
from decentfn.algorithms.momentum_tracking import momentum_tracking
from decentfn.algorithms.noloco import noloco
from decentfn.algorithms.power_gossip import power_gossip
from decentfn.algorithms.push_diging import push_diging
from decentfn.algorithms.quasi_global_momentum import quasi_global_adam, quasi_global_momentum
from decentfn.algorithms.relay_sgd import relay_sgd
from decentfn.algorithms.slowmo import slowmo
from decentfn.algorithms.stochastic_gradient_push import stochastic_gradient_push
from decentfn.algorithms.streaming_diloco import streaming_diloco

__all__ = [
    "adapt_then_combine",
    "adapt_while_communicate",
    "all_reduce",
    "choco_sgd",
    "d2",
    "decentlam",
    "deep_squeeze",
    "demo",
    "diloco",
    "exact_diffusion",
    "extra",
    "gradient_tracking",
    "momentum_tracking",
    "noloco",
    "power_gossip",
    "push_diging",
    "quasi_global_adam",
    "quasi_global_momentum",
    "relay_sgd",
    "slowmo",
    "stochastic_gradient_push",
    "streaming_diloco",
]
