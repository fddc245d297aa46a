"""What a loss must be where a worker is several processes."""

from __future__ import annotations

from decentfn import collectives
from decentfn.gradient.by_autograd import ByAutograd
from decentfn.gradient.loss import LossFn, WrappedLoss
from decentfn.gradient.module import ShardedLoss
from decentfn.words import brief


def require_inside(loss_fn: LossFn) -> None:
    """Raise ValueError where a worker is several processes, unless the loss says what they share: a sharded module's."""
    size = collectives.processes_per_worker()
    if size == 1:
        return
    inside, by_autograd = loss_fn, False
    while isinstance(inside, WrappedLoss):
        by_autograd |= isinstance(inside, ByAutograd)
        inside = inside.loss_fn
    if not isinstance(inside, ShardedLoss):
        raise ValueError(
            f"loss_fn={brief(inside)}: df.init(processes_per_worker={size}) says that {size} processes share a worker's parameters, "
            'but this loss is not of a module under fully_shard(module, mesh=world.mesh["shard"]); make it with '
            "df.functional(module, criterion), or call df.init() for workers of one process."
        )
    if not by_autograd:
        raise ValueError(
            f"loss_fn={brief(inside)}: the gradient of a module under fully_shard is PyTorch's own; write df.autograd(loss_fn)."
        )
