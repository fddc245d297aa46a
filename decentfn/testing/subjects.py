"""An algorithm under test, run by the simulator and by gloo ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import PyTree, trees
from decentfn.core.buckets import Buckets, wide
from decentfn.engine import cache as compile_cache
from decentfn.engine.compilation import compile
from decentfn.engine.donation import donate, require_distinct
from decentfn.engine.simulation import simulate
from decentfn.gradient import LossFn
from decentfn.kit.step import Algorithm
from decentfn.optim.transforms import sgd
from decentfn.testing import problem
from decentfn.testing.ranks import alone_as_rank_of, on_kept_ranks
from decentfn.topologies import Topology

STEPS = 6


class Law(NamedTuple):
    """Quantity that keeps its initial value in every step, on every schedule."""

    name: str
    quantity: Callable[[Any, Topology, int], list[Tensor]]
    """`(stacked state, topology, steps taken) -> [D] float64` for each bucket of the parameters: of `state.memory.m`, say,
    `lambda state, topology, t: [b.double().mean(0) for b in state.memory.m]`."""
    with_gradients: bool = False
    """True if it also holds while workers follow their gradients."""


def _mean(state: Any, topology: Topology, t: int) -> list[Tensor]:
    """Return the workers' mean, on a column-stochastic graph weighted by push-sum's `memory.weight`."""
    weight = getattr(state.memory, "weight", None) if topology.needs_push_sum else None
    scale = 1.0 if weight is None else weight.double()[:, None]
    return [(scale * bucket.double()).mean(0) for bucket in state.params]


def _spread(state: Any, topology: Topology, t: int) -> list[Tensor]:
    return [bucket.double().amax(0) - bucket.double().amin(0) for bucket in state.params]


mean_is_preserved = Law("mean preserved", _mean)
replicas_stay_equal = Law("replicas equal", _spread, with_gradients=True)


@dataclass(frozen=True, eq=False)
class Subject:
    """Algorithm under test.

    Args:
        algorithm: `(loss_fn, optimizer, topology, **hyperparameters) -> Algorithm`.
        topology: `num_workers -> Topology`.
        hyperparameters: the algorithm's hyperparameters, such as `{"beta": 0.5}`; its own defaults if left out. Most
            promises train with `df.sgd(0.05, momentum=0.5)`.
        laws: its invariants.
        num_workers: N, even.
        starts_equal: all workers must start with the same parameters.
        mixes_narrow: the laws also hold with a narrow `wire_dtype` (group averages round their sums).
        backend: torch.compile's, of the promises about compiled steps; "aot_eager" traces only, without wrappers.
    """

    algorithm: Callable[..., Algorithm]
    topology: Callable[[int], Topology]
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    laws: tuple[Law, ...] = (mean_is_preserved,)
    num_workers: int = 4
    starts_equal: bool = False
    mixes_narrow: bool = True
    backend: str = "inductor"

    def build(
        self, num_workers: int | None = None, loss_fn: Any = problem.loss_fn, optimizer: Any = None, **options: Any
    ) -> Algorithm:
        """Build the algorithm on the contract tests' problem."""
        optimizer = sgd(0.05, momentum=0.5) if optimizer is None else optimizer
        options = {"bucket_mb": problem.BUCKET_MB, **self.hyperparameters, **options}
        return self.algorithm(loss_fn, optimizer, self.topology(num_workers or self.num_workers), **options)

    def start(
        self,
        algorithm: Algorithm,
        workers: range,
        *,
        stacked: bool,
        with_buffers: bool = False,
        dtypes: tuple[torch.dtype, ...] = problem.DTYPES,
    ) -> Any:
        """Return the initial state of these workers, of one or stacked."""
        seeds = [0 if self.starts_equal else i for i in workers]
        buffers = [(problem.buffers(i),) if with_buffers else () for i in seeds]
        states = [algorithm.init(problem.params(i, dtypes), *more) for i, more in zip(seeds, buffers, strict=True)]
        require_distinct("donate", states[0])
        return problem.stacked(states) if stacked else states[0]


class Run(NamedTuple):
    """Configuration of a run."""

    backend: str | None = None  # of torch.compile; "donate": eager and donated
    local: int = 1  # workers of each process
    options: tuple[tuple[str, Any], ...] = ()
    with_buffers: bool = False
    losses: tuple[Callable[[LossFn], LossFn], ...] = ()  # around the loss: accumulated, scaled
    wrappers: tuple[Callable[[Algorithm], Algorithm], ...] = ()  # around the algorithm


class Declined(ValueError):
    """The algorithm refused to be built; the message is its own."""


class _Program(NamedTuple):
    algorithm: Algorithm
    step: Callable[..., Any]
    is_compiled: threading.Event
    graphs: list[Any]  # traced graphs, unless the backend is Inductor
    local: int  # workers of each process: all, if each takes its own steps, as ranks then do not repeat a run


