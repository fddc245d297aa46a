"""`df.autograd`: any model, as plain PyTorch trains it, in every mode; what it returns, what it leaves, what it refuses."""

import contextlib
import copy
import gc
import multiprocessing
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import decentfn as df
from decentfn import testing
from decentfn.comm.collectives import world
from decentfn.core import trees
from decentfn.core.draws import torch_draws
from decentfn.engine import cache as compile_cache

pytestmark = pytest.mark.thorough


class Checkpointed(nn.Module):
    """A block used twice, computed again in the backward pass, with dropout and batch norm."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.start, self.end = nn.Linear(5, 8), nn.Linear(8, 1)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x):
        h = self.start(x)
        for _ in range(2):
            h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.end(h)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.end = nn.LSTM(5, 8, 2, dropout=0.2), nn.Linear(8, 1)

    def forward(self, x):
        h = self.rnn(x[None])[0][0]
        return self.end(h) if h.sum().item() > -1e9 else h


class Routed(nn.Module):
    """Rows go where they like; some experts get none."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList(nn.Linear(5, 1) for _ in range(3))

    def forward(self, x):
        choice = self.gate(x).softmax(1)
        out = x.new_zeros(len(x), 1)
        for i, expert in enumerate(self.experts):
            rows = choice.argmax(1) == i
            if rows.any():
                out[rows] = choice[rows, i : i + 1] * expert(x[rows])
        return out


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.end = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.end(self.table((x[:, 0].abs() * 5).long() % 20))


class Following(nn.Module):
    """Frozen weights that follow others by momentum."""

    def __init__(self, by_data):
        super().__init__()
        self.own, self.frozen, self.still = (nn.Linear(5, 1) for _ in range(3))
        self.by_data = by_data
        for layer in (self.frozen, self.still):
            layer.requires_grad_(False)

    def forward(self, x):
        if self.by_data:
            self.frozen.weight.data = 0.9 * self.frozen.weight.data + 0.1 * self.own.weight.data
        else:
            with torch.no_grad():
                self.frozen.weight.mul_(0.9).add_(self.own.weight, alpha=0.1)
        return self.own(x) - 0.5 * self.frozen(x) + self.still(x)


class Remembering(nn.Module):
    """Module that keeps a value between calls without a buffer."""

    def __init__(self):
        super().__init__()
        self.rnn, self.end = nn.GRU(5, 4), nn.Linear(4, 1)
        self.hidden, self.means, self.calls, self.ready, self.total = None, [], 0, False, torch.zeros(())

    def forward(self, x):
        if not self.ready:  # a flag of something that is done once
            self.end.register_forward_hook(lambda layer, inputs, out: out * 1.5)
            self.ready = True
        if self.calls == 0:
            self.register_buffer("shift", torch.linspace(-1, 1, 5), persistent=False)
        self.calls += 1
        h, last = self.rnn((x + self.shift)[None], None if self.hidden is None else self.hidden[0])
        self.hidden = (last.detach(), x)
        self.means.append(h.mean().detach())
        with torch.no_grad():
            self.total.mul_(0.9).add_(h.sum())
        return self.end(h[0]) / self.calls + sum(self.means) + self.total


NETS = {
    "remembering": Remembering,
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "checkpointed": lambda: Checkpointed(False),
    "LSTM": Recurrent,
    "routed": Routed,
    "sparse": Sparse,
    "following": lambda: Following(False),
    "following by data": lambda: Following(True),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 1)),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 1)),
    "compiled inside": lambda: nn.Sequential(torch.compile(nn.Linear(5, 8), backend="aot_eager"), nn.Linear(8, 1)),
}


def batches(worker, steps=4):
    draw = torch.Generator().manual_seed(worker)
    return [(torch.randn(6, 5, generator=draw), torch.randn(6, 1, generator=draw)) for _ in range(steps)]


