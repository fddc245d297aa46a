"""Outer optimizers of DiLoCo, whole and in fragments, with late workers and few bits, against float64 loops."""

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn import compressors as C
from decentfn.core import trees
from tests.algorithms.test_decoupled_diloco import FRAGMENTS, H, P, is_in_time, tokens_of
from tests.algorithms.test_weighted_means import LR, STEPS, N, built, ends_on_ranks, run, tokens_at
from tests.quadratics import build, loss, problem, start, states, static_ring
from tests.quadratics import run as run_plain

PIECES = [[[0], [2, 3]], [[1], [4]]]
"""Of each fragment: its part of each bucket, which is compressed by itself."""


def nesterov(eta, beta):
    b = 0.0

    def step(phi, delta):
        nonlocal b
        b = beta * b + delta
        return phi - eta * (delta + beta * b)

    return step


def adam(rate):
    m = v = k = 0

    def step(phi, delta):
        nonlocal m, v, k
        m, v, k = 0.9 * m + 0.1 * delta, 0.999 * v + 0.001 * delta**2, k + 1
        return phi - rate * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)

    return step


def scheduled():
    k, m = 0, 0.0

    def step(phi, delta):
        nonlocal k, m
        m, k = 0.5 * m + delta, k + 1
        return phi - (0.1 + 0.05 * (k - 1)) * m

    return step


def clipped():
    return lambda phi, delta: phi - 0.5 * delta * min(1, 0.2 / (np.linalg.norm(delta) + 1e-6))


OUTERS = {
    "norm of the fragment": (clipped, {"outer_optimizer": df.chain(df.clip_by_global_norm(0.2), df.sgd(0.5))}),
    "no momentum": (lambda: nesterov(0.6, 0.0), {"outer_learning_rate": 0.6, "outer_momentum": 0.0}),
    "full momentum": (lambda: nesterov(0.1, 1.0), {"outer_learning_rate": 0.1, "outer_momentum": 1.0}),
    "Adam": (lambda: adam(0.05), {"outer_optimizer": df.adam(0.05)}),
    "schedule": (scheduled, {"outer_optimizer": df.sgd(lambda k: 0.1 + 0.05 * k.double(), momentum=0.5)}),
}
each_outer = pytest.mark.parametrize("outer", OUTERS)
each_bits = pytest.mark.parametrize(
    "bits", [None, 2, *(pytest.param(b, marks=pytest.mark.thorough) for b in (4, 8))], ids="{} bits".format
)


def quantizer(bits):
    return None if bits is None else C.quantize(bits)


def coded(bits, values):
    """`quantize(bits)` of each worker's row from its definition: the nearest of 2L + 1 levels up to the largest magnitude."""
    levels, largest = 2 ** (bits - 1) - 1, np.abs(values).max(1, keepdims=True)
    return np.round(values / np.where(largest > 0, largest, 1) * levels) / levels * largest


class Errors:
    """Error feedback of each worker, by fragment."""

    def __init__(self, bits, n):
        self.bits, self.e = bits, np.zeros((n, 5))

    def sent(self, f, x, sends=slice(None)):
        """What arrives of x, a fragment; rows outside of `sends` are zeros, and their errors stay."""
        if self.bits is None:
            return x
        q, full = np.zeros_like(self.e), np.zeros_like(self.e)
        full[:, FRAGMENTS[f]] = x
        for piece in PIECES[f]:
            fed = (self.e + full)[sends][:, piece]
            q[np.ix_(np.arange(len(q))[sends], piece)] = coded(self.bits, fed)
            self.e[np.ix_(np.arange(len(q))[sends], piece)] = fed - q[sends][:, piece]
        return q[:, FRAGMENTS[f]]


def is_due(step, f):
    return step > 0 and step % H == (f + 1) * H // P % H


