"""A row of the contract, trained on a rank, and by the eager simulator on the CPU for comparison."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing import Subject, problem
from tests import contract

STEPS = 5
PLAIN = ("eager", "donated", "by autograd")
NARROW = ("bfloat16", "bfloat16 wire")
TRACED = ("traced",)
REGIONS = ("traced, by autograd", "traced, by regions")
FAMILIES = (
    "adapt_while_communicate",
    "all_reduce",
    "gradient_tracking, atc",
    "exact_diffusion",
    "stochastic_gradient_push",
    "quasi_global_momentum",
    "relay_sgd, models",
    "slowmo",
)
"""A row of each family that takes a narrow wire."""


def rows_of(how: str) -> tuple[str, ...]:
    return FAMILIES if how in NARROW else tuple(contract.ROWS)


def dtypes_of(how: str) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if how == "bfloat16" else problem.DTYPES


@cache
def loss_of(how: str) -> Any:
    if "autograd" in how:
        return df.autograd(problem.loss_fn)
    return df.autograd(torch.compile(problem.loss_fn)) if "regions" in how else problem.loss_fn


def build(subject: Subject, how: str, n: int) -> df.Algorithm:
    options = {"wire_dtype": torch.bfloat16} if how == "bfloat16 wire" else {}
    return subject.build(num_workers=n, loss_fn=loss_of(how), **options)


@cache
def reference(row: str, how: str, n: int) -> Any:
    """The parameters of all workers after `STEPS` steps, `[n, ...]`, or in words why there are none."""
    subject, dtypes = contract.ROWS[row], dtypes_of(how)
    try:
        algorithm = build(subject, how if how in NARROW else "eager", n)
    except ValueError as declined:
        return str(declined)
    state, step = subject.start(algorithm, range(n), stacked=True, dtypes=dtypes), df.simulate(algorithm.step, n)
    for t in range(STEPS):
        state, _ = step(state, problem.stacked([problem.batch(i, t, dtypes=dtypes) for i in range(n)]), t)
    return df.params(state)


def train(row: str, how: str, world: Any) -> tuple[Any, Any, Any]:
    """This rank's parameters on the CPU after `STEPS` steps, and the step and state to go on with."""
    subject, me, dtypes = contract.ROWS[row], world.rank, dtypes_of(how)
    algorithm = build(subject, how, world.size)
    start = problem.params(0 if subject.starts_equal else me, dtypes)
    state = algorithm.init(trees.map(lambda x: x.to(world.device), start))
    step = algorithm.step
    if "traced" in how:
        step = df.compile(step)
    elif how == "donated":
        step = df.donate(step)
    for t in range(STEPS):
        state, _ = step(state, batch(how, world, t), t)
    return trees.map(lambda x: x.cpu(), df.params(state)), step, state


def batch(how: str, world: Any, t: int) -> Any:
    return trees.map(lambda x: x.to(world.device), problem.batch(world.rank, t, dtypes=dtypes_of(how)))


def require_equal(got: Any, wanted: Any, rank: int, how: str) -> None:
    tolerance = 0.05 if how in NARROW else 1e-4
    for mine, all_of in zip(trees.leaves(got), trees.leaves(wanted), strict=True):
        torch.testing.assert_close(mine, all_of[rank], atol=tolerance, rtol=tolerance)