def plain_loop(net, workers=1, steps=4):
    """The gradients' mean over workers, one optimizer: what all-reduce computes; buffers are the first worker's."""
    nets = [copy.deepcopy(net) for _ in range(workers)]
    opts = [torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in nets]
    data = [batches(i) for i in range(workers)]
    for t in range(steps):
        for i, n in enumerate(nets):
            n.zero_grad()
            with torch_draws(t, i):
                mse_loss(n(data[i][t][0]), data[i][t][1]).backward()
        for group in zip(*(n.parameters() for n in nets), strict=True):
            grads = [p.grad.to_dense() for p in group if p.grad is not None]
            for p in group:
                p.grad = None if not grads else sum(grads) / workers
        for opt in opts:
            opt.step()
    return nets[0].state_dict()


def bits(net):
    return {name: x.clone() for name, x in net.state_dict().items()}


def assert_as_before(net, before):
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert all(p.grad is None and p.is_leaf and type(p) is nn.Parameter for p in net.parameters())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NETS)
def test_a_net_trains_as_in_a_plain_loop_in_every_mode(name):
    torch.manual_seed(3)
    made = NETS[name]()
    expected = {1: plain_loop(made), 2: plain_loop(made, 2)}
    for n in (1, 2) if name != "remembering" else (1,):
        for compiled in (False, True):
            net = copy.deepcopy(made)
            overwritten = ["frozen"] if isinstance(net, Following) else []
            params, buffers, loss_fn = df.functional(net, mse_loss, overwritten=overwritten)
            init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1, momentum=0.9), df.topology("complete", n))
            state, run = init(params, buffers), step
            if n > 1:
                state, run = df.stack(state, n), df.simulate(step, n)
            graphs = []
            if compiled:
                run = df.compile(run, backend=compile_cache.counted("aot_eager", graphs))
            for t in range(4):
                batch = batches(0)[t]
                if n > 1:
                    batch = trees.map(lambda *rows: torch.stack(rows), *(batches(i)[t] for i in range(n)))
                state, metrics = run(state, batch, t)
            first = state if n == 1 else df.worker(state, 0)
            got = df.state_dict(net, first)
            assert got.keys() == expected[n].keys()
            for key, x in expected[n].items():
                torch.testing.assert_close(got[key], x, atol=1e-6, rtol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
            assert not compiled or len(graphs) == 1
            assert_as_before(net, bits(made))


def test_plain_attributes_stay_in_the_module_and_only_what_is_changed_in_place_is_shared():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.end, self.calls, self.seen = nn.Linear(5, 1), 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(x.sum())
            return self.end(x) * self.calls

    torch.manual_seed(3)
    net = Counting()
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 2))
    state, step = df.stack(init(params, buffers), 2), df.simulate(step, 2)
    _, metrics = step(state, df.stack(batches(0)[0], 2), 0)
    x, y = batches(0)[0]
    expected = mse_loss(net.end(x), y).expand(2)
    torch.testing.assert_close(metrics.loss, expected.detach())
    assert net.calls == 1 and len(net.seen) == 2


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_parameters_are_called_or_refused_where_the_gradient_is_traced(late):
    def halved(p):
        p.grad.mul_(0.5)

    def made():
        torch.manual_seed(3)
        net = nn.Linear(5, 1)
        if late:
            net.weight.register_post_accumulate_grad_hook(halved)
        else:
            net.weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
        return net

    net, plain = made(), made()
    mse_loss(plain(batches(0)[0][0]), batches(0)[0][1]).backward()
    expected = plain.weight - 0.1 * plain.weight.grad
    params, buffers, loss_fn = df.functional(net, mse_loss)
    for around in (df.autograd, lambda loss_fn: loss_fn):
        init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
        for run in (step, df.compile(step, backend="aot_eager")):
            if around is not df.autograd:
                with pytest.raises(ValueError, match=r"register_hook.*df\.autograd"):
                    run(init(params, buffers), batches(0)[0], 0)
                continue
            state, _ = run(init(params, buffers), batches(0)[0], 0)
            torch.testing.assert_close(df.params(state)["weight"], expected)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_hook_registered_after_functional_is_refused_where_the_gradient_is_traced(backend):
    net = nn.Linear(5, 1)
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    state, run = init(params, buffers), step if backend is None else df.compile(step, backend=backend)
    net.weight.register_hook(torch.zeros_like)
    with pytest.raises(ValueError, match=r"\['weight'\] have hooks by register_hook.*df\.autograd"):
        run(state, batches(0)[0], 0)


