"""Common first mistakes: one sentence names the finding and the fix."""

import pytest
import torch
from torch.nn.functional import mse_loss

import decentfn as df

pytestmark = pytest.mark.thorough

N = 4


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def plain_loss(params, batch):
    return (params["w"] ** 2).sum()


def loss_with_buffers(params, buffers, batch):
    return (params["w"] ** 2).sum(), (buffers, None)


def build(loss_fn=plain_loss, optimizer=None, topology=None, **options):
    topology = topology or df.topology("complete", 1)
    return df.adapt_then_combine(loss_fn, optimizer or df.sgd(0.1), topology, **options)


def w(dtype=torch.float32):
    return {"w": torch.ones(3, dtype=dtype)}


def of_module():
    params, buffers, loss_fn = df.functional(net(), mse_loss)
    return params, buffers, build(loss_fn)


def a_step():
    return build().step


def one_step(batch, loss_fn=None):
    params, buffers, made = df.functional(net(), mse_loss)
    init, step = build(loss_fn or made)
    return step(init(params, buffers), batch, 0)


def init_of_module(*chosen):
    """`init` with a choice of "params", "buffers" and "fewer" parameters."""
    params, buffers, (init, _) = of_module()
    fewer = {name: p for name, p in params.items() if name != "0.bias"}
    return init(*({"params": params, "buffers": buffers, "fewer": fewer}[name] for name in chosen))


def step_with(*chosen):
    """A first step with "state", "batch", "t" or "params", in the order given."""
    init, step = build()
    batch = torch.ones(8, 3), torch.ones(8)
    values = {"state": init(w()), "batch": batch, "t": 0, "params": w()}
    return step(*(values[name] for name in chosen))


