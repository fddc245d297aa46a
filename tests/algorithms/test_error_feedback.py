"""Compressed messages with error feedback in outer methods, against float64 loops written from the equations."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn import compressors as C
from decentfn.algorithms import outer
from decentfn.core import trees
from decentfn.testing.ranks import on_kept_ranks
from tests.quadratics import Sgd, batch, build, flat, loss, problem, run, start, states, static_ring

N, H, LR, STEPS = 6, 4, 0.1, 40
OTHERS = {
    "diloco": {},
    "slowmo": {},
    "streaming_diloco": {"num_fragments": 2, "delay": 1},
    "streaming_diloco, late": {"num_fragments": 2, "delay": 3},
    "decoupled_diloco": {"num_fragments": 2},
    "noloco": {},
    "gasloc": {},
    "factored_gossip_diloco": {},
}
COMPRESSORS = [
    C.quantize(2),
    *(
        pytest.param(c, marks=pytest.mark.thorough)
        for c in (
            C.quantize(8),
            C.quantize(4),
            C.quantize(4, stochastic=True),
            C.top_k(0.3),
            C.chunk_top_k(1),
            C.sign(),
        )
    ),
]
everyone = pytest.mark.parametrize("name", OTHERS)
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: c.name)


def built(name, p, **options):
    function = getattr(df, name.partition(",")[0])
    return build(function, p, static_ring(N), LR, **{"inner_steps": H} | OTHERS[name] | options)


def largest(e, k=1):
    """top_k(k) of the buckets, which are the leaves of 2 and 3 elements."""
    q = np.zeros_like(e)
    for row, values in zip(q, e, strict=True):
        for leaf in (slice(0, 2), slice(2, 5)):
            kept = leaf.start + np.abs(values[leaf]).argsort()[-k:]
            row[kept] = values[kept]
    return q


@everyone
def test_the_identity_is_the_method_without_a_compressor_bit_for_bit(name):
    p = problem(N, starts_equal=True)
    plain = run(built(name, p), p, STEPS)
    np.testing.assert_array_equal(run(built(name, p, compressor=C.identity(), error_decay=0.5), p, STEPS), plain)


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_compressed_diloco_follows_its_equation(decay):
    p = problem(N, starts_equal=True)
    theta, phi, b, e, xs = p.start, p.start, np.zeros_like(p.start), np.zeros_like(p.start), [p.start]
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        if (t + 1) % H == 0:
            e = decay * e + phi - theta
            q = largest(e)
            e, delta = e - q, q.mean(0)
            b = 0.8 * b + delta
            theta = phi = phi - 0.6 * (delta + 0.8 * b)
        xs.append(theta)
    outer = {"outer_learning_rate": 0.6, "outer_momentum": 0.8}
    algorithm = built("diloco", p, compressor=C.top_k(k=1), error_decay=decay, **outer)
    np.testing.assert_allclose(run(algorithm, p, STEPS), np.stack(xs), rtol=0, atol=1e-10)


def test_compressed_slowmo_follows_its_equation():
    p, W = problem(N, starts_equal=True), static_ring(N)[0]
    x = x0 = p.start
    u, e, xs = np.zeros_like(x), np.zeros_like(x), [x]
    for t in range(STEPS):
        x = x - LR * p.gradients(x)
        if (t + 1) % H == 0:
            e = e + x0 - x
            q = largest(e)
            e, u = e - q, 0.6 * u + q.mean(0)
            x = x0 = x0 - 0.9 * u
        else:
            x = W @ x
        xs.append(x)
    algorithm = built("slowmo", p, compressor=C.top_k(k=1), alpha=0.9, beta=0.6)
    np.testing.assert_allclose(run(algorithm, p, STEPS), np.stack(xs), rtol=0, atol=1e-10)


def test_compressed_factored_gossip_diloco_follows_its_equation():
    """Rounds alternate between a ring and pairs; each of the two payloads has an error of its own."""
    p = problem(N)
    pairs = np.kron(np.eye(N // 2), np.full((2, 2), 0.5))
    matrices = np.stack([static_ring(N)[0], pairs])
    theta = phi = p.start
    (b, first, second), xs = (np.zeros_like(p.start) for _ in range(3)), [p.start]
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        if (t + 1) % H == 0:
            b = 0.8 * b + phi - theta
            v = -0.6 * (phi - theta + 0.8 * b)
            first = 0.9 * first + phi
            q = largest(first, 2)
            y, first = phi + (matrices[0] - np.eye(N)) @ q + v, first - q
            second = 0.9 * second + y
            q = largest(second, 2)
            theta = phi = y + (matrices[1] - np.eye(N)) @ q
            second = second - q
        xs.append(theta)
    outer = df.sgd(0.6, momentum=0.8, nesterov=True)
    options = {"outer_optimizer": outer, "compressor": C.top_k(k=2), "error_decay": 0.9}
    algorithm = build(df.factored_gossip_diloco, p, matrices, LR, inner_steps=H, **options)
    np.testing.assert_allclose(run(algorithm, p, STEPS), np.stack(xs), rtol=0, atol=1e-10)


def test_mail_is_not_compressed_with_a_reason():
    with pytest.raises(
        TypeError, match=r"asynchronous_diloco\(compressor=.*not compressed.*wire_dtype.*diloco compress"
    ):
        df.asynchronous_diloco(loss, Sgd(LR), df.topology("one-peer-exp", 4), compressor=C.quantize(8))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_compressed_streaming_diloco_follows_its_equation(delay):
    """One fragment: compressed DiLoCo whose outer gradient is applied later."""
    p = problem(N, starts_equal=True)
    theta, phi, b, e = p.start, p.start, np.zeros_like(p.start), np.zeros_like(p.start)
    launched, xs = {}, [p.start]
    for step in range(1, STEPS + 1):
        theta = theta - LR * p.gradients(theta)
        if step % H == 0:
            e = 0.9 * e + phi - theta
            launched[step] = largest(e)
            e = e - launched[step]
        if step - delay in launched:
            delta = launched[step - delay].mean(0)
            b = 0.8 * b + delta
            phi = phi - 0.6 * (delta + 0.8 * b)
            theta = 0.75 * phi + 0.25 * theta
        xs.append(theta)
    options = {"outer_learning_rate": 0.6, "outer_momentum": 0.8, "alpha": 0.25, "num_fragments": 1, "delay": delay}
    algorithm = built("streaming_diloco", p, compressor=C.top_k(k=1), error_decay=0.9, **options)
    np.testing.assert_allclose(run(algorithm, p, STEPS), np.stack(xs), rtol=0, atol=1e-10)


def test_compressed_decoupled_diloco_of_one_fragment_is_compressed_diloco():
    p, options = problem(N, starts_equal=True), {"compressor": C.top_k(k=1), "error_decay": 0.9}
    expected = run(built("diloco", p, **options), p, STEPS)
    found = run(built("decoupled_diloco", p, num_fragments=1, **options), p, STEPS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@each_compressor
@pytest.mark.parametrize("name", ["diloco", "slowmo", "decoupled_diloco", "streaming_diloco"])
def test_what_was_applied_and_what_is_left_are_all_that_was_learned(name, compressor):
    """Σ over workers, for every compressor, with a plain outer step of rate 1: φ₀ - φ + mean e = Σ mean Δ."""
    p = problem(N, starts_equal=True)
    plain = {"alpha": 1.0, "beta": 0.0} if name == "slowmo" else {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    late = {"delay": 0, "alpha": 0.0} if name == "streaming_diloco" else {}
    algorithm = built(name, p, compressor=compressor, **plain, **late)
    history, learned = states(algorithm, p, STEPS), 0.0
    outer = (lambda s: flat(s.memory.x0)) if name == "slowmo" else (lambda s: flat(s.memory.phi))
    for before, after in zip(history, history[1:], strict=False):
        x = flat(before.params)
        trained = x - LR * p.gradients(x)
        due = np.ptp(flat(after.params), 0) == 0  # elements of a fragment that was merged
        learned = learned + np.where(due, (outer(before) - trained).mean(0), 0.0)
        applied = (outer(history[0]) - outer(after)).mean(0)
        np.testing.assert_allclose(applied + flat(after.memory.error).mean(0), learned, rtol=0, atol=1e-12)
    assert np.abs(learned).max() > 0.1


@pytest.mark.parametrize("name", ["noloco", "gasloc", "factored_gossip_diloco"])
@pytest.mark.parametrize("compressor", [C.quantize(8), C.quantize(4), C.cast(torch.bfloat16)], ids=lambda c: c.name)
def test_the_mean_does_not_depend_on_the_compressor_of_messages_to_peers(name, compressor):
    p = problem(N)
    p = p._replace(A=np.tile(p.A[:1], (N, 1, 1)))  # so that the mean gradient is that of the mean
    found, plain = (run(built(name, p, **options), p, STEPS) for options in ({"compressor": compressor}, {}))
    np.testing.assert_allclose(found.mean(1), plain.mean(1), rtol=0, atol=1e-11)
    assert np.abs(found - plain).max() > 1e-6


@pytest.mark.parametrize("schedule", ["complete", "base"])
@pytest.mark.parametrize("name", ["noloco", "gasloc", "factored_gossip_diloco"])
def test_groups_get_compressed_values_as_messages(name, schedule):
    """A compressor that loses nothing, and has an error and messages all the same, is the method without one."""
    p, topology, found = problem(N), df.topology(schedule, N), []
    for compressor in (None, C.cast(torch.float64)):
        made = getattr(df, name)(loss, Sgd(LR), topology, inner_steps=H, bucket_mb=1e-9, compressor=compressor)
        found.append(run(made, p, STEPS))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["noloco", "gasloc", "factored_gossip_diloco"])
def test_a_peer_refuses_a_compressor_that_leaves_parameters_out(name):
    algorithm = built(name, problem(N), compressor=C.sign())
    with pytest.raises(ValueError, match=rf"{name}\(compressor=sign.*δ >= 1/2.*quantize\(bits=8\)"):
        algorithm.init({"head": torch.zeros(8, 1), "tail": torch.zeros(8)})


@pytest.mark.parametrize("name", ["noloco", "gasloc", "factored_gossip_diloco"])
def test_messages_to_peers_need_no_table_of_all_pairs(name, monkeypatch):
    def refused(num_workers):
        raise AssertionError(f"{name} made a table of {num_workers}² messages")

    monkeypatch.setattr(outer, "all_to_all", refused)
    built(name, problem(N), compressor=C.quantize(8))


@pytest.mark.parametrize("name", ["diloco", "slowmo", "streaming_diloco", "decoupled_diloco"])
def test_outer_parameters_stay_bit_for_bit_equal_with_a_compressor(name):
    p = problem(N, starts_equal=True)
    for state in states(built(name, p, compressor=C.quantize(2)), p, STEPS):
        outer = flat(state.memory.x0 if name == "slowmo" else state.memory.phi)
        np.testing.assert_array_equal(outer, np.tile(outer[:1], (N, 1)))


@pytest.mark.parametrize(
    "how", [{"compressor": C.quantize(4)}, {"wire_dtype": torch.bfloat16}], ids=["4 bits", "bfloat16"]
)
@pytest.mark.parametrize("name", ["diloco", "slowmo", "streaming_diloco"])
def test_workers_that_send_progress_start_equal(name, how):
    made = getattr(df, name)(loss, Sgd(LR), df.topology("ring", 2), inner_steps=H, **how)

    def begin(rank):
        made.init({"head": torch.full((2, 1), float(rank)), "tail": torch.zeros(3)})

    with pytest.raises(Exception, match=r"init\(params"):
        on_kept_ranks(2, begin)


def test_a_late_worker_sends_nothing_and_keeps_its_error():
    p = problem(N, starts_equal=True)
    algorithm = built(
        "decoupled_diloco", p, num_fragments=1, compressor=C.quantize(2), arrives=lambda t, worker: worker != 1
    )
    history = states(algorithm, p, STEPS)
    assert all(flat(state.memory.error)[1].any() == 0 for state in history)
    assert all(flat(history[-1].memory.error)[i].any() for i in (0, 2, 3, 4, 5))
    outer = flat(history[-1].memory.phi)
    np.testing.assert_array_equal(outer, np.tile(outer[:1], (N, 1)))


def test_weights_and_a_compressor_average_the_weighted_progress():
    """Weights 0 and 1: DiLoCo of those with 1."""
    p = problem(N, starts_equal=True)

    def weighed(x, data):
        *data, w = data
        return loss(x, data), w

    init_step = df.diloco(
        weighed,
        Sgd(LR),
        df.topology("ring", N),
        inner_steps=H,
        bucket_mb=1e-9,
        compressor=C.top_k(k=1),
        weight=lambda w: w,
    )
    few = p._replace(A=p.A[:4], b=p.b[:4], start=p.start[:4])
    expected = run(build(df.diloco, few, static_ring(4), LR, inner_steps=H, compressor=C.top_k(k=1)), few, STEPS)
    step, state = df.simulate(init_step.step, N), start(init_step, p)
    w = torch.tensor([1.0] * 4 + [0.0] * 2, dtype=torch.float64)
    for t in range(STEPS):
        state, _ = step(state, (*batch(p), w), t)
        if (t + 1) % H == 0:
            np.testing.assert_allclose(flat(state.params)[:4], expected[t + 1], rtol=0, atol=1e-12)


def test_a_restart_clears_the_error_and_the_momentum():
    p = problem(N, starts_equal=True)
    state = states(built("diloco", p, compressor=C.top_k(k=1)), p, H)[-1]
    assert flat(state.memory.error).any()
    fresh = df.with_params(state, df.params(state))
    assert not flat(fresh.memory.error).any() and not flat(fresh.memory.b).any()
    np.testing.assert_array_equal(flat(fresh.memory.phi), flat(state.params))


@everyone
def test_a_compressor_and_a_wire_dtype_are_refused_together(name):
    with pytest.raises(ValueError, match=rf"{name.partition(',')[0]}\(wire_dtype=.*compressors\.cast"):
        built(name, problem(N), compressor=C.quantize(4), wire_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"error_decay=2.*\[0, 1\]"):
        built(name, problem(N), compressor=C.quantize(4), error_decay=2)


# -- outer optimizers -------------------------------------------------------------------------------------------------


def test_the_outer_optimizer_is_diloco_by_default():
    p = problem(N, starts_equal=True)
    outer = df.sgd(0.7, momentum=0.9, nesterov=True)
    found = run(built("diloco", p, outer_optimizer=outer), p, STEPS)
    np.testing.assert_allclose(found, run(built("diloco", p), p, STEPS), rtol=0, atol=1e-13)


def test_schedules_of_the_outer_optimizer_count_outer_steps():
    p = problem(N, starts_equal=True)
    theta, phi, xs, k = p.start, p.start, [p.start], 0
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        if (t + 1) % H == 0:
            theta = phi = phi - (0.1 + 0.05 * k) * (phi - theta).mean(0)
            k += 1
        xs.append(theta)
    outer = df.sgd(lambda count: 0.1 + 0.05 * count.double())
    found = run(built("diloco", p, outer_optimizer=outer), p, STEPS)
    np.testing.assert_allclose(found, np.stack(xs), rtol=0, atol=1e-10)


def test_an_outer_optimizer_is_resized_and_restarted_and_keeps_its_rate():
    p = problem(N, starts_equal=True)
    state = states(built("diloco", p, outer_optimizer=df.adam(0.05)), p, 2 * H)[-1]
    fresh = df.with_params(state, df.params(state))
    rates = [[float(x.max()) for x in trees.leaves(s.memory.b) if x.shape == (N,)] for s in (state, fresh)]
    assert 0.05 in rates[0] and 0.05 in rates[1]


def test_rate_and_momentum_beside_an_outer_optimizer_are_refused():
    with pytest.raises(ValueError, match=r"diloco\(outer_learning_rate=0\.5.*its own rate and momentum"):
        built("diloco", problem(N), outer_optimizer=df.sgd(0.7), outer_learning_rate=0.5)