def on_a_rank():
    rank = df.init().rank
    torch.manual_seed(3)
    net = Checkpointed(False)
    params, buffers, loss_fn = df.functional(net, mse_loss)
    topology = df.topology("ring", 2)
    init, step = df.adapt_while_communicate(df.autograd(loss_fn), df.sgd(0.1, momentum=0.9), topology)
    ends = []
    for run in (step, df.compile(step, backend="aot_eager")):
        state = init(params, buffers)
        for t, batch in enumerate(batches(rank)):
            state, metrics = run(state, batch, t)
        ends.append((df.params(state), df.buffers(state), metrics.loss))
    return ends


def test_ranks_draw_what_the_simulator_draws(ranks):
    """Dropout included: random numbers follow from the seed, t and the worker, simulated, on ranks, compiled."""
    by_rank = ranks(2).run(on_a_rank)
    torch.manual_seed(3)
    net = Checkpointed(False)
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.adapt_while_communicate(df.autograd(loss_fn), df.sgd(0.1, momentum=0.9), df.topology("ring", 2))
    state, step = df.stack(init(params, buffers), 2), df.simulate(step, 2)
    for t in range(4):
        batch = trees.map(lambda *rows: torch.stack(rows), *(batches(i)[t] for i in range(2)))
        state, metrics = step(state, batch, t)
    for rank, ends in enumerate(by_rank):
        for end in ends:
            expected = trees.map(lambda x, rank=rank: x[rank], (df.params(state), df.buffers(state), metrics.loss))
            for got, want in zip(trees.leaves(end), trees.leaves(expected), strict=True):
                torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_unused_parameters_are_skipped_as_torch_does_or_move_on(compiled):
    torch.manual_seed(0)
    net = Routed()
    net.gate.bias.data = torch.tensor([0.0, 1.0, -9.0])  # the third expert gets nothing
    params, buffers, loss_fn = df.functional(net, mse_loss)
    data, ends = batches(0, 6), {}
    for skips in (True, False):
        optimizer = df.sgd(0.1, momentum=0.9, weight_decay=0.1)
        init, step = df.all_reduce(df.autograd(loss_fn, skip_unused=skips), optimizer, df.topology("complete", 1))
        state = init(params, buffers)
        step = df.compile(step, backend="aot_eager") if compiled else step
        for t, batch in enumerate(data):
            state, _ = step(state, batch, t)
        ends[skips] = df.params(state)
    for skips, end in ends.items():
        plain = copy.deepcopy(net)
        opt = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for x, y in data:
            opt.zero_grad()
            mse_loss(plain(x), y).backward()
            for p in plain.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None and not skips else p.grad
            opt.step()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(end[name], p.detach(), atol=1e-6, rtol=1e-5)
    assert torch.equal(ends[True]["experts.2.weight"], params["experts.2.weight"])
    assert not torch.equal(ends[False]["experts.2.weight"], params["experts.2.weight"])
    init, step = df.adapt_then_combine(df.autograd(loss_fn, skip_unused=True), df.adamw(0.1), df.topology("ring", 2))
    state, step = df.stack(init(params, buffers), 2), df.simulate(step, 2)
    state, _ = step(state, df.stack(data[0], 2), 0)
    assert torch.equal(df.params(state)["experts.2.weight"][1], params["experts.2.weight"])


