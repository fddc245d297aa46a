"""Traced and by autograd, eager and compiled, of one worker and simulated: the same errors, dtypes and aux."""

import dataclasses
import gc
import traceback
from collections import deque
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import decentfn as df

pytestmark = pytest.mark.thorough


class Mine(RuntimeError):
    pass


def divides(params, batch):
    return params.sum() / (1 // 0)


def looks_up(params, batch):
    return params.sum() * batch["labels"]


def raises_mine(params, batch):
    raise Mine("of the user")


def multiplies(params, batch):
    return (params @ torch.ones(7, 7)).sum()


class FailsBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        raise LookupError("in backward")


def fails_backward(params, batch):
    return FailsBackward.apply(params).sum()


AROUND = {
    "traced": lambda f: f,
    "autograd": df.autograd,
    "accumulated": df.accumulate,
    "accumulated, autograd": lambda f: df.accumulate(df.autograd(f)),
    "scaled": df.dynamic_loss_scale,
    "scaled, autograd": lambda f: df.dynamic_loss_scale(df.autograd(f)),
}
everywhere = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
modes = pytest.mark.parametrize("mode", ["eager", "donated", "simulated", "compiled", "simulated and compiled"])


def step_of(loss_fn, around, mode, params, batch):
    """A step, its state and its batch."""
    n = 2 if "simulated" in mode else 1
    init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", n))
    state = init(params)
    if around in (AROUND["accumulated"], AROUND["accumulated, autograd"]):
        batch = df.stack(batch, 2)
    if n > 1:
        state, batch, step = df.stack(state, n), df.stack(batch, n), df.simulate(step, n)
    if mode == "donated":
        step = df.donate(step)
    return df.compile(step, backend="eager") if "compiled" in mode else step, state, batch


def assert_arrives(loss_fn, kind, text, mode, around):
    step, state, batch = step_of(loss_fn, around, mode, torch.ones(3), {"x": torch.ones(3)})
    with pytest.raises(kind, match=text) as caught:
        step(state, batch, 0)
    assert caught.type is kind and caught.value.__cause__ is None
    assert traceback.extract_tb(caught.tb)[-1].name == loss_fn.__name__


@pytest.mark.one_in(3)
@everywhere
@modes
def test_an_error_of_the_loss_arrives_as_it_was_raised(mode, around):
    assert_arrives(divides, ZeroDivisionError, "integer division", mode, around)


@pytest.mark.parametrize("mode", ["eager", "simulated", "compiled"])
@pytest.mark.parametrize(
    ("loss_fn", "kind", "text"),
    [
        (looks_up, KeyError, "labels"),
        (raises_mine, Mine, "of the user"),
        (multiplies, RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_an_error_of_any_kind_arrives_as_it_was_raised(loss_fn, kind, text, mode):
    for around in (AROUND["traced"], AROUND["autograd"]):
        assert_arrives(loss_fn, kind, text, mode, around)


@modes
@pytest.mark.parametrize("around", [AROUND["traced"], AROUND["autograd"]], ids=["traced", "autograd"])
def test_an_error_of_the_backward_pass_arrives_as_it_was_raised(around, mode):
    step, state, batch = step_of(fails_backward, around, mode, torch.ones(3), {"x": torch.ones(3)})
    with pytest.raises(LookupError, match="in backward"):
        step(state, batch, 0)


def test_an_error_of_one_worker_alone_arrives_as_it_was_raised():
    def loss_fn(params, batch):
        return params[batch].sum()

    init, step = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 3))
    state, rows = df.stack(init(torch.ones(3)), 3), torch.tensor([[0], [1], [7]])
    with pytest.raises(IndexError, match="out of"):
        df.simulate(step, 3)(state, rows, 0)


@pytest.mark.one_in(3)
@everywhere
@pytest.mark.parametrize("mode", ["eager", "simulated", "simulated and compiled"])
def test_the_loss_is_reported_in_its_own_dtype_and_value(mode, around):
    wide, narrow = torch.float64, torch.bfloat16
    kinds = [(torch.float32, wide), (wide, torch.float32), (narrow, narrow)]
    for of_params, of_batch in kinds[1:2] if "compiled" in mode else kinds:

        def loss_fn(params, batch):
            return ((params.to(batch.dtype) - batch) ** 2).mean()

        params, batch = torch.full((3,), 0.1, dtype=of_params), torch.full((3,), 1 / 3, dtype=of_batch)
        step, state, given = step_of(loss_fn, around, mode, params, batch)
        loss = step(state, given, 0)[1].loss
        assert loss.dtype == of_batch
        torch.testing.assert_close(loss, loss_fn(params, batch).expand(loss.shape))


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    parts: list


@dataclasses.dataclass
class Slotted:
    __slots__ = ("logits",)
    logits: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    inner: Any


class Plain:
    def __init__(self, logits):
        self.logits, self.own = logits, self


CONTAINERS = {
    "dataclass": lambda x: Output(x, [x, {"deep": Slotted(x)}]),
    "slots": Slotted,
    "named tuple": lambda x: Pair(x, Plain(x)),
    "object": Plain,
    "namespace": lambda x: SimpleNamespace(deep=SimpleNamespace(x={"a": (x,)})),
    "set": lambda x: {x},
    "deque": lambda x: deque([x, Plain(x)]),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0),
}


def tensors_in(x, seen):
    """All tensors that the garbage collector finds from here."""
    if id(x) in seen or isinstance(x, (type, ModuleType, FunctionType)):
        return []
    seen.add(id(x))
    own = [x] if isinstance(x, torch.Tensor) else []
    return own + [y for held in gc.get_referents(x) for y in tensors_in(held, seen)]


@pytest.mark.parametrize("mode", ["eager", "simulated", "compiled"])
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_aux_by_autograd_holds_no_graph_and_no_memory_of_the_state_whatever_it_stands_in(make, mode):
    made = []

    def loss_fn(params, batch):
        made.append(make(params * 2))
        return (params * batch).sum(), {"computed": made[-1], "given": make(params)}

    step, state, batch = step_of(loss_fn, df.autograd, mode, torch.ones(3), torch.ones(3))
    aux = df.donate(step)(state, batch, 0)[1].aux if mode == "eager" else step(state, batch, 0)[1].aux
    found = tensors_in(aux, set())
    assert found and not any(x.requires_grad or x.grad_fn is not None for x in found)
    assert mode == "simulated" or type(aux["given"]) is type(made[-1])
    assert sum(x.numel() and float(x.max()) == 2 for x in found) and all(float(x.min()) >= 1 for x in found)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_traced_aux_is_of_tensors_and_numbers(mode):
    init, step = df.all_reduce(lambda p, b: (p.sum(), {"name": "x"}), df.sgd(0.1), df.topology("complete", 1))
    step = step if mode == "eager" else df.compile(step, backend="eager")
    with pytest.raises(ValueError, match=r"loss_fn returned 'x' in its aux.*df\.autograd"):
        step(init(torch.ones(3)), torch.ones(3), 0)
