"""Asynchronous DiLoCo against its equation in numpy, torch's optimizers, DiLoCo, and recorded outer steps."""

from functools import partial

import numpy as np
import pytest
import torch

import decentfn as df
from tests.timing.test_asynchronous import (
    DIRECTED,
    ONE_PEER,
    N,
    assert_replayed,
    batch,
    conserves,
    loss_fn,
    starts,
    sums,
)
from tests.timing.traces import RECORDED, random_trace, replayed

H = 3
EVERYONE = df.topologies.from_shifts("everyone", [{k: 1 / N for k in range(1, N)}], N)


def built(topology=ONE_PEER, optimizer=None, loss=loss_fn, **options):
    return df.asynchronous_diloco(loss, optimizer or df.sgd(0.1), topology, **{"inner_steps": H} | options)


def by_its_equation(trace, topology, own, eta, beta):
    """φ and w of each worker after a trace, event by event, in numpy; with gradients x - batch and η_inner = 0.1."""
    phi = np.stack([np.concatenate([start[name].numpy() for name in "ab"]) for start in own])
    w, d, b, mail = np.ones(N), np.zeros_like(phi), np.zeros_like(phi), {}
    events = sorted((trace.ended[i][k], i, k) for i in range(N) for k in range(len(trace.ended[i])))

    def take(i, messages):
        total = np.array([mail[message, i][0] for message in messages]).sum()
        moved = sum((mail[message, i][0] * mail[message, i][1] for message in messages), w[i] * phi[i])
        phi[i], w[i] = moved / (w[i] + total), w[i] + total

    for _, i, k in events:
        first = len(trace.taken[i][k]) - trace.late[i][k]
        take(i, trace.taken[i][k][:first])
        d[i] -= 0.1 * (phi[i] + d[i] - float(batch(i, k)))
        take(i, trace.taken[i][k][first:])
        if (k + 1) % H:
            continue
        b[i] = beta * b[i] - d[i]
        phi[i], d[i] = phi[i] + eta * (d[i] - beta * b[i]), 0
        this, held = topology.round(k // H), w[i]
        for slot, to in enumerate(this.destinations[i].tolist()):
            if trace.sent[i][k][slot]:
                share = held * float(df.mixing_matrix(topology, k // H)[to, i])
                mail[(i, k), to] = share, phi[i].copy()
                w[i] -= share
    for i, its in enumerate(trace.taken):
        take(i, its[-1])
    return phi, w


@pytest.mark.parametrize(
    ("topology", "compiled"),
    [(ONE_PEER, None), (DIRECTED, None), (EVERYONE, None), (EVERYONE, "aot_eager")],
    ids=lambda of: getattr(of, "name", of),
)
def test_it_follows_its_equation(topology, compiled):
    algorithm = built(topology, outer_learning_rate=0.6, outer_momentum=0.8)
    trace = random_trace(algorithm.topology, 40 * N, 0, rates=[4, 2, 1, 1])
    state = df.settle(replayed(algorithm, trace, starts(), batch, compiled=compiled), arrivals=trace)
    phi, w = by_its_equation(trace, topology, starts(), 0.6, 0.8)
    found = np.concatenate([df.params(state)[name].numpy() for name in "ab"], 1)
    np.testing.assert_allclose(found, phi, atol=1e-10)
    np.testing.assert_allclose(state.memory.mail.weight.numpy(), w, atol=1e-12)


def test_one_worker_is_the_outer_optimizer_of_torch():
    init, step = built(df.topology("complete", 1), df.sgd(0.1, momentum=0.5))
    state = init(starts()[0])
    slow = [torch.nn.Parameter(x.clone()) for x in starts()[0].values()]
    fast = [torch.nn.Parameter(x.clone()) for x in starts()[0].values()]
    inner = torch.optim.SGD(fast, lr=0.1, momentum=0.5)
    outer = torch.optim.SGD(slow, lr=0.7, momentum=0.9, nesterov=True)
    for t in range(40):
        state, metrics = step(state, batch(0, t), t)
        loss = loss_fn(dict(enumerate(fast)), batch(0, t))
        torch.testing.assert_close(metrics.loss, loss.detach(), atol=1e-12, rtol=1e-12)
        inner.zero_grad()
        loss.backward()
        inner.step()
        if (t + 1) % H == 0:
            for x, y in zip(slow, fast, strict=True):
                x.grad = x.detach() - y.detach()
            outer.step()
            for x, y in zip(slow, fast, strict=True):
                y.data.copy_(x.data)
    torch.testing.assert_close(list(df.params(state).values()), [x.detach() for x in slow], atol=1e-12, rtol=0)


def at_once(algorithm, own, steps):
    init, step = algorithm
    state, step = df.stack(init(own[0]), N), df.simulate(step, N)
    state = df.with_params(state, {name: torch.stack([start[name] for start in own]) for name in own[0]})
    for t in range(steps):
        state, _ = step(state, torch.stack([batch(i, t) for i in range(N)]), t)
    return state


def test_equal_clocks_and_instant_links_among_all_workers_are_diloco():
    """By linearity: the workers' momenta differ, and their mean is DiLoCo's."""
    own = [starts()[0]] * N
    ours = df.settle(at_once(built(EVERYONE), own, 12 * H))
    theirs = at_once(df.diloco(loss_fn, df.sgd(0.1), df.topology("complete", N), inner_steps=H), own, 12 * H)
    torch.testing.assert_close(df.params(ours), df.params(theirs), atol=1e-12, rtol=0)


def test_an_outer_step_in_an_idle_round_is_taken_and_a_worker_that_hears_nobody_is_a_lone_one():
    idle, (init, step) = df.topologies.idle(N), built(df.topology("complete", 1))
    together = df.params(at_once(built(idle), starts(), 3 * H))
    replay = random_trace(built(idle).topology, 12 * H, 0)
    apart = df.params(replayed(built(idle), replay, starts(), batch))
    for i in range(N):
        for found, steps in ((together, 3 * H), (apart, len(replay.taken[i]) - 1)):
            state = init(starts()[i])
            for t in range(steps):
                state, _ = step(state, batch(i, t), t)
            torch.testing.assert_close(df.worker(found, i), df.params(state), atol=1e-12, rtol=0)


@pytest.mark.parametrize("topology", [ONE_PEER, DIRECTED], ids=lambda made: made.name)
def test_with_plain_outer_steps_after_every_step_it_is_asynchronous_gradient_push(topology):
    ours = at_once(built(topology, inner_steps=1, outer_learning_rate=1.0, outer_momentum=0.0), starts(), 20)
    theirs = at_once(df.asynchronous_gradient_push(loss_fn, df.sgd(0.1), topology), starts(), 20)
    torch.testing.assert_close(df.params(ours), df.params(theirs), atol=1e-14, rtol=0)
    ours, theirs = (  # each on the same trace, which has the name of its schedule
        replayed(algorithm, random_trace(algorithm.topology, 80, 0), starts(), batch)
        for algorithm in (
            built(topology, inner_steps=1, outer_learning_rate=1.0, outer_momentum=0.0),
            df.asynchronous_gradient_push(loss_fn, df.sgd(0.1), topology),
        )
    )
    torch.testing.assert_close(df.params(ours), df.params(theirs), atol=1e-13, rtol=0)


# -- mass ---------------------------------------------------------------------------------------------------------------

outer = partial(df.asynchronous_diloco, inner_steps=2)


@pytest.mark.parametrize("topology", [ONE_PEER, DIRECTED], ids=lambda made: made.name)
def test_without_gradients_mass_is_conserved_and_all_reach_the_weighted_mean(topology):
    state = conserves(topology, 2, 700, torch.float64, make=outer)
    for bucket, total in zip(state.params, sums(starts()), strict=True):
        torch.testing.assert_close(bucket, (total / N).expand_as(bucket), atol=1e-9, rtol=0)


@pytest.mark.thorough
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mass_is_conserved_over_two_thousand_events(dtype):
    """Gradient push, whose mail it is, over ten thousand."""
    conserves(ONE_PEER, 0, 2_000, dtype, make=outer, compiled="eager")


def test_what_a_narrow_wire_rounds_stays_with_the_sender():
    conserves(ONE_PEER, 1, 200, torch.float32, make=outer, wire_dtype=torch.bfloat16)


# -- ranks --------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "around",
    [
        pytest.param(df.donate, id="donated"),
        pytest.param(partial(df.compile, backend="eager"), id="compiled", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_ranks_is_replayed_bit_for_bit(around):
    assert_replayed(ONE_PEER, 120, 0.002, partial(df.asynchronous_diloco, inner_steps=H), around)


# -- recorded outer steps -----------------------------------------------------------------------------------------------


def test_recorded_nesterov_steps_on_given_progress():
    """Delayed Nesterov without delay: c = 0; a window of N merges is a round of N steps of rate 1/N."""
    recorded = RECORDED["delayed_nesterov"]
    gradients = torch.tensor(recorded["gradients"], dtype=torch.float64)
    cases = [case for case in recorded["cases"] if case["c"] == 0]
    assert [case["N"] for case in cases] == [1, 4]
    for case in cases:
        window, expected = case["N"], torch.tensor(case["x"], dtype=torch.float64)
        init, step = df.asynchronous_diloco(
            lambda x, g: (x * g).sum(),
            df.sgd(1 / window),
            df.topology("complete", 1),
            inner_steps=window,
            outer_learning_rate=recorded["eta"],
            outer_momentum=recorded["beta"],
        )
        state = init(torch.tensor(recorded["start"], dtype=torch.float64))
        for t, g in enumerate(gradients):
            state, _ = step(state, g, t)
            if (t + 1) % window == 0:
                torch.testing.assert_close(df.params(state), expected[t], atol=1e-12, rtol=0)


def test_the_recorded_synchronous_run():
    """All workers wait for all in the recorded run; here messages between all arrive before the next step."""
    recorded = RECORDED["quadratics"]
    optima = torch.tensor(recorded["optima"], dtype=torch.float64)
    algorithm = df.asynchronous_diloco(
        lambda x, c: ((x - c) ** 2).sum() / 2,
        df.sgd(recorded["gamma"]),
        EVERYONE,
        inner_steps=recorded["H"],
        outer_learning_rate=recorded["eta"],
        outer_momentum=recorded["beta"],
    )
    init, step = algorithm.init, df.simulate(algorithm.step, N)
    state, t = df.stack(init(torch.tensor(recorded["start"], dtype=torch.float64)), N), 0
    for _, x in recorded["runs"]["sync"]:
        for _ in range(recorded["H"]):
            state, t = step(state, optima, t)[0], t + 1
        expected = torch.tensor(x, dtype=torch.float64).expand(N, 2)
        torch.testing.assert_close(df.params(df.settle(state)), expected, atol=1e-12, rtol=0)


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: built(df.topology("complete", N)), "asynchronous_diloco.*averages in groups"),
        (lambda: built(df.topologies.from_shifts("shift", [{1: 1.0}], N)), "asynchronous_diloco.*self-weight of 0"),
        (lambda: built(inner_steps=0), "inner_steps=0"),
        (lambda: built(shared=lambda name, shape: True), "asynchronous_diloco.*mail carries all parameters"),
        (lambda: built(outer_learning_rate=0.0), "outer_learning_rate=0"),
        (lambda: built(outer_momentum=1.5), "outer_momentum=1.5"),
        (lambda: built(loss=df.dynamic_loss_scale(loss_fn, agree=True)), "asynchronous_diloco.*agree=False"),
    ],
)
def test_what_cannot_hold_is_refused_with_a_reason(call, words):
    with pytest.raises(ValueError, match=words):
        call()