@pytest.mark.parametrize("skips", [True, False])
def test_a_rare_average_takes_the_leaves_that_its_own_step_does_not_use(skips):
    """PyTorch's PeriodicModelAverager leaves them out: findings/local_sgd_and_two_heads.sh."""
    target = torch.tensor([1.0, 2.0])

    def loss_fn(params, batch):
        task, worker = batch
        head = params["even" if task.item() == 0 else "odd"]
        return (params["trunk"] * head - target[worker.long()]).square().mean()

    local = df.topologies.every(2, df.topology("complete", 2))
    init, step = df.adapt_then_combine(df.autograd(loss_fn, skip_unused=skips), df.sgd(0.1), local)
    state = df.stack(init({name: torch.ones(3) for name in ("trunk", "even", "odd")}), 2)
    step, seen = df.simulate(step, 2), set[tuple[int, bool]]()
    for t in range(6):
        state, _ = step(state, (torch.full((2,), t % 2), torch.arange(2)), t)
        seen.add((t % 2, all(torch.equal(*p) for p in df.params(state).values())))
    assert seen == {(0, True), (1, False)}, "all leaves are equal after a step that averages, and apart after the other"


@pytest.mark.parametrize("name", ["all_reduce", "demo", "relay_sgd"])
def test_replicas_stay_equal_where_workers_use_different_leaves(name):
    def loss_fn(params, batch):
        return sum(((p - 1) ** 2).sum() for i, p in enumerate(params) if batch == i or i == 2)

    made = {
        "all_reduce": lambda loss: df.all_reduce(loss, df.sgd(0.1, momentum=0.9), df.topology("complete", 2)),
        "demo": lambda loss: df.demo(loss, df.sgd(0.1), df.topology("complete", 2), chunk=2, k=1),
        "relay_sgd": lambda loss: df.relay_sgd(loss, df.sgd(0.1), df.topology("chain", 2), relay="gradients"),
    }[name](df.autograd(loss_fn, skip_unused=True))
    state = df.stack(made.init([torch.zeros(2), torch.zeros(3), torch.zeros(4), torch.zeros(1)]), 2)
    step = df.simulate(made.step, 2)
    for t in range(4):
        state, _ = step(state, torch.tensor([0, 1]), t)
    used = df.params(state)
    if name != "relay_sgd":  # its workers hear of a gradient one step later
        assert all(torch.equal(p[0], p[1]) for p in used)
    assert all((p != 0).all() for p in used[:3]) and not used[3].any()


def test_a_part_of_the_optimizer_skips_unused_leaves_too():
    def loss_fn(params, batch):
        return (params["a"] - 1).square().sum()

    optimizer = df.transforms.partition(
        {"a": df.sgd(0.1, momentum=0.9), "b": df.adamw(0.1)}, lambda name, shape: name[0]
    )
    init, step = df.all_reduce(df.autograd(loss_fn, skip_unused=True), optimizer, df.topology("complete", 1))
    state = init({"a": torch.zeros(3), "b": torch.ones(3)})
    for t in range(2):
        state, _ = step(state, None, t)
    torch.testing.assert_close(df.params(state), {"a": torch.full((3,), 0.54), "b": torch.ones(3)})


def quadratic(params, batch):
    return ((params - batch["x"]) ** 2).mean(), {"text": batch["text"], "twice": (params * 2).detach(), "x": batch["x"]}


