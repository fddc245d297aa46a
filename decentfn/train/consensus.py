"""Reads and comparisons across workers: parameters, their mean and distance, gathered metrics, equal replicas.

They accept the state of one worker (collective under a process group) or a stacked state. Not for use inside a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.comm.fingerprint import as_bytes, compare, digest
from decentfn.core import PyTree, checks_numbers, require, trees
from decentfn.core.buckets import Buckets, Plan, counted_once, each, part_of, sum_within_worker, wide
from decentfn.errors import ReplicaMismatch
from decentfn.kit.state import Metrics
from decentfn.optim.transforms.transform import Averaging
from decentfn.train.own_steps import memory_of

__all__ = [
    "buffers",
    "check_replicas",
    "consensus_buffers",
    "consensus_distance",
    "consensus_mean",
    "distance_in_steps",
    "distance_to_consensus",
    "gather",
    "mean",
    "params",
]


def params(state: Any) -> PyTree:
    """Return copies of the parameters to evaluate, as the tree given to `init`; `[N, ...]` if stacked.

    Schedule-free optimizers train at others, `state.params`, which workers mix; `with_params` takes those to evaluate.
    For a sharded module they are this process's shards; `df.state_dict(module, state)` gathers them.
    """
    return trees.map(torch.clone, to_evaluate(state).tree())


def buffers(state: Any) -> PyTree:
    """Return copies of this worker's buffers, as the tree last returned by the loss; `[N, ...]` if stacked."""
    buckets_of(state, of_runs=True)  # raises ValueError unless it is a state
    return trees.map(torch.clone, state.buffers)


def to_evaluate(state: Any, *, back: bool = False) -> Buckets:
    """Return the parameters to evaluate, which some optimizers' states compute; `back`: those to train for these."""
    x, opt = buckets_of(state, of_runs=True), getattr(getattr(state, "local", None), "opt", None)
    states: list[Any] = trees.nodes_of(Averaging, opt)
    if not states:
        return x
    if x[0].dim() > 1:
        rows = [to_evaluate(trees.map(lambda leaf, i=i: leaf[i], state), back=back) for i in range(len(x[0]))]
        return Buckets([torch.stack(column) for column in zip(*rows, strict=True)], x.plan)
    new = dict(zip(x.plan.buckets, x, strict=True))
    for own in states:
        part = Buckets([new[bucket] for bucket in own.plan.buckets], own.plan)
        new.update(zip(own.plan.buckets, own.evaluated(part, back), strict=True))
    return Buckets(new.values(), x.plan)


def is_stacked(state: Any, *, of_runs: bool = False) -> bool:
    """Return True if the state has a leading axis of workers (buckets of one worker are vectors)."""
    return buckets_of(state, of_runs=of_runs)[0].dim() == 2


def require_sharded_alike(call: str, plan: Plan, *, is_sharded: bool) -> None:
    """Raise ValueError if the state is of a sharded module and the argument of a plain one."""
    if plan.is_sharded and not is_sharded:
        raise ValueError(
            f"{call}: the state is of a sharded module, and this is of a plain one; pass the module that "
            "df.functional was given, or what df.functional(module, criterion) or df.functional(module, forward=...) "
            "has made of it."
        )


@collectives.calling("df.consensus_mean(state)", of_state=True)
def consensus_mean(state: Any) -> PyTree:
    """Return the workers' mean of the parameters as the user's tree; copies, the same on every rank. Collective.

    Parameters that are not shared are this worker's own; of a stacked state, its first worker's. Of workers on their
    own clocks it is `Σ w z / Σ w`: exact after `df.settle(state)`.
    """
    return trees.map(torch.clone, mean_parameters(state).tree())


