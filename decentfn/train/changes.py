"""Changes of a state between two steps: other parameters, another learning rate, another number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.comm.fingerprint import require_equal, require_equal_rows
from decentfn.core import PyTree, brief, first_difference, over_workers, real, trees
from decentfn.core.buckets import Buckets, Plan, cast_like, is_finite, with_own
from decentfn.engine.simulation import stack
from decentfn.errors import NonFinite
from decentfn.kit.state import State, is_state, lines_of, restarted
from decentfn.kit.step import Algorithm, require_algorithm
from decentfn.optim.transforms.basic import RateState, current_rate, rates
from decentfn.train.consensus import buckets_of, is_stacked, to_evaluate
from decentfn.train.own_steps import goes_on, memory_of

_SET = "set_learning_rate(state, rate)"
_CALL = "resize(state, algorithm)"

Rule = Callable[[Iterable[Tensor]], Tensor]
"""Function from the old workers' values of a leaf to the new workers' common value."""


@torch.inference_mode(False)  # where Lightning's validation hooks run; steps must be able to write to the result
def with_params(state: Any, params: PyTree) -> Any:
    """Return a copy of the state with other parameters, for example from a checkpoint or an average.

    The optimizer's state and the buffers are kept. The algorithm's memory (slow copies, trackers, momentum,
    corrections, errors, in-flight messages, the average of `df.ema`) restarts from the new parameters. Set the
    parameters of all workers in the same step (under torchrun on every rank), or memories stay inconsistent. `t` counts
    on; a run from t = 0 starts with `init`.

    Args:
        state: a training state, `State(params, local, memory)`.
        params: a tree like the one given to `init`, `[N, ...]` if stacked; a tied leaf is read from its first place.

    Raises:
        ValueError: leaves, shapes or dtypes that differ from the state's, or a memory without `restart`; on every rank,
            unequal parameters if the algorithm needs equal starts (`all_reduce`, `demo`, ...).
    """
    x = buckets_of(state)
    expected = [
        (name, leaf.shape, leaf.dtype)
        for name, leaf in trees.named_leaves(x.plan.without_values(x[0].shape[:-1]).tree())
    ]
    given = [(name, leaf.shape, leaf.dtype) for name, leaf in trees.named_leaves(params)]
    if given != expected:
        got, want = first_difference(given, expected)
        rule = f"found {got} where the state has {want} (name, shape, dtype); pass a tree like df.params(state)."
        raise ValueError(f"with_params(state, params): {rule}")
    new = [one.detach() for one in x.plan.lay_out(params, workers=tuple(x[0].shape[:-1]))]
    new = Buckets([new.to(old.device) for new, old in zip(new, x, strict=True)], x.plan)
    if x.plan.starts_equal:
        require_equal("with_params(state, params)", {"params": new.shared()})
        if is_stacked(state):
            require_equal_rows("with_params(state, params)", {"params": new.shared()})
    new = to_evaluate(state._replace(params=new), back=True)
    changed = with_memory(restarted, state, new)
    goes_on(state, changed)
    return changed


def with_memory(restart: Callable[[Any, Buckets], Any], state: Any, x: Buckets) -> Any:
    """Return a copy of the state with the parameters `x` and the memory `restart(memory, x)`, of each worker here."""

    def one(state: State, x: Buckets) -> State:
        return state._replace(params=x, memory=restart(state.memory, x))

    # Leaves that do not depend on the worker come back expanded.
    new = over_workers(one, x[0].shape[0], state, x) if is_stacked(state) else one(state, x)
    return trees.map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), new)


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


@torch.inference_mode(False)
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
        new = torch.tensor(float(real("set_learning_rate", "rate", rate)), dtype=torch.float64, device=old.device)
    if not bool(((new >= 0) & torch.isfinite(new)).all()):
        raise ValueError(f"{_SET}: rate={brief(rate)}: a learning rate is a finite number >= 0.")
    rows = iter(new.expand(old.shape).unbind(-1) if len(rates(opt)) > 1 else [new.expand(old.shape)])
    opt = trees.map_nodes(RateState, lambda node: RateState(next(rows)), opt)
    copied = trees.map(torch.clone, state._replace(local=state.local._replace(opt=opt)))
    goes_on(state, copied)  # perhaps in another epoch
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


def resize(state: State, algorithm: Algorithm) -> State:
    """Convert the stacked state of W workers to one of W' workers for `algorithm`. Copies.

    With W' = W the state is bitwise unchanged. Otherwise every new worker starts from the mean, computed in float64 and
    rounded once, of parameters, optimizer state, floating-point buffers and averages of `df.ema`; from the largest of
    integers (update counts); and from the smallest loss scale. Of parameters that are not shared, new worker i has those
    of old worker i mod W, with their optimizer state and memory. The algorithm's memory of neighbors restarts, and its
    memory of the run is averaged, so its invariants hold for W' workers (`docs/resizing.md`).

    Divide the data again; `t` continues. Under torchrun another number of processes needs a restart from a checkpoint.

    Args:
        state: `[W, ...]` in every leaf, from `df.stack` or `df.simulate`.
        algorithm: the same algorithm with a topology of W' workers, and the old run's optimizer, options and wrappers.

    Raises:
        ValueError: a state that is not stacked, or not of this algorithm, optimizer and options; an algorithm without
            `topology`; several processes.
        NonFinite: a mean is infinite or NaN because a worker's value is.
    """
    require_algorithm("resize", algorithm)
    if not is_stacked(state):
        raise ValueError(f"{_CALL}: the state is one worker's; stack it, df.resize(df.stack(state, 1), algorithm).")
    if collectives.all_processes().size > 1:
        raise ValueError(
            f"{_CALL}: {collectives.all_processes().size} processes each hold a part of the workers; save a checkpoint, and "
            "restore it with the other number of processes."
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
    return trees.map(torch.clone, state) if before == after else stacked(fresh, lambda: state, range(after))


def stacked(fresh: State, rows: Callable[[], State], workers: range) -> State:
    """Return the states of these new workers, `[L, ...]`; arguments as for `resized`."""
    if all(bucket.is_shared for bucket in fresh.params.plan.buckets):
        return stack(resized(fresh, rows()), len(workers))
    return trees.map(lambda *leaves: torch.stack(leaves), *[resized(fresh, rows(), worker) for worker in workers])


def resized(fresh: State, rows: State, worker: int = 0) -> State:
    """Return the state from which a new worker starts; raise NonFinite if a mean is infinite or NaN.

    All start equal, but for parameters that are not shared.

    `fresh` is the state of the new algorithm's `init`; its values are used only for leaves that restart. `rows` is a
    tree like it, with an iterable of the W workers' values for each leaf, such as a tensor `[W, ...]`. It is read once,
    and not at all for leaves that restart.
    """
    rules = _with_own(_rules(fresh), fresh.params.plan, worker)
    memory = memory_of(rows)  # with masses, by which parameters count, as in `consensus_mean`
    mass = None if memory is None else torch.stack(list(memory.weight))

    def weighed(values: Iterable[Tensor]) -> Iterable[Tensor]:
        if mass is None:
            return values
        return (row.double() * share for row, share in zip(values, mass / mass.mean(), strict=True))

    x = cast_like(trees.map(lambda rule, values: rule(weighed(values)), rules.params, rows.params), fresh.params)
    restart = (fresh.local, restarted(fresh.memory, x))
    new = State(x, *trees.map(lambda r, own, s: s.clone() if r is _restart else r(own), rules[1:], rows[1:], restart))
    for (name, leaf), rule, start in zip(
        trees.named_leaves(new), trees.leaves(rules), trees.leaves(fresh), strict=True
    ):
        # A finite sum tells in one pass. A value that a fresh state has too is intended, such as a mask of -inf.
        if rule is mean and not leaf.sum().isfinite() and (leaf.isnan() | is_finite(start) & ~is_finite(leaf)).any():
            raise NonFinite(
                f"resize: a worker's {name} is infinite or NaN, and so would be the mean, from which all workers "
                "start; give it its neighbor's (parameters with df.with_params), or go back to an earlier checkpoint."
            )
    return new


def mean(rows: Iterable[Tensor]) -> Tensor:
    """Average in float64 and round once."""
    total, count, dtype = None, 0, torch.float64
    for row in rows:
        wide = torch.promote_types(row.dtype, torch.float64)
        total = row.to(wide, copy=True) if total is None else total.add_(row)
        count, dtype = count + 1, row.dtype
    assert total is not None
    return (total / count).to(dtype)


def largest(rows: Iterable[Tensor]) -> Tensor:
    """Return the largest count; counts differ if workers skipped updates."""
    values = torch.stack(list(rows))
    return values.long().amax(0).to(values.dtype)  # unsigned ones have no maximum


def smallest(rows: Iterable[Tensor]) -> Tensor:
    """Return the smallest loss scale, which is safe for all workers."""
    return torch.stack(list(rows)).amin(0)


def _with_own(rules: State, plan: Plan, worker: int) -> State:
    """Replace means over workers by one worker's value, where parameters are not shared: in buckets, or by their names."""
    if all(bucket.is_shared for bucket in plan.buckets):
        return rules
    is_shared = {f".{s.name}.": bucket.is_shared for bucket in plan.buckets for s in bucket.segments}

    def one(rows: Iterable[Tensor]) -> Tensor:
        values = list(rows)
        return values[worker % len(values)].clone()

    def of_bucket(_: Buckets, rules: Buckets) -> Buckets:
        own: list[Any] = [rule if rule is _restart else one for rule in rules]
        return with_own(rules, Buckets(own, rules.plan))

    def of_leaf(path: str, rule: Rule) -> Rule:
        names = [name for name in is_shared if name in f".{path}."]
        return rule if rule is _restart or not names or is_shared[max(names, key=len)] else one

    def named(tree: PyTree) -> PyTree:
        return trees.fill(trees.enumerate_leaves(tree), [of_leaf(*leaf) for leaf in trees.named_leaves(tree)])

    local = rules.local._replace(opt=named(rules.local.opt))
    return trees.map_nodes(Buckets, of_bucket, rules._replace(local=local, memory=named(rules.memory)), rules)


