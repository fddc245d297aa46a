"""Mistakes in user-written algorithms raise a clear error at the first step or before."""

from typing import Any, NamedTuple

import pytest
import torch

import decentfn as df
from decentfn import kit


def loss_fn(params, batch):
    return ((params - batch) ** 2).mean()


def first_step(returned, memory=None, *, way="eager"):
    """The first step of an algorithm that returns `returned(state, x, local, g)`."""
    n = 2 if way == "simulated" else 1

    @kit.algorithm
    def mine(loss_fn, optimizer, topology, **options):
        worker = kit.Worker(loss_fn, optimizer, topology, **options)

        def step(state, batch, t):
            g, local = worker.gradient(state.params, state.local, batch, t)
            return returned(state, state.params, local, g)

        return worker.algorithm(step, memory)

    init, step = mine(loss_fn, df.sgd(0.1), df.topology("complete", n))
    if way == "simulated":
        return df.simulate(step, n)(df.stack(init(torch.zeros(3)), n), torch.ones(n, 3), 0)
    if way == "compiled":
        step = df.compile(step, backend="eager")
    return step(init(torch.zeros(3)), torch.ones(3), 0)


class Memory(NamedTuple):
    a: Any
    b: Any

    def restart(self, x):
        return self


MOVED = {
    "a tensor becomes buckets": (lambda x: (x[0].clone(), x), lambda a, b: (b, b)),
    "buckets become a tensor": (lambda x: (x, x[0].clone()), lambda a, b: (b, b)),
    "a tensor goes to other buckets": (
        lambda x: (kit.Buckets([x[0], x[0]], x.plan), x),
        lambda a, b: (b, a),
    ),
}


@pytest.mark.parametrize("mistake", MOVED)
def test_what_is_remembered_stays_in_its_place(mistake):
    """Also where all tensors, one after another, have the same shapes and dtypes."""
    start, moved = MOVED[mistake]
    with pytest.raises(ValueError, match=r"the step returned a state with memory\..* where it was given one with"):
        first_step(
            lambda state, x, local, g: (kit.State(x, local, Memory(*moved(*state.memory))), g.metrics),
            lambda x: Memory(*start(x)),
        )


WRONG = {
    "no metrics": (
        lambda state, x, local, g: kit.State(x, local),
        r"returned \['Buckets', 'Local', 'tuple'\]; it returns",
    ),
    "fields without their State": (
        lambda state, x, local, g: ((x, local, ()), g.metrics),
        r"returned \['tuple', 'Metrics'\]; it returns",
    ),
    "nothing": (lambda state, x, local, g: None, r"returned NoneType; it returns"),
    "the gradient for metrics": (
        lambda state, x, local, g: (kit.State(x, local), g),
        r"\['State', 'Gradient'\].*g\.metrics",
    ),
    "other dtypes": (
        lambda state, x, local, g: (kit.State(kit.each(torch.Tensor.double, x), local), g.metrics),
        r"params\.0 torch\.float64 \[3\] where it was given one with params\.0 torch\.float32 \[3\]",
    ),
}


@pytest.mark.parametrize(
    ("mistake", "way"),
    [
        *((mistake, "eager") for mistake in WRONG),
        *((mistake, way) for mistake in ("fields without their State", "nothing") for way in ("simulated", "compiled")),
    ],
)
def test_what_a_step_returns_is_looked_at_once(mistake, way):
    returned, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        first_step(returned, way=way)


def test_a_sound_step_passes():
    _, metrics = first_step(lambda state, x, local, g: (kit.State(x, local), g.metrics))
    assert metrics.loss == 1


@kit.algorithm
def listening(loss_fn, optimizer, topology, **options):
    """Train nothing; aux is what arrived."""
    worker = kit.Worker(loss_fn, optimizer, topology, **options)

    def step(state, batch, t):
        g, local = worker.gradient(state.params, state.local, batch, t)
        posted = worker.post(state.params, t)
        mix = kit.mix_context(posted)
        heard = mix.inboxes[0], mix.weights, mix.sources, posted.row.worker
        return kit.State(state.params, local), g.metrics._replace(aux=heard)

    return worker.algorithm(step)


