"""A run that goes on with another number of workers: all of them start from the mean of the old ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.core.buckets import is_finite
from decentfn.core.trees import PyTree
from decentfn.engine.simulation import stack
from decentfn.errors import NonFinite
from decentfn.kit.state import State, restarted
from decentfn.kit.step import Algorithm, require_algorithm
from decentfn.train.consensus import is_stacked

_CALL = "resize(state, algorithm)"

Rule = Callable[[Iterable[Tensor]], Tensor]
"""From the old workers' values of a leaf, one after another, to the new workers' common one."""


def resize(state: State, algorithm: Algorithm) -> State:
    """Return the stacked state of W workers as one of W', with which `algorithm` goes on. Copies.

    With W' = W it comes back bit for bit. Otherwise every new worker starts from the mean of all, computed in float64 and
    rounded once: parameters, the optimizer's state, floating-point buffers, averages of `df.ema`; of integers (counts of
    updates) from the largest, of loss scales from the smallest. What the algorithm remembers of its neighbors starts anew
    and what it remembers of the run is averaged, so that its invariants hold for W' workers (`docs/resizing.md`).

    You divide the data anew; `t` goes on. Under torchrun another number of processes takes a restart from a checkpoint.

    Args:
        state: `[W, ...]` in every leaf, from `df.stack` or `df.simulate`.
        algorithm: the same algorithm, built with a topology of W' workers; the optimizer, the options and the wrappers
            (`df.ema`, ...) are those of the old run.

    Raises:
        ValueError: a state that is not stacked, or not of this algorithm, optimizer and options; an algorithm without
            `topology`; several processes.
        NonFinite: a worker's parameters, or what else is averaged, are infinite or NaN, and the mean with them.
    """
    require_algorithm("resize", algorithm)
    if not is_stacked(state):
        raise ValueError(f"{_CALL}: the state is one worker's; stack it, df.resize(df.stack(state, 1), algorithm).")
    if collectives.everyone().size > 1:
        raise ValueError(
            f"{_CALL}: {collectives.everyone().size} processes hold a part of the workers each; save a checkpoint, and restore "
            "it with the other number of processes."
        )
    if algorithm.topology is None:
        raise ValueError(
            f"{_CALL}: the algorithm does not say how many workers it has; decorate the function that builds it with "
            "df.kit.algorithm."
        )
    first = trees.map(lambda leaf: leaf[0], state)
    fresh = algorithm.init(first.params.tree(), first.buffers)
    before, after = len(state.params[0]), algorithm.topology.num_workers
    _require_alike(first, fresh, everything=before == after)
    if before == after:
        return trees.map(torch.clone, state)
    return stack(resized(fresh, state), after)


def resized(fresh: State, rows: State) -> State:
    """Return the state that every worker starts from after W workers.

    Args:
        fresh: what the new algorithm's `init` lays out; its values stand for nothing but what starts anew.
        rows: a tree like it; in the place of each leaf an iterable of the W workers' values, such as a tensor `[W, ...]`.
            It is gone through once, and not at all where a leaf starts anew.

    Raises:
        NonFinite: a mean is infinite or NaN.
    """
    rules = _rules(fresh)
    x = trees.map(lambda rule, values: rule(values), rules.params, rows.params)
    anew = (fresh.local, restarted(fresh.memory, x))
    new = State(x, *trees.map(_apply, rules[1:], rows[1:], anew))
    for (name, leaf), rule, start in zip(
        trees.named_leaves(new), trees.leaves(rules), trees.leaves(fresh), strict=True
    ):
        # What a start has, too, is meant: a mask of -inf.
        if rule is mean and bool((leaf.isnan() | (is_finite(start) & ~is_finite(leaf))).any()):
            raise NonFinite(
                f"resize: a worker's {name} is infinite or NaN, and so would be the mean of all, from which all start; give it its "
                "neighbor's (parameters with df.with_params), or go back to an earlier checkpoint."
            )
    return new


def _apply(rule: Rule, rows: Iterable[Tensor], anew: Tensor) -> Tensor:
    return anew.clone() if rule is _anew else rule(rows)


def mean(rows: Iterable[Tensor]) -> Tensor:
    """Summed in float64, rounded once."""
    total, count, dtype = None, 0, torch.float64
    for row in rows:
        wide = row.to(torch.promote_types(row.dtype, torch.float64))
        total, count, dtype = wide if total is None else total + wide, count + 1, row.dtype
    assert total is not None
    return (total / count).to(dtype)


def largest(rows: Iterable[Tensor]) -> Tensor:
    """Of counts, which differ where workers skipped updates."""
    return torch.stack(list(rows)).amax(0)


def smallest(rows: Iterable[Tensor]) -> Tensor:
    """Of loss scales, which is safe for all."""
    return torch.stack(list(rows)).amin(0)


def _anew(rows: Iterable[Tensor]) -> Tensor:
    raise AssertionError("what starts anew is not asked for")


def _rules(state: State) -> State:
    """The rule of each leaf, in its place."""
    opt, buffers = trees.map(_by_dtype, (state.local.opt, state.local.buffers))
    scale = trees.map(lambda leaf: smallest, state.local.scale)
    local = trees.map(lambda leaf: _anew, state.local)._replace(opt=opt, buffers=buffers, scale=scale)
    return State(trees.map(_by_dtype, state.params), local, _rules_of_memory(state.memory))


def _rules_of_memory(memory: Any) -> Any:
    """Means of the fields that the memory says are `averaged`; a wrapper's holds the algorithm's own."""
    if not hasattr(memory, "_fields"):
        return trees.map(lambda leaf: _anew, memory)
    averaged = getattr(memory, "averaged", ())
    fields = zip(memory._fields, memory, strict=True)
    return type(memory)(*(trees.map(_by_dtype, v) if name in averaged else _rules_of_memory(v) for name, v in fields))


def _by_dtype(leaf: Tensor) -> Rule:
    return mean if leaf.is_floating_point() or leaf.is_complex() else largest


def _require_alike(old: State, fresh: State, *, everything: bool) -> None:
    """The states have the same leaves, in shapes and dtypes too, but where leaves start anew (or `everything`)."""
    rules = trees.leaves(_rules(fresh))
    lines = [_lines(old), _lines(fresh)]
    if not everything and len(lines[0]) == len(rules):
        lines = [[line for line, rule in zip(side, rules, strict=True) if rule is not _anew] for side in lines]
    layouts = [[*state.params.plan.describe(), *side] for state, side in zip((old, fresh), lines, strict=True)]
    for found, expected in itertools.zip_longest(*layouts, fillvalue="nothing"):
        if found != expected:
            raise ValueError(
                f"{_CALL}: the state holds {found} where the algorithm lays out {expected}; build it with the algorithm, "
                "the optimizer, the options and the wrappers of the old run, and another topology."
            )


def _lines(state: PyTree) -> list[str]:
    return [f"{name} {leaf.dtype} {list(leaf.shape)}" for name, leaf in trees.named_leaves(state)]
