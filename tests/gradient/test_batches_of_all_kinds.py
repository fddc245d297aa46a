"""Batches that are not trees of plain tensors, and modules with unusual parts: right in every mode, or refused."""

import re
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import decentfn as df
from decentfn.core import trees


class Tagged(torch.Tensor):
    """A tensor with methods of its own, as MONAI's MetaTensor and torchvision's tv_tensors."""

    def doubled(self):
        return self * 2


class Refusing(torch.Tensor):
    """A tensor that keeps its class to itself, as TVTensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Packed(Mapping):
    """Tensors by name with methods of tensors, as a TensorDict."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def __getitem__(self, key):
        return self.tensors[key]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)

    def clone(self):
        return Packed(**{name: x.clone() for name, x in self.tensors.items()})

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


MODES = ["eager", "simulated", "donated", *(pytest.param(m, marks=pytest.mark.thorough) for m in ("compiled", "both"))]
X = torch.linspace(-1, 1, 24).view(2, 4, 3)


def stepped(loss_fn, batch, mode):
    workers = 2 if mode in ("simulated", "both") else 1
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", workers))
    state = init({"w": torch.ones(3)})
    state, step = (df.stack(state, 2), df.simulate(step, 2)) if workers == 2 else (state, step)
    step = df.compile(step, backend="aot_eager") if mode in ("compiled", "both") else step
    return (df.donate(step) if mode == "donated" else step)(state, batch, 0)


@cache
def trained_on(kind, mode, around):
    loss_fn = around(lambda params, batch: (batch["x"] @ params["w"]).square().mean())
    given = X if mode in ("simulated", "both") else X[0]
    return stepped(loss_fn, {"x": given.clone().as_subclass(kind)}, mode)


AROUND = pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd], ids=["traced", "autograd"])


@AROUND
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, mode) for kind in (Tagged, Refusing) for mode in ("eager", "simulated", "donated")),
        *(pytest.param(*cell, marks=pytest.mark.thorough) for cell in ((Tagged, "compiled"), (Refusing, "both"))),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((Refusing, "compiled"), (Tagged, "both"))),
    ],
)
def test_a_tensor_of_a_subclass_trains_as_a_plain_one_and_the_loss_is_plain(kind, mode, around):
    state, metrics = trained_on(kind, mode, around)
    expected, plain = trained_on(torch.Tensor, mode, around)
    assert type(metrics.loss) is torch.Tensor
    assert {type(x) for x in trees.leaves((state, df.params(state)))} == {torch.Tensor}
    torch.testing.assert_close(metrics.loss, plain.loss, rtol=0, atol=0)
    torch.testing.assert_close(df.params(state)["w"], df.params(expected)["w"], rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_by_autograd_a_batch_keeps_its_class(mode):
    loss_fn = df.autograd(lambda params, batch: (batch.doubled() @ params["w"]).square().mean())
    batch = X if mode in ("simulated", "both") else X[0]
    loss = stepped(loss_fn, batch.as_subclass(Tagged), mode)[1].loss
    torch.testing.assert_close(loss, (2 * batch @ torch.ones(3)).square().mean(-1))


@AROUND
def test_a_buffer_that_a_loss_takes_from_such_a_batch_is_plain(around):
    loss_fn = around(
        lambda params, old, batch: ((batch @ params["w"]).square().mean(), (0.5 * (old + batch.mean(0)), None))
    )
    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    state, _ = step(init({"w": torch.ones(3)}, torch.zeros(3)), X[0].as_subclass(Tagged), 0)
    assert type(df.buffers(state)) is torch.Tensor
    torch.testing.assert_close(df.buffers(state), 0.5 * X[0].mean(0))


class Rows(Packed):
    """The same with one batch size for all of its tensors."""

    @property
    def shape(self):
        return self.tensors["x"].shape[:1]

    def __getitem__(self, key):
        return self.tensors[key] if isinstance(key, str) else Rows(**{name: x[key] for name, x in self.items()})


def packed_loss(params, batch):
    return (batch.clone()["x"] @ params["w"]).square().mean()


@pytest.mark.parametrize("kind", [Packed, Rows])
@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd], ids=["traced", "autograd"])
def test_a_container_with_methods_is_refused_stacked_or_gives_its_rows_and_both_ways_out_work(around, kind):
    expected = stepped(lambda p, b: (b["x"] @ p["w"]).square().mean(), dict(kind(x=X)), "simulated")[1].loss
    if kind is Rows and around is df.autograd:
        torch.testing.assert_close(stepped(around(packed_loss), kind(x=X), "simulated")[1].loss, expected)
    else:
        match = rf"batch is {kind.__name__}; .*tensors in dicts.*df\.autograd.*list of one tuple, dict or object"
        with pytest.raises(ValueError, match=match):
            stepped(around(packed_loss), kind(x=X), "simulated")
    losses = stepped(df.autograd(packed_loss), [kind(x=x) for x in X], "simulated")[1].loss
    torch.testing.assert_close(losses, expected)


