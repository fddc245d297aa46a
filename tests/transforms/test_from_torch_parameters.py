"""Parameters that `df.from_torch` gives to an optimizer: in the module's order, with their attributes, of plain classes."""

from functools import partial

import pytest
import torch
from torch import nn

import decentfn as df

INPUTS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Stack(nn.Module):
    """Layers whose names do not sort in their order, and two that are tied."""

    def __init__(self, depth=12):
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(depth))
        self.head = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)
        self.again.weight = self.layers[2].weight

    def forward(self, x):
        for layer in (self.stem, *self.layers, self.again, self.head):
            x = x + torch.tanh(layer(x))
        return x


def criterion(output, target):
    return (output - target).square().mean()


NOTE = nn.Identity()  # an attribute that is no number


def net(mark=lambda name: True):
    torch.manual_seed(0)
    made = Stack().double()
    for name, p in made.named_parameters():
        if "bias" in name:
            p._no_weight_decay, p.note = mark(name), NOTE
    return made


def by_position(params):
    """Layer-wise decay by the place in the list."""
    return torch.optim.SGD([{"params": [one], "lr": 0.5 * 0.9**i} for i, one in enumerate(params)])


def by_attribute(params):
    decays = {
        flag: [(n, p) for n, p in params if getattr(p, "_no_weight_decay", False) == flag] for flag in (False, True)
    }
    groups = [{"params": its, "weight_decay": 0.0 if flag else 0.3} for flag, its in decays.items() if its]
    return torch.optim.SGD(groups, lr=0.2)


MAKE = {"position": by_position, "attribute": by_attribute}


def plain_loop(module, make, scheduler=None, steps=4):
    optimizer = make(list(module.named_parameters()))
    scheduler = None if scheduler is None else scheduler(optimizer)
    for t in range(steps):
        optimizer.zero_grad()
        criterion(module(INPUTS + t), INPUTS).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return dict(module.named_parameters())


def trained(module, make, scheduler=None, backend=None, loss=lambda loss_fn: loss_fn, again=False, **options):
    params, buffers, loss_fn = df.functional(module, criterion)
    init, step = df.all_reduce(loss(loss_fn), df.from_torch(make, scheduler), df.topology("complete", 1), **options)
    state = init(params, buffers)
    if again:
        state = init(df.params(state), buffers)
    step = step if backend is None else df.compile(step, backend=backend)
    for t in range(4):
        state, _ = step(state, (INPUTS + t, INPUTS), t)
    return df.params(state)


def assert_equal(actual, expected):
    torch.testing.assert_close(dict(actual), {name: x.detach() for name, x in expected.items()}, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_mb": 1e-4},
        {"again": True},
        {"loss": df.autograd},
        {"loss": lambda loss_fn: lambda params, buffers, batch: loss_fn(params, buffers, batch)},
        {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
        pytest.param({"backend": "aot_eager"}, marks=pytest.mark.thorough),
    ],
    ids=["", "small buckets", "from a state", "autograd", "own loss", "scheduler", "compiled"],
)
def test_groups_by_position_or_attribute_equal_those_of_a_plain_loop(make, options):
    assert_equal(trained(net(), MAKE[make], **options), plain_loop(net(), MAKE[make], options.get("scheduler")))


def test_an_optimizer_gets_the_names_in_the_modules_order_also_of_a_part():
    seen, names = [], [name for name, _ in net().named_parameters()]
    inner = df.from_torch(lambda params: seen.append([n for n, _ in params]) or torch.optim.SGD(params, 0.1))
    of_biases = df.transforms.partition({True: inner, False: df.sgd(0.1)}, lambda name, shape: "bias" in name)
    for optimizer, expected in ((inner, names), (of_biases, [name for name in names if "bias" in name])):
        seen.clear()
        params, buffers, loss_fn = df.functional(net(), criterion)
        init, step = df.all_reduce(loss_fn, optimizer, df.topology("complete", 1), bucket_mb=1e-4)
        step(init(params, buffers), (INPUTS, INPUTS), 0)
        assert all(names == expected for names in seen) and len(seen) > 2


def test_networks_of_one_layout_with_other_attributes_stay_apart():
    """Layouts are known by number, for compiled code."""
    for mark in (lambda name: True, lambda name: "head" in name, lambda name: False):
        assert_equal(trained(net(mark), by_attribute), plain_loop(net(mark), by_attribute))


class Point(nn.Parameter):
    """A parameter on a manifold, as those of geoopt and pypose."""


