"""`sweep`: many simulated runs in one process, as one batch of runs over the batch of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import PyTree, brief, context, first_difference, over_workers, require_first, trees
from decentfn.core.arguments import MOST_WORKERS, checks_numbers, require, require_at_most
from decentfn.kit.state import lines_of
from decentfn.kit.step import Step


@checks_numbers
def sweep(step: Step, num_runs: int) -> Step:
    """Return the step of `num_runs` simulated runs at once: every leaf of state, batch and metrics gains a leading `[R]`.

    Runs do not communicate; each equals the same run alone. They share the algorithm, the topology and what the loss
    draws (dropout), and differ in data: the start, the batches, the learning rate of each
    (`df.set_learning_rate(states, rates)`, `[R, N]`) and schedules made by `df.schedules.per_run`, such as γ of
    `adapt_while_communicate`. In one process, on the traced gradient path. For small models, whose time is that of
    many small operations; compile as `df.compile(df.sweep(df.simulate(step, N), R))`.

    Args:
        step: a simulated step, `df.simulate(step, N)`.
        num_runs: R >= 1. `df.stack_runs` stacks the stacked states, and the batches, of all runs; `df.worker(states, r)`
            is the stacked state of run r.

    Raises:
        ValueError: R is not positive; a step that is not simulated, or compiled, donated or swept already; one of workers
            on their own clocks, or whose loss is `df.autograd`; or (when called) a leaf without R rows, or several processes.

    >>> import torch, decentfn as df
    >>> init, step = df.adapt_while_communicate(lambda x, b: ((x - b) ** 2).sum(), df.sgd(0.1), df.topology("ring", 4))
    >>> states, step = df.stack_runs([df.stack(init(torch.zeros(1)), 4)] * 2), df.sweep(df.simulate(step, 4), 2)
    >>> states = df.set_learning_rate(states, torch.tensor([[0.1], [0.5]]).double().expand(2, 4))
    >>> states, metrics = step(states, torch.ones(2, 4, 1), 0)
    >>> df.params(df.worker(states, 1)).tolist()
    [[1.0], [1.0], [1.0], [1.0]]
    """
    if not isinstance(step, Step) or not step.had("simulate"):
        raise ValueError(f"sweep({brief(step)}): expected a simulated step, df.sweep(df.simulate(step, N), R).")
    step = Step.of(step, "sweep", refuse=("compile", "donate", "sweep"))
    if step.own_steps:
        raise ValueError(
            f"sweep({step.name}, {num_runs}): its workers take their own steps, whose mail is looked up for one run at a time; "
            "simulate one run after the other."
        )
    if step.is_by_autograd:
        raise ValueError(
            "sweep(step of df.autograd(loss_fn), R): PyTorch's autograd computes one worker after the other, so nothing "
            "is gained; pass the loss without df.autograd, or train one run after the other."
        )
    require_at_most("sweep", MOST_WORKERS, num_runs=num_runs)
    one = step.run

    def run(states: Any, batches: PyTree, t: Tensor) -> tuple[Any, Any]:
        def run_of(number: Tensor, state: Any, batch: PyTree) -> tuple[Any, Any]:
            context.runs.append((number, num_runs))
            try:
                return one(state, batch, t)
            finally:
                context.runs.pop()

        batches = _require_runs(states, batches, num_runs)
        numbers = torch.arange(num_runs, device=trees.leaves(states)[0].device)
        return over_workers(run_of, num_runs, numbers, states, batches, randomness="same")

    def check(states: Any, batches: PyTree, t: Tensor) -> None:
        if collectives.world().size > 1:
            raise ValueError(
                f"sweep(step, {num_runs}): {collectives.world().size} processes run, and a sweep is of one process; start "
                "each process alone, without torchrun, with a part of the runs."
            )
        batches = _require_runs(states, batches, num_runs)
        assert step.check is not None
        for r in range(num_runs):
            state, batch = trees.map(lambda leaf, r=r: leaf[r], (states, batches))
            step.check(state, batch, t)

    return step.transformed("sweep", num_runs, run=run, check=None if step.check is None else check)


def _require_runs(states: PyTree, batches: PyTree, num_runs: int) -> PyTree:
    """Return the batches, plain; raise ValueError unless every leaf of them and of the states has a row for each run."""
    way_out, batches = "df.stack_runs, of the stacked states of all runs, or of their batches", trees.plain(batches)
    for what, tree in (("states", states), ("batches", batches)):
        require_first(what, tree, num_runs, f"sweep(num_runs={num_runs})", "runs", way_out)
    return batches


def stack_runs(runs: Sequence[PyTree]) -> PyTree:
    """Stack the states (or the batches) of several runs: every leaf `[N, ...]` becomes `[R, N, ...]`, in new memory.

    Args:
        runs: one tree for each run, of equal structure, shapes and dtypes.

    Raises:
        ValueError: no runs, or unequal ones.
    """
    require(isinstance(runs, (list, tuple)) and len(runs) > 0, "stack_runs", "expected a list of states.", runs=runs)
    described = [lines_of(run) for run in runs]
    first = described[0]
    for r, found in enumerate(described):
        if found != first:
            theirs, ours = first_difference(found, first)
            raise ValueError(f"stack_runs: run {r} has the leaf {theirs} where run 0 has {ours}.")
    return trees.map(lambda *rows: torch.stack(rows), *runs)