class Graph:
    def __init__(self, x, name):
        self.x, self.name = x, name


@dataclass
class Record:
    x: torch.Tensor


class Encoding(UserDict):
    """Tensors by name and as attributes, as transformers' BatchEncoding."""

    def __getattr__(self, name):
        return self.data[name]


OBJECTS = {
    "mappings with attributes": ([Encoding(x=X[0]), Encoding(x=X[1])], lambda b: b.x),
    "dataclasses": ([Record(X[0]), Record(X[1])], lambda b: b.x),
    "graphs of different sizes": ([Graph(X[0], "a"), Graph(X[1][:2], "b")], lambda b: b.x),
    "lists of strings": ([["1", "2", "3"], ["4", "5", "6"]], lambda b: torch.tensor([float(s) for s in b])),
    "tensors of different shapes": ([{"x": X[0]}, {"x": X[1][:2]}], lambda b: b["x"]),
}


@pytest.mark.parametrize("mode", [MODES[1], MODES[-1]])
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_list_of_one_batch_per_worker_equals_each_worker_alone(kind, mode):
    batches, of = OBJECTS[kind]
    loss_fn = df.autograd(lambda params, batch: (of(batch) @ params["w"]).square().mean())
    losses = stepped(loss_fn, batches, mode)[1].loss
    torch.testing.assert_close(losses, torch.stack([stepped(loss_fn, b, "eager")[1].loss for b in batches]))


def test_a_stacked_list_of_tensors_is_one_batch_as_before():
    loss_fn = df.autograd(lambda params, batch: ((batch[0] @ params["w"] - batch[1]) ** 2).mean())
    y = torch.ones(2, 4)
    expected = ((X @ torch.ones(3) - y) ** 2).mean(-1)
    torch.testing.assert_close(stepped(loss_fn, [X, y], "simulated")[1].loss, expected)


@pytest.mark.parametrize("batch", [["a", "b", "c"], Graph(X, "a"), [Graph(X, "a")], Record(X)])
def test_another_number_of_objects_than_workers_is_refused(batch):
    with pytest.raises(
        ValueError, match=r"first axis must be the 2 workers.*list of one tuple, dict or object for each"
    ):
        stepped(df.autograd(lambda params, batch: params["w"].sum()), batch, "simulated")


def test_a_list_of_bare_tensors_is_one_batch_whose_rows_are_required():
    with pytest.raises(ValueError, match=r"leaf '1' of the batch is \[4\]; its first axis must be the 2 workers"):
        stepped(df.autograd(lambda params, batch: (batch[0] @ params["w"]).sum()), [X, X[0, :, 0]], "simulated")


@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd], ids=["traced", "autograd"])
def test_a_loaders_batch_that_is_not_divided_names_the_collate_function_which_divides_it(around):
    data = [(x, x.sum()) for x in X.reshape(-1, 3)]  # the first worker's samples, then the second's
    loss_fn = around(lambda params, batch: ((batch[0] @ params["w"] - 2 * batch[1]) ** 2).mean())
    with pytest.raises(ValueError, match=r"first axis must be the 2 workers.*collate_fn=df\.data") as raised:
        stepped(loss_fn, next(iter(DataLoader(data, batch_size=len(data)))), "simulated")
    collate = eval(re.search(r"collate_fn=(df\.[a-z_.]+\(\d+\))", str(raised.value))[1], {"df": df})
    [batch] = DataLoader(data, batch_size=len(data), collate_fn=collate)
    torch.testing.assert_close(stepped(loss_fn, batch, "simulated")[1].loss, X.sum(-1).square().mean(-1))