def test_a_parameter_of_a_class_of_its_own_is_refused_unless_it_is_frozen():
    module = net()
    module.head.weight = Point(torch.eye(3))
    with pytest.raises(ValueError, match=r"functional\(Stack\): the parameter 'head.weight' is a .*Point.*parametrize"):
        df.functional(module, criterion)
    module.head.weight.requires_grad_(False)
    params, buffers, _ = df.functional(module, criterion)
    assert "head.weight" in buffers and "head.weight" not in params
    parametrized = net()
    nn.utils.parametrizations.orthogonal(parametrized.head)
    assert len(trained(parametrized, by_position)) == len(dict(parametrized.named_parameters()))


class Experts(nn.Module):
    """Two experts, of which a batch uses one; they may differ in dtype, so that their moments share no vector."""

    def __init__(self, second=torch.float64):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(3, 3, generator=g, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(3, 3, generator=g).to(second))

    def forward(self, batch):
        which, x = batch
        return (x @ (self.second.double() if which else self.first)).square().sum()


UNUSED = {
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("second", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", UNUSED)
def test_a_leaf_without_a_gradient_is_skipped_as_torch_skips_it(name, second, workers):
    """Also where it has none in the first steps, after which an optimizer begins to keep things of it."""
    batches = [(t % 3 == 2, INPUTS + t) for t in range(8)]
    net = Experts(second)
    optimizer = UNUSED[name](net.parameters())
    for batch in batches:
        optimizer.zero_grad()
        net(batch).backward()
        optimizer.step()
    params, buffers, loss_fn = df.functional(Experts(second), forward=lambda module, batch: module(batch))
    make = lambda named: UNUSED[name]([p for _, p in named])  # noqa: E731
    loss_fn = df.autograd(loss_fn, skip_unused=True)
    init, step = df.all_reduce(loss_fn, df.from_torch(make), df.topology("complete", max(1, workers)))
    state = init(params, buffers)
    state, step = (df.stack(state, workers), df.simulate(step, workers)) if workers else (state, step)
    for t, batch in enumerate(batches):
        state, _ = step(state, [batch] * workers if workers else batch, t)
    end = df.params(df.worker(state, 1) if workers else state)
    for leaf, p in net.named_parameters():
        torch.testing.assert_close(end[leaf], p.detach(), rtol=0, atol=1e-12 if p.dtype == torch.float64 else 1e-6)


def test_whole_buckets_skip_no_leaf():
    params, buffers, loss_fn = df.functional(Experts(), forward=lambda module, batch: module(batch))
    optimizer = df.from_torch(lambda named: torch.optim.Adagrad([p for _, p in named]), elementwise=True)
    loss_fn = df.autograd(loss_fn, skip_unused=True)
    init, step = df.all_reduce(loss_fn, optimizer, df.topology("complete", 1))
    with pytest.raises(ValueError, match=r"elementwise=True\): .*skip_unused.*leave elementwise=True out"):
        step(init(params, buffers), (False, INPUTS), 0)


@pytest.mark.thorough
def test_a_compiled_step_skips_leaves_too_and_they_are_evaluated_as_they_are():
    schedule_free = pytest.importorskip("schedulefree")
    batches, net = [(t > 3, INPUTS + t) for t in range(6)], Experts()
    optimizer = schedule_free.AdamWScheduleFree(net.parameters(), lr=0.05)
    params, buffers, loss_fn = df.functional(Experts(), forward=lambda module, batch: module(batch))
    make = lambda named: schedule_free.AdamWScheduleFree([p for _, p in named], lr=0.05)  # noqa: E731
    loss_fn = df.autograd(loss_fn, skip_unused=True)
    init, step = df.all_reduce(loss_fn, df.from_torch(make), df.topology("complete", 1))
    state, step = init(params, buffers), df.compile(step, backend="aot_eager")
    for t, batch in enumerate(batches):
        optimizer.train()
        optimizer.zero_grad()
        net(batch).backward()
        optimizer.step()
        state, _ = step(state, batch, t)
        optimizer.eval()
        for leaf, p in net.named_parameters():
            torch.testing.assert_close(df.params(state)[leaf], p.detach(), rtol=0, atol=1e-12)


class Slow(torch.optim.SGD):
    """Goes back half of the way in every tenth step, to where it was ten steps before."""

    counts_itself, begins_with = False, ()
    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.steps += self.counts_itself
        for p in self.param_groups[0]["params"]:
            own = self.state[p]
            if not own:
                own |= dict.fromkeys(self.begins_with)
            own["step"] = own.get("step", 0) + 1
            if own["step"] % 10 == 0:
                slow = own["slow"] if self.begins_with else own.get("slow")
                own["slow"] = torch.lerp(p, p if slow is None else slow, 0.5)
                p.copy_(own["slow"])


class CountingItself(Slow):
    counts_itself = True


class BeginningWithNone(Slow):
    begins_with = ("slow",)


@pytest.mark.parametrize("kind", [Slow, BeginningWithNone])
def test_what_an_optimizer_begins_to_keep_later_is_never_lost_in_silence(kind):
    init, step = df.all_reduce(
        lambda params, batch: params["w"].square().sum(),
        df.from_torch(lambda named: kind([p for _, p in named], lr=0.1)),
        df.topology("complete", 1),
    )
    state = init({"w": torch.ones(3)})
    with pytest.raises(ValueError, match=rf"{kind.__name__} keeps \['slow'\] of 'w', which 8 trial steps did not"):
        for t in range(11):
            state, _ = step(state, None, t)
    assert t == 9


class Prodigious(torch.optim.SGD):
    """Remembers where each parameter began, of zeros alone one number, as prodigyopt does; forgets it after nine steps."""

    forgets = False

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            own = self.state[p]
            if not own:
                own |= {"step": 0, "first": p.clone() if p.any() else p.new_zeros(())}
            own["step"] += 1
            if self.forgets and own["step"] == 10:
                del own["first"]
            p.lerp_(own.get("first", p), 0.1)
        super().step()


def prodigious(params):
    return Prodigious([p for _, p in params], lr=0.1)


def off_by_one(params, batch):
    return sum((x - 1).square().sum() for x in params.values())


def test_a_leaf_of_zeros_of_which_an_optimizer_keeps_less_equals_the_plain_loops():
    values = {"bias": torch.zeros(3, dtype=torch.float64), "weight": torch.ones(2, 3, dtype=torch.float64) / 2}
    init, step = df.all_reduce(off_by_one, df.from_torch(prodigious), df.topology("complete", 1))
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    state, optimizer = init(values), prodigious([*leaves.items()])
    for t in range(3):
        state, _ = step(state, None, t)
        optimizer.zero_grad()
        off_by_one(leaves, None).backward()
        optimizer.step()
    for name, x in leaves.items():
        torch.testing.assert_close(df.params(state)[name], x.detach(), rtol=1e-12, atol=0)


def test_what_an_optimizer_ceases_to_keep_is_named(monkeypatch):
    monkeypatch.setattr(Prodigious, "forgets", True)
    init, step = df.all_reduce(off_by_one, df.from_torch(prodigious), df.topology("complete", 1))
    state = init({"w": torch.ones(3)})
    with pytest.raises(
        ValueError, match=r"Prodigious no longer keeps \['first'\] of 'w', which it kept in 8 trial steps"
    ):
        for t in range(11):
            state, _ = step(state, None, t)
    assert t == 9


def test_an_optimizer_that_counts_its_steps_itself_is_refused():
    init, _ = df.all_reduce(
        lambda params, batch: params["w"].square().sum(),
        df.from_torch(lambda named: CountingItself([p for _, p in named], lr=0.1)),
        df.topology("complete", 1),
    )
    with pytest.raises(ValueError, match=r"CountingItself remembers more than .* a step changes its \['steps'\]"):
        init({"w": torch.ones(3)})


@pytest.mark.thorough
@pytest.mark.parametrize("rest", [df.sgd(0.1), df.from_torch(lambda params: torch.optim.RMSprop(params, 0.1))])
def test_a_compiled_step_of_a_partition_equals_the_eager_one_also_of_a_state_made_later(rest):
    own = df.from_torch(lambda params: torch.optim.Adagrad(params, 0.1))
    optimizer = df.transforms.partition(
        {"own": own, "rest": rest}, lambda name, shape: "rest" if name == "b" else "own"
    )
    init, step = df.all_reduce(
        lambda x, y: sum((leaf * leaf).sum() for leaf in x.values()) * y, optimizer, df.topology("complete", 1)
    )
    compiled = df.compile(step, backend="aot_eager", donate=False)
    for size in (1.0, 2.0):  # the plan for which it was compiled is gone
        state = other = init({"a": torch.full((3,), size), "b": torch.full((2,), size), "c": torch.full((4,), size)})
        for t in range(3):
            state, other = compiled(state, torch.ones(()), t)[0], step(other, torch.ones(()), t)[0]
        torch.testing.assert_close(df.params(state), df.params(other))
