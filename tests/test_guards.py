"""A compiled step looks again at whatever is read from outside: changed between steps, it does what the eager step does."""

import copy
from types import SimpleNamespace

import pytest
import torch

import decentfn as df
from decentfn import kit
from decentfn.comm import collectives
from decentfn.comm.collectives import Channels, Identity, World
from decentfn.core import trees
from decentfn.engine import compilation

pytestmark = pytest.mark.thorough

WORKERS = 4
outside = SimpleNamespace()
args = SimpleNamespace()
flag = True
terms = []
weights = {}
layer = criterion = None
mask = torch.ones(4)


def set_all():
    """Everything outside, as a script has it before the first step."""
    torch.manual_seed(0)
    globals().update(
        args=SimpleNamespace(beta=0.5, power=2),
        flag=True,
        terms=[lambda w: w.sum()],
        weights={"decay": 0.1},
        layer=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(1.0)).requires_grad_(False),
        criterion=torch.nn.SmoothL1Loss(beta=1.0),
        mask=torch.tensor([1.0, 0.0, 1.0, 1.0]),
    )
    vars(outside).update(rate=torch.tensor(0.1), momentum=0.9, scale=1.0, shift=1, gamma=torch.tensor(0.5))


def loss_fn(params, batch):
    w = params["w"]
    loss = args.beta * (mask * (w - batch) ** args.power).mean() + criterion(w, batch)
    loss = loss + sum(term(w) for term in terms) + weights["decay"] * (w**2).sum() + weights.get("more", 0.0) * w.sum()
    return loss + (layer(w) ** 2).mean() if flag else -loss


def set_global(name, value):
    globals()[name] = value


NUMBERS = {
    "a number": lambda: setattr(args, "beta", 2.0),
    "a number that becomes an int": lambda: setattr(args, "beta", 3),
    "a number that becomes a tensor": lambda: setattr(args, "beta", torch.tensor(0.7)),
    "an exponent": lambda: setattr(args, "power", 4),
    "a list of terms": lambda: terms.append(lambda w: (w**3).sum()),
    "one of the terms": lambda: terms.__setitem__(0, lambda w: (2 * w).sum()),
    "a dict's entry": lambda: weights.update(decay=0.3),
    "a dict's new entry": lambda: weights.update(more=0.2),
    "a module in evaluation": lambda: layer.eval(),
    "a hook": lambda: layer[0].register_forward_hook(lambda module, inputs, output: 2 * output),
    "a module's weights": lambda: setattr(layer[0], "weight", torch.nn.Parameter(torch.eye(4), requires_grad=False)),
    "an attribute of the criterion": lambda: setattr(criterion, "beta", 0.01),
    "another criterion": lambda: set_global("criterion", torch.nn.MSELoss()),
    "a flag": lambda: set_global("flag", False),
}
TENSORS = {
    "a mask changed in place": lambda: mask.mul_(2),
    "a mask whose data is shorter, and float64": lambda: setattr(
        mask, "data", torch.tensor([2.5], dtype=torch.float64)
    ),
    "a float64 mask": lambda: set_global("mask", torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)),
    "a shorter mask": lambda: set_global("mask", torch.tensor([3.0])),
    "a mask of bools": lambda: set_global("mask", torch.tensor([True, False, False, True])),
    "a mask with strides": lambda: set_global("mask", torch.arange(8.0)[::2]),
    "a float64 rate": lambda: setattr(outside, "rate", torch.tensor(0.05, dtype=torch.float64)),
    "a rate that becomes a number": lambda: setattr(outside, "rate", 0.02),
    "a float64 gamma": lambda: setattr(outside, "gamma", torch.tensor(0.25, dtype=torch.float64)),
    "a gamma that becomes a number": lambda: setattr(outside, "gamma", 1.0),
    "what a transform reads": lambda: setattr(outside, "scale", 3.0),
    "what an algorithm reads": lambda: setattr(outside, "momentum", 0.5),
    "what a topology reads": lambda: setattr(outside, "shift", 3),
}
FEW = ["a number", "a shorter mask", "what an algorithm reads", "what a topology reads"]


def scaled():
    """A transform of the user's own, which reads a number from outside."""
    return df.transforms.Transform(
        lambda params: (), lambda grads, state, params: (kit.each(lambda g: g * outside.scale, grads), state)
    )


def draw(t):
    """A topology of the user's own: whom a worker hears is read from outside."""
    shift = torch.as_tensor(outside.shift)
    workers = torch.arange(WORKERS)
    return (
        ((workers - shift) % WORKERS).view(-1, 1),
        ((workers + shift) % WORKERS).view(-1, 1),
        torch.full((WORKERS, 2), 0.5, dtype=torch.float64),
    )