def decoupled_loop(p, make, bits):
    theta, phi = p.start.copy(), p.start.copy()
    outers, errors = [make() for _ in range(P)], Errors(bits, N)
    tokens, steps, xs = np.zeros((P, N)), np.zeros((P, N)), [p.start]
    for t in range(STEPS):
        theta = theta - LR * p.gradients(theta)
        tokens, steps = tokens + tokens_of(t), steps + (tokens_of(t) > 0)
        here = np.array([bool(is_in_time(torch.tensor(t), torch.tensor(i))) for i in range(N)])
        for f, mine in enumerate(FRAGMENTS):
            if is_due(t + 1, f) and ((steps[f] > 0) & here).sum() >= 2:
                w = here * tokens[f] ** 2 / np.maximum(steps[f], 1)
                x = (w / w.mean())[:, None] * (phi[:, mine] - theta[:, mine])
                phi[:, mine] = outers[f](phi[0, mine], errors.sent(f, x, w > 0).mean(0))
                theta[np.ix_(here, mine)] = phi[np.ix_(here, mine)]
                tokens[f, here], steps[f, here] = 0, 0
        xs.append(theta.copy())
    return np.stack(xs)


def streaming_loop(p, make, bits, delay, alpha=0.25):
    n = len(p.start)
    theta, phi, launched, xs = p.start.copy(), p.start.copy(), {}, [p.start]
    outers, errors = [make() for _ in range(P)], Errors(bits, n)
    for step in range(1, STEPS + 1):
        theta = theta - LR * p.gradients(theta)
        for f, mine in enumerate(FRAGMENTS):
            if is_due(step, f):
                launched[f, step] = errors.sent(f, phi[:, mine] - theta[:, mine]).mean(0)
        for f, mine in enumerate(FRAGMENTS):
            if (f, step - delay) in launched:
                phi[:, mine] = outers[f](phi[0, mine], launched[f, step - delay])
                theta[:, mine] = (1 - alpha) * phi[:, mine] + alpha * theta[:, mine]
        xs.append(theta.copy())
    return np.stack(xs)


@each_outer
@each_bits
def test_decoupled_diloco_with_late_and_absent_workers_follows_its_equation(outer, bits):
    p, (make, options) = problem(N, starts_equal=True), OUTERS[outer]
    how = {"inner_steps": H, "num_fragments": P, "quorum": 2, "arrives": is_in_time, "compressor": quantizer(bits)}
    made = built(df.decoupled_diloco, **how, **options)
    np.testing.assert_allclose(run(made, p, tokens_of), decoupled_loop(p, make, bits), rtol=0, atol=1e-10)


@each_outer
@each_bits
@pytest.mark.parametrize("delay", [*(pytest.param(delay, marks=pytest.mark.slow) for delay in (0, 1)), 3])
def test_streaming_diloco_follows_its_equation(outer, bits, delay):
    p, (make, options) = problem(N, starts_equal=True), OUTERS[outer]
    how = {"inner_steps": H, "num_fragments": P, "delay": delay, "alpha": 0.25, "compressor": quantizer(bits)}
    made = build(df.streaming_diloco, p, static_ring(N), LR, **how, **options)
    np.testing.assert_allclose(run_plain(made, p, STEPS), streaming_loop(p, make, bits, delay), rtol=0, atol=1e-10)


FORMS = {
    "diloco": {},
    "streaming_diloco": {"num_fragments": P},
    "streaming_diloco, late": {"num_fragments": P, "delay": 3},
    "decoupled_diloco": {"num_fragments": P},
}
BY_NAME = df.transforms.partition(
    {True: df.adam(0.05), False: OUTERS["schedule"][1]["outer_optimizer"]}, lambda name, shape: name == "head"
)
BY_LEAF = df.transforms.partition(
    {True: df.transforms.muon(0.05), False: df.adam(0.05)}, lambda name, shape: len(shape) == 2
)
TAKEN = {"diloco": 3, "streaming_diloco": [3, 2], "streaming_diloco, late": [2, 2], "decoupled_diloco": [3, 3]}
"""Outer steps of each fragment in 3 H steps."""
each_form = pytest.mark.parametrize("name", FORMS)


def formed(name, p, **options):
    function = getattr(df, name.partition(",")[0])
    return build(function, p, static_ring(len(p.start)), LR, **{"inner_steps": H} | FORMS[name] | options)


@each_form
def test_nesterov_as_a_pair_is_the_default_bit_for_bit(name):
    p, pair = problem(N, starts_equal=True), df.sgd(0.7, momentum=0.9, nesterov=True)
    found, default = (run_plain(formed(name, p, **o), p, STEPS) for o in ({"outer_optimizer": pair}, {}))
    np.testing.assert_array_equal(found, default)


