"""A worker that sends garbage, for trials of an algorithm's robustness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from decentfn.core import PyTree, checks_numbers, context, require
from decentfn.kit.state import Metrics, State
from decentfn.kit.step import Algorithm, require_bare


@checks_numbers
def hostile(algorithm: Algorithm, worker: int, sends: Callable[[Tensor, Tensor], Tensor]) -> Algorithm:
    """Let one worker send something else instead of its values, in every message; its own training stays honest.

    For simulation and for ranks. Compressed messages, which are bytes, are sent as they are. Nested calls make several
    hostile workers: `hostile(hostile(algorithm, 3, lambda x, t: 100 * x), 5, lambda x, t: -x)`.

    Args:
        algorithm: the result of any function of `decentfn.algorithms`.
        worker: the hostile worker, from 0 to N - 1.
        sends: a function of a bucket that it would send and the step (0-d int64), which returns one of the same shape:
            `lambda x, t: -x` flips the sign, `lambda x, t: torch.full_like(x, torch.nan)` sends NaN. It is traced, and
            batched over workers.

    Raises:
        ValueError: there is no such worker, or no function; in a step, the function returns another shape.
    """
    require_bare("hostile", algorithm)
    require(callable(sends), "hostile", "sends is a function (x, t) -> x.", sends=sends)
    n = algorithm.step.num_workers
    require(0 <= worker < (n or worker + 1), "hostile", f"there are {n} workers, from 0.", worker=worker)
    one = algorithm.step.run

    def told(x: Tensor, me: Tensor, t: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        lie = sends(x, t)
        is_like_x = isinstance(lie, Tensor) and lie.shape == x.shape
        require(is_like_x, "hostile", f"sends(x, t) returns a tensor like x, of shape {list(x.shape)}.", returned=lie)
        return torch.where(me == worker, lie.to(x.dtype), x)

    def run(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        context.hostile.append(told)
        try:
            return one(state, batch, t)
        finally:
            context.hostile.pop()

    return algorithm._replace(step=replace(algorithm.step, run=run))
