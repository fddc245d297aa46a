"""An eager donated step computes what the pure step computes, in the memory of the state that it was given."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import decentfn as df
from decentfn import kit
from decentfn.core import buckets, trees


def start():
    return tuple(buckets.flatten({"x": torch.arange(21.0) + 100 * i}) for i in range(3))


def swapped(state, batch, t):
    a, b, c = state
    return (b, kit.each(torch.add, a, b), kit.each(lambda a: a, a)), None


def shifted(state, batch, t):
    """One vector in two places, and one that is read through a view with another beginning."""
    a, b, c = state
    new = kit.each(torch.mul, a, c)
    late = kit.Buckets([torch.cat([b[0][5:], a[0][:5]])], b.plan)
    return (new, kit.each(torch.add, late, kit.Buckets([torch.roll(a[0], 3)], a.plan)), new), None


def viewed(state, batch, t):
    """Views of old leaves."""
    a, b, c = state
    return (kit.Buckets([c[0].flip(0).flip(0)], a.plan), kit.Buckets([a[0].view(3, 7).view(21)], a.plan), b), None


def summed(state, batch, t):
    """A new leaf is a part of an old one that is written before, though it was cloned."""
    a, b, c = state
    part, rest = a[0].split([20, 1])
    parts = kit.Buckets([torch.cat([part, rest * 0])], c.plan)
    return (kit.each(torch.add, a, b), kit.Buckets([a[0].view(3, 7).clone().view(21)], b.plan), parts), part.clone()


BACKENDS = [None, "eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [swapped, shifted, viewed, summed])
def test_a_donated_step_may_move_leaves_from_place_to_place(step, backend):
    donated = df.donate(step) if backend is None else df.compile(step, backend=backend)
    over, expected = start(), start()
    for t in range(3):
        assert donated(over, None, t)[0] is over
        expected, _ = step(expected, None, t)
    for got, wanted in zip(trees.leaves(over), trees.leaves(expected), strict=True):
        assert torch.equal(got, wanted)


def test_a_donated_step_that_raises_leaves_the_state():
    def raises(state, batch, t):
        (a, b, c), _ = shifted(state, batch, t)
        if t:
            raise RuntimeError("no")
        return (a, b, c), None

    state, donated = start(), df.donate(raises)
    donated(state, None, 0)
    kept = trees.map(torch.clone, state)
    with pytest.raises(RuntimeError, match="no"):
        donated(state, None, 1)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(state), trees.leaves(kept), strict=True))


def test_metrics_do_not_show_the_next_state():
    donated = df.donate(lambda state, batch, t: (state + 1, state[:1]))
    state, first = donated(torch.zeros(3), None, 0)
    donated(state, None, 1)
    assert first == 0


class Remembers(torch.nn.Module):
    """A layer whose buffer holds its weights of the step before."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)
        self.register_buffer("before", torch.zeros(1, 2))

    def forward(self, x):
        y = self.layer(x) + 0.5 * (x @ self.before.clone().T)
        with torch.no_grad():
            self.before.copy_(self.layer.weight)
        return y


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_buffer_may_hold_the_weights_of_the_step_before(backend):
    torch.manual_seed(0)
    net, mse = Remembers(), torch.nn.functional.mse_loss
    params, buffers, loss_fn = df.functional(net, mse)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    state, step = init(params, buffers), df.compile(step, backend=backend)
    optimizer, batch = torch.optim.SGD(net.parameters(), 0.1), (torch.randn(8, 2), torch.randn(8, 1))
    for t in range(3):
        state, _ = step(state, batch, t)
        optimizer.zero_grad()
        mse(net(batch[0]), batch[1]).backward()
        optimizer.step()
    torch.testing.assert_close(df.params(state)["layer.weight"], net.layer.weight.detach())
    torch.testing.assert_close(df.buffers(state)["before"], net.before)


class Last(torch.nn.Module):
    """Its buffer is the batch it saw last."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("last", torch.zeros(3, 2))

    def forward(self, x):
        self.last = x
        return self.layer(x)


def of_a_module():
    params, buffers, loss_fn = df.functional(Last(), forward=lambda module, batch: module(batch).square().mean())
    return loss_fn, params, buffers


def of_a_function():
    def loss_fn(params, buffers, batch):
        return (params["w"] - batch).square().mean(), ({"last": batch, "w": params["w"].detach()}, None)

    return loss_fn, {"w": torch.ones(2)}, {"last": torch.zeros(3, 2), "w": torch.zeros(2)}


@pytest.mark.parametrize("make", [of_a_module, of_a_function])
def test_a_donated_step_after_an_eager_one_overwrites_neither_the_batch_nor_an_older_state(make):
    loss_fn, params, buffers = make()
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    first, batch = init(params, buffers), torch.zeros(3, 2)
    kept = trees.map(torch.clone, first)
    state, _ = step(first, batch, 0)
    df.donate(step)(state, torch.ones(3, 2), 1)
    assert torch.equal(df.buffers(state)["last"], torch.ones(3, 2)) and torch.equal(batch, torch.zeros(3, 2))
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(first), trees.leaves(kept), strict=True))


def test_a_pure_step_after_donated_ones_writes_over_nothing():
    """Not over Adam's moments either, as donated steps do."""
    init, step = df.all_reduce(lambda p, b: (p - b).square().mean(), df.adam(0.1), df.topology("complete", 1))
    state, batch, donated = init(torch.ones(3)), torch.zeros(3), df.donate(step)
    for t in range(2):
        donated(state, batch, t)
    kept = trees.map(torch.clone, state)
    step(state, batch, 2)
    assert all(map(torch.equal, trees.leaves(state), trees.leaves(kept)))


