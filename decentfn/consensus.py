"""What the workers hold together: the parameters that one evaluates, their mean and how far apart they are.

All of it works for the state of one worker (under a process group, collectively) and for a stacked one.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from decentfn import collectives, trees
from decentfn.buckets import Buckets, counted_once, part_of, sum_inside, whole, without_values
from decentfn.kit.state import State, restarted
from decentfn.replicas import require_equal, require_equal_rows
from decentfn.stacking import over_workers
from decentfn.trees import PyTree


def params(state: Any) -> PyTree:
    """The parameters that one evaluates, as the tree that `init` was given; copies. `[N, ...]` when stacked.

    Of a sharded module they are this process's shards; `df.state_dict(module, state)` gathers them. Where a worker is several
    processes and the loss wants whole parameters, they are gathered: collective, over the worker's processes.
    """
    return trees.map(torch.clone, whole(_buckets(state)).tree())


def buffers(state: Any) -> PyTree:
    """This worker's own buffers, as the tree that `init` was given or the loss last returned; copies. `[N, ...]` when stacked."""
    return trees.map(torch.clone, state.buffers)


def with_params(state: Any, params: PyTree) -> Any:
    """The state with other parameters: from a checkpoint, an average, a surgery. Copies.

    The optimizer's state and the buffers are kept. What the algorithm itself remembers (slow copies, trackers, momentum,
    corrections, errors, messages on their way, the average of `df.ema`) starts anew at the new parameters, so that nothing
    pulls back to the old ones; each memory's own `restart` says how.

    Give all workers theirs in the same step (under torchrun on every rank): what they remember of one another starts
    anew on all of them, or would never add up again. The state that is passed in stays as it is.

    Args:
        state: a training state, `State(params, local, memory)`.
        params: a tree like the one that `init` was given, `[N, ...]` for a stacked state; a tied leaf counts in its
            first place.

    Raises:
        ValueError: other leaves, shapes or dtypes than the state's, or a state whose memory has no `restart`; on every rank,
            unequal parameters where the algorithm's workers must start equal (`all_reduce`, `demo`, ...).
    """
    x = _buckets(state)
    expected = [(name, leaf.shape, leaf.dtype) for name, leaf in trees.named_leaves(without_values(x).tree())]
    given = [(name, leaf.shape, leaf.dtype) for name, leaf in trees.named_leaves(params)]
    for want, got in itertools.zip_longest(expected, given):
        if want != got:
            raise ValueError(
                f"with_params(state, params): found {got} where the state has {want} (name, shape, dtype); pass a tree "
                "like df.params(state)."
            )
    if x.plan.starts_equal:
        require_equal("with_params(state, params)", {"params": params})
        if is_stacked(state):
            require_equal_rows("with_params(state, params)", {"params": params})
    plan = x.plan.whole or x.plan
    new = Buckets(plan.lay_out(params, workers=tuple(x[0].shape[:-1])), plan)
    if x.plan.whole is not None:
        new = Buckets(part_of(new, collectives.everyone().process, x.plan.processes), x.plan)
    new = Buckets([new.to(old.device) for new, old in zip(new, x, strict=True)], x.plan)

    def anew(state: State, x: Buckets) -> State:
        return state._replace(params=x, memory=restarted(state.memory, x))

    if not is_stacked(state):
        return trees.map(torch.clone, anew(state, new))
    # What does not depend on the worker comes back expanded.
    stacked = over_workers(anew, new[0].shape[0], state, new)
    return trees.map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), stacked)


def is_stacked(state: Any) -> bool:
    """Whether the state holds a leading axis of workers (buckets of one worker are vectors)."""
    return _buckets(state)[0].dim() == 2


@collectives.calling("df.consensus_mean(state)", of_state=True)
def consensus_mean(state: Any) -> PyTree:
    """The mean of the parameters over all workers, as the user's tree; copies, the same on every rank. Collective."""
    x = _buckets(state)
    return trees.map(torch.clone, whole(Buckets([_mean(bucket) for bucket in x], x.plan)).tree())


@collectives.calling("df.consensus_buffers(state)", of_state=True)
def consensus_buffers(state: Any) -> PyTree:
    """The mean of the floating-point buffers over all workers, the same on every rank; others are worker 0's; copies. Collective.

    Buffers that are equal on all workers (frozen parameters) come back bit for bit. Where a worker is several processes the mean is
    over all of them, and of a frozen parameter that is cut, over those that hold the same shard.
    """
    stacked, plan = is_stacked(state), state.params.plan
    shards = {name for name, _ in plan.places} if plan.is_cut else ()

    def mean(name: str, b: Tensor) -> Tensor:
        among = collectives.world() if name in shards else collectives.everyone()
        # Around worker 0's, so that equal ones have no rounding, and masks of -inf are no NaN.
        first = collectives.process_broadcast(b[0] if stacked else b, among)
        if not b.is_floating_point():
            return first
        away = torch.where(b == first, 0.0, b.double() - first.double())
        return (first.double() + collectives.process_mean(away.mean(0) if stacked else away, among)).to(b.dtype)

    means = [mean(name, b) for name, b in trees.named_leaves(state.buffers)]
    return trees.fill(trees.enumerate_leaves(state.buffers), means)


@collectives.calling("df.consensus_distance(state)", of_state=True)
def consensus_distance(state: Any) -> Tensor:
    """`sqrt(mean_i ‖x_i - x̄‖²)` over all workers and parameters, 0-d float64; the same on every rank. Collective."""
    return collectives.process_mean((distance_to_consensus(state) ** 2).mean()).sqrt()


@collectives.calling("df.distance_to_consensus(state)", of_state=True)
def distance_to_consensus(state: Any) -> Tensor:
    """`‖x_i - x̄‖₂` of this worker (0-d float64), or of each (`[N]`) when stacked. Collective."""
    x = _buckets(state)
    squares = [((bucket.double() - _mean(bucket).double()) ** 2).sum(-1) for bucket in x]
    return sum_inside(torch.stack(counted_once(squares, x.plan)).sum(0), x.plan.processes).sqrt()


def _mean(bucket: Tensor) -> Tensor:
    """Mean over the workers here (the first of two axes, if there are two) and over all processes."""
    return collectives.process_mean(bucket.mean(0) if bucket.dim() == 2 else bucket)


def _buckets(state: Any) -> Buckets:
    found = getattr(state, "params", None)
    if not isinstance(found, Buckets):
        raise ValueError(
            f"{type(state).__name__} is not a training state: expected a `.params` of buckets, from init(params)."
        )
    collectives.require_workers_of(found.plan.processes)
    return found
