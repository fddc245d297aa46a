"""Mass of guarded workers: a skipped step keeps all of it, and one with bad parameters loses its own, and no mail."""

import random
import time
from functools import partial

import pytest
import torch

import decentfn as df
from decentfn.testing import on_ranks
from decentfn.train.own_steps import memory_of
from tests.timing.test_asynchronous import ONE_PEER, N, mass, starts, sums
from tests.timing.traces import random_trace, replayed

MAKE = [df.asynchronous_gradient_push, partial(df.asynchronous_diloco, inner_steps=2)]


def times(params, factor):
    """Gradient 0, or NaN if the factor is."""
    return 0.0 * factor * sum(p.sum() for p in params.values())


def factor(i, k):
    """NaN in a third of the steps."""
    return torch.tensor(float("nan") if random.Random(f"{i} {k}").random() < 1 / 3 else 1.0, dtype=torch.float64)


def guarded(make, loss=times, optimizer=None, topology=ONE_PEER, **options):
    return df.guard(make(loss, optimizer or df.sgd(0.1), topology, **options), limit=1000)


def assert_all_mass(state, own):
    found, weight = mass(state)
    assert abs(float(weight) - N) < 1e-12
    torch.testing.assert_close(torch.cat(found), torch.cat(sums(own)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("seed", range(3))
def test_a_skipped_step_keeps_all_mass(make, seed):
    algorithm = guarded(make)
    trace = random_trace(algorithm.step.topology, 150, seed, rates=[4, 2, 1, 1])
    state = replayed(algorithm, trace, starts(), factor)
    assert state.local.guard.skipped.sum() > 20
    assert_all_mass(df.settle(state, arrivals=trace), starts())


def jump(params, batch):
    """Gradient of size 1e300 or 0: with a rate of 1e8 the update is finite, and the sum with a large value is not."""
    return sum((p * batch).sum() for p in params.values())


@pytest.mark.parametrize("make", MAKE)
def test_an_update_that_overflows_keeps_all_mass(make):
    """The sum of two finite values is infinite: the update is left out, and the mail of the step is kept."""
    large = [{name: torch.full_like(x, (1 + i / 10) * 1e308) for name, x in starts()[0].items()} for i in range(N)]
    algorithm = guarded(make, jump, df.sgd(1e200))
    trace = random_trace(algorithm.step.topology, 60, 0)
    state = replayed(algorithm, trace, large, lambda i, k: torch.tensor(-1.5e108 * (i == 1), dtype=torch.float64))
    settled = df.settle(state, arrivals=trace)
    share = memory_of(settled).weight / N
    assert state.local.guard.replaced[1] > 5 and abs(float(share.sum()) - 1) < 1e-12
    for x in settled.params:
        torch.testing.assert_close(share @ x / 1e308, torch.full_like(x[0], 1.15), atol=1e-12, rtol=0)


def test_what_is_beyond_the_range_of_the_wire_is_kept():
    """As float16 the parameters of worker 1 are infinite: it sends nothing, and all mass is there."""
    own = [
        {name: (x * (1e6 if i == 1 else 1)).float() for name, x in start.items()} for i, start in enumerate(starts())
    ]
    algorithm = guarded(df.asynchronous_gradient_push, wire_dtype=torch.float16)
    trace = random_trace(algorithm.step.topology, 60, 0)
    state = df.settle(replayed(algorithm, trace, own, lambda i, k: torch.ones(())), arrivals=trace)
    assert all(torch.isfinite(x).all() for x in state.params) and state.local.guard.replaced.tolist()[1] > 5
    assert memory_of(state).weight.sum() == pytest.approx(N, abs=1e-12)


def poison(x):
    """Write NaN over the parameters of a worker."""
    x.fill_(float("nan"))


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("has_mail", [True, False])
@pytest.mark.parametrize("options", [{}, {"wire_dtype": torch.bfloat16}], ids=["", "bfloat16"])
def test_a_worker_whose_parameters_turn_bad_loses_its_own_mass_and_no_mail(make, options, has_mail):
    """The mail of the same step, before and after the gradient, is kept, and is what it trains from."""
    algorithm = guarded(make, **options)
    trace = random_trace(algorithm.step.topology, 200, 1)
    step, state = (
        df.simulate(algorithm.step, N, arrivals=trace),
        df.stack(algorithm.init(starts()[0]), N, arrivals=trace),
    )
    mail = {level: trace.taken[i][k] for level, its in enumerate(trace.levels) for i, k in its if i == 2}
    steps = [level for level, its in mail.items() if level > 20 and bool(its) is has_mail]
    lost = 0.0
    for level in range(len(trace.levels)):
        if level == steps[0]:
            lost = float(memory_of(state).weight[2])
            poison(state.params[0][2])
        state, metrics = step(state, torch.ones(N, dtype=torch.float64), level)
        assert torch.isfinite(state.params[0]).all()
    settled = df.settle(state, arrivals=trace)
    assert lost and float(memory_of(settled).weight.sum()) == pytest.approx(N - lost, abs=1e-12)
    assert metrics.guard.replaced.tolist() == [0, 0, 1, 0]
    for name, value in df.params(settled).items():  # all began alike, without a gradient
        torch.testing.assert_close(value, starts()[0][name].expand_as(value), atol=0.02 if options else 1e-12, rtol=0)


def run_with_bad_values(rank, make, turns_bad):
    """A rank whose loss takes a while, so that mail comes during it; rank 1 is bad in a step, or at times."""

    @df.autograd
    def slow(params, factor):
        time.sleep(0.003 * random.random())
        return times(params, factor)

    init, step = guarded(make, slow)
    state, lost = init(starts()[rank]), 0.0
    for t in range(60):
        if turns_bad and t == 20 and rank == 1:
            lost = float(memory_of(state).weight)
            poison(state.params[0])
        state, _ = step(state, torch.ones((), dtype=torch.float64) if turns_bad else factor(rank, t), t)
    settled = df.settle(state)
    return settled, lost, sum(df.trace().late[rank])


@pytest.mark.parametrize("make", MAKE)
def test_ranks_keep_all_mass_of_skipped_steps(make):
    out = on_ranks(N, run_with_bad_values, make, False)
    assert sum(late for *_, late in out) > 5
    weights = [memory_of(state).weight for state, *_ in out]
    total = sum(w * state.params[0] for w, (state, *_) in zip(weights, out, strict=True))
    assert abs(float(sum(weights)) - N) < 1e-12
    torch.testing.assert_close(total, torch.cat(sums(starts())), atol=1e-12, rtol=0)


@pytest.mark.parametrize("make", MAKE)
def test_a_rank_whose_parameters_turn_bad_loses_its_own_mass_and_no_mail(make):
    out = on_ranks(N, run_with_bad_values, make, True)
    weights = [float(memory_of(state).weight) for state, *_ in out]
    assert sum(weights) == pytest.approx(N - out[1][1], abs=1e-12)
    assert all(torch.isfinite(x).all() for state, *_ in out for x in state.params)
