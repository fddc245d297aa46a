"""A metric over held-out batches, of the consensus or of every worker's own replica; exact for batches of unequal sizes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from decentfn import collectives, trees
from decentfn.buckets import Plan, sum_inside, whole
from decentfn.consensus import consensus_buffers, consensus_mean, is_stacked
from decentfn.engine.simulation import worker
from decentfn.errors import PeerLost, RunError
from decentfn.gradient.loss import WrappedLoss, is_pair
from decentfn.gradient.module import ModuleLoss, ShardedLoss
from decentfn.replicas import digest
from decentfn.trees import PyTree
from decentfn.words import brief

_Replica = tuple[PyTree, PyTree]
_Count = Callable[[Any], int]
_Sums = dict[str, Any]
"""`samples`, and each value's sum over them by name; "" where the metric is one value."""


@collectives.calling("df.evaluate(metric, state, batches)", of_state=True)
def evaluate(metric: Callable[..., Any], state: Any, batches: Iterable[Any], *, samples: _Count | None = None) -> Any:
    """The mean of a metric over all samples, of the consensus (`consensus_mean`, `consensus_buffers`). Collective.

    No gradient is taken. A module that `df.functional` made the metric of is in eval mode meanwhile, and its buffers stay. The mean
    is over the samples of all processes: a short last batch counts by its samples, and a process may have no batch at all. Where a
    worker is several processes they run the module together, on a batch of each: one that has fewer batches repeats its last one
    meanwhile, which does not count, and one that has none is refused if others of its worker have some. Processes of a
    tensor-parallel worker have the same batches. Where a sharded module fails on one process its worker's others lose it: start again.

    Args:
        metric: `(params, batch)`, or with buffers `(params, buffers, batch)`, returns the mean over the batch's samples: a 0-d
            tensor or a number, or a dict of them. A loss will do; what it returns beside the loss is left out. Of a sharded module
            it is one of `df.functional`, such as `df.functional(module, forward=lambda module, batch: ...)[2]`.
        state: a training state, of one worker or stacked; `df.ema_state(state)` evaluates the average.
        batches: this process's own share of the held-out data, of one worker's form. Where every process passes all of the data,
            the result is the same and takes longer.
        samples: counts a batch's samples. None: the length of its tensors, which all have the same (0-d ones aside).

    Returns:
        A 0-d float64 tensor, or a dict of them; the same on every rank.

    Raises:
        ValueError: no process has a sample, or a batch's tensors differ in length, or the metric returns something else, or is not of
            the sharded module.
        df.errors.RunError: on every other rank, where the metric or the batches of one have failed.
    """
    replicas = [(consensus_mean(state), consensus_buffers(state))]
    names, everyone = _of_workers("evaluate", metric, replicas, batches, samples, state.params.plan)
    count = sum(of["samples"] for of in everyone)
    totals = {name: sum(of["sums"][name] for of in everyone if of["samples"]) / count for name in names}
    return _as_returned({name: torch.tensor(total, dtype=torch.float64) for name, total in totals.items()})


@collectives.calling("df.evaluate_replicas(metric, state, batches)", of_state=True)
def evaluate_replicas(
    metric: Callable[..., Any], state: Any, batches: Iterable[Any], *, samples: _Count | None = None
) -> Any:
    """The mean of a metric over a process's samples, of each worker's own replica and buffers: `[N]` float64. Collective.

    Everything else is as in `evaluate`. The workers of a process evaluate all of its batches, a worker of several processes those of
    all of them. To compare replicas give every
    process the same data; for their mean alone, `evaluate_replicas(...).nanmean()`, shares will do.

    Returns:
        `[N]` float64, NaN for the workers of a process without a batch, or a dict of such; the same on every rank.
    """
    if is_stacked(state):
        replicas = [worker((state.params, state.buffers), i) for i in range(state.params[0].shape[0])]
    else:
        replicas = [trees.map(torch.clone, (state.params, state.buffers))]
    own = [(whole(x).tree(), buffers) for x, buffers in replicas]
    names, everyone = _of_workers("evaluate_replicas", metric, own, batches, samples, state.params.plan)

    def means(name: str) -> Tensor:
        values = [of["sums"][name] / of["samples"] if of["samples"] else float("nan") for of in everyone]
        return torch.tensor(values, dtype=torch.float64)

    return _as_returned({name: means(name) for name in names})