@pytest.mark.parametrize("donating", [df.donate, lambda step: df.compile(step, backend="eager")])
def test_a_copy_keeps_a_state_whose_outer_memory_a_pure_step_passed_on(donating):
    def loss_fn(params, batch):
        return (params["w"] - batch).square().mean()

    init, step = df.diloco(loss_fn, df.sgd(0.1), df.topology("complete", 1), inner_steps=2)
    first, batch = init({"w": torch.ones(2)}), torch.zeros(2)
    kept = trees.map(torch.clone, first)
    state, _ = step(first, batch, 0)
    assert state.memory.phi[0] is first.memory.phi[0]  # docs/gotchas.md
    own = copy.deepcopy(state)
    donating(step)(own, batch, 1)
    assert not torch.equal(own.memory.phi[0], first.memory.phi[0])
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(first), trees.leaves(kept), strict=True))


def trained(optimizer, donated, algorithm=df.adapt_while_communicate, wrap=lambda pair: pair, **options):
    params = {"a": torch.linspace(-1, 1, 12), "b": torch.linspace(1, 2, 4, dtype=torch.float64)}
    pair = wrap(algorithm(lambda p, b: sum((x * b).square().sum() for x in p.values()), optimizer, ONE, **options))
    step, states = df.donate(pair.step) if donated else pair.step, []
    state = pair.init(params)
    for t in range(5):
        state, _ = step(state, torch.tensor(1.0 + t), t)
        states.append([x.clone() for x in trees.leaves(state)])
    return states, state, step


ONE = df.topology("complete", 1)


def skipping(inner):
    """A user's wrapper, which looks at the old state after the update."""

    def update(grads, state, params):
        u, new = inner.update(grads, state, params)
        keeps = state[0].count % 2 == 0
        return u, trees.map(lambda a, b: torch.where(keeps, a, b), new, state)

    return df.Transform(inner.init, update)


@pytest.mark.parametrize("wrap", [lambda pair: pair, df.guard, lambda pair: df.ema(pair, 0.9)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: df.adamw(0.1, weight_decay=lambda count: 0.01 * count),
        lambda: df.sgd(0.1, momentum=0.9),
        lambda: skipping(df.adam(0.1)),
        lambda: df.chain(
            df.clip_by_global_norm(1.0),
            df.transforms.partition({"a": df.adam(0.1), "b": df.transforms.lion(0.1)}, lambda name, _: name),
        ),
    ],
)
def test_an_optimizer_that_writes_over_its_moments_computes_what_a_pure_one_does(make, wrap):
    (pure, *_), (donated, *_) = trained(make(), False, wrap=wrap), trained(make(), True, wrap=wrap)
    for ours, theirs in zip(donated, pure, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_algorithm_of_the_user_may_read_the_old_moments_after_the_update():
    @kit.algorithm
    def lazy(loss_fn, optimizer, topology, **options):
        worker = kit.Worker(loss_fn, optimizer, topology, **options)

        def step(state, batch, t):
            g, local = worker.gradient(state.params, state.local, batch, t)
            u, new = worker.update(g.grads, g, local, state.params)
            opt = trees.map(lambda a, b: torch.where(t % 2 == 0, a, b), new.opt, local.opt)
            return kit.State(kit.add(state.params, u), new._replace(opt=opt)), g.metrics

        return worker.algorithm(step)

    (pure, *_), (donated, *_) = (trained(df.adam(0.1), way, lazy) for way in (False, True))
    assert all(
        torch.equal(a, b) for ours, theirs in zip(donated, pure, strict=True) for a, b in zip(ours, theirs, strict=True)
    )


def test_an_error_after_the_moments_were_written_says_so(monkeypatch):
    _, state, step = trained(df.adam(0.1), True)
    kept = trees.map(torch.clone, state)
    with pytest.raises(RuntimeError) as raised:
        step(state, torch.ones(3), 5)  # before the update
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(state), trees.leaves(kept), strict=True))
    assert "write over" not in str(getattr(raised.value, "__notes__", ()))
    monkeypatch.setattr(kit, "add", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        step(state, torch.tensor(1.0), 5)
    assert "had begun to write over its state; continue from a checkpoint" in raised.value.__notes__[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("transform", [df.donate, lambda step: df.compile(step, backend="eager")])
def test_a_state_of_expanded_views_is_refused_by_its_leaf_and_cloned_it_trains(transform):
    """Stacked by hand, all workers share one memory, and no step can write one's new values there."""
    init, step = df.adapt_while_communicate(
        lambda p, x: (x @ p["w"]).square().mean(), df.sgd(0.1, momentum=0.9), df.topology("complete", 2)
    )
    one, x = init({"w": torch.ones(3)}), torch.eye(3).expand(2, 3, 3)
    state = trees.map(lambda leaf: leaf.expand(2, *leaf.shape), one)
    with pytest.raises(ValueError, match=r"leaf 'params\.0.*expanded view.*df\.stack\(state, N\).*leaf\.clone\(\)"):
        transform(df.simulate(step, 2))(state, x, 0)
    ends = []
    for start in (trees.map(torch.clone, state), df.stack(one, 2)):
        ends.append(transform(df.simulate(step, 2))(start, x, 0)[0])
    assert all(map(torch.equal, trees.leaves(ends[0]), trees.leaves(ends[1])))


@pytest.mark.thorough
def test_interrupts_leave_the_old_or_the_new_state_in_a_process_of_their_own():
    tests = Path(__file__).with_name("test_interrupts.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slow", tests]
    ended = subprocess.run(command, cwd=tests.parents[1], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout
