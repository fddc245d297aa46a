"""Algorithms, one paper per file; all are on `df`."""

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

__all__ = [
    "a2cid2",
    "adapt_then_combine",
    "adapt_while_communicate",
    "all_reduce",
    "asynchronous_diloco",
    "asynchronous_gradient_push",
    "beer",
    "choco_sgd",
    "clipped_gossip",
    "d2",
    "decentlam",
    "decoupled_diloco",
    "deep_squeeze",
    "demo",
    "demuon",
    "diloco",
    "exact_diffusion",
    "extra",
    "factored_gossip_diloco",
    "gasloc",
    "gradient_tracking",
    "k_gt",
    "led",
    "momentum_tracking",
    "motef",
    "nids",
    "noloco",
    "power_gossip",
    "push_diging",
    "quasi_global_adam",
    "quasi_global_momentum",
    "relay_sgd",
    "slowmo",
    "sparta",
    "sparse_loco",
    "stochastic_gradient_push",
    "streaming_diloco",
]