def _of_workers(
    call: str,
    metric: Callable[..., Any],
    replicas: list[_Replica],
    batches: Iterable[Any],
    samples: _Count | None,
    plan: Plan,
) -> tuple[list[str], list[_Sums]]:
    """The values' names, and the sums of every replica of all workers; collective, and all processes come back from it."""
    while isinstance(metric, WrappedLoss):
        metric = metric.loss_fn
    if plan.whole is not None and isinstance(metric, ShardedLoss):
        raise ValueError(
            f"{call}(metric={brief(metric)}): the state is of a plain module, and this of a sharded one; make it with "
            "df.functional of a plain module."
        )
    if plan.is_cut and not isinstance(metric, ShardedLoss):
        raise ValueError(
            f"{call}(metric={brief(metric)}): the state holds shards, and this is not of the sharded module; make it with "
            "df.functional(module, criterion), or df.functional(module, forward=lambda module, batch: ...)."
        )
    # In one place and the same order: the same answer on every rank.
    everyone, own = collectives.attempt(call, _sums, call, metric, replicas, batches, samples, plan.is_cut)
    failed = {rank: its for rank, its in enumerate(everyone) if "error" in its}
    lost = {rank for rank, its in failed.items() if "PeerLost" in its["kinds"]}
    causes = failed.keys() - lost or lost
    here = collectives.everyone().rank
    if own is not None and here in causes:
        raise own
    if failed:
        rank = min(causes)
        over = ". A worker's processes have lost one another: start the run again" * bool(lost)
        raise RunError(
            f"{call}: process {rank} has failed: {failed[rank]['brief']}{over}", process=here, peer=rank
        ) from own
    told = [its["value"] for its in everyone]
    names, size = _names(call, [of for theirs in told for of in theirs]), collectives.processes_per_worker()
    team = getattr(metric, "team", 1)  # which counts once
    workers = [zip(*told[first : first + size : team], strict=True) for first in range(0, len(told), size)]
    return names, [_added(names, parts) for worker in workers for parts in worker]


def _added(names: list[str], parts: Sequence[_Sums]) -> _Sums:
    """The sums of the processes of one worker as one."""
    sums = {name: sum(of["sums"].get(name, 0.0) for of in parts) for name in names}
    return {"samples": sum(of["samples"] for of in parts), "sums": sums}


@torch.no_grad()
def _sums(
    call: str,
    metric: Callable[..., Any],
    replicas: list[_Replica],
    batches: Iterable[Any],
    samples: _Count | None,
    is_cut: bool,
) -> list[_Sums]:
    if samples is not None and not callable(samples):
        raise ValueError(
            f"{call}(samples={brief(samples)}): a function of a batch, which returns how many samples it has."
        )
    evaluated: Any = _together(metric) if isinstance(metric, ShardedLoss) else metric
    number, totals = 0, [dict[str, Tensor]() for _ in replicas]
    size_of = partial(_size, call) if samples is None else partial(_told_size, call, samples)
    sized = ((batch, size_of(batch)) for batch in batches)
    with closing(_in_step(call, sized, getattr(metric, "team", 1)) if is_cut else sized) as rounds:
        for batch, size in rounds:
            number += size
            with _in_eval_mode(metric) if isinstance(metric, ModuleLoss) else nullcontext():
                found = [evaluated(x, batch) if b is None else evaluated(x, b, batch) for x, b in replicas]
            for value, total in zip(found, totals, strict=True):
                for name, x in _values(call, value).items() if size else ():
                    total[name] = total.get(name, 0) + size * x
    return [{"samples": number, "sums": {name: x.item() for name, x in total.items()}} for total in totals]


def _together(metric: ShardedLoss) -> Callable[..., Any]:
    """The metric; where it fails, the other processes that run its module with this one are let go."""

    def evaluated(*arguments: Any) -> Any:
        try:
            return metric(*arguments)
        except Exception as error:
            collectives.leave(metric.module)
            if not collectives.is_lost(error):
                raise
            here = collectives.everyone().rank
            raise PeerLost(f"the module lost another process of its worker: {error}", process=here) from error

    return evaluated