@kit.algorithm
def own(loss_fn, optimizer, topology, **options):
    """An algorithm of the user's own: what it mixes is weighted by a number from outside."""
    worker = kit.Worker(loss_fn, optimizer, topology, **options)

    def step(state, batch, t):
        g, local = worker.gradient(state.params, state.local, batch, t)
        u, local = worker.update(kit.each(lambda g: g * outside.momentum, g.grads), g, local, state.params)
        return kit.State(worker.mix(kit.add(state.params, u), t), local), g.metrics

    return worker.algorithm(step)


def build(algorithm, *, simulated):
    topology = df.topologies.from_draw("mine", WORKERS, draw) if simulated else df.topology("complete", 1)
    optimizer = df.chain(scaled(), df.sgd(lambda t: outside.rate))
    init, step = (
        own(loss_fn, optimizer, topology)
        if algorithm == "own"
        else df.adapt_while_communicate(loss_fn, optimizer, topology, gamma=lambda t: outside.gamma)
    )
    state, batch = init({"w": torch.linspace(-1, 1, 4)}), torch.linspace(0, 2, 4)
    if not simulated:
        return step, state, batch
    return df.simulate(step, WORKERS), df.stack(state, WORKERS), torch.linspace(0, 2, 4 * WORKERS).view(WORKERS, 4)


def as_eager_after(changes, algorithm, *, simulated, donate, backend):
    """Compare both steps of the first state after each change and, again, in the step after that."""
    set_all()
    step, state, batch = build(algorithm, simulated=simulated)
    compiled = df.compile(step, donate=donate, backend=backend)
    for t, name in enumerate(name for change in ("nothing", *changes) for name in (change, "nothing")):
        {**NUMBERS, **TENSORS, "nothing": lambda: None}[name]()
        mine = compiled(copy.deepcopy(state), batch, t)
        for a, b in zip(trees.leaves(mine), trees.leaves(step(state, batch, t)), strict=True):
            torch.testing.assert_close(a, b, msg=lambda said, name=name: f"{name}: {said}")


def test_numbers_and_modules_that_the_loss_reads_are_looked_at_again():
    as_eager_after(NUMBERS, "adapt_while_communicate", simulated=False, donate=True, backend="eager")


def test_tensors_and_what_else_a_step_reads_are_looked_at_again():
    as_eager_after(TENSORS, "adapt_while_communicate", simulated=True, donate=True, backend="eager")


def test_also_by_an_algorithm_of_ones_own():
    as_eager_after(FEW, "own", simulated=True, donate=False, backend="eager")


def test_inductors_code_is_never_given_another_dtype_or_size():
    changes = ["a mask whose data is shorter, and float64", "a rate that becomes a number"]
    as_eager_after(changes, "adapt_while_communicate", simulated=False, donate=True, backend="inductor")


def test_a_number_that_is_another_in_every_step_is_right_until_an_error_says_so(monkeypatch):
    monkeypatch.setattr(compilation, "_GRAPHS", 3)
    set_all()
    init, step = df.all_reduce(lambda w, batch: args.beta * w.sum(), df.sgd(1.0), df.topology("complete", 1))
    state, compiled = init(torch.zeros(1)), df.compile(step, backend="eager")
    for t in range(3):
        args.beta = float(t)
        state, _ = compiled(state, None, t)
    assert df.params(state) == -3.0
    args.beta = 3.0
    with pytest.raises(
        RuntimeError, match="more than 3 kinds .* read what changes from a tensor that is filled in place"
    ):
        compiled(state, None, 3)


def test_an_array_of_numpys_is_refused():
    set_all()
    args.array = torch.ones(1).numpy()
    init, step = df.all_reduce(
        lambda w, batch: (torch.from_numpy(args.array) * w).sum(), df.sgd(1.0), df.topology("complete", 1)
    )
    with pytest.raises(
        RuntimeError, match="cannot guard a NumPy array, of the batch or from outside the loss; make it a tensor"
    ):
        df.compile(step, backend="eager")(init(torch.zeros(1)), None, 0)


def test_a_step_compiled_alone_is_compiled_again_among_others():
    init, step = df.adapt_then_combine(lambda w, b: (w * b).sum(), df.sgd(1.0), df.topology("complete", 4))
    compiled, state = df.compile(df.simulate(step, 4), backend="eager", donate=False), df.stack(init(torch.zeros(1)), 4)
    compiled(state, torch.ones(4, 1), 0)
    with (
        collectives.use(World(Channels(Identity.of(0, 2)))),
        pytest.raises(ValueError, match="num_workers=4, but 2 process"),
    ):
        compiled(state, torch.ones(4, 1), 1)