@pytest.mark.parametrize("name", ["star", "random-matching", "static-exp"])
def test_each_message_is_its_senders_and_idle_slots_weigh_nothing(name):
    """Five workers: an odd one of the pairs, and all but the center of the star, have idle slots."""
    n = 5
    topology, x = df.topology(name, n), 1 + torch.arange(5.0)[:, None]
    init, step = listening(loss_fn, df.sgd(0.1), topology)
    state, step = df.with_params(df.stack(init(x[0]), n), x), df.simulate(step, n)
    for t in range(3):
        _, metrics = step(state, x, t)
        inboxes, weights, sources, workers = metrics.aux
        assert workers.tolist() == list(range(n))
        for i, (inbox, w, senders) in enumerate(zip(inboxes, weights, sources, strict=True)):
            counts = w[1:] > 0
            assert not inbox[~counts].any() and torch.equal(inbox[counts], x[senders[counts]])
            row = w[0] * torch.eye(n, dtype=torch.float64)[i]
            row[senders[counts]] += w[1:][counts]
            torch.testing.assert_close(row, df.mixing_matrix(topology, t)[i], rtol=0, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_mean_leaves_out_whatever_has_weight_0_and_mixing_leaves_infinite_values(backend):
    """0 times NaN, and inf - inf, would be NaN on every worker."""

    @kit.algorithm
    def mean_of_x(loss_fn, optimizer, topology, *, way="mean", **options):
        worker = kit.Worker(loss_fn, optimizer, topology, **options)

        def step(state, batch, t):
            x, (weight,) = state.params, batch
            g, local = worker.gradient(x, state.local, batch, t)
            mixed = worker.mean(x, t, weight=weight) if way == "mean" else worker.mix(x, t)
            if way == "none of it":
                mixed = kit.collect(worker.post(x, t), gamma=torch.zeros((), dtype=torch.float64))
            return kit.State(mixed, local), g.metrics

        return worker.algorithm(step)

    def mixed(name, way, rows, weights):
        init, step = mean_of_x(lambda p, batch: p.sum(), df.sgd(0.0), df.topology(name, 3), way=way)
        step = df.simulate(step, 3)
        step = step if backend is None else df.compile(step, backend=backend)
        state = df.with_params(df.stack(init(torch.zeros(2)), 3), torch.tensor(rows))
        return df.params(step(state, (torch.tensor(weights),), 0)[0])

    nan, inf = float("nan"), float("inf")
    left_out = mixed("complete", "mean", [[1.0, 2.0], [nan, inf], [4.0, -4.0]], [2.0, 0.0, 1.0])
    torch.testing.assert_close(left_out, torch.tensor([[2.0, 0.0]] * 3))
    for name in ("static-ring", "complete", "random-matching"):  # in a matching, one of three is alone
        everywhere = mixed(name, "mix", [[-inf, 1.0], [-inf, 2.0], [-inf, 3.0]], [1.0] * 3)
        assert (everywhere[:, 0] == -inf).all() and everywhere[:, 1].mean() == 2
    alone = torch.tensor([[1.0, 2.0], [nan, inf], [4.0, -4.0]])
    assert torch.equal(mixed("static-ring", "none of it", alone.tolist(), [1.0] * 3)[::2], alone[::2])


def test_the_decorator_says_what_it_decorates():
    with pytest.raises(ValueError, match=r"@kit\.algorithm on mine\(loss, opt.*loss_fn, optimizer, topology"):

        @kit.algorithm
        def mine(loss, opt, topo):
            return None

    @kit.algorithm
    def nothing(loss_fn, optimizer, topology):
        return None

    with pytest.raises(ValueError, match=r"nothing\(\.\.\.\) returned None.*return worker\.algorithm\(step\)"):
        nothing(loss_fn, df.sgd(0.1), df.topology("complete", 1))


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'gossip_sgd'"):
        _ = df.gossip_sgd