@lru_cache(maxsize=16)
def program(subject: Subject, run: Run) -> _Program:
    """Build the algorithm and the step of a run, or raise `Declined`."""
    loss_fn: LossFn = problem.loss_with_buffers if run.with_buffers else problem.loss_fn
    for around in run.losses:
        loss_fn = around(loss_fn)
    try:
        algorithm = subject.build(loss_fn=loss_fn, **dict(run.options))
        for wrap in run.wrappers:
            algorithm = wrap(algorithm)
    except ValueError as reason:
        raise Declined(str(reason)) from reason
    local = subject.num_workers if algorithm.step.own_steps else run.local
    step = algorithm.step if local == 1 else simulate(algorithm.step, local)
    graphs: list[Any] = []
    if run.backend == "donate":
        step = donate(step)
    elif run.backend is not None:
        backend = run.backend if run.backend == "inductor" else compile_cache.counted(run.backend, graphs)
        step = compile(step, backend=backend)
    return _Program(algorithm, step, threading.Event(), graphs, local)


_PLAIN = Run()

Batches = Callable[[int, int], PyTree]
"""`(worker, t) -> batch`."""


def ranks(
    subject: Subject, run: Run, *, steps: int = STEPS, batches: Batches = problem.batch, delay: float = 0.0
) -> list[Any]:
    """Return the stacked states of all workers, initial and after every step, computed by gloo ranks."""
    built = program(subject, run)
    size, local = subject.num_workers // built.local, built.local

    def workers(rank: int) -> range:
        return range(rank * local, (rank + 1) * local)

    def batch(rank: int, t: int) -> PyTree:
        rows = [batches(i, t) for i in workers(rank)]
        return problem.stacked(rows) if local > 1 else rows[0]

    def start(rank: int) -> Any:
        return subject.start(built.algorithm, workers(rank), stacked=local > 1, with_buffers=run.with_buffers)

    def train(rank: int) -> list[Any]:
        state, history = starts[rank], [trees.map(torch.clone, starts[rank])]
        for t in range(steps):
            state, _ = built.step(state, batch(rank, t), t)
            history.append(trees.map(torch.clone, state))
        return history

    starts = on_kept_ranks(size, start, delay=delay)
    if run.backend not in (None, "donate") and not built.is_compiled.is_set():
        with alone_as_rank_of(size):
            for t in range(steps):  # with and without a round
                built.step(trees.map(torch.clone, starts[0]), batch(0, t), t)
        built.is_compiled.set()
    join = torch.cat if local > 1 else torch.stack
    histories = on_kept_ranks(size, train, delay=delay)
    return [trees.map(lambda *rows: join(rows), *states) for states in zip(*histories, strict=True)]


@lru_cache(maxsize=32)
def simulated(subject: Subject, run: Run = _PLAIN, *, batches: Batches = problem.batch) -> list[Any]:
    """Return the states as `ranks` does, computed eagerly by the simulator."""
    n = subject.num_workers
    built = program(subject, run._replace(backend=None, local=n))
    state = subject.start(built.algorithm, range(n), stacked=True, with_buffers=run.with_buffers)
    history = [state]
    for t in range(STEPS):
        state, _ = built.step(state, problem.stacked([batches(i, t) for i in range(n)]), t)
        history.append(state)
    assert all(bool(torch.isfinite(bucket).all()) for bucket in state.params), "the simulation is not finite"
    return history


_CLOSE = {torch.float64: 1e-7, torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.005}


def assert_close(
    got: Any, expected: Any, *, within: Mapping[torch.dtype, float] | None = None, but: float = 0.0
) -> None:
    """Assert that two states agree leaf by leaf, to rounding of the dtype, or `within` bounds by dtype (else bitwise).

    A fraction `but` of the values may be off by up to 0.02.
    """
    assert len(trees.leaves(got)) == len(trees.leaves(expected)), "the states have other numbers of leaves"
    accurate = trees.leaves(trees.map_nodes(Buckets, _to_accuracy, got))
    for (name, mine), theirs, rounded in zip(trees.named_leaves(got), trees.leaves(expected), accurate, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, (
            f"{name}: {mine.dtype}{list(mine.shape)} for {theirs.dtype}{list(theirs.shape)}"
        )
        bound = (_CLOSE if within is None else within).get(rounded.dtype, 0.0)
        if but and float(torch.isclose(mine, theirs, atol=bound, rtol=bound).double().mean()) >= 1 - but:
            bound = 0.02
        torch.testing.assert_close(
            mine, theirs, atol=bound, rtol=bound, msg=lambda text, name=name: f"{name}: {text}", equal_nan=True
        )


def _to_accuracy(x: Buckets) -> Buckets:
    """Return `x` in the dtypes that tell its accuracy: a float64 sum of float32 messages is no more exact than they."""
    pairs = zip(x.tensors, x.plan.buckets, strict=True)
    return Buckets([b.to(wide(plan.dtype)) if b.dtype == torch.float64 else b for b, plan in pairs], x.plan)
