"""Parameters that `df.from_torch` gives to an optimizer: in the module's order, with their attributes, of plain classes."""

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
