"""The loss and its gradient: of one batch, or averaged over micro-batches, of a module."""

from decentfn.gradient.accumulated import Accumulated, accumulate
from decentfn.gradient.by_autograd import autograd, is_by_autograd
from decentfn.gradient.evaluation import evaluate, learn, raise_own, reading, require_batch, require_inputs
from decentfn.gradient.inside import Inside, inside_of
from decentfn.gradient.loss import LossFn, require_loss
from decentfn.gradient.module import functional
from decentfn.gradient.scaled import DynamicLossScale, LossScale, dynamic_loss_scale
from decentfn.gradient.traced import Evaluation

__all__ = [
    "Accumulated",
    "DynamicLossScale",
    "Evaluation",
    "Inside",
    "LossFn",
    "LossScale",
    "accumulate",
    "autograd",
    "dynamic_loss_scale",
    "evaluate",
    "functional",
    "inside_of",
    "is_by_autograd",
    "learn",
    "raise_own",
    "reading",
    "require_batch",
    "require_inputs",
    "require_loss",
]
