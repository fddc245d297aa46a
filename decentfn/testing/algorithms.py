"""Promises of every algorithm: functions of a `Subject` that raise AssertionError if the promise is broken.

An algorithm may decline a promise at construction with a ValueError; `try_promise` returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from decentfn.core import PyTree, trees
from decentfn.core.buckets import Buckets
from decentfn.engine.compilation import compile
from decentfn.engine.simulation import simulate, stack, worker
from decentfn.gradient import accumulate, autograd, dynamic_loss_scale
from decentfn.kit.step import Algorithm
from decentfn.optim.transforms import MixAware, MixContext, sgd
from decentfn.testing import problem
from decentfn.testing.ranks import alone_as_rank_of
from decentfn.testing.subjects import STEPS, Batches, Declined, Run, Subject, assert_close, program, ranks, simulated
from decentfn.topologies import Topology
from decentfn.train.consensus import params as params_of
from decentfn.wrappers import average_buffers, ema, ema_params

_LATE_S = 0.03


def interpreters_agree(subject: Subject) -> None:
    """Gloo ranks, with one worker or two per process, agree with the simulator."""
    for local in (1, 2):
        assert_close(ranks(subject, Run(local=local))[-1], simulated(subject)[-1])


def traced_ranks_agree(subject: Subject) -> None:
    """Gloo ranks, traced (aot_eager) and donated, agree with the simulator; so do donated ones of two workers each."""
    full, *two_per_process = _traced(subject)
    assert_close(ranks(subject, full)[-1], simulated(subject, full)[-1])
    _assert_packed_ranks_agree(subject, *(two_per_process or [_packed(subject)]))


def compiled_ranks_agree(subject: Subject) -> None:
    """Gloo ranks, compiled by Inductor and donated, with one worker or two per process, agree with the simulator."""
    run = _compiled(subject)
    assert_close(ranks(subject, run)[-1], simulated(subject, run)[-1])
    _assert_packed_ranks_agree(subject, _packed(subject))


def donated_is_pure(subject: Subject) -> None:
    """A donated step on ranks, traced or eager, is bitwise equal to the eager pure step."""
    donated = _traced(subject)[0]
    pure = ranks(subject, donated._replace(backend=None))
    for run in (donated, donated._replace(backend="donate")):
        for mine, theirs in zip(ranks(subject, run), pure, strict=True):
            assert_close(mine, theirs, within={})


def one_graph(subject: Subject) -> None:
    """One graph serves all steps, and one those without a round (`kit.rests`), on ranks, with one and two workers each."""
    for run in _traced(subject):
        ranks(subject, run)
        _assert_few_graphs(subject, run)


def _assert_few_graphs(subject: Subject, run: Run) -> None:
    schedules = subject.build().step.schedules
    kinds = {any(one.round(t).is_active for one in schedules) for t in range(STEPS)}
    found = len(program(subject, run).graphs)
    assert found == len(kinds), f"{found} graphs for {STEPS} steps"


_averaged = partial(ema, decay=0.8)
_scaled = partial(dynamic_loss_scale, init_scale=2.0**10)
_NARROW = Run(options=(("wire_dtype", torch.bfloat16),))
_SCALED = Run(losses=(_scaled,))
_MIXED_BUFFERS = Run(with_buffers=True, wrappers=(average_buffers,))


@lru_cache(maxsize=64)
def _full(subject: Subject) -> Run:
    """Return a run with loss scaling, EMA and, if accepted, averaged buffers; eager if the step alone is traced."""
    wrappers = (average_buffers, _averaged) if _takes(subject, _MIXED_BUFFERS) else (_averaged,)
    backend = "aot_eager" if subject.backend == "inductor" else "donate"
    return Run(backend, with_buffers=True, losses=(_scaled,), wrappers=wrappers)


def _compiled(subject: Subject) -> Run:
    """Return a run compiled by the subject's backend, with EMA; if it only traces, the run that is traced anyway."""
    return Run("inductor", wrappers=(_averaged,)) if subject.backend == "inductor" else _traced(subject)[0]


def _traced(subject: Subject) -> tuple[Run, ...]:
    """Return the traced runs: with all wrappers, and of two workers per process; if it only traces, of the step alone."""
    return (_full(subject), Run("aot_eager", local=2)) if subject.backend == "inductor" else (Run("aot_eager"),)


def _packed(subject: Subject) -> Run:
    """Return a run with two workers per process and, if accepted, a bfloat16 wire; eager if the subject is only traced."""
    backend = "inductor" if subject.backend == "inductor" else "donate"
    return Run(backend, local=2, options=_NARROW.options if _takes(subject, _NARROW) else ())


