"""Effect of bad values in every algorithm with the guard; run as a program, it writes docs/bad_values.md's table.

python -m tests.bad_values
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import decentfn as df
from decentfn.core import trees
from decentfn.testing import Law, problem
from tests import contract

PAGE = Path(__file__).parent.parent / "docs" / "bad_values.md"
N = 4
NAN_GRADIENT, INF_GRADIENT, NAN_PARAMETER, NAN_MOMENTS, STEPS = 3, 4, 6, 9, 12
"""The steps at which worker 1 gets a NaN gradient, worker 2 an infinite one, worker 1 NaN among its parameters, worker 3 among its
optimizer's moments, and how many steps there are."""


def _mean(field: str) -> Law:
    return Law(
        f"mean({field}) = 0",
        lambda state, topology, t: [b.double().mean(0) for b in getattr(state.memory, field)],
        True,
    )


INVARIANTS = {"extra": _mean("p"), "exact_diffusion": _mean("c"), "d2": _mean("c"), "choco_sgd": _mean("pull")}
"""Further laws that the corrections need, besides the contract's own."""

_MIX, _OUTER, _NEVER = "neighbors' mix", "outer parameters", "not repaired"
DRAWN = "neighbors' mix of each value, once drawn"
MENDED = {
    "choco_sgd": "own public copy",
    "relay_sgd, models": "the others' mean, as heard last",
    "stochastic_gradient_push, delayed": "neighbors' mass",
    "stochastic_gradient_push": "neighbors' mass",
    "asynchronous_gradient_push": "neighbors' mass",
    "asynchronous_diloco": "neighbors' mass",
    "diloco": _OUTER,
    "streaming_diloco": _OUTER,
    "noloco": _OUTER,
    "decoupled_diloco": _OUTER,
    "gasloc": _OUTER,
    "factored_gossip_diloco": _OUTER,
    "sparse_loco": _OUTER,
    "sparta": DRAWN,
    "k_gt": _OUTER,
    "led": _OUTER,
    "diloco, 4 bits": _OUTER,
    "diloco, SPARTA": _OUTER,
    "streaming_diloco, 2 bits": _OUTER,
    "noloco, 8 bits": _OUTER,
    "decoupled_diloco, Adam": _OUTER,
    "factored_gossip_diloco, 8 bits": _OUTER,
    "beer": "own public copy",
    "motef": "own public copy",
    "all_reduce": _NEVER,
    "demo": _NEVER,
    "power_gossip": _NEVER,
    "relay_sgd, gradients": _NEVER,
}
"""New start of a worker with bad parameters, if it is not the mix of its neighbors."""

GRADIENT = {
    "all_reduce": "left out of the mean; all take the step",
    "demo": "adds nothing; all take the step",
    "relay_sgd, gradients": "adds nothing; all take the step",
}


def laws(row: str) -> list[Law]:
    own = [law for law in contract.ROWS[row].laws if law.name != "mean preserved"]
    name = row.partition(",")[0]
    return [*own, *([INVARIANTS[name]] if name in INVARIANTS else [])]


def batch(worker: int, t: int) -> Any:
    targets, weight = problem.batch(worker, t)
    bad = {(1, NAN_GRADIENT): float("nan"), (2, INF_GRADIENT): float("inf")}.get((worker, t), 1.0)
    return targets, weight * bad


def spoilt(state: Any, t: int, row: Tensor) -> Any:
    """The state with a bad value in it; `row` says which workers' it holds, `[L]`."""
    state = trees.map(torch.clone, state)
    worker, leaves = {
        NAN_PARAMETER: (1, list(state.params)),
        NAN_MOMENTS: (
            3,
            [leaf for leaf in trees.leaves(state.local.opt) if leaf.shape[-1:] == state.params[0].shape[-1:]],
        ),
    }.get(t, (None, []))
    for leaf in leaves:
        view = leaf if leaf.dim() == 2 else leaf[None]
        view[row == worker, 3] = float("nan")
    return state


def run(row: str) -> tuple[list[Any], Any]:
    """The stacked states, the start first, and the last metrics of a guarded run into which bad values come."""
    subject = contract.ROWS[row]
    algorithm = df.guard(subject.build(), limit=STEPS)
    state, step = subject.start(algorithm, range(N), stacked=True), df.simulate(algorithm.step, N)
    history, metrics = [state], None
    for t in range(STEPS):
        state = spoilt(state, t, torch.arange(N))
        state, metrics = step(state, problem.stacked([batch(i, t) for i in range(N)]), t)
        history.append(state)
    return history, metrics


def finite(state: Any) -> Tensor:
    """`[N]` bool, whose parameters are."""
    return torch.stack([torch.isfinite(b).all(1) for b in state.params]).all(0)


def broken(row: str, history: list[Any], until: int) -> list[str]:
    """The laws that do not hold in the first states."""
    topology, found = contract.ROWS[row].topology(N), []
    for law in laws(row):
        first = law.quantity(history[0], topology, 0)
        for t, state in enumerate(history[: until + 1]):
            pairs = zip(state.params, first, law.quantity(state, topology, t), strict=True)
            if any(not float((now - was).abs().max()) <= 1e3 * torch.finfo(b.dtype).eps for b, was, now in pairs):
                found.append(law.name)
                break
    return found


def line(row: str, history: list[Any]) -> str:
    """The table's line of an algorithm, as it happened."""
    at_once, at_last = (bool(finite(history[t])[1]) for t in (NAN_PARAMETER + 1, STEPS))
    said = MENDED.get(row, _MIX)
    assert (at_once, at_last) == (said not in (DRAWN, _NEVER), said != _NEVER), f"{row}: {at_once=}, {at_last=}"
    lost = broken(row, history, STEPS)
    kept = [law.name for law in laws(row) if law.name not in lost]
    told = [f"kept: {', '.join(kept)}"] * bool(kept) + [f"lost: {', '.join(lost)}"] * bool(lost)
    return f"| `{row}` | {GRADIENT.get(row, 'no update')} | {said} | {'; '.join(told) or '–'} |"


def lines_of_page() -> list[str]:
    return [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]


def main() -> None:
    warnings.simplefilter("ignore")
    for row in contract.ROWS:
        print(line(row, run(row)[0]), flush=True)


if __name__ == "__main__":
    main()
