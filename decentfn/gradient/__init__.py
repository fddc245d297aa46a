"""The loss and its gradient: of one batch, or averaged over micro-batches."""

from decentfn.gradient.accumulated import Accumulated, accumulate
from decentfn.gradient.evaluation import evaluate, require_batch, require_inputs
from decentfn.gradient.loss import LossFn, require_loss
from decentfn.gradient.traced import Evaluation

__all__ = [
    "Accumulated",
    "Evaluation",
    "LossFn",
    "accumulate",
    "evaluate",
    "require_batch",
    "require_inputs",
    "require_loss",
]