class Irreps(tuple):
    """A tuple that refuses its length, as e3nn's."""

    def __len__(self):
        raise NotImplementedError


class WithIrreps(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("scale", torch.ones(()))
        self.irreps = Irreps((1, 2))


def test_a_module_that_keeps_a_tuple_without_a_length_trains():
    params, buffers, loss_fn = df.functional(WithIrreps(), mse_loss)
    for one in (loss_fn, df.autograd(loss_fn)):
        init, step = df.all_reduce(one, df.sgd(0.1), df.topology("complete", 1))
        assert torch.isfinite(step(init(params, buffers), (X[0], torch.zeros(4, 1)), 0)[1].loss)


@pytest.mark.parametrize("around", [lambda loss_fn: loss_fn, df.autograd], ids=["traced", "autograd"])
def test_a_parameter_of_a_subclass_is_refused_by_init_too(around):
    init, _ = df.all_reduce(
        around(lambda params, batch: (batch @ params["w"]).sum()), df.sgd(0.1), df.topology("complete", 1)
    )
    with pytest.raises(ValueError, match=r"init\(params\): leaf 'w' is a .*Tagged; a state holds plain tensors"):
        init({"w": torch.ones(3).as_subclass(Tagged)})


class Codebook(nn.Module):
    """Its codes are a buffer with a gradient, which no optimizer trains; a second one gets it in the call (VectorQuantize)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 3)
        self.register_buffer("codes", torch.eye(3).requires_grad_())
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.zero.requires_grad_()
        x = self.net(x)
        nearest = self.codes[torch.cdist(x, self.codes).argmin(-1)]
        self.codes.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + nearest + self.zero


def test_a_buffer_with_a_gradient_is_a_buffer_in_every_way():
    torch.manual_seed(0)
    module = Codebook()
    params, buffers, loss_fn = df.functional(module, mse_loss)
    batch = X[0], torch.zeros(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 2))
    state, step = df.stack(init(params, buffers), 2), df.simulate(step, 2)
    before = module.codes
    for t in range(3):
        state, metrics = step(state, trees.map(lambda x: torch.stack([x, x]), batch), t)
    assert module.codes is before and module.codes.requires_grad and module.codes.grad is None
    for _ in range(3):
        optimizer.zero_grad()
        loss = mse_loss(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(metrics.loss, loss.detach().expand(2))
    torch.testing.assert_close(df.buffers(df.worker(state, 0))["codes"], module.codes.detach())


def of_rows(params, batch):
    return sum((row * params["x"]).sum() for row in batch["rows"].unbind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_enter_by_autograd_and_elsewhere_the_error_says_so(layout):
    """Simulated, a list has one for each worker; as many rows as workers are no workers' rows."""
    batch = {"rows": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)}
    init, traced = df.adapt_while_communicate(of_rows, df.sgd(0.1), df.topology("complete", 2))
    state = df.stack(init({"x": torch.ones(3)}), 2)
    step = df.simulate(
        df.adapt_while_communicate(df.autograd(of_rows), df.sgd(0.1), df.topology("complete", 2)).step, 2
    )
    assert step(state, [batch, batch], 0)[1].loss.tolist() == [9, 9]
    with pytest.raises(ValueError, match=r"'rows' of the batch is nested; .* a list of one tuple, dict"):
        step(state, batch, 0)
    with pytest.raises(ValueError, match="'rows' of the batch is nested"):
        df.simulate(traced, 2)(state, batch, 0)
    init, traced = df.adapt_while_communicate(of_rows, df.sgd(0.1), df.topology("complete", 1))
    if layout == torch.strided:
        with pytest.raises(ValueError, match="pad it, torch.nested.to_padded_tensor"):
            traced(init({"x": torch.ones(3)}), batch, 0)