def _assert_packed_ranks_agree(subject: Subject, packed: Run) -> None:
    # A group average on a narrow wire is rounded once more, in the order of the processes.
    averages = not subject.mixes_narrow or subject.topology(subject.num_workers).groups is not None
    apart = 0.0 if not packed.options else 1.0 if averages else _MAY_ROUND_APART
    assert_close(ranks(subject, packed)[-1], simulated(subject, packed)[-1], but=apart)


def _takes(subject: Subject, run: Run) -> bool:
    try:
        program(subject, run)
    except Declined:
        return False
    return True


_FEW = 4
_MAY_CHOOSE_APART = 0.05
_MAY_ROUND_APART = 0.01
"""Fraction of values that two computations, equal to rounding, may round to different bfloat16 numbers."""


def dtypes_stay(subject: Subject) -> None:
    """The state keeps its shapes and dtypes, for parameters of every floating dtype; the old state is not changed."""
    n, dtypes = subject.num_workers, (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    algorithm = subject.build()
    state = subject.start(algorithm, range(n), stacked=True, dtypes=dtypes)
    step = simulate(algorithm.step, n)
    for t in range(2):  # what a memory of zeros becomes may be zeros
        kept = trees.map(torch.clone, state)
        new, _ = step(state, problem.stacked([problem.batch(i, t, dtypes=dtypes) for i in range(n)]), t)
        assert_close(state, kept, within={})
        for (name, before), after in zip(trees.named_leaves(kept), trees.leaves(new), strict=True):
            assert (before.shape, before.dtype) == (after.shape, after.dtype), (
                f"{name}: {after.dtype}{list(after.shape)}"
            )
        state = new
    assert {b.dtype for b in state.params} == set(dtypes)


def sixteen_bits_compile(subject: Subject) -> None:
    """With bfloat16 parameters, simulated, a compiled (Inductor), donated step agrees with eager code to rounding."""
    n, dtypes, ends = subject.num_workers, (torch.bfloat16,), []
    algorithm = subject.build()
    step = simulate(algorithm.step, n)
    for run in (step, compile(step, backend=subject.backend)):
        state = subject.start(algorithm, range(n), stacked=True, dtypes=dtypes)
        for t in range(_FEW):
            state, _ = run(state, problem.stacked([problem.batch(i, t, dtypes=dtypes) for i in range(n)]), t)
        ends.append(torch.cat([bucket.flatten() for bucket in state.params]).double())
    eager, compiled = ends
    # Rounding may change a compressor's choice, or a sign, for a few values.
    share = float(torch.isclose(compiled, eager, rtol=0.03, atol=0.03).double().mean())
    assert share >= 1 - _MAY_CHOOSE_APART, f"{1 - share:.0%} of the values differ"


def works_alone(subject: Subject) -> None:
    """One worker trains without a process group, eagerly, and simulated in one graph alike, and learns: with plain SGD,
    so that a momentum of the algorithm is the only one, the loss of its first batch falls by a tenth at least.
    """
    algorithm = subject.build(num_workers=1, optimizer=sgd(0.05))
    step, in_one_graph = algorithm.step, compile(simulate(algorithm.step, 1), backend="eager")
    state, losses = algorithm.init(problem.params()), []
    stacked = stack(state, 1)
    for t in range(40):
        batch = problem.batch(0, t % 2)
        state, metrics = step(state, batch, t)
        stacked, _ = in_one_graph(stacked, problem.stacked([batch]), t)
        losses.append(metrics.loss.item())
    assert_close(worker(stacked, 0), state)
    first, *_, last, _ = losses  # of the first of two batches that take turns
    assert last < 0.9 * first, (
        f"with df.sgd(0.05), the loss of one batch went from {first:.4g} to {last:.4g} in 38 steps of one worker, but an "
        "algorithm lowers it by a tenth at least; if yours needs other numbers, pass check_algorithm(..., "
        "hyperparameters={...})"
    )


def laws_hold(subject: Subject) -> None:
    """The invariants hold on ranks, compiled by Inductor and donated."""
    _assert_laws(subject, _compiled(subject))


def laws_hold_on_a_narrow_wire(subject: Subject) -> None:
    """The invariants hold with a bfloat16 wire and two workers per process."""
    program(subject, _NARROW)
    if subject.mixes_narrow:
        _assert_laws(subject, _packed(subject))
    else:
        _assert_packed_ranks_agree(subject, _packed(subject))


def equal_workers_stay_equal(subject: Subject) -> None:
    """Workers that start equal and have no gradient stay as they are, simulated."""
    n, algorithm = subject.num_workers, subject.build()
    state, step = stack(algorithm.init(problem.params()), n), simulate(algorithm.step, n)
    first, batch = state.params, problem.stacked([_without_gradients(i, 0) for i in range(n)])
    for t in range(_FEW * STEPS):
        state, _ = step(state, batch, t)
    for bucket, before in zip(state.params, first, strict=True):
        moved = float((bucket - before).abs().max())
        bound = 60 * torch.finfo(bucket.dtype).eps * max(1.0, float(before.abs().max()))
        assert moved <= bound, f"off by {moved:.3g} after {_FEW * STEPS} steps in {bucket.dtype}"


def nothing_in_flight_is_written_over(subject: Subject) -> None:
    """Messages in flight are not overwritten: sending late does not change results (compiled, donated, on ranks)."""
    for run in (_compiled(subject), _packed(subject)):
        for mine, theirs in zip(ranks(subject, run, delay=_LATE_S), ranks(subject, run), strict=True):
            assert_close(mine, theirs, within={})


def accumulates(subject: Subject) -> None:
    """Two accumulated micro-batches equal one batch of both, simulated and on ranks."""
    run = Run(losses=(accumulate,))
    assert_close(simulated(subject, run, batches=_halves)[-1], simulated(subject)[-1])
    assert_close(ranks(subject, run, batches=_halves)[-1], simulated(subject)[-1])


def _halves(worker: int, t: int) -> PyTree:
    return trees.map(lambda x: x.unflatten(0, (2, 2)), problem.batch(worker, t))


def works_by_autograd(subject: Subject) -> None:
    """`df.autograd` agrees with the traced gradient on ranks, in one graph, donated, with every feature; the invariants
    hold if one worker overflows, and with accumulation and two workers per process.
    """
    traced = _full(subject)._replace(backend="aot_eager")
    run = traced._replace(losses=(autograd, *traced.losses))
    expected = simulated(subject, traced)[-1]
    assert_close(simulated(subject, run)[-1], expected)
    assert_close(ranks(subject, run)[-1], expected)
    _assert_few_graphs(subject, run)
    _assert_laws(subject, run, _overflowing)
    accumulated = Run(local=2, losses=(autograd, accumulate))
    assert_close(ranks(subject, accumulated, batches=_halves)[-1], simulated(subject)[-1])


def scales_the_loss(subject: Subject) -> None:
    """A loss scale without overflow does not change the result; if one worker overflows, its scale shrinks, all values
    stay finite, and the invariants hold (traced, on ranks).
    """
    program(subject, _SCALED)
    run = _full(subject)
    assert_close(params_of(ranks(subject, run)[-1]), params_of(simulated(subject)[-1]))
    end = ranks(subject, run, batches=_overflowing(problem.batch))[-1]
    assert all(bool(torch.isfinite(bucket).all()) for bucket in end.params), "an overflow of worker 1 spread"
    assert float(end.local.scale.scale[1]) == 2.0**9
    _assert_laws(subject, run, _overflowing)


def _overflowing(batches: Batches) -> Batches:

    def spoilt(worker: int, t: int) -> PyTree:
        targets, weight = batches(worker, t)
        return targets, weight * (float("inf") if (worker, t) == (1, 3) else 1.0)

    return spoilt


def keeps_an_ema(subject: Subject) -> None:
    """`df.ema` keeps the moving average of every worker's parameters, on ranks, compiled by Inductor and donated."""
    run = _compiled(subject)
    history = ranks(subject, run if run.wrappers else _full(subject))
    expected = trees.map(torch.Tensor.double, params_of(history[0]))
    for state in history[1:]:
        expected = trees.map(lambda e, x: 0.8 * e + 0.2 * x.double(), expected, params_of(state))
    assert_close(ema_params(history[-1]), trees.map(lambda e, x: e.to(x.dtype), expected, params_of(history[0])))


def averages_buffers(subject: Subject) -> None:
    """`average_buffers` mixes floating-point buffers only, on ranks, traced and donated; their disagreement shrinks."""
    program(subject, _MIXED_BUFFERS)
    mixed = ranks(subject, _full(subject))
    apart = simulated(subject, Run(with_buffers=True))
    near, far = (
        sum(leaf.double().std(0).sum() for leaf in trees.leaves(end[-1].buffers["means"])) for end in (mixed, apart)
    )
    assert near < 0.7 * far, "buffers did not draw near"
    assert torch.equal(mixed[-1].buffers["count"], mixed[0].buffers["count"] + STEPS)


def shows_the_mix(subject: Subject) -> None:
    """A `MixAware` optimizer receives the messages, with weights that sum to one, on ranks and in the simulator."""
    program(subject, _MIX_AWARE)
    end = simulated(subject, _MIX_AWARE)[-1]
    assert_close(ranks(subject, _MIX_AWARE)[-1], end)
    assert_close(end.local.opt, torch.ones(subject.num_workers, dtype=torch.float64))


def _weighed(grads: Buckets, state: Tensor, params: Buckets, mix: MixContext) -> tuple[Buckets, Tensor]:
    total = mix.weights.sum() if mix.mean_weight is None else mix.weights.sum() + mix.mean_weight
    return trees.map(lambda g: -0.05 * g, grads), total


_MIX_AWARE = Run(
    options=(("optimizer", MixAware(lambda params: params[0].new_zeros((), dtype=torch.float64), _weighed)),)
)


def _assert_laws(subject: Subject, run: Run, spoil: Callable[[Batches], Batches] = lambda batches: batches) -> None:
    topology = subject.topology(subject.num_workers)
    for law in subject.laws:
        batches = spoil(problem.batch if law.with_gradients else _without_gradients)
        states = ranks(subject, run, steps=20, batches=batches)
        history = [state._replace(memory=getattr(state.memory, "inner", state.memory)) for state in states]
        first = law.quantity(history[0], topology, 0)
        for t, state in enumerate(history):
            for bucket, was, is_now in zip(state.params, first, law.quantity(state, topology, t), strict=True):
                bound = 60 * torch.finfo(bucket.dtype).eps * max(1.0, float(bucket.abs().max()))
                drift = float((is_now - was).abs().max())
                assert drift <= bound, f"{law.name}: off by {drift:.3g} after {t} steps in {bucket.dtype}"


def _without_gradients(worker: int, t: int) -> PyTree:
    return problem.batch(worker, t, strength=0.0)


PROMISES: dict[str, Callable[[Subject], None]] = {
    promise.__name__: promise
    for promise in (
        interpreters_agree,
        traced_ranks_agree,
        compiled_ranks_agree,
        donated_is_pure,
        one_graph,
        dtypes_stay,
        sixteen_bits_compile,
        works_alone,
        laws_hold,
        laws_hold_on_a_narrow_wire,
        equal_workers_stay_equal,
        nothing_in_flight_is_written_over,
        accumulates,
        works_by_autograd,
        scales_the_loss,
        keeps_an_ema,
        averages_buffers,
        shows_the_mix,
    )
}


@alone_as_rank_of(1)
def try_promise(promise: Callable[[Subject], None], subject: Subject) -> str | None:
    """Return None if the promise holds, or the reason for which the algorithm declines it.

    Raises:
        AssertionError: the promise is broken; the message names it.
    """
    try:
        promise(subject)
    except Declined as declined:
        return str(declined)
    except AssertionError as broken:
        promised = " ".join((promise.__doc__ or "").split())
        raise AssertionError(f"{promise.__name__}: {broken}\nThe promise: {promised}") from broken
    return None


def check_algorithm(
    algorithm: Callable[..., Algorithm], topology: Callable[[int], Topology], **how: Any
) -> dict[str, str | None]:
    """Try every promise on an algorithm: 18, with compilations by Inductor, in 45 s on two quiet cores.

    Args:
        algorithm: a function like those of `decentfn.algorithms`.
        topology: `num_workers -> Topology`, for 1 and 4 workers.
        how: arguments of `Subject`: `hyperparameters={"beta": 0.5}` is passed to the algorithm, `laws=()` declares no
            invariant, as of messages drawn by each worker (by default the workers' mean is kept, on a column-stochastic
            graph weighted by `state.memory.weight`, and equal workers without gradients stay equal), `num_workers=`
            another N, `starts_equal=True` equal parameters, `backend="aot_eager"` traces only, without wrappers.

    Returns:
        None for each promise that holds, or the reason for which the algorithm declines it.

    Raises:
        AssertionError: a promise is broken; the message names it.
    """
    subject = Subject(algorithm, topology, **how)
    promises = {name: p for name, p in PROMISES.items() if subject.laws or p is not equal_workers_stay_equal}
    return {name: try_promise(promise, subject) for name, promise in promises.items()}