def built(loss_fn, **kwargs):
    return df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1), **kwargs)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_of_any_kind_goes_in_and_aux_comes_out_and_share_nothing(compiled):
    init, step = built(df.autograd(quadratic))
    state = init(torch.zeros(3))
    graphs = []
    if compiled:
        step = df.compile(step, backend=compile_cache.counted("aot_eager", graphs))
    for t in range(12):
        batch = {"x": torch.full((t, 3) if t else (3,), float(t)), "text": f"step {t}", "count": t}
        new, metrics = step(state, batch, 2 * t)
        assert metrics.aux["text"] == f"step {t}" and torch.equal(metrics.aux["x"], batch["x"])
        kept = metrics.aux["twice"].clone()
        batch["x"].zero_()
        state, _ = step(new, {"x": torch.ones(3), "text": "", "count": 0}, 2 * t + 1)
        assert torch.equal(metrics.aux["twice"], kept) and (not t or metrics.aux["x"].eq(t).all())
    assert not compiled or len(graphs) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_aux_whose_names_differ_between_workers_or_micro_batches_is_a_list(compiled):
    def by_domain(p, x):
        loss = ((p - x) ** 2).mean()
        return loss, {"easy" if x.mean() < 2 else "hard": loss.detach()}

    for around, batch, workers in (
        (df.autograd, torch.tensor([[1.0], [9.0]]), 2),
        (lambda loss_fn: df.accumulate(df.autograd(loss_fn)), torch.tensor([[[1.0], [9.0]]]), 1),
    ):
        init, step = df.all_reduce(around(by_domain), df.sgd(0.0), df.topology("complete", workers))
        step = df.simulate(step, workers)
        step = df.compile(step, backend="eager") if compiled else step
        _, metrics = step(df.stack(init(torch.zeros(())), workers), batch.unsqueeze(-1), 0)
        assert metrics.aux == [{"easy": 1.0}, {"hard": 81.0}]


def test_a_loss_that_is_a_parameter_is_reported_as_it_was():
    init, step = df.all_reduce(df.autograd(lambda p, batch: p), df.sgd(0.5), df.topology("complete", 1))
    state, metrics = df.donate(step)(init(torch.ones(())), None, 0)
    assert (float(df.params(state)), float(metrics.loss)) == (0.5, 1.0)


def test_accumulated_and_scaled_as_when_traced():
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    params, buffers, loss_fn = df.functional(net, mse_loss)
    micro = trees.map(lambda *rows: torch.stack(rows), *batches(0, 3))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ends = []
        for around in (lambda f: f, df.autograd):
            scaled = df.dynamic_loss_scale(df.accumulate(around(loss_fn)), init_scale=2.0**8)
            init, step = built(scaled)
            cast = [
                trees.map(lambda x, d=dtype: x.to(d) if x.is_floating_point() else x, tree)
                for tree in (params, buffers, micro)
            ]
            state = init(*cast[:2])
            for t in range(3):
                state, metrics = step(state, cast[2], t)
            ends.append((df.params(state), df.buffers(state), metrics.loss.double(), metrics.grad_norm.double()))
        close = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 0.02}[dtype]
        for a, b in zip(*map(trees.leaves, ends), strict=True):
            torch.testing.assert_close(a, b, atol=close, rtol=close)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("in the backward pass")


@pytest.mark.parametrize("compiled", [False, True])
def test_an_exception_comes_out_as_itself_and_leaves_the_state(compiled):
    def loss_fn(params, batch):
        return (Twice.apply(params) if batch["bad"] else params).square().mean()

    init, step = built(df.autograd(loss_fn))
    if compiled:
        step = df.compile(step, backend="aot_eager")
    state = init(torch.ones(3))
    state, _ = step(state, {"bad": False}, 0)
    before = [x.clone() for x in trees.leaves(state)]
    with pytest.raises(ArithmeticError, match="in the backward pass") as caught:
        step(state, {"bad": True}, 1)
    assert "backward" in [entry.name for entry in caught.traceback]
    assert all(torch.equal(a, b) for a, b in zip(before, trees.leaves(state), strict=True))
    step(state, {"bad": False}, 1)