def mean_parameters(state: Any) -> Buckets:
    """Return the buckets of `consensus_mean`, or views of the state's, in which nobody writes. Collective."""
    buckets_of(state)  # of one run
    x = to_evaluate(state)
    if (memory := memory_of(state)) is not None:
        w = memory.weight
        share = w / _mean(w.view(-1, 1) if w.dim() else w.view(1))
        x = each(lambda b: (b.double() * (share[:, None] if w.dim() else share)).to(b.dtype), x)
    pairs = zip(x, x.plan.buckets, strict=True)
    return Buckets([_mean(b) if plan.is_shared else b[0] if b.dim() == 2 else b for b, plan in pairs], x.plan)


@collectives.calling("df.consensus_buffers(state)", of_state=True)
def consensus_buffers(state: Any) -> PyTree:
    """Return the mean of floating-point buffers over all workers, and worker 0's other buffers; copies. Collective.

    The result is the same on every rank. Buffers that are equal on all workers (frozen parameters) come back bitwise
    unchanged. With several processes per worker the mean is over all processes; for a sharded frozen parameter, over
    those that hold the same shard.
    """
    stacked, plan = is_stacked(state), state.params.plan
    shards = {name for name, _ in plan.places} if plan.is_sharded else ()

    def mean(name: str, b: Tensor) -> Tensor:
        among = collectives.world() if name in shards else collectives.all_processes()
        # Average differences from worker 0, so equal values are not rounded and masks of -inf do not become NaN.
        first = collectives.process_broadcast(b[0] if stacked else b, among)
        if not b.is_floating_point():
            return first
        away = torch.where(b == first, 0.0, b.double() - first.double())
        mean = collectives.process_mean(away.mean(0) if stacked else away, among)
        return torch.where(mean == 0, first, (first.double() + mean).to(b.dtype))  # -0.0 stays, too

    means = [mean(name, b) for name, b in trees.named_leaves(state.buffers)]
    return trees.fill(trees.enumerate_leaves(state.buffers), means)


@collectives.calling("df.consensus_distance(state)", of_state=True)
def consensus_distance(state: Any) -> Tensor:
    """Return `sqrt(mean_i ‖x_i - x̄‖²)` over all workers, 0-d float64, the same on every rank. Collective.

    Parameters that are not shared do not count.
    """
    return collectives.process_mean((distance_to_consensus(state) ** 2).mean()).sqrt()


@collectives.calling("df.distance_to_consensus(state)", of_state=True)
def distance_to_consensus(state: Any) -> Tensor:
    """Return `‖x_i - x̄‖₂` of this worker (0-d float64), or of each (`[N]`) if stacked. Collective."""
    x = part_of(buckets_of(state), True)
    squares = counted_once([_squared_distance(bucket) for bucket in x], x.plan)
    return sum_within_worker(torch.stack(squares).sum(0), x.plan.processes).sqrt()


