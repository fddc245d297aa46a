"""One case in one column: the step of this library against a plain PyTorch loop.

python -m tests.models.trial CASE WAY COLUMN:BACKEND ...    one line of JSON for each column
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import decentfn as df
from decentfn.core import draws, trees
from tests.models.cases import CASES, Case, Made, batch_of
from tests.models.registry import SEED

WAYS = ("autograd", "traced")
COLUMNS = ("eager", "simulated", "2 gloo ranks", "compiled", "simulated and compiled")
STEPS = 4
RATE, MOMENTUM = 0.05, 0.9

State = tuple[dict[str, Tensor], list[float]]  # parameters and buffers by name, and the losses


class Differs(Exception):
    """The step ran, and gave other numbers than the plain loop."""


def loss_of(made: Made, batch: Any) -> Tensor:
    """The loss that `df.functional` makes of this, in plain PyTorch."""
    if made.forward is not None:
        returned = made.forward(made.module, batch)
        return returned[0] if isinstance(returned, tuple) else returned
    if isinstance(batch, Mapping):
        return made.module(**batch).loss
    assert made.criterion is not None
    return made.criterion(made.module(batch[0]), *batch[1:])


def plain(case: Case, workers: int) -> list[State]:
    """Return the workers' parameters after training with the mean gradient."""
    ones = [case.make() for _ in range(workers)]
    optimizers = [torch.optim.SGD(one.module.parameters(), RATE, momentum=MOMENTUM) for one in ones]
    torch.manual_seed(SEED)
    losses: list[list[float]] = [[] for _ in ones]
    for t in range(STEPS):
        for worker, one in enumerate(ones):
            optimizers[worker].zero_grad()
            with draws.torch_draws(t, worker):
                loss = loss_of(one, batch_of(one, t, worker))
                loss.backward()
            losses[worker].append(float(loss.detach()))
        for shared in zip(*(trained(one) for one in ones), strict=True):
            mean = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in shared]).mean(0)
            for p in shared:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [(tensors(one), its) for one, its in zip(ones, losses, strict=True)]


def trained(made: Made) -> list[Tensor]:
    return [p for p in made.module.parameters() if p.requires_grad]


def tensors(made: Made) -> dict[str, Tensor]:
    named = (*made.module.named_parameters(), *made.module.named_buffers())
    return {name: x.detach().clone() for name, x in named}


def start(case: Case, way: str) -> tuple[Made, Any, Any]:
    """The made case, its parameters and buffers, and its loss."""
    made = case.make()
    params, buffers, loss_fn = df.functional(made.module, **made.loss)
    return made, (params, buffers), df.autograd(loss_fn) if way == "autograd" else loss_fn


def step_of(algorithm: Any, loss_fn: Any, workers: int) -> df.Algorithm:
    return algorithm(loss_fn, df.sgd(RATE, momentum=MOMENTUM), df.topology("complete", workers))


def alone(case: Case, way: str, backend: str | None) -> list[State]:
    made, values, loss_fn = start(case, way)
    init, step = step_of(df.adapt_while_communicate, loss_fn, 1)
    state = init(*values)
    step = step if backend is None else df.compile(step, backend=backend)
    torch.manual_seed(SEED)
    losses = []
    for t in range(STEPS):
        state, metrics = step(state, batch_of(made, t, 0), t)
        losses.append(float(metrics.loss))
    return [(df.params(state) | df.buffers(state), losses)]


def simulated(case: Case, way: str, backend: str | None) -> list[State]:
    made, values, loss_fn = start(case, way)
    init, step = step_of(df.all_reduce, loss_fn, 2)
    state, step = df.stack(init(*values), 2), df.simulate(step, 2)
    step = step if backend is None else df.compile(step, backend=backend)
    torch.manual_seed(SEED)
    losses = []
    for t in range(STEPS):
        batches = [batch_of(made, t, worker) for worker in range(2)]
        state, metrics = step(state, trees.map(lambda *rows: torch.stack(rows), *batches), t)
        losses.append(metrics.loss.tolist())
    own = [df.worker(state, worker) for worker in range(2)]
    return [(df.params(o) | df.buffers(o), [row[i] for row in losses]) for i, o in enumerate(own)]


def on_ranks(case: Case, way: str) -> list[State]:
    lock = threading.Lock()  # the ranks are threads, and PyTorch's generator is the process's

    def train(rank: int) -> State:
        with lock:
            made, values, loss_fn = start(case, way)
        init, step = step_of(df.all_reduce, loss_fn, 2)
        state, losses = init(*values), []
        for t in range(STEPS):
            state, metrics = step(state, batch_of(made, t, rank), t)
            losses.append(float(metrics.loss))
        return df.params(state) | df.buffers(state), losses

    return df.testing.on_ranks(2, train)


def attempt(case: Case, way: str, column: str, backend: str = "inductor") -> float | None:
    """The worst relative difference to the plain loop, or None where only finiteness can be asked for.

    Raises:
        Differs: the numbers are others.
    """
    compiled = backend if "compiled" in column else None
    if "simulated" in column:
        ours = simulated(case, way, compiled)
    else:
        ours = on_ranks(case, way) if "ranks" in column else alone(case, way, compiled)
    if case.random and not comparable(way, column):
        if not all(x.isfinite().all() for state, _ in ours for x in state.values()):
            raise Differs("not finite")
        return None
    before, theirs = tensors(case.make()), plain(case, len(ours))
    worst = max(difference(before, *pair) for pair in zip(ours, theirs, strict=True))
    if not worst <= case.tolerance:
        raise Differs("it runs without an error, and its numbers are others than the plain loop's")
    return worst


def comparable(way: str, column: str) -> bool:
    """Return True if a loss draws the same random numbers as the plain loop."""
    return "ranks" not in column if way == "autograd" else column == "eager"


def difference(before: dict[str, Tensor], ours: State, theirs: State) -> float:
    """The worst of a tensor's distance by the length of its update, and of the losses' relative differences."""
    (mine, losses), (reference, their_losses) = ours, theirs
    reference = {name: reference[name] for name in before}  # without buffers that a call makes
    if mine.keys() != reference.keys():
        raise Differs(f"names differ: {sorted(mine.keys() ^ reference.keys())[:3]}")
    moved = {name: length((x - before[name]).nan_to_num(0, 0, 0)) for name, x in reference.items() if grows(x)}
    overall = math.hypot(*moved.values())
    assert overall > 0, "the plain loop does not move"
    worst = max(abs(a - b) / max(1e-3, abs(b)) for a, b in zip(losses, their_losses, strict=True))
    for name, x in reference.items():
        if grows(x):
            worst = max(worst, nan_is_worst(length(mine[name] - x) / max(moved[name], 1e-3 * overall)))
        elif not torch.equal(mine[name], x):
            raise Differs(f"{name} differs")
    return worst


def grows(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.to(torch.complex128 if x.is_complex() else torch.float64)))


def nan_is_worst(x: float) -> float:
    return math.inf if math.isnan(x) else x


def main(name: str, way: str, *asked: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for column, _, backend in (one.partition(":") for one in asked):
        began = time.perf_counter()
        found: dict[str, Any] = {}
        try:
            found = {"outcome": "yes", "worst": attempt(CASES[name], way, column, backend)}
        except Differs as error:
            found = {"outcome": "differs", "sentence": str(error)}
        except Exception as error:
            found = {"outcome": "error", "sentence": f"{type(error).__name__}: {error}"}
        found["seconds"] = round(time.perf_counter() - began, 1)
        print("\nRESULT " + json.dumps({"column": column, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