def test_leaves_may_have_outer_optimizers_of_their_own():
    def by_name():
        of_head, of_tail = adam(0.05), scheduled()
        return lambda phi, delta: np.concatenate([of_head(phi[:1], delta[:1]), of_tail(phi[1:], delta[1:])])

    p = problem(N, starts_equal=True)
    made = formed("streaming_diloco, late", p, alpha=0.25, outer_optimizer=BY_NAME)
    np.testing.assert_allclose(run_plain(made, p, STEPS), streaming_loop(p, by_name, None, 3), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["streaming_diloco", "decoupled_diloco"])
def test_one_fragment_is_diloco_with_the_same_outer_optimizer(name):
    """Of one fragment a pair may also see whole leaves."""
    p, options = problem(N, starts_equal=True), {"delay": 0, "alpha": 0.0} if name == "streaming_diloco" else {}
    for pair in (df.adam(0.05), BY_LEAF):
        expected = run_plain(formed("diloco", p, outer_optimizer=pair), p, STEPS)
        found = run_plain(formed(name, p, num_fragments=1, outer_optimizer=pair, **options), p, STEPS)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@each_form
def test_an_outer_optimizers_rates_stay_and_its_counts_begin_again(name):
    p = problem(N, starts_equal=True)
    state = states(formed(name, p, outer_optimizer=df.adam(0.05)), p, 3 * H)[-1]
    x = trees.map(lambda leaf: leaf[:1].expand_as(leaf).clone(), df.params(state))
    for its, taken in ((state, TAKEN[name]), (df.with_params(state, x), 0)):
        numbers = [leaf for leaf in trees.leaves(its.memory.b) if leaf.shape == (N, *np.shape(TAKEN[name]))]
        counts = [number for number in numbers if not number.is_floating_point()]
        assert counts and all((count == torch.as_tensor(taken)).all() for count in counts)
        assert any((number == 0.05).all() for number in numbers)


@each_form
def test_three_workers_continue_with_the_outer_state_of_four(name, tmp_path):
    four, three = problem(N, starts_equal=True), problem(3, starts_equal=True)
    make = lambda p: formed(name, p, outer_optimizer=df.adam(0.05), compressor=C.quantize(4))  # noqa: E731
    state = states(make(four), four, 3 * H)[-1]
    resized = df.resize(state, make(three))
    for old, new in zip(trees.leaves(state.memory.b), trees.leaves(resized.memory.b), strict=True):
        expected = old.mean(0) if old.is_floating_point() else old.amax(0)
        torch.testing.assert_close(new, expected.expand_as(new), rtol=0, atol=1e-15)
    df.checkpoint.save(tmp_path, state, 3 * H)
    again = df.checkpoint.restore(tmp_path, start(make(four), four)).state
    for old, new in zip(trees.leaves(state), trees.leaves(again), strict=True):
        assert torch.equal(old, new)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "around", [df.donate, lambda step: df.compile(step, backend="aot_eager")], ids=["donated", "compiled"]
)
def test_ranks_take_the_simulated_workers_outer_steps(around):
    p = problem(N, starts_equal=True)
    made = built(
        df.decoupled_diloco,
        inner_steps=H,
        num_fragments=P,
        arrives=is_in_time,
        compressor=C.quantize(4),
        outer_optimizer=df.adam(0.05),
    )
    found = ends_on_ranks(made, p, around(made.step), tokens_at)
    np.testing.assert_allclose(found, run(made, p)[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("function", [df.streaming_diloco, df.decoupled_diloco], ids=lambda f: f.__name__)
def test_what_a_fragment_cannot_take_is_refused(function):
    make = lambda **options: function(loss, df.sgd(0.1), df.topology("ring", N), **options)  # noqa: E731
    with pytest.raises(ValueError, match=rf"{function.__name__}\(outer_optimizer\).*parts of leaves.*num_fragments=1"):
        make(outer_optimizer=BY_LEAF).init({"head": torch.zeros(2, 2), "tail": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"outer_momentum=0\.5.*its own rate and momentum"):
        make(outer_optimizer=df.sgd(0.7), outer_momentum=0.5)
    with pytest.raises(ValueError, match=rf"{function.__name__}\(outer_optimizer\).*init"):
        make(outer_optimizer=0.7)
