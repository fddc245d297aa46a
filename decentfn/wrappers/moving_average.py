"""Exponential moving average of the parameters, with any algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import PyTree, brief, checks_numbers, require, trees
from decentfn.core.buckets import Buckets, cast_like, copy_wide, each
from decentfn.kit.state import Local, Metrics, State, kept, kind_of, restarted
from decentfn.kit.step import Algorithm, require_bare
from decentfn.train.consensus import params


class EMAMemory(NamedTuple):
    """The algorithm's memory and the average, in float32 or wider."""

    inner: Any
    ema: Buckets

    averaged = ("ema",)

    def restart(self, x: Buckets) -> EMAMemory:
        """Restart the average at the new parameters."""
        return EMAMemory(restarted(self.inner, x), copy_wide(x))

    def without_lost(self, x: Buckets, mean: Callable[[Buckets], Buckets]) -> EMAMemory:
        """Keep the average."""
        return EMAMemory(kept(self.inner, x, mean), self.ema)


@checks_numbers
def ema(algorithm: Algorithm, decay: float = 0.999) -> Algorithm:
    """Add a moving average `ema⁺ = d ema + (1 - d) x⁺` on every worker; nothing more is sent.

    The average starts at the first parameters. `df.ema_params(state)` is a worker's own average;
    `df.consensus_mean(df.ema_state(state))` is the mean over workers.

    Args:
        algorithm: the result of any function of `decentfn.algorithms`.
        decay: d in [0, 1).
    Source: torch.optim.swa_utils.get_ema_multi_avg_fn.
    """
    require_bare("ema", algorithm)
    require(0 <= decay < 1, f"ema(decay={brief(decay)})", "the decay lies in [0, 1); 0.999 is usual.")
    init, step = algorithm
    one = step.run

    def start(params: PyTree, buffers: PyTree = None) -> State:
        state = init(params, buffers)
        return state._replace(memory=EMAMemory(state.memory, copy_wide(state.params)))

    def check(state: Any, batch: PyTree, t: Tensor) -> None:
        if not _has_average(state):
            raise ValueError(
                f"step(state, batch, t): the state is a {kind_of(state)}, but this step needs one with an average; "
                "call the init that df.ema(...) returned with it."
            )
        if step.check is not None:
            step.check(state._replace(memory=state.memory.inner), batch, t)

    def run(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        inner, average = state.memory
        state, metrics = one(state._replace(memory=inner), batch, t)
        average = each(lambda e, x: decay * e + (1 - decay) * x.to(e.dtype), average, state.params)
        return state._replace(memory=EMAMemory(state.memory, average)), metrics

    return algorithm._replace(init=start, step=replace(step, run=run, check=check))


def ema_state(state: State) -> State:
    """Return a copy of the state with the average as parameters, for `params`, `consensus_mean`, ...; not to train."""
    if not _has_average(state):
        raise ValueError(f"ema_state({kind_of(state)}): there is no average; make the algorithm with df.ema(...).")
    return trees.map(torch.clone, State(cast_like(state.memory.ema, state.params), Local(None, state.buffers)))


def ema_params(state: State) -> PyTree:
    """Return this worker's averaged parameters as the user's tree in their dtypes; copies. `[N, ...]` if stacked."""
    return params(ema_state(state))


def _has_average(state: Any) -> bool:
    return isinstance(getattr(state, "memory", None), EMAMemory)