def _restart(rows: Iterable[Tensor]) -> Tensor:
    raise AssertionError("leaves that restart have no rule")


def _rules(state: State) -> State:
    opt, buffers = trees.map(_by_dtype, (state.local.opt, state.local.buffers))
    scale = trees.map(lambda leaf: smallest, state.local.scale)
    local = trees.map(lambda leaf: _restart, state.local)._replace(opt=opt, buffers=buffers, scale=scale)
    return State(trees.map(_by_dtype, state.params), local, _rules_of_memory(state.memory))


def _rules_of_memory(memory: Any) -> Any:
    """Return the mean for fields named in the memory's `averaged`; a wrapper's memory contains the algorithm's."""
    if not hasattr(memory, "_fields"):
        return trees.map(lambda leaf: _restart, memory)
    averaged = getattr(memory, "averaged", ())
    fields = zip(memory._fields, memory, strict=True)
    return type(memory)(*(trees.map(_by_dtype, v) if name in averaged else _rules_of_memory(v) for name, v in fields))


def _by_dtype(leaf: Tensor) -> Rule:
    return mean if leaf.is_floating_point() or leaf.is_complex() else largest


def _require_alike(old: State, fresh: State, *, everything: bool) -> None:
    rules = trees.leaves(_rules(fresh))
    lines = [lines_of(old), lines_of(fresh)]
    if not everything and len(lines[0]) == len(rules):
        lines = [[line for line, rule in zip(side, rules, strict=True) if rule is not _restart] for side in lines]
    layouts = [[*state.params.plan.describe(), *side] for state, side in zip((old, fresh), lines, strict=True)]
    if layouts[0] != layouts[1]:
        found, expected = first_difference(*layouts)
        raise ValueError(
            f"{_CALL}: the state holds {found} where the algorithm lays out {expected}; build it with the "
            "algorithm, the optimizer, the options and the wrappers of the old run, and another topology."
        )