def _in_step(call: str, batches: Iterator[tuple[Any, int]], team: int) -> Generator[tuple[Any, int]]:
    """The batches and their sizes, as many as any process of this worker has: after its own the last one again, with size 0.

    Ends where another process has failed, which raises its error; left by an error, it lets the others end.
    """
    last = None
    while True:
        try:
            batch, size = next(batches, (None, 0))
        except Exception:
            _told_inside("failed", None, team)
            raise
        others = _told_inside("none" if batch is None else "batch", batch, team)
        if others["failed"] or not others["batch"]:
            return
        if others["different"]:
            raise ValueError(
                f"{call}(batches): the processes of a tensor-parallel worker run the module together on the same batches, and "
                f"theirs differ; choose them by {'world.worker' if team == collectives.processes_per_worker() else f'world.rank // {team}'}."
            )
        if others["none"] and last is None:  # in the first round
            if batch is not None:
                return
            here = collectives.everyone()
            raise ValueError(
                f"{call}(batches): process {here.process} of worker {here.worker} has no batch, and others of its worker have; they "
                "run the module together: give each of them a batch, the same will do."
            )
        try:
            yield (last, 0) if batch is None else (batch, size)
        except GeneratorExit:
            with suppress(RunError):  # of others that are gone
                _told_inside("failed", None, team)
            raise
        last = batch if batch is not None else last


def _told_inside(what: str, batch: Any, team: int) -> dict[str, bool]:
    """Whether any process of this worker tells of a "batch", of "none", or that it has "failed"; collective over them.

    And whether the batches of those of a team are "different".
    """
    mark = torch.tensor(float(_mark(batch) if team > 1 else 0), dtype=torch.float64)
    differs = bool(sum_inside(mark, team) != team * mark)
    kinds = ("batch", "none", "failed", "different")
    own = [float(kind == what or differs and kind == "different") for kind in kinds]
    told = sum_inside(torch.tensor(own), collectives.processes_per_worker())
    return {kind: bool(count > 0) for kind, count in zip(kinds, told, strict=True)}


def _mark(batch: Any) -> int:
    """A number, equal for two batches of equal tensors."""
    tensors = [x for x in trees.leaves(trees.plain(batch)) if isinstance(x, torch.Tensor)]
    return zlib.crc32(" ".join(f"{list(x.shape)} {digest(x)}" for x in tensors).encode())


@contextmanager
def _in_eval_mode(metric: ModuleLoss) -> Iterator[None]:
    """Within, the module and all inside it are in eval mode, and no other thread trains it; afterwards each is as it was."""
    with metric.alone():
        were = [(inner, inner.training) for inner in metric.whole.modules()]
        metric.whole.eval()
        try:
            yield
        finally:
            for inner, was in were:
                inner.training = was


def _size(call: str, batch: Any) -> int:
    named = [(name, x) for name, x in trees.named_leaves(trees.plain(batch)) if isinstance(x, torch.Tensor) and x.dim()]
    if not named:
        raise ValueError(
            f"{call}(batches): {brief(batch)} has no tensor with an axis of samples; a batch is what the loss takes, of one worker."
        )
    if len({len(x) for _, x in named}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named)
        raise ValueError(
            f"{call}(batches): the tensors of a batch differ in length, {shapes}, so its samples cannot be counted; count them, "
            "samples=lambda batch: len(...), or keep what has no axis of samples out of the batch."
        )
    return len(named[0][1])


def _told_size(call: str, samples: _Count, batch: Any) -> int:
    size: Any = samples(batch)
    size = size.item() if isinstance(size, torch.Tensor) and not size.dim() else size
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:
        raise ValueError(f"{call}(samples): it returned {brief(size)}; a batch's number of samples is an integer >= 0.")
    return int(size)


def _values(call: str, value: Any) -> dict[str, Tensor]:
    value = value[0] if is_pair(value) else value
    values = dict(value) if isinstance(value, Mapping) else {"": value}
    for name, x in values.items():
        x = torch.as_tensor(x) if isinstance(x, (Tensor, int, float)) else None
        if x is None or x.dim() or x.is_complex() or not isinstance(name, str):
            got = f"{name!r}: {brief(values[name])}" if name else brief(value)
            raise ValueError(
                f"{call}(metric): it returned {got}; a metric returns the mean over the batch's samples, a 0-d real tensor or a "
                "number, or a dict of them by name."
            )
        values[name] = x.double()
    return values


def _names(call: str, everyone: list[_Sums]) -> list[str]:
    found = [sorted(of["sums"]) for of in everyone if of["samples"]]
    if not found:
        raise ValueError(f"{call}(batches): no process has a sample; give at least one of them a batch.")
    for names in found:
        if names != found[0]:
            raise ValueError(f"{call}(metric): it returned {names} on one process and {found[0]} on another.")
    return found[0]


def _as_returned(values: dict[str, Tensor]) -> Any:
    return values[""] if list(values) == [""] else values