def _squared_distance(bucket: Tensor) -> Tensor:
    """Return `‖x_i - x̄‖²`, block by block: in one process, the bucket is read once and never copied."""
    rows, several = bucket.shape[:-1].numel(), collectives.world().size > 1
    parts = bucket.split(max(1, (1 << 18 if bucket.device.type == "cpu" else 1 << 24) // rows), -1)
    if rows == 1 and not several:  # alone: 0, or NaN
        return torch.stack([(part - part).sum(-1) for part in parts]).sum(0).double()
    means: list[Any] = [None] * len(parts)
    if several:
        mean = collectives.process_mean(torch.cat([part.double().view(rows, -1).mean(0) for part in parts]))
        means = [*mean.split(parts[0].shape[-1])]
    total = torch.zeros(bucket.shape[:-1], dtype=torch.float64, device=bucket.device)
    for part, mean in zip(parts, means, strict=True):
        own = part.to(wide(part.dtype))
        own = own - (own[0] if mean is None else mean)  # 0 of equal workers
        total += (own.sub_(own.mean(0)) if mean is None else own).square_().sum(-1)
    return total


@checks_numbers
def distance_in_steps(
    state: Any,
    metrics: Metrics,
    *,
    momentum: float = 0.0,
    adaptive: bool = False,
    learning_rate: float | None = None,
) -> Tensor:
    """Return the distance between workers in units of one worker's step, 0-d float64, equal on all ranks. Collective.

    `consensus_distance / (η / (1 - β) · mean gradient norm)`; of an adaptive optimizer `consensus_distance / (η √D)`.
    Healthy runs have 0.1 to 1.1; above 3 mixing is broken (`docs/healthy_run.md`). Where a step has length 0, as at the
    end of a schedule, it is inf; 0 for equal workers.

    Args:
        state: the state, of one worker or stacked.
        metrics: metrics of the step that made it.
        momentum: β in [0, 1) of SGD.
        adaptive: True for optimizers whose elements move by at most about η in a step: Adam and its relatives, Lion.
        learning_rate: η > 0; None: `metrics.learning_rate`, the largest of several.

    Raises:
        ValueError: a number out of range, or no learning rate.
    """
    require(0 <= momentum < 1, "distance_in_steps", "momentum is in [0, 1).", momentum=momentum)
    if learning_rate is None:
        rule = "this optimizer's state has no learning rate; pass learning_rate=."
        require(metrics.learning_rate is not None, "distance_in_steps(state, metrics)", rule)
        rate = torch.as_tensor(metrics.learning_rate).max()
    else:
        require(learning_rate > 0, "distance_in_steps", "learning_rate is positive.", learning_rate=learning_rate)
        rate = torch.tensor(learning_rate, dtype=torch.float64)
    distance = consensus_distance(state)
    if adaptive:
        x = part_of(buckets_of(state), True)
        own = counted_once([torch.tensor(float(b.shape[-1]), device=b.device) for b in x], x.plan)
        count = float(sum_within_worker(torch.stack(own).sum(), x.plan.processes))
        length = rate.to(distance.device) * count**0.5
    else:
        norm = mean(state, metrics.grad_norm).double()
        length = rate.to(norm.device) / (1 - momentum) * norm
    return torch.where(distance == 0, 0.0, distance / length)


@collectives.calling("df.gather(state, tree)", of_state=True)
def gather(state: Any, tree: PyTree) -> PyTree:
    """Gather a tree from every worker, `[N, ...]` in worker order, the same on every rank; copies. Collective.

    `df.gather(state, metrics).loss` contains the losses of all workers, under torchrun and simulated.

    Args:
        state: the training state, of one worker or stacked.
        tree: tensors or numbers of the same shapes and dtypes on every rank; `[L, ...]` if stacked, of L workers.

    Raises:
        ValueError: on every rank, if the trees differ in more than their values, or a leaf lacks a row per worker.
    """
    return trees.fill(trees.enumerate_leaves(tree), _gathered("gather(state, tree)", state, tree))


@collectives.calling("df.mean(state, tree)", of_state=True)
def mean(state: Any, tree: PyTree) -> PyTree:
    """Average a tree over all workers, in float64 (complex: complex128); the same on every rank. Collective.

    `df.mean(state, metrics).loss` is the run's loss. Arguments and errors are those of `gather`.
    """
    rows = _gathered("mean(state, tree)", state, tree)
    means = [x.to(torch.complex128 if x.is_complex() else torch.float64).mean(0) for x in rows]
    return trees.fill(trees.enumerate_leaves(tree), means)


@collectives.calling("df.check_replicas(state)", of_state=True)
def check_replicas(state: Any, tree: PyTree = None) -> None:
    """Raise unless all workers are bitwise equal, as after `init`, and at any time with `all_reduce`. Collective.

    Args:
        state: a training state, of one worker or stacked.
        tree: the tree to compare, such as `df.buffers(state)` or `state.local.opt`; None is the shared parameters.

    Raises:
        df.errors.ReplicaMismatch: on every rank, with the workers that differ from the majority and the first such
        leaf. ValueError: on every rank, if the trees differ in more than their values.
    """
    tree = to_evaluate(state).shared() if tree is None else tree
    mine = [[digest(row) for row in leaf] for leaf in _rows("check_replicas(state)", state, tree)]
    if not mine:
        return
    here = collectives.all_processes()
    told, size = collectives.gather_objects(mine, here), here.processes_per_worker
    shards = [[leaf for its in told[i : i + size] for leaf in its] for i in range(0, len(told), size)]
    everyone = [list(worker) for leaves in shards for worker in zip(*leaves, strict=True)]
    usual = max(everyone, key=everyone.count)
    others = [worker for worker, theirs in enumerate(everyone) if theirs != usual]
    if not others:
        return
    names = [name or "leaf" for name, _ in trees.named_leaves(tree)] * size
    differing = [name for name, one, most in zip(names, everyone[others[0]], usual, strict=True) if one != most]
    raise ReplicaMismatch(
        f"check_replicas(state): worker {others[0]} differs from worker {everyone.index(usual)} in {len(differing)} of "
        f"{len(names)} leaves, first in {differing[0]!r}; {len(others)} of {len(everyone)} workers differ from most: "
        f"{others[:8]}{' ...' if len(others) > 8 else ''}. Give all workers one start with df.broadcast before init; "
        "under decentralized algorithms replicas differ by design.",
        process=here.rank,
        peer=others[0] * here.size // len(everyone),
    )


def _gathered(call: str, state: Any, tree: PyTree) -> list[Tensor]:
    """Return each leaf of all workers, `[N, ...]`, on its own device."""
    rows = _rows(call, state, tree)
    if collectives.world().size == 1 or not rows:
        return [x.clone() for x in rows]
    flat = [as_bytes(x.cpu()) for x in rows]
    everyone = [told.split([x.numel() for x in flat]) for told in collectives.gather_bytes(torch.cat(flat))]
    return [
        torch.cat([part.clone().view(x.dtype).view(x.shape) for part in parts]).to(x.device)
        for x, parts in zip(rows, zip(*everyone, strict=True), strict=True)
    ]


def _rows(call: str, state: Any, tree: PyTree) -> Sequence[Tensor]:
    """Return the leaves as tensors `[workers here, ...]` after comparing their layout over ranks. Collective."""
    local = state.params[0].shape[0] if is_stacked(state) else None
    rows, lines = [], []
    for name, leaf in trees.named_leaves(tree):
        if not isinstance(leaf, (Tensor, bool, int, float, complex)):
            lines.append(f"{name or 'leaf'} of type {type(leaf).__name__}, which is no tensor and no number")
            break
        x = torch.as_tensor(leaf).detach()
        if kind := trees.not_plain(x):
            lines.append(f"{name or 'leaf'}, which is {kind}; pass a dense tensor")
            break
        if local is not None and (x.dim() == 0 or len(x) != local):
            lines.append(f"{name or 'leaf'} {list(x.shape)}, which has no row for each of the {local} workers here")
            break
        rows.append(x if local is not None else x[None])
        lines.append(f"{name or 'leaf'} {list(x.shape)} {x.dtype}")
    compare(call, [], "pass the same tree on every rank", lines)
    if len(lines) > len(rows):
        raise ValueError(f"{call}: a leaf is {lines[-1]}.")
    return rows


def _mean(bucket: Tensor) -> Tensor:
    """Average over the workers here (the first of two axes, if there are two) and over all processes."""
    return collectives.process_mean(bucket if bucket.dim() == 1 else bucket.flatten(0, -2).mean(0))


def buckets_of(state: Any, *, of_runs: bool = False) -> Buckets:
    """Return the parameters of a training state, or raise ValueError for anything else, and for several runs."""
    found: Any = getattr(state, "params", None)
    rule = "expected a `.params` of buckets, from init(params)."
    require(isinstance(found, Buckets), f"{type(state).__name__} is not a training state", rule)
    if found[0].dim() > 2 and not of_runs:
        raise ValueError("the state is that of several runs (df.sweep); take one of them, df.worker(states, r).")
    collectives.require_workers_of(found.plan.processes)
    return found