@pytest.mark.filterwarnings("ignore:step.state, batch, t=2. after step t=0")
def test_an_exception_on_one_rank_drains_its_messages_and_the_next_step_names_it():
    def fails_once(rank):
        def loss_fn(params, batch):
            if batch["t"] == 1 and rank == 0:
                raise ArithmeticError("a bad sample")
            return (params - rank).square().mean()

        said = []
        for around in (df.autograd, lambda f: f):
            init, step = df.adapt_while_communicate(around(loss_fn), df.sgd(0.1), df.topology("ring", 2))
            state = init(torch.ones(3))
            for t in range(2 if rank else 3):
                before = [x.clone() for x in trees.leaves(state)]
                try:
                    state, _ = step(state, {"t": torch.tensor(t) if around is not df.autograd else t}, t)
                except (ArithmeticError, RuntimeError) as error:
                    said.append(str(error))
                    assert all(torch.equal(a, b) for a, b in zip(before, trees.leaves(state), strict=True))
            assert not world().session.in_flight
        return said

    said, others = testing.on_ranks(2, fails_once)
    assert not others
    for first, second in (said[:2], said[2:]):
        assert "a bad sample" in first
        assert "t=1 raised" in second and "a bad sample" in second and "Start the run again" in second


def test_what_cannot_be_is_refused_with_a_sentence():
    loss_fn = df.autograd(lambda p, batch: (p - batch).square().mean())
    with pytest.raises(ValueError, match="the other way round, df.accumulate"):
        df.autograd(df.accumulate(lambda p, b: p.sum()))
    with pytest.raises(ValueError, match="once is enough"):
        df.autograd(loss_fn)
    init, step = built(loss_fn)
    state = init(torch.ones(3))
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.func.grad(
            lambda x: step(state._replace(params=df.kit.Buckets([x], state.params.plan)), torch.zeros(3), 0)[1].loss
        )(state.params[0])
    with pytest.raises(ValueError, match="does not depend on the parameters"):
        built(df.autograd(lambda p, batch: batch.sum()))[1](state, torch.zeros(3), 0)


def test_a_handle_goes_with_its_step_and_nothing_grows():
    def life():
        params, buffers, loss_fn = df.functional(nn.Linear(4, 1), mse_loss)
        by_autograd = df.autograd(loss_fn)
        init, step = built(by_autograd)
        state, run = init(params, buffers), df.compile(step, backend="aot_eager")
        batch = (torch.ones(2, 4), torch.ones(2, 1))
        counts = []
        for t in range(1101):
            state, _ = run(state, batch, t)
            if t % 1000 == 100:
                gc.collect()
                counts.append(len(gc.get_objects()))
        assert counts[1] - counts[0] < 50
        return weakref.ref(by_autograd)

    handle = life()
    torch._dynamo.reset()
    gc.collect()
    assert handle() is None


def over_its_state(step, compiled):
    return df.compile(step, backend="aot_eager") if compiled else df.donate(step)


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_of_one_call_end_with_it_and_no_parameter_outlives_its_step(compiled):
    """Also after an exception in the backward pass."""
    seen, heard = [], []

    def loss_fn(params, batch):
        w, b = params
        seen.append(weakref.ref(w))
        if batch["hook"]:
            b.register_hook(heard.append)
        loss = (w.square().sum() + b.sum()) / 2
        return loss + 0 * Twice.apply(w).sum() if batch["bad"] else loss

    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(1.0), df.topology("complete", 1))
    step = over_its_state(step, compiled)
    state = init((torch.full((3,), 2.0), torch.zeros(3)))
    plain = {"bad": False, "hook": False}
    for t, batch in enumerate([plain] * 3 + [plain | {"hook": True}] + [plain] * 2):
        before = [x.clone() for x in df.params(state)]
        state, _ = step(state, batch, t)
        torch.testing.assert_close(df.params(state), (0 * before[0], before[1] - 0.5))
    assert len(heard) == 1
    with pytest.raises(ArithmeticError):
        step(state, plain | {"bad": True}, 6)
    before = df.params(state)[1].clone()
    state, _ = step(state, plain, 6)
    torch.testing.assert_close(df.params(state), (torch.zeros(3), before - 0.5))
    assert all(leaf() is None for leaf in seen)