MISTAKES = {
    "a module as the loss": (lambda: build(net()), r"^loss_fn=Sequential.*df\.functional\(module, criterion\)"),
    "a criterion as the loss": (lambda: build(torch.nn.MSELoss()), r"^loss_fn=MSELoss\(\).*df\.functional"),
    "a module accumulated": (lambda: df.accumulate(net()), r"^accumulate\(loss_fn\)=Sequential.*df\.functional"),
    "a module as the parameters": (lambda: build().init(net()), r"^init\(params=Sequential.*df\.functional"),
    "a dict as the batch": (
        lambda: one_step({"x": torch.ones(8, 3), "y": torch.ones(8, 2)}),
        r"batch is a dict of keyword arguments, but Sequential\.forward does not take \['x', 'y'\]",
    ),
    "a tensor as the batch": (lambda: one_step(torch.ones(2, 8, 3)), r"batch is a Tensor, expected a tuple"),
    "buffers forgotten": (
        lambda: init_of_module("params"),
        r"^init\(params, buffers\): there are no buffers.*1\.num_batches_tracked.*; call init\(params, buffers\)",
    ),
    "buffers forgotten by a plain loss": (
        lambda: build(loss_with_buffers).init(w()),
        r"no buffers.*\(params, batch\).*call init\(params, buffers\)",
    ),
    "buffers for a loss without": (
        lambda: build().init(w(), {"b": torch.ones(1)}),
        r"there are buffers.*\(params, buffers, batch\).*leave the buffers out",
    ),
    "parameters and buffers swapped": (lambda: init_of_module("buffers", "params"), r"swapped"),
    "another module's parameters": (
        lambda: init_of_module("fewer", "buffers"),
        r"loss of Sequential, whose parameter '0\.bias' is missing.*requires_grad_\(False\)",
    ),
    "buffers not returned": (
        lambda: build(lambda p, b, batch: (p["w"].sum(), torch.ones(2))).step(
            build(loss_with_buffers).init(w(), {"b": torch.ones(1)}), None, 0
        ),
        r"with buffers a loss returns \(loss, \(buffers, aux\)\)",
    ),
    "simulate after compile": (
        lambda: df.simulate(df.compile(a_step()), N),
        r"^simulate\(compile\(step\)\): the order is df\.compile\(.*df\.simulate\(step, N\)",
    ),
    "compiled twice": (lambda: df.compile(df.compile(a_step())), r"^compile\(compile\(step\)\).*once"),
    "simulated twice": (
        lambda: df.simulate(df.simulate(a_step(), N), N),
        r"^simulate\(simulate\(step\)\).*at most once",
    ),
    "a compiled step wrapped": (
        lambda: df.ema(build()._replace(step=df.compile(a_step()))),
        r"^ema\(Algorithm\(init, compile\(step\)\)\).*wrap the algorithm first",
    ),
    "the pair compiled": (lambda: df.compile(build()), r"^compile\(Algorithm.*init, step ="),
    "the pair simulated": (lambda: df.simulate(build(), N), r"^simulate\(Algorithm.*init, step ="),
    "a wire dtype's name": (lambda: build(wire_dtype="bf16"), r"^wire_dtype='bf16'.*torch\.bfloat16"),
    "a wire dtype of integers": (lambda: build(wire_dtype=torch.int8), r"^wire_dtype=torch\.int8: expected a floating"),
    "a wider wire": (
        lambda: build(wire_dtype=torch.float32).init(w(torch.bfloat16)),
        r"^wire_dtype=torch\.float32 is wider than every parameter \(torch\.bfloat16\).*leave it out",
    ),
    "a bucket's size as text": (lambda: build(bucket_mb="25"), r"^bucket_mb='25'.*number of MiB"),
    "a bucket without end": (lambda: build(bucket_mb=float("inf")), r"^bucket_mb=inf.*number of MiB"),
    "torch's optimizer": (
        lambda: build(optimizer=torch.optim.SGD(net().parameters(), lr=0.1)),
        r"^optimizer: torch\.optim\.SGD .* df\.sgd\(learning_rate\)",
    ),
    "torch's optimizer, the class": (lambda: build(optimizer=torch.optim.AdamW), r"torch\.optim\.AdamW .* df\.adamw\("),
    "torch's optimizer in a chain": (
        lambda: df.chain(df.clip_by_global_norm(1.0), torch.optim.RMSprop(net().parameters())),
        r"^chain\(\.\.\.\): torch\.optim\.RMSprop .* df\.adamw\(",
    ),
    "an optimizer that was not called": (
        lambda: build(optimizer=df.adamw),
        r"^optimizer: found the function adamw; call it",
    ),
    "a state as the parameters": (
        lambda: build().init(build().init(w())),
        r"^init\(params\): found a training state's State.*init\(df\.params\(state\)\)",
    ),
    "a state's buckets as the parameters": (lambda: build().init(build().init(w()).params), r"init\(df\.params\(state"),
    "parameters as the state": (
        lambda: step_with("params", "batch", "t"),
        r"^step\(state, batch, t\): its first argument is a dict, not a training state, from init\(params\)",
    ),
    "batch before state": (lambda: step_with("batch", "state", "t"), r"first argument is a tuple.* batch comes second"),
    "t before batch": (lambda: step_with("state", "t", "batch"), r"third argument is a tuple; the order is"),
    "t first": (lambda: step_with("t", "state", "batch"), r"third argument is a tuple, and its first a int; the order"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence_and_not_a_page(mistake):
    make, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence) as caught:
        make()
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


HOW = {
    "simulated": lambda step: df.simulate(step, N),
    "compiled": lambda step: df.compile(step, backend="aot_eager"),
    "both": lambda step: df.compile(df.simulate(step, N), backend="aot_eager"),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("order", "sentence"),
    [("tsb", "the order is"), ("stb", "the order is"), ("bst", "not a training state"), ("sdt", "batch is a dict")],
)
def test_compiled_and_simulated_steps_say_the_same(how, order, sentence):
    """Before anything is traced: no page of Dynamo's around the sentence."""
    params, buffers, loss_fn = df.functional(net(), mse_loss)
    init, step = build(loss_fn, topology=df.topology("complete", 1 if how == "compiled" else N))
    state, batch = init(params, buffers), (torch.ones(8, 3), torch.ones(8, 2))
    if how != "compiled":
        state, batch = df.stack(state, N), df.stack(batch, N)
    values = {"s": state, "b": batch, "t": 0, "d": dict(zip("xy", batch, strict=True))}
    with pytest.raises(ValueError, match=sentence) as caught:
        HOW[how](step)(*(values[name] for name in order))
    assert len(str(caught.value)) < 400
