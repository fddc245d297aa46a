"""The loss and its gradient: of one batch or averaged over micro-batches, of a function or a module."""

from decentfn.gradient.accumulated import accumulate
from decentfn.gradient.by_autograd import autograd, is_by_autograd
from decentfn.gradient.evaluation import (
    evaluate,
    lock_of,
    partition_of_loss,
    require_first,
    require_inputs,
    tell_of_batch,
)
from decentfn.gradient.loss import LossFn, constants, require_loss
from decentfn.gradient.module import functional
from decentfn.gradient.result import Gradient, Metrics, nothing_like, where_good
from decentfn.gradient.scaled import DynamicLossScale, LossScale, dynamic_loss_scale
from decentfn.gradient.side_channel import Weight
