"""Metrics over held-out batches, of the consensus or of every worker's own replica; exact for unequal batch sizes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from decentfn import sharded
from decentfn.comm import collectives
from decentfn.comm.fingerprint import digest
from decentfn.core import PyTree, brief, context, require, trees
from decentfn.core.buckets import Plan, each, sum_within_worker
from decentfn.errors import PeerLost, RunError
from decentfn.gradient.evaluation import swapping
from decentfn.gradient.loss import is_pair, takes, unwrapped
from decentfn.gradient.module import ModuleLoss, ShardedLoss
from decentfn.train.collective_calls import on_all
from decentfn.train.consensus import consensus_buffers, is_stacked, mean_parameters, require_sharded_alike, to_evaluate

_Replica = tuple[PyTree, PyTree]
_Count = Callable[[Any], int]
_Sums = dict[str, list[float]]
"""By name, the sum of a value over its samples and their number; "" if the metric is one value."""


@collectives.calling("df.evaluate(metric, state, batches)", of_state=True)
def evaluate(metric: Callable[..., Any], state: Any, batches: Iterable[Any], *, samples: _Count | None = None) -> Any:
    """Average a metric of the consensus (`consensus_mean`, `consensus_buffers`) over all samples. Collective.

    No gradient is computed. The mean is over the samples of all processes: a short last batch counts by its samples,
    and a process may have no batch. A module of `df.functional` is in eval mode meanwhile, and its buffers stay.
    Of parameters that are not shared each process takes its own, and one with several workers its first one's; to compare
    them, `evaluate_replicas`.

    If a worker is several processes, they run the module together, each on its own batch (a tensor-parallel worker's on
    the same batch). A process with fewer batches repeats its last one, which does not count; having none is an error if
    others of its worker have some. If a sharded module fails on one process, the worker's others lose it: restart.

    Args:
        metric: `(params, batch)` or `(params, buffers, batch)` -> the mean over the batch's samples, a 0-d tensor or
            number, or a dict of them; a name may come with some batches only, whose samples then count. A loss works; its
            aux is ignored. For a sharded module use a loss of `df.functional`, such as
            `df.functional(module, forward=lambda module, batch: ...)[2]`.
        state: a training state, of one worker or stacked; `df.ema_state(state)` evaluates the average.
        batches: this process's share of the held-out data, in one worker's form. If every process passes all data, the
            result is the same but takes longer.
        samples: counts a batch's samples. None: the common length of its tensors (0-d ones aside).

    Returns:
        A 0-d float64 tensor, or a dict of them; the same on every rank.

    Raises:
        ValueError: no process has a sample; a batch's tensors differ in length; the metric returns something else, or
            does not belong to the sharded module.
        df.errors.RunError: on every rank, if the metric or the batches of one rank failed (a single process raises the
            original error).
    """
    replicas = [(each(torch.clone, mean_parameters(state)).tree(), consensus_buffers(state))]
    total = _added(_of_workers("evaluate", metric, replicas, batches, samples, state.params.plan))
    return _as_returned({name: x / samples for name, (x, samples) in total.items()})


@collectives.calling("df.evaluate_replicas(metric, state, batches)", of_state=True)
def evaluate_replicas(
    metric: Callable[..., Any], state: Any, batches: Iterable[Any], *, samples: _Count | None = None
) -> Any:
    """Average a metric of each worker's own replica and buffers over its process's samples. Collective.

    Otherwise as `evaluate`. Each worker evaluates all batches of its process (or processes). To compare replicas, give
    every process the same data; for their mean alone, `evaluate_replicas(...).nanmean()`, shares suffice.

    Returns:
        `[N]` float64, NaN for the workers of a process without a batch (of this name), or a dict of them; the same on
        every rank.
    """
    given, rows = (to_evaluate(state), state.buffers), range(len(state.params[0])) if is_stacked(state) else [...]
    own = [(x.tree(), b) for x, b in (trees.map(lambda leaf, i=i: leaf[i].clone(), given) for i in rows)]
    everyone = _of_workers("evaluate_replicas", metric, own, batches, samples, state.params.plan)
    none = (float("nan"), 1)
    return _as_returned({k: [x / n for x, n in (of.get(k, none) for of in everyone)] for k in _added(everyone)})


def _of_workers(
    call: str,
    metric: Callable[..., Any],
    replicas: list[_Replica],
    batches: Iterable[Any],
    samples: _Count | None,
    plan: Plan,
) -> list[_Sums]:
    """Return the sums of every replica of all workers. Collective; raises on all processes or on none."""
    rule = f"expected (params, batch) -> number, as df.functional(module, criterion)[2]; the order is {call}(metric, state, batches)."
    require(callable(metric) and not isinstance(metric, torch.nn.Module), call, rule, metric=metric)
    if isinstance(batches, Tensor):
        raise ValueError(
            f"{call}(batches): found a tensor of shape {[*batches.shape]}; pass a list of batches: [batch]."
        )
    metric, _ = unwrapped(metric)
    if plan.is_sharded:
        require_sharded_alike(f"{call}(metric={brief(metric)})", plan, is_sharded=isinstance(metric, ShardedLoss))
    # Sum in one order, for the same result on every rank.
    told = on_all(call, _sums, call, metric, replicas, batches, samples, plan.is_sharded)
    size = collectives.processes_per_worker()
    names = sorted({name for its in told for of in its for name in of})
    if not names:
        raise ValueError(f"{call}(batches): no process has a sample; give at least one of them a batch.")
    if not names[0] and names[1:]:
        raise ValueError(f"{call}(metric): it returned a number for some batches and {names[1:]} for others; name it.")
    # The processes that share a batch all count it, as often in the sum as in its number of samples.
    return [_added(parts) for i in range(0, len(told), size) for parts in zip(*told[i : i + size], strict=True)]


def _added(parts: Sequence[_Sums]) -> _Sums:
    names = dict.fromkeys(name for of in parts for name in of)
    pairs = {name: [of[name] for of in parts if name in of] for name in names}
    return {name: [sum(column) for column in zip(*its, strict=True)] for name, its in pairs.items()}


@torch.no_grad()
def _sums(
    call: str,
    metric: Callable[..., Any],
    replicas: list[_Replica],
    batches: Iterable[Any],
    samples: _Count | None,
    is_sharded: bool,
) -> list[_Sums]:
    totals = [dict[str, tuple[Any, int]]() for _ in replicas]
    sized = ((batch, _size(call, samples, batch)) for batch in batches)
    rounds = _in_step(call, sized, getattr(metric, "partition", sharded.Partition()).tp_size) if is_sharded else sized
    with closing(rounds), _of_replicas(metric, replicas) as lenders:
        # What a list holds is there for one replica after another; what is read batch by batch, for all of them at once.
        by_batch = len(replicas) > 1 and (is_sharded or not isinstance(batches, (list, tuple)))
        for part in ([one] for one in rounds) if by_batch else [[*rounds] if len(replicas) > 1 else rounds]:
            for lend, total in zip(lenders, totals, strict=True):
                with lend() as of:
                    for batch, size in part:
                        value = _evaluating(of, batch)
                        for name, x in _values(call, value).items() if size else ():
                            already, seen = total.get(name, (0, 0))
                            total[name] = already + size * x, seen + size
    return [{name: [float(x), float(n)] for name, (x, n) in total.items()} for total in totals]


def _evaluating(function: Callable[..., Any], argument: Any) -> Any:
    context.evaluates = True
    try:
        return function(argument)
    finally:
        context.evaluates = False


_Lender = Callable[[], AbstractContextManager[Callable[[Any], Any]]]


@contextmanager
def _of_replicas(metric: Callable[..., Any], replicas: list[_Replica]) -> Iterator[list[_Lender]]:
    """Context with, for each replica, a context of its metric as a function of batches: a module is lent to it."""
    if not isinstance(metric, ModuleLoss) or isinstance(metric, ShardedLoss) or replicas[0][1] is None:
        evaluated: Any = _together(metric) if isinstance(metric, ShardedLoss) else metric
        takes_buffers = replicas[0][1] is not None and takes(metric, 3)
        functions = [partial(evaluated, x, b) if takes_buffers else partial(evaluated, x) for x, b in replicas]
        yield [partial(nullcontext, of) for of in functions]
        return
    with swapping(metric) as lent:
        yield [partial(lent, *replica) for replica in replicas]


def _together(metric: ShardedLoss) -> Callable[..., Any]:
    """Wrap the metric so that its failure releases the other processes that run the module with this one."""

    def evaluated(*arguments: Any) -> Any:
        try:
            return metric(*arguments)
        except Exception as error:
            sharded.leave(metric.module)
            if not collectives.is_peer_lost(error):
                raise
            here = collectives.all_processes().rank
            raise PeerLost(f"the module lost another process of its worker: {error}", process=here) from error

    return evaluated


def _in_step(call: str, batches: Iterator[tuple[Any, int]], tensor_parallel: int) -> Generator[tuple[Any, int]]:
    """Yield batches and sizes, as many as any process of this worker has; repeat the last one with size 0.

    Ends if another process has failed, and ends the others if this one fails.
    """
    last, processes = None, collectives.processes_per_worker()
    while True:
        try:
            batch, size = next(batches, (None, 0))
        except Exception:
            _tell_worker(None, True, tensor_parallel)
            raise
        having, failed, differing = _tell_worker(batch, False, tensor_parallel)
        if failed or not having:
            return
        if differing:
            number = "world.worker" if tensor_parallel == processes else f"world.rank // {tensor_parallel}"
            raise ValueError(
                f"{call}(batches): the processes of a tensor-parallel worker run the module together on the same "
                f"batches, and theirs differ; choose them by {number}."
            )
        if having < processes and last is None:  # in the first round
            if batch is not None:
                return
            here = collectives.all_processes()
            raise ValueError(
                f"{call}(batches): process {here.process} of worker {here.worker} has no batch, and others of its "
                "worker have; they run the module together: give each of them a batch; the same one works."
            )
        try:
            yield (last, 0) if batch is None else (batch, size)
        except GeneratorExit:
            with suppress(RunError):  # the others may be gone
                _tell_worker(None, True, tensor_parallel)
            raise
        last = batch if batch is not None else last


def _tell_worker(batch: Any, has_failed: bool, tensor_parallel: int) -> list[int]:
    """Return how many processes of this worker have a batch, have failed, and differ within their tensor-parallel group.

    Collective over the worker's processes.
    """
    leaves = trees.leaves(trees.plain(batch)) if tensor_parallel > 1 else []
    marks = " ".join(f"{list(x.shape)} {digest(x)}" for x in leaves if isinstance(x, torch.Tensor))
    mark = torch.tensor(zlib.crc32(marks.encode()), dtype=torch.float64)
    differs = bool(sum_within_worker(mark, tensor_parallel) != tensor_parallel * mark)
    own = torch.tensor([float(batch is not None), float(has_failed), float(differs)])
    return sum_within_worker(own, collectives.processes_per_worker()).int().tolist()


def _size(call: str, samples: _Count | None, batch: Any) -> int:
    if samples is not None:
        size: Any = samples(batch)
        size = size.item() if isinstance(size, torch.Tensor) and not size.dim() else size
        is_number = isinstance(size, Integral) and not isinstance(size, bool) and int(size) >= 0
        rule = f"it returned {brief(size)}; a batch's number of samples is an integer >= 0."
        require(is_number, f"{call}(samples)", rule)
        return int(size)
    is_flat = type(batch) in (list, tuple) and trees.is_flat(batch)
    leaves = batch if is_flat else trees.leaves(trees.plain(batch))
    sizes = {x.size(0) for x in leaves if isinstance(x, torch.Tensor) and x.dim()}
    if len(sizes) != 1:
        named = trees.named_leaves(trees.plain(batch))
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named if isinstance(x, torch.Tensor) and x.dim())
        raise ValueError(
            f"{call}(batches): the samples of {brief(batch)} cannot be counted by the first axis of its tensors "
            f"({shapes}); count them, samples=lambda batch: len(...), or remove tensors without an axis of samples "
            "from the batch of one worker."
        )
    return sizes.pop()


def _values(call: str, value: Any) -> dict[str, float | Tensor]:
    value = value[0] if is_pair(value) else value
    values = dict(value) if not isinstance(value, Tensor) and isinstance(value, Mapping) else {"": value}
    for name, x in values.items():
        is_real = x.numel() == 1 and not x.is_complex() if isinstance(x, Tensor) else isinstance(x, (int, float))
        if not is_real or not isinstance(name, str):
            got = f"{name!r}: {brief(x)}" if name else brief(value)
            raise ValueError(
                f"{call}(metric): it returned {got}; a metric returns the mean over the batch's samples, a 0-d real "
                "tensor or a number, or a dict of them by name."
            )
        values[name] = x.double() if isinstance(x, Tensor) and not x.is_cpu else float(x)  # which waits for no GPU
    return values


def _as_returned(values: Mapping[str, float | list[float]]) -> Any:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return tensors[""] if list(tensors) == [""] else tensors
