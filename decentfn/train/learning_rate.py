"""Learning rate of a run: read it from the state, or set it between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from decentfn.core import brief, real, trees
from decentfn.kit.state import State, is_state
from decentfn.optim.transforms.basic import RateState, current_rate, rates

_SET = "set_learning_rate(state, rate)"


def learning_rate(state: State) -> Tensor:
    """Return the learning rate of the next update, or of the last one if it follows a schedule.

    Returns:
        0-d float64, `[N]` for a stacked state of N workers; with G parameter groups a last axis `[G]`, in their order.

    Raises:
        ValueError: not a training state, or its optimizer keeps no learning rate.
    """
    rate = current_rate(_optimizer_of("learning_rate(state)", state))
    assert rate is not None
    return rate


def set_learning_rate(state: State, rate: float | Tensor) -> State:
    """Return a copy of the state with another learning rate, as for a schedule that follows a metric.

    The optimizer was built with a number, as in `df.adamw(3e-4)`. A compiled step is not compiled again, and a
    checkpoint keeps the rate. A schedule is lowered by a tensor that it multiplies: `factor = torch.tensor(1.0)`,
    `df.adamw(lambda count: factor * schedule(count))`, and then `factor.fill_(0.1)` on every rank. Nothing is compiled
    again; a checkpoint does not keep the factor, so save it in `extra`.

    Args:
        state: a training state, stacked or not; it is not changed.
        rate: finite, >= 0; one number for all, or a tensor of the shape of `df.learning_rate(state)`: a rate for each
            simulated worker and each parameter group.

    Raises:
        ValueError: a rate out of range or of another shape, one that follows a schedule, or no rate in the state.
    """
    opt = _optimizer_of(_SET, state)
    if any(node.is_scheduled for node in rates(opt)):
        raise ValueError(
            f"{_SET}: the optimizer's learning rate follows a schedule, which would overwrite it; build the optimizer with "
            "a number, df.adamw(3e-4), and set every rate, or multiply the schedule by a tensor and fill that: factor = "
            "torch.tensor(1.0), df.adamw(lambda count: factor * schedule(count)), factor.fill_(0.1)."
        )
    old = learning_rate(state)
    if isinstance(rate, Tensor):
        new = rate.detach().to(old.device, torch.float64)
        if new.dim() and new.shape != old.shape:
            raise ValueError(
                f"{_SET}: the rate has shape {list(new.shape)}; expected one number, or {list(old.shape)} as "
                "df.learning_rate(state)."
            )
    else:
        new = torch.tensor(float(real(_SET, "rate", rate)), dtype=torch.float64, device=old.device)
    if not bool(((new >= 0) & torch.isfinite(new)).all()):
        raise ValueError(f"{_SET}: rate={brief(rate)}: a learning rate is a finite number >= 0.")
    several = len(rates(opt)) > 1
    rows = iter(new.expand(old.shape).unbind(-1) if several else [new.expand(old.shape)])
    opt = trees.map_nodes(RateState, lambda node: RateState(next(rows)), opt)
    copied = trees.map(torch.clone, state._replace(local=state.local._replace(opt=opt)))
    copied.params.taken_at = state.params.taken_at  # the run goes on, perhaps in another epoch
    return copied


def _optimizer_of(call: str, state: State) -> object:
    if not is_state(state):
        raise ValueError(f"{call}: found a {type(state).__name__}; expected a training state, from init(params).")
    if not rates(state.local.opt):
        raise ValueError(
            f"{call}: the optimizer keeps no learning rate in its state; df.sgd, df.adamw and all that end in "
            "df.transforms.scale_by_learning_rate do, and so do those of df.from_torch."
        )
    return state.local.opt
