"""An exponential moving average of the parameters, kept beside any algorithm's state."""

from __future__ import annotations

from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

from decentfn.algorithms.expected import check, kind_of, marked
from decentfn.algorithms.worker import Algorithm, Metrics
from decentfn.buckets import Buckets, copy_wide, each
from decentfn.consensus import params, restarted
from decentfn.trees import PyTree
from decentfn.words import brief


class EMAState(NamedTuple):
    """The algorithm's own state, and the average, in float32 or wider."""

    inner: Any
    ema: Buckets

    @property
    def params(self) -> Buckets:
        """The parameters themselves, so that everything that reads a state's parameters reads them."""
        return self.inner.params

    @property
    def buffers(self) -> PyTree:
        """The algorithm's buffers."""
        return self.inner.buffers

    def with_params(self, x: Buckets) -> EMAState:
        """The average starts anew, at the new parameters."""
        return EMAState(restarted(self.inner, x), copy_wide(x))


class AveragedState(NamedTuple):
    """The EMA in the place of the parameters: what `ema_state` returns."""

    params: Buckets
    buffers: PyTree


def ema(algorithm: Algorithm, decay: float = 0.999) -> Algorithm:
    """The algorithm, with `ema⁺ = d ema + (1 - d) x⁺` beside it on every worker; nothing more travels.

    The average starts at the first parameters. `df.ema_params(state)` is a worker's own;
    `df.consensus_mean(df.ema_state(state))` the mean over workers.

    Args:
        algorithm: from any function of `decentfn.algorithms`.
        decay: d in [0, 1).
    Source: torch.optim.swa_utils.get_ema_multi_avg_fn.
    """
    if not isinstance(algorithm, tuple) or len(algorithm) != 2:
        raise ValueError(
            f"ema({brief(algorithm)}): expected an Algorithm(init, step), from df.adapt_while_communicate(...)."
        )
    if not 0 <= decay < 1:
        raise ValueError(f"ema(decay={brief(decay)}): the decay lies in [0, 1); 0.999 is usual.")
    init, step = algorithm

    def start(params: PyTree, buffers: PyTree = None) -> EMAState:
        inner = init(params, buffers)
        return EMAState(inner, copy_wide(inner.params))

    def look(state: Any, batch: PyTree, t: Any) -> None:
        if not isinstance(state, EMAState):
            raise ValueError(
                f"step(state, batch, t): the state is a {kind_of(state)}, and this step takes an EMAState; call the init "
                "that df.ema(...) returned beside it."
            )
        check(step, state.inner, batch, t)

    @wraps(step)
    def averaged(state: EMAState, batch: PyTree, t: int | Tensor) -> tuple[EMAState, Metrics]:
        if not isinstance(state, EMAState):
            look(state, batch, t)
        inner, metrics = step(state.inner, batch, t)
        mean = each(lambda e, x: decay * e + (1 - decay) * x.to(e.dtype), state.ema, inner.params)
        return EMAState(inner, mean), metrics

    return Algorithm(start, marked(averaged, check=look))


def ema_state(state: EMAState) -> AveragedState:
    """A view of the state in which the EMA stands for the parameters: for `params`, `consensus_mean`, distances."""
    if not isinstance(state, EMAState):
        raise ValueError(
            f"ema_state({type(state).__name__}): there is no average; make the algorithm with df.ema(...)."
        )
    x = state.params
    return AveragedState(Buckets([e.to(b.dtype) for e, b in zip(state.ema, x, strict=True)], x.plan), state.buffers)


def ema_params(state: EMAState) -> PyTree:
    """This worker's averaged parameters as the user's tree, in the parameters' dtypes; copies. `[N, ...]` when stacked."""
    return params(ema_state(state))
