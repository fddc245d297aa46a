"""GASLoC, Factored Gossip DiLoCo and SparseLoCo against float64 loops written from their equations, and their laws."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

import decentfn as df
from decentfn import compressors
from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.core.stacking import over_workers
from decentfn.elastic.generation import Generation, Members
from tests.quadratics import (
    Sgd,
    batch,
    build,
    flat,
    loss,
    problem,
    random_column_stochastic,
    random_symmetric,
    run,
    start,
    static_ring,
)

N, H, LR, STEPS = 6, 4, 0.1, 40
COMPLETE = np.full((1, N, N), 1 / N)
schedules = pytest.mark.parametrize(
    "matrices", [static_ring(N), random_symmetric(N, 3, seed=1)], ids=["static", "time-varying"]
)


def agree(actual, expected, atol=1e-10):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def outer_loop(p, outer, steps=STEPS, own=H):
    """SGD in the last `own` of H steps, and then `θ = outer(k, φ, θ)`, φ the parameters at the start of round k."""
    theta = phi = p.start
    xs = [theta]
    for t in range(steps):
        theta = theta - LR * p.gradients(theta) * np.reshape(t % H >= H - np.array(own), (-1, 1))
        if (t + 1) % H == 0:
            theta = phi = outer(t // H, phi, theta)
        xs.append(theta)
    return np.stack(xs)


def gasloc_loop(p, matrices, eta, gamma, own=H, alpha=0.6):
    y_old = p.start

    def outer(k, phi, theta):
        nonlocal y_old
        y = phi + eta * (theta - phi)
        x = y + alpha * (matrices[k % len(matrices)] @ y - y) + gamma * (y - y_old)
        y_old = y
        return x

    return outer_loop(p, outer, own=own)


def factored_loop(p, matrices, eta, beta, decay=0.0):
    b = np.zeros_like(p.start)

    def outer(k, phi, theta):
        nonlocal b
        first, second = (matrices[(2 * k + j) % len(matrices)] for j in range(2))
        delta = phi - theta + decay * phi
        b = beta * b + delta
        return second @ (first @ phi - eta * (delta + beta * b))

    return outer_loop(p, outer)


def sparse_loop(p, compress, alpha, beta):
    e = np.zeros_like(p.start)

    def outer(k, phi, theta):
        nonlocal e
        e = beta * e + phi - theta
        q = np.stack([compress(row) for row in e])
        e = e - q
        return phi - alpha * q.mean(0)

    return outer_loop(p, outer)


def largest_of_each_bucket(x):
    """The largest of the two and of the three elements of the leaves."""
    q = np.zeros_like(x)
    for part in (slice(0, 2), slice(2, 5)):
        place = part.start + np.abs(x[part]).argmax()
        q[place] = x[place]
    return q


@schedules
@pytest.mark.parametrize("alpha", [0.6, 0.4])
def test_gasloc_follows_its_equation(matrices, alpha):
    p = problem(N)
    options = {"outer_learning_rate": 0.6, "outer_momentum": 0.8} | ({} if alpha == 0.6 else {"gossip_step": alpha})
    agree(
        run(build(df.gasloc, p, matrices, LR, inner_steps=H, **options), p, STEPS),
        gasloc_loop(p, matrices, 0.6, 0.8, alpha=alpha),
    )


@pytest.mark.parametrize("workers", [N, 1])
@pytest.mark.parametrize("name", ["gasloc", "noloco"])
def test_an_outer_step_in_an_idle_round_is_taken_alone(name, workers):
    """W = I, as for those whom a sample leaves out; and the topology of one worker changes nothing."""
    p, b = problem(workers), 0.0
    matrices = np.stack([np.full((workers, workers), 1 / workers), np.eye(workers)])
    topology = df.topologies.alternate(df.topology("complete", workers), df.topologies.idle(workers))

    def noloco_step(k, phi, theta):
        nonlocal b
        W = matrices[k % 2]
        b = 0.3 * b + 0.6 * W @ (theta - phi) + 0.7 * (W @ phi - phi)
        return phi + b

    if name == "noloco":
        built = df.noloco(loss, Sgd(LR), topology, inner_steps=H, alpha=0.3, beta=0.6, gamma=0.7)
        expected = outer_loop(p, noloco_step)
    else:
        built = df.gasloc(loss, Sgd(LR), topology, inner_steps=H, outer_learning_rate=0.6, outer_momentum=0.4)
        expected = gasloc_loop(p, matrices, 0.6, 0.4)
    agree(run(built, p, STEPS), expected)


def test_workers_of_gasloc_may_take_different_numbers_of_steps():
    p, own = problem(N), [4, 1, 3, 4, 2, 4]
    built = build(df.gasloc, p, static_ring(N), LR, inner_steps=own, outer_learning_rate=0.6, outer_momentum=0.8)
    agree(run(built, p, STEPS), gasloc_loop(p, static_ring(N), 0.6, 0.8, own))
    resting = df.gasloc(loss, df.adamw(0.1), df.topology("ring", N), inner_steps=own)
    state = df.simulate(resting.step, N)(start(resting, p), batch(p), 0)[0]
    counts = [leaf for leaf in trees.leaves(state.local.opt) if leaf.dtype == torch.int64]
    assert all(count.tolist() == [1, 0, 0, 1, 0, 1] for count in counts) and counts  # who rests keeps its moments
    with pytest.raises(
        ValueError, match=r"gasloc\(inner_steps=\[1, 2\]\): one number of steps for each of the 6 workers"
    ):
        build(df.gasloc, p, static_ring(N), inner_steps=[1, 2])


def test_a_bad_gradient_moves_no_worker_that_takes_its_own_steps():
    """Momentum would move it, if the step counted as one of its own alone."""
    p = problem(N)
    made = df.guard(
        df.gasloc(loss, df.sgd(0.1, momentum=0.9), df.topology("static-ring", N), inner_steps=[4, 2, 4, 4, 4, 4])
    )
    step, state = df.simulate(made.step, N), start(made, p)
    A, b = batch(p)
    state, _ = step(state, (A, b), 0)
    bad = b.clone()
    bad[2] = torch.inf
    after, _ = step(state, (A, bad), 1)
    moved = np.abs(flat(after.params) - flat(state.params)).max(1)
    assert [m > 0 for m in moved] == [True, False, False, True, True, True]


@schedules
def test_factored_gossip_diloco_follows_its_equation(matrices):
    p = problem(N)
    outer = df.sgd(0.6, momentum=0.8, nesterov=True)
    built = build(df.factored_gossip_diloco, p, matrices, LR, inner_steps=H, outer_optimizer=outer)
    agree(run(built, p, STEPS), factored_loop(p, matrices, 0.6, 0.8))


def test_the_outer_optimizer_of_factored_gossip_diloco_may_decay_some_leaves_alone():
    """In one bucket with the others, without the masks."""
    p, mask = problem(N), lambda name, shape: name == "tail"
    outer = df.sgd(0.6, momentum=0.8, nesterov=True, weight_decay=0.1, mask=mask)
    ring = df.topology("static-ring", N)
    built = df.factored_gossip_diloco(loss, Sgd(LR), ring, inner_steps=H, outer_optimizer=outer)
    decay = 0.1 * (np.arange(5) >= 2)
    agree(run(built, p, STEPS), factored_loop(p, static_ring(N), 0.6, 0.8, decay))


def test_sparse_loco_follows_its_equation():
    p = problem(N, starts_equal=True)
    options = {"outer_learning_rate": 0.9, "decay": 0.8, "compressor": compressors.top_k(k=1)}
    built = build(df.sparse_loco, p, COMPLETE, LR, inner_steps=H, **options)
    agree(run(built, p, STEPS), sparse_loop(p, largest_of_each_bucket, 0.9, 0.8))


def test_sparse_loco_of_the_workers_that_are_left_is_sparse_loco_of_as_many():
    """In the compiled form of twice as many, as after `df.survive`."""
    p = problem(2, starts_equal=True)
    options = {"inner_steps": H, "compressor": compressors.identity()}
    few = df.sparse_loco(loss, Sgd(LR), df.topology("complete", 2), **options)
    many = df.sparse_loco(loss, Sgd(LR), df.topology("complete", 4), **options)
    batch, states = (torch.tensor(p.A), torch.tensor(p.b)), [start(few, p), start(few, p)]
    left = collectives.World(collectives.Channels(replace(collectives.Identity.of(0, 1), size_at_start=2)))
    left.become(hooks=Generation(left, Members(1, (0,), (0,)), 0, HashStore()))
    for t in range(2 * H):
        states[0], _ = df.simulate(few.step, 2)(states[0], batch, t)
        with collectives.use(left):
            states[1], _ = over_workers(lambda s, b, t=t: many.step.run(s, b, torch.tensor(t)), 2, states[1], batch)
    agree(flat(states[1].params), flat(states[0].params), 1e-12)
    assert np.abs(flat(states[0].params) - p.start).max() > 0.1


@pytest.mark.parametrize("name", ["ring", "random-matching", "complete"])
def test_the_mean_of_gasloc_is_nesterov_of_torch_on_the_mean_progress(name):
    p, topology, rounds = problem(N), df.topology(name, N), 30
    xs = run(df.gasloc(loss, Sgd(LR), topology, inner_steps=H), p, rounds * H)
    mean = torch.tensor(p.start.mean(0), requires_grad=True)
    outer = torch.optim.SGD([mean], lr=0.3, momentum=0.7, nesterov=True)
    for k in range(rounds):
        last = xs[(k + 1) * H - 1]  # before the round's last inner step
        progress = last - LR * p.gradients(last) - xs[k * H]
        mean.grad = -torch.tensor(progress.mean(0))
        outer.step()
        agree(xs[(k + 1) * H].mean(0), mean.detach().numpy(), 1e-12)
    assert np.ptp(xs[-1], 0).max() > 1e-3 or name == "complete"


@schedules
def test_gasloc_of_one_plain_step_is_adapt_then_combine(matrices):
    p = problem(N)
    plain = build(df.gasloc, p, matrices, LR, inner_steps=1, outer_learning_rate=1.0, outer_momentum=0.0, gossip_step=1)
    agree(run(plain, p), run(build(df.adapt_then_combine, p, matrices, LR), p), 1e-12)


def diloco(p, **options):
    return run(build(df.diloco, p, COMPLETE, LR, inner_steps=H, **options), p, STEPS)


def test_gasloc_on_complete_is_diloco_without_momentum():
    """At a gossip step of 1; its momentum is each worker's own, DiLoCo's is common."""
    p = problem(N, starts_equal=True)
    plain = {"outer_learning_rate": 0.6, "outer_momentum": 0.0}
    gasloc = df.gasloc(loss, Sgd(LR), df.topology("complete", N), inner_steps=H, gossip_step=1, **plain)
    agree(run(gasloc, p, STEPS), diloco(p, **plain), 1e-12)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_the_mean_of_gasloc_on_complete_is_diloco_if_workers_curve_alike(alpha):
    """Then the mean gradient is that of the mean, and for every gossip step the mean follows DiLoCo, momentum included."""
    p = problem(N, starts_equal=True)
    p = p._replace(A=np.tile(p.A[:1], (N, 1, 1)))
    same = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    gasloc = df.gasloc(loss, Sgd(LR), df.topology("complete", N), inner_steps=H, gossip_step=alpha, **same)
    agree(run(gasloc, p, STEPS).mean(1), diloco(p, **same).mean(1), 1e-12)


@pytest.mark.parametrize("name", ["one-peer-exp", "random-matching", "base", "static-exp"])
def test_gasloc_refuses_a_gossip_step_that_diverges(name):
    """8 workers: by 5% to 24% per round."""
    with pytest.raises(
        ValueError, match=rf"gasloc\(gossip_step=1, .*on '{name}' disagreement grows by 0\.\d+ .*gossip_step"
    ):
        df.gasloc(loss, Sgd(LR), df.topology(name, 8), outer_momentum=0.9, gossip_step=1)


def test_factored_gossip_diloco_with_an_idle_and_a_complete_mix_is_diloco():
    p = problem(N, starts_equal=True)
    topology = df.topologies.alternate(df.topologies.idle(N), df.topology("complete", N))
    agree(run(df.factored_gossip_diloco(loss, Sgd(LR), topology, inner_steps=H), p, STEPS), diloco(p), 1e-12)


def test_sparse_loco_that_sends_everything_is_diloco_without_momentum():
    p = problem(N, starts_equal=True)
    built = build(df.sparse_loco, p, COMPLETE, LR, inner_steps=H, decay=0.0, compressor=compressors.identity())
    agree(run(built, p, STEPS), diloco(p, outer_learning_rate=1.0, outer_momentum=0.0), 1e-12)


@pytest.mark.thorough
def test_the_papers_compressor_of_sparse_loco_learns():
    p = problem(N, starts_equal=True)
    xs = run(build(df.sparse_loco, p, COMPLETE, LR, inner_steps=H), p, 400)
    A, b = p.A.reshape(-1, 5), p.b.reshape(-1)
    optimum = np.linalg.lstsq(A, b, rcond=None)[0]
    assert np.linalg.norm(xs[-1].mean(0) - optimum) < 0.2 * np.linalg.norm(xs[0].mean(0) - optimum)


def test_factored_gossip_diloco_without_its_second_mix_never_waits_and_takes_its_outer_step():
    p, ring = problem(N), static_ring(N)
    topology = df.topologies.alternate(df.topologies.from_matrices("ring", ring), df.topologies.idle(N))
    outer = df.sgd(0.6, momentum=0.8, nesterov=True)
    algorithm = df.factored_gossip_diloco(loss, Sgd(LR), topology, inner_steps=H, outer_optimizer=outer)
    agree(run(algorithm, p, STEPS), factored_loop(p, np.stack([ring[0], np.eye(N)]), 0.6, 0.8))


def test_factored_gossip_diloco_on_base_reaches_the_exact_mean_after_its_period():
    p = problem(6)
    algorithm = df.factored_gossip_diloco(loss, Sgd(0.0), df.topology("base", 6), inner_steps=1)  # of period 4
    agree(run(algorithm, p, 2)[-1], np.tile(p.start.mean(0), (6, 1)))


def orthogonal(m):
    x = m.T if m.shape[0] > m.shape[1] else m
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if m.shape[0] > m.shape[1] else x


def test_diloco_of_muon_is_muloco_on_matrices_in_common_buckets():
    """Two matrices share a bucket; each is orthogonalized as a whole (Thérien et al., 2025; arXiv:2505.23725)."""
    n, rate, draw = 3, 0.02, np.random.default_rng(0)
    shapes, steps = {"tall": (5, 2), "wide": (3, 4)}, 3 * H
    target = {name: draw.normal(size=(n, *shape)) for name, shape in shapes.items()}
    first = {name: draw.normal(size=shape) for name, shape in shapes.items()}

    def distance(params, batch):
        return sum(((params[name] - batch[name]) ** 2).sum() for name in shapes)

    init, step = df.diloco(distance, df.transforms.muon(rate), df.topology("complete", n), inner_steps=H)
    state = df.stack(init({name: torch.tensor(x) for name, x in first.items()}), n)
    assert len(state.params) == 1
    for t in range(steps):
        state, _ = df.simulate(step, n)(state, {name: torch.tensor(x) for name, x in target.items()}, t)
    for name, (rows, columns) in shapes.items():
        phi, b = first[name], 0.0
        theta, m = np.stack([phi] * n), np.zeros((n, rows, columns))
        for t in range(steps):
            g = 2 * (theta - target[name])
            m = 0.95 * m + 0.05 * g
            d = np.stack([orthogonal(x) for x in 0.05 * g + 0.95 * m])
            theta = theta - rate * (np.sqrt(max(1, rows / columns)) * d + 0.1 * theta)
            if (t + 1) % H == 0:
                delta = phi - theta.mean(0)
                b = 0.9 * b + delta
                phi = phi - 0.7 * (delta + 0.9 * b)
                theta = np.stack([phi] * n)
        agree(state.params.tree()[name].numpy(), theta)


def test_the_outer_optimizer_may_be_any_transform():
    p = problem(N, starts_equal=True)
    topology = df.topologies.alternate(df.topologies.idle(N), df.topology("complete", N))
    algorithm = df.factored_gossip_diloco(
        loss, Sgd(LR), topology, inner_steps=H, outer_optimizer=df.sgd(0.5, momentum=0.6)
    )
    phi = torch.tensor(p.start[0], requires_grad=True)
    outer = torch.optim.SGD([phi], lr=0.5, momentum=0.6)
    for _ in range(STEPS // H):
        theta = np.repeat(phi.detach().numpy()[None], N, 0)
        for _ in range(H):
            theta = theta - LR * p.gradients(theta)
        phi.grad = phi.detach() - torch.tensor(theta.mean(0))
        outer.step()
    agree(run(algorithm, p, STEPS)[-1], np.tile(phi.detach().numpy(), (N, 1)), 1e-12)


def test_with_params_keeps_the_outer_optimizers_learning_rate():
    """It is in the state that restarts at 0, and with a rate of 0 every round would return to its start."""
    p, elsewhere = problem(N, seed=0, starts_equal=True), problem(N, seed=1)
    algorithm = df.factored_gossip_diloco(loss, Sgd(LR), df.topology("complete", N), inner_steps=H)
    first = start(algorithm, p)
    put = df.with_params(start(algorithm, elsewhere), df.params(first))
    step, ends = df.simulate(algorithm.step, N), []
    for state in (first, put):
        for t in range(2 * H):
            state, _ = step(state, batch(p), t)
        ends.append(flat(state.params))
    agree(ends[1], ends[0], 0)
    assert abs(ends[0] - p.start).max() > 0.01


def test_preconditions_say_what_to_do():
    p = problem(4)
    for algorithm in (df.gasloc, df.factored_gossip_diloco):
        name = algorithm.__name__
        with pytest.raises(ValueError, match=rf"{name}.*column-stochastic.*stochastic_gradient_push"):
            build(algorithm, p, random_column_stochastic(4, 1, seed=0))
    with pytest.raises(ValueError, match=r"gasloc\(outer_momentum=2.0\)"):
        build(df.gasloc, p, static_ring(4), outer_momentum=2.0)
    with pytest.raises(ValueError, match=r"gasloc\(gossip_step=0\): α is in \(0, 1\]"):
        build(df.gasloc, p, static_ring(4), gossip_step=0)
    with pytest.raises(ValueError, match=r"factored_gossip_diloco\(outer_optimizer\).*init"):
        build(df.factored_gossip_diloco, p, static_ring(4), outer_optimizer=0.7)
    with pytest.raises(ValueError, match=r"point along the gradient"):
        build(df.factored_gossip_diloco, p, static_ring(4), outer_optimizer=df.transforms.trace(0.9))
    with pytest.raises(ValueError, match=r"sparse_loco\(inner_steps=0\)"):
        build(df.sparse_loco, p, static_ring(4), inner_steps=0)
    with pytest.raises(ValueError, match=r"sparse_loco\(wire_dtype=.*compressor"):
        build(df.sparse_loco, p, static_ring(4), wire_dtype=torch.bfloat16)