def test_hooks_of_saved_tensors_are_called_whenever_they_come():
    """Also those that a compiler could take into its graph. Dynamo guards them, so the step is compiled once more."""
    init, step = built(df.autograd(lambda p, batch: p.square().sum()))
    state, step = init(torch.ones(3)), df.compile(step)
    state, _ = step(state, None, 0)
    before = df.params(state).clone()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.autograd.graph.saved_tensors_hooks(*map(torch.fx.symbolic_trace, (lambda x: x * 2, lambda x: x * 1))):
        _, doubled = step(state, None, 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs + 1
    torch.testing.assert_close(doubled.grad_norm, 2 * (2 * before).norm())


def test_pytorch_says_which_nodes_it_runs_where_it_is_asked(caplog):
    init, step = built(df.autograd(lambda p, batch: p.square().sum()))
    with caplog.at_level("DEBUG", "torch.autograd.graph"):
        step(init(torch.ones(3)), None, 0)
    assert any("PowBackward0" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_around_many_steps_casts_the_parameters_of_each(compiled):
    ends = []
    for around_all in (False, True):
        init, step = df.all_reduce(
            df.autograd(lambda w, x: (x @ w).float().square().mean()), df.sgd(0.1), df.topology("complete", 1)
        )
        state, step = init(torch.ones(3, 2)), over_its_state(step, compiled)
        with torch.autocast("cpu", torch.bfloat16) if around_all else contextlib.nullcontext():
            for t in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    state, _ = step(state, torch.eye(3) + t, t)
        ends.append(df.params(state).clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_runs_as_where_the_step_was_called(compiled):
    """Autocast around the step, torch.func and nested tensors inside."""

    def loss_fn(params, batch):
        product = batch @ params["w"]
        slopes = torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).square().sum()), (None, 0))(params["w"], batch)
        rows = torch.nested.nested_tensor([batch[:1], batch[1:]], layout=torch.jagged)
        return product.float().square().mean() + slopes.var() + (rows @ params["w"]).values().mean(), str(product.dtype)

    init, step = built(df.autograd(loss_fn))
    step = df.compile(step, backend="aot_eager") if compiled else step
    state = init({"w": torch.ones(3, 2)})
    with torch.autocast("cpu", torch.bfloat16):
        assert step(state, torch.randn(4, 3), 0)[1].aux == "torch.bfloat16"
    assert step(state, torch.randn(4, 3), 1)[1].aux == "torch.float32"


@pytest.mark.slow
def test_ten_thousand_steps_leave_memory_and_module_as_they_were():
    # In a process of its own: what other tests left behind is freed at any time, and counts as resident until then.
    process = multiprocessing.get_context("spawn").Process(target=_ten_thousand_steps)
    process.start()
    process.join()
    assert process.exitcode == 0


def _ten_thousand_steps():
    torch.set_num_threads(1)
    net = Checkpointed(False)
    before = bits(net)
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.adapt_while_communicate(df.autograd(loss_fn), df.adamw(1e-3), df.topology("complete", 1))
    for run in (step, df.compile(step)):
        state, batch, resident = init(params, buffers), batches(0)[0], []
        for t in range(10_000):
            state, _ = run(state, batch, t)
            if t % 3000 == 999:
                gc.collect()
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        assert max(resident) - resident[0] < 2 * 2**20, resident
    assert_as_before(net, before)
    torch.compile(copy.deepcopy(net), backend="eager")(batch[0])


def test_a_parameter_in_two_places_has_the_sum_of_both_gradients():
    w = torch.ones(3)

    def loss_fn(params, batch):
        return (params["a"] * batch).sum() + (2 * params["b"] * batch).sum()

    for loss in (loss_fn, df.autograd(loss_fn)):
        init, step = df.all_reduce(loss, df.sgd(1.0), df.topology("complete", 1))
        state, _ = step(init({"a": w, "b": w}), torch.ones(3), 0)
        assert {name: x.tolist() for name, x in df.params(state).items()} == {"a": [-2.0] * 3, "b": [-2.0] * 3}
