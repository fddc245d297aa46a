"""`simulate`: many workers in one process, by the very step that trains on many processes."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from decentfn import collectives, trees
from decentfn.gradient.beside import Beside, passing_beside
from decentfn.kit.expected import check, is_state, marked, require_order, watch
from decentfn.kit.state import Step
from decentfn.numbers import MOST_WORKERS, checks_numbers, require_at_most
from decentfn.replicas import require_equal_rows
from decentfn.scalars import as_step
from decentfn.stacking import over_workers, require_rows
from decentfn.torch_private import functorch
from decentfn.trees import PyTree
from decentfn.words import brief


@checks_numbers
def simulate(step: Step, num_workers: int, *, chunk_size: int | None = None) -> Step:
    """The step of `num_workers` workers at once: every leaf of state, batch and metrics gains a leading `[N]`.

    In one process N is the topology's size. Under torchrun each process simulates N workers and
    N x processes is the topology's size; worker i lives in process i // N. Compile as
    `compile(simulate(step, N))`; with `donate=False` no copy back is made, at the price of a second state. Random
    operations in the loss (dropout) differ between workers.

    Args:
        step: a step written for one worker.
        num_workers: N >= 1, the workers of this process.
        chunk_size: evaluate the loss and its gradient for so many workers at a time (None: for all at once), so that
            no more of them hold activations at once. The compiled graph grows with the number of chunks, and a loss
            that draws random numbers is refused.

    Raises:
        ValueError: N or `chunk_size` is not positive, `step` is compiled or simulated already, or (when called) a leaf
            does not have N rows, or N x processes is not the topology's size.
    """
    if not callable(step):
        raise ValueError(f"simulate({brief(step)}): expected a step; init, step = df.adapt_while_communicate(...).")
    if getattr(step, "made_by", None) == "compile":
        raise ValueError(
            "simulate(compile(step), N): a compiled step is one worker's graph, over which nothing is batched; the other "
            "way round, df.compile(df.simulate(step, N))."
        )
    if getattr(step, "made_by", None) == "donate":
        raise ValueError(
            "simulate(donate(step), N): the other way round, df.donate(df.simulate(step, N)): the state of all workers is one."
        )
    if getattr(step, "made_by", None) == "simulate":
        raise ValueError(
            "simulate(simulate(step, N)): the step has its workers already; simulate once, N of them in all."
        )
    require_at_most("simulate", MOST_WORKERS, num_workers=num_workers)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"simulate(chunk_size={brief(chunk_size)}): workers at a time, an integer >= 1, or None for all."
        )

    def require_size() -> None:
        size = getattr(step, "num_workers", None)
        if size is not None:  # else a step of another kind
            collectives.require_size(num_workers, size, "simulate")

    started: list[Any] = [None]  # the plan of the last run that began here

    def require_start(state: Any, t: Tensor) -> None:
        if functorch.has_no_value(t) or not getattr(step, "starts_equal", False) or int(t) != 0 or not is_state(state):
            return
        if started[0] is not state.params.plan:
            require_equal_rows("simulate(step, N)(state, batch, 0)", {"params": state.params.tree()})
            started[0] = state.params.plan

    def look(state: Any, batch: PyTree, t: Any) -> None:
        require_order(state, batch, t)
        require_size()
        require_rows("state", state, num_workers)
        batch = trees.plain(batch)
        require_rows("batch", batch, num_workers)
        require_start(state, as_step(t))
        first, its_batch = trees.map(lambda leaf: leaf[0], (state, batch))
        check(step, first, its_batch, t)

    @wraps(step)
    def simulated(state: Any, batch: PyTree, t: int | Tensor) -> tuple[Any, Any]:
        if not torch.compiler.is_dynamo_compiling():
            require_order(state, batch, t)
            require_size()
        t = as_step(t)
        require_rows("state", state, num_workers)
        require_start(state, t)
        if not getattr(step, "by_autograd", False):
            batch = trees.plain(batch)
            require_rows("batch", batch, num_workers)
            result = over_workers(
                lambda state, batch: step(state, batch, t), num_workers, state, batch, chunk_size=chunk_size
            )
        elif isinstance(batch, Beside):
            result = over_workers(lambda state: step(state, batch, t), num_workers, state, chunk_size=chunk_size)
        else:
            return passing_beside(lambda batch: simulated(state, batch, t), batch)
        watch(step, result[0], t)
        return result

    return marked(simulated, check=look, made_by="simulate")


@checks_numbers
def stack(state: PyTree, num_workers: int) -> PyTree:
    """`num_workers` copies of a state (or a batch): every leaf `[...]` becomes `[N, ...]`, memory of its own.

    Raises:
        ValueError: `num_workers` is no integer >= 1.
    """
    require_at_most("stack", MOST_WORKERS, num_workers=num_workers)
    return trees.map(lambda leaf: leaf.unsqueeze(0).repeat(num_workers, *[1] * leaf.dim()), state)


@checks_numbers
def worker(state: PyTree, i: int) -> PyTree:
    """Worker `i`'s own part of a stacked state, as copies.

    Args:
        state: stacked, every leaf `[N, ...]`.
        i: from 0 to N - 1; of the workers that this process holds, where several processes hold some.

    Raises:
        ValueError: there is no such worker.
    """
    held = min((leaf.shape[0] if leaf.dim() else 0 for leaf in trees.leaves(state)), default=0)
    if not -held <= i < held:
        raise ValueError(
            f"worker(state, {i}): the state has {held} workers here, from 0; a state that is not stacked has none."
        )
    return trees.map(lambda leaf: leaf[i].clone(), state)
