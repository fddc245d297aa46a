"""A metric over held-out batches, of the consensus or of every worker's own replica; exact for batches of unequal sizes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.comm.fingerprint import digest
from decentfn.core import trees
from decentfn.core.buckets import Plan, sum_inside, whole
from decentfn.core.formatting import brief
from decentfn.core.trees import PyTree
from decentfn.engine.simulation import worker
from decentfn.errors import PeerLost, RunError
from decentfn.gradient.loss import WrappedLoss, is_pair
from decentfn.gradient.module import ModuleLoss, ShardedLoss
from decentfn.train.consensus import consensus_buffers, consensus_mean, is_stacked, require_sharded_alike
from decentfn.train.together import together

_Replica = tuple[PyTree, PyTree]
_Count = Callable[[Any], int]
_Sums = dict[str, Any]
"""`samples`, and each value's sum over them by name; "" where the metric is one value."""


@collectives.calling("df.evaluate(metric, state, batches)", of_state=True)
def evaluate(metric: Callable[..., Any], state: Any, batches: Iterable[Any], *, samples: _Count | None = None) -> Any:
    """Average a metric over all samples, of the consensus (`consensus_mean`, `consensus_buffers`). Collective.

    No gradient is taken. A module that `df.functional` made the metric of is in eval mode meanwhile, and its buffers stay. The mean
    is over the samples of all processes: a short last batch counts by its samples, and a process may have no batch at all. Where a
    worker is several processes they run the module together, on a batch of each: one that has fewer batches repeats its last one,
    which does not count, and one that has none is refused if others of its worker have some. Processes of a tensor-parallel worker
    have the same batches. Where a sharded module fails on one process its worker's others lose it: start again.

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
        df.errors.RunError: on every rank, where the metric or the batches of one have failed (of one process, what they raised).
    """
    replicas = [(consensus_mean(state), consensus_buffers(state))]
    total = _added(_of_workers("evaluate", metric, replicas, batches, samples, state.params.plan))
    return _as_returned({name: x / total["samples"] for name, x in total["sums"].items()})


@collectives.calling("df.evaluate_replicas(metric, state, batches)", of_state=True)
def evaluate_replicas(
    metric: Callable[..., Any], state: Any, batches: Iterable[Any], *, samples: _Count | None = None
) -> Any:
    """Average a metric over a process's samples, of each worker's own replica and buffers: `[N]` float64. Collective.

    Everything else is as in `evaluate`. The workers of a process evaluate all of its batches, a worker of several processes those of
    all of them. To compare replicas give every process the same data; for their mean alone, `evaluate_replicas(...).nanmean()`, shares
    will do.

    Returns:
        `[N]` float64, NaN for the workers of a process without a batch, or a dict of such; the same on every rank.
    """
    if is_stacked(state):
        replicas = [worker((state.params, state.buffers), i) for i in range(state.params[0].shape[0])]
    else:
        replicas = [trees.map(torch.clone, (state.params, state.buffers))]
    own = [(whole(x).tree(), buffers) for x, buffers in replicas]
    everyone = _of_workers("evaluate_replicas", metric, own, batches, samples, state.params.plan)
    nan = float("nan")
    means = {
        name: [of["sums"][name] / of["samples"] if of["samples"] else nan for of in everyone]
        for name in _added(everyone)["sums"]
    }
    return _as_returned(means)


def _of_workers(
    call: str,
    metric: Callable[..., Any],
    replicas: list[_Replica],
    batches: Iterable[Any],
    samples: _Count | None,
    plan: Plan,
) -> list[_Sums]:
    """Return the sums of every replica of all workers. Collective; raises on all processes or on none."""
    while isinstance(metric, WrappedLoss):
        metric = metric.loss_fn
    require_sharded_alike(f"{call}(metric={brief(metric)})", plan, is_sharded=isinstance(metric, ShardedLoss))
    # In one place and the same order: the same answer on every rank.
    told = together(call, _sums, call, metric, replicas, batches, samples, plan.is_cut)
    size = collectives.processes_per_worker()
    names = [sorted(of["sums"]) for its in told for of in its if of["samples"]]
    if not names:
        raise ValueError(f"{call}(batches): no process has a sample; give at least one of them a batch.")
    if differing := [others for others in names if others != names[0]]:
        raise ValueError(f"{call}(metric): it returned {differing[0]} on one process and {names[0]} on another.")
    team = getattr(metric, "team", 1)  # which counts once
    return [
        _added(parts)
        for first in range(0, len(told), size)
        for parts in zip(*told[first : first + size : team], strict=True)
    ]


def _added(parts: Sequence[_Sums]) -> _Sums:
    sums: dict[str, float] = {}
    for of in parts:
        for name, x in of["sums"].items():
            sums[name] = sums.get(name, 0.0) + x
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
    evaluated: Any = _together(metric) if isinstance(metric, ShardedLoss) else metric
    number, totals = 0, [dict[str, Tensor]() for _ in replicas]
    sized = ((batch, _size(call, samples, batch)) for batch in batches)
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
    """Return the metric; where it fails, the other processes that run its module with this one are let go."""

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
    """Yield batches and sizes, as many as any process of this worker has: after its own the last one again, with size 0.

    Ends where another process has failed; left by an error, it lets the others end.
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
    """Return whether any process of this worker tells of a "batch", of "none", or that it has "failed". Collective over them.

    And whether the batches of those of a team are "different".
    """
    tensors = [x for x in trees.leaves(trees.plain(batch)) if isinstance(x, torch.Tensor)] if team > 1 else []
    marks = " ".join(f"{list(x.shape)} {digest(x)}" for x in tensors)
    mark = torch.tensor(zlib.crc32(marks.encode()), dtype=torch.float64)
    differs = bool(sum_inside(mark, team) != team * mark)
    kinds = ("batch", "none", "failed", "different")
    own = [float(kind == what or differs and kind == "different") for kind in kinds]
    told = sum_inside(torch.tensor(own), collectives.processes_per_worker())
    return {kind: bool(count > 0) for kind, count in zip(kinds, told, strict=True)}


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


def _size(call: str, samples: _Count | None, batch: Any) -> int:
    """Return how many samples a batch has."""
    if samples is not None:
        size: Any = samples(batch)
        size = size.item() if isinstance(size, torch.Tensor) and not size.dim() else size
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:
            raise ValueError(
                f"{call}(samples): it returned {brief(size)}; a batch's number of samples is an integer >= 0."
            )
        return int(size)
    named = [(name, x) for name, x in trees.named_leaves(trees.plain(batch)) if isinstance(x, torch.Tensor) and x.dim()]
    if len({len(x) for _, x in named}) != 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named)
        raise ValueError(
            f"{call}(batches): the samples of {brief(batch)} cannot be counted by the first axis of its tensors ({shapes}); count them, "
            "samples=lambda batch: len(...), or keep what has no axis of samples out of the batch, which is of one worker."
        )
    return len(named[0][1])


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


def _as_returned(values: Mapping[str, float | list[float]]) -> Any:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return tensors[""] if list(tensors) == [""] else tensors
