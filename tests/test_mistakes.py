"""Mistakes: one sentence names the call, the value, the rule and the way out, and the way out works.

`tests/mistakes.py` has the page of mistakes, with whole sentences; `test_bad_numbers.py` tries numbers.
"""

import math
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import decentfn as df
from decentfn.optim import schedules

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
    "a module accumulated": (lambda: df.accumulate(net()), r"^accumulate\(loss_fn\)=Sequential.*df\.functional"),
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
    "torch's optimizer in a chain": (
        lambda: df.chain(df.clip_by_global_norm(1.0), torch.optim.RMSprop(net().parameters())),
        r"^chain\(\.\.\.\): torch\.optim\.RMSprop .* df\.adamw\(",
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
    "the state before the module": (
        lambda: df.state_dict(build().init(w()), net()),
        r"^state_dict\(module=State.*the module comes first",
    ),
    "parameters as the state of buffers": (lambda: df.buffers(w()), r"^dict is not a training state"),
    "donate in words": (lambda: df.compile(a_step(), donate="no"), r"^compile\(donate='no'\): donate is True or False"),
    "t before batch": (lambda: step_with("state", "t", "batch"), r"t=\(tensor.*third argument numbers the steps"),
    "t first": (lambda: step_with("t", "state", "batch"), r"t=\(tensor.*third argument numbers the steps"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence_and_not_a_page(mistake):
    make, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence) as caught:
        make()
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_keywords_that_a_module_does_not_take_are_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        one_step({"x": torch.ones(8, 3), "y": torch.ones(8, 2)})


HOW = {
    "simulated": lambda step: df.simulate(step, N),
    "compiled": lambda step: df.compile(step, backend="aot_eager"),
    "both": lambda step: df.compile(df.simulate(step, N), backend="aot_eager"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("order", "sentence"),
    [("tsb", "third argument numbers"), ("stb", "third argument numbers"), ("bst", "not a training state")],
)
def test_compiled_and_simulated_steps_say_the_same(how, order, sentence):
    """Before anything is traced: no page of Dynamo's around the sentence."""
    params, buffers, loss_fn = df.functional(net(), mse_loss)
    init, step = build(loss_fn, topology=df.topology("complete", 1 if how == "compiled" else N))
    state, batch = init(params, buffers), (torch.ones(8, 3), torch.ones(8, 2))
    if how != "compiled":
        state, batch = df.stack(state, N), df.stack(batch, N)
    values = {"s": state, "b": batch, "t": 0}
    with pytest.raises(ValueError, match=sentence) as caught:
        HOW[how](step)(*(values[name] for name in order))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: df.topology("alternating-exp-ring", 6, local_world_size=4), r"multiple of local_world_size"),
        (lambda: df.topology("alternating-exp-ring", 6, local_world_size=2), r"3 nodes.*power of two"),
        (
            lambda: df.topologies.from_groups(
                "mine", [[df.topologies.Edge([0, 1], 0.7), df.topologies.Edge([1, 2])]], 3
            ),
            r"\[0, 1, 1, 2\].*exactly one",
        ),
        (lambda: df.topologies.from_groups("mine", [[df.topologies.Edge([0, 1], 1.4)]], 2), r"weight=1.4.*\[0, 1\]"),
        (
            lambda: df.topologies.from_permutations("mine", [[[1], [1]]], [[[0.5, 0.5]] * 2]),
            r"phase 0, slot 0.*not a permutation",
        ),
        (lambda: df.topologies.from_matrices("mine", torch.eye(3)), r"workers \[0, 1, 2\] receive no message"),
        (
            lambda: df.adapt_while_communicate(plain_loss, object(), df.topology("ring", 4)),
            r"no init\(\).*pair \(init, update\).*df.adamw",
        ),
        (
            lambda: df.adapt_while_communicate(plain_loss, df.sgd(0.1), df.topology("ring", 4), update_at="x"),
            r"'x'.*'local' or 'mixed'",
        ),
        (lambda: df.init(timeout=timedelta(0)), r"timeout=0:00:00.*positive"),
        (lambda: df.params(torch.ones(3)), r"Tensor is not a training state.*init\(params\)"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("returned", [torch.ones(3), torch.tensor(1), 1.5])
def test_a_loss_that_is_no_scalar_is_refused(returned):
    init, step = df.adapt_then_combine(lambda p, b: returned, df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(ValueError, match=r"loss_fn returned.*0-d floating-point tensor"):
        step(init({"w": torch.ones(2)}), None, 0)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_who_forgets_init_under_torchrun_is_told_so(monkeypatch, backend):
    monkeypatch.setenv("WORLD_SIZE", "4")
    init, step = df.adapt_then_combine(lambda p, b: (p["w"] ** 2).sum(), df.sgd(0.1), df.topology("ring", 4))
    step = step if backend is None else df.compile(step, backend=backend)
    with pytest.raises(ValueError, match=r"this process is alone: 4 processes were started .*Call df\.init\(\) first"):
        step(init({"w": torch.ones(2)}), None, 0)


def test_a_simulation_of_another_size_is_refused():
    init, step = df.adapt_then_combine(plain_loss, df.sgd(0.1), df.topology("ring", 4))
    state = df.stack(init({"w": torch.ones(2)}), 2)
    with pytest.raises(ValueError, match=r"num_workers=4, but 1 process\(es\) hold 2 worker"):
        df.simulate(step, 2)(state, None, 0)
    with pytest.raises(
        ValueError, match=r"simulate\(num_workers=4\): leaf 'params.0' of the state is \[2, 2\].*df.stack"
    ):
        df.simulate(step, 4)(state, None, 0)
    with pytest.raises(ValueError, match=r"1 process\(es\) hold 1 worker\(s\) each. Start 4 processes with torchrun"):
        step(init({"w": torch.ones(2)}), None, 0)


def test_more_workers_than_a_topology_of_one_are_refused():
    init, step = df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.1), df.topology("ring", 1))
    state, simulated = df.stack(init(torch.zeros(1)), 3), df.simulate(step, 3)
    for run in (simulated, df.compile(simulated, backend="eager")):
        with pytest.raises(ValueError, match=r"num_workers=1, but 1 process\(es\) hold 3"):
            run(state, torch.ones(3, 1), 0)


# -- advice that is followed -----------------------------------------------------------------------------------------

ONE, RING = df.topology("complete", 1), df.topology("ring", 4)
NET = nn.Linear(2, 2)
PARAMS = {"w": torch.ones(2)}
HALF = df.Transform(lambda params: (), lambda grads, state, params: (df.kit.each(lambda g: -g / 2, grads), state))


def loss_fn(params, batch):
    return ((params["w"] - batch) ** 2).sum()


def trained(optimizer=None, loss=loss_fn, topology=ONE, **options):
    init, step = df.adapt_while_communicate(loss, optimizer or df.sgd(0.1), topology, **options)
    return step(init(PARAMS), torch.zeros(2), 0)[0]


def module_state():
    params, buffers, loss = df.functional(NET, nn.functional.mse_loss)
    return df.adapt_while_communicate(loss, df.sgd(0.1), ONE).init(params, buffers)


STATE = trained()
MODULE = df.functional(NET, nn.functional.mse_loss)
ARRAYS = (np.ones((4, 3, 2), np.float32), np.zeros((4, 3, 2), np.float32))
PIECES = [torch.ones(2, 2), torch.ones(3, 2)]


def simulated(batch):
    params, buffers, loss = MODULE
    init, step = df.adapt_while_communicate(loss, df.sgd(0.1), RING)
    return df.simulate(step, 4)(df.stack(init(params, buffers), 4), batch, 0)


def from_module(*start, loss=MODULE[2]):
    return df.adapt_while_communicate(loss, df.sgd(0.1), ONE).init(*start)


def accumulated(batch, of=lambda batch: batch):
    loss = df.accumulate(df.autograd(lambda params, batch: loss_fn(params, of(batch))))
    return df.adapt_while_communicate(loss, df.sgd(0.1), ONE).step(from_module(PARAMS, loss=loss), batch, 0)


CASES = {
    "a NumPy batch": (
        lambda: simulated(ARRAYS),
        r"'0' of the batch is ndarray.*NumPy arrays; torch.utils.data.default_convert\(batch\)",
        lambda: simulated(torch.utils.data.default_convert(ARRAYS)),
    ),
    "the parameters of a module": (
        lambda: from_module(NET.parameters()),
        r"init\(params, buffers\): .*'bias' is missing.*call init\(params, buffers\)",
        lambda: (
            from_module(*MODULE[:2]),
            from_module(dict(NET.named_parameters()), loss=lambda params, batch: params["bias"].sum()),
        ),
    ),
    "bare tensors as micro-batches": (
        lambda: accumulated(PIECES),
        r"list of bare tensors is one batch: torch.stack\(batch\).*\[\(x,\) for x in batch\]",
        lambda: (
            accumulated(torch.stack(PIECES[:1] * 2)),
            accumulated([(x,) for x in PIECES], lambda batch: batch[0]),
        ),
    ),
    "a learning rate of the algorithm": (lambda: trained(lr=0.1), "optimizer's, df.sgd", lambda: trained(df.sgd(0.1))),
    "an optimizer that is not called": (lambda: trained(df.sgd), "function sgd; call it", lambda: trained(df.sgd(0.1))),
    "a list of transforms": (
        lambda: df.chain([df.clip_by_global_norm(1.0), df.sgd(0.1)]),
        "one by one",
        lambda: trained(df.chain(df.clip_by_global_norm(1.0), df.sgd(0.1))),
    ),
    "an update without a state": (
        lambda: trained(df.Transform(lambda params: (), lambda grads, state, params: grads)),
        r"returned Buckets; it returns \(updates, state\).*df\.kit\.each",
        lambda: trained(HALF),
    ),
    "an optimizer of another module": (
        lambda: trained(df.from_torch(lambda params: torch.optim.AdamW(NET.parameters()))),
        "2 of the optimizer's parameters are not its argument's; make it of those: lambda params",
        lambda: trained(df.from_torch(lambda params: torch.optim.AdamW(params, lr=1e-3))),
    ),
    "an optimizer of nothing": (
        lambda: trained(df.from_torch(lambda: torch.optim.AdamW(NET.parameters()))),
        "make.params. raised TypeError.*one argument",
        lambda: trained(df.from_torch(lambda params: torch.optim.AdamW(params, lr=1e-3))),
    ),
    "a criterion's class": (
        lambda: df.functional(NET, nn.MSELoss),
        r"or the object nn.MSELoss\(\)",
        lambda: df.functional(NET, nn.MSELoss()),
    ),
    "DataParallel": (
        lambda: df.functional(nn.DataParallel(NET), nn.MSELoss()),
        r"a process for each with torchrun, and pass its \.module",
        lambda: df.functional(nn.DataParallel(NET).module, nn.MSELoss()),
    ),
    "SyncBatchNorm": (
        lambda: df.functional(nn.SyncBatchNorm(2), nn.MSELoss()),
        r"nn\.BatchNorm with df\.average_buffers",
        lambda: df.average_buffers(df.all_reduce(df.functional(nn.BatchNorm1d(2), nn.MSELoss())[2], df.sgd(0.1), ONE)),
    ),
    "a stacked state, stacked": (
        lambda: df.stack(df.stack(STATE, 4), 4),
        r"what init\(params\) returned",
        lambda: df.stack(STATE, 4),
    ),
    "one batch in place of a list": (
        lambda: df.evaluate(loss_fn, STATE, torch.zeros(1, 2)),
        r"a list of batches: \[batch\]",
        lambda: df.evaluate(loss_fn, STATE, [torch.zeros(1, 2)]),
    ),
    "an evaluation's arguments in another order": (
        lambda: df.evaluate(STATE, loss_fn, [torch.zeros(1, 2)]),
        "not a training state",
        lambda: df.evaluate(loss_fn, STATE, [torch.zeros(1, 2)]),
    ),
    "the weights of a module that was not trained": (
        lambda: df.state_dict(NET, STATE),
        r"tensors are \['w'\], the module's parameters \['bias', 'weight'\]; pass the module of df\.functional",
        lambda: df.state_dict(NET, module_state()),
    ),
    "a topology without its name": (
        lambda: df.register_topology(lambda num_workers: RING),
        r'@register_topology\("mine"\)',
        lambda: df.register_topology("mine"),
    ),
    "a cluster's rate in place of its link": (
        lambda: df.planning.Cluster(4, 1.0),
        r"between=1\.0.*its links are df\.planning\.Link\(gbit_per_s\)",
        lambda: df.planning.Cluster(4, df.planning.Link(1.0)),
    ),
    "world_size": (
        lambda: df.simulate(trained, world_size=4),
        "there are step, num_workers",
        lambda: df.simulate(trained, num_workers=4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advice_that_is_followed_works(name):
    wrong, said, right = CASES[name]
    with pytest.raises((TypeError, ValueError), match=said):
        wrong()
    right()


def test_a_backend_may_come_first_as_in_init_process_group():
    assert df.init("gloo").size == 1


def test_lists_and_words_are_no_lines_of_a_log(tmp_path):
    with df.logs.JSONLines(tmp_path / "log.jsonl") as log:
        with pytest.raises(ValueError, match="expected a dict"):
            log.write([1, 2])
        with pytest.raises(ValueError, match="step is an integer"):
            log.write({"loss": 1.0}, "loss")
        log.write({"loss": 1.0}, 0)
    assert df.logs.read(log.path) == [{"step": 0, "loss": 1.0}]


def test_a_file_is_no_checkpoint(tmp_path):
    torch.save(NET.state_dict(), tmp_path / "model.pt")
    for call in (df.checkpoint.latest, lambda path: df.checkpoint.restore(path, STATE)):
        with pytest.raises(NotADirectoryError, match="Not a directory.*model.pt"):
            call(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"`load\(path, weights_only=True\)` returns"):
        df.checkpoint.import_(tmp_path / "model.pt")
    df.load_state_dict(NET, module_state(), torch.load(tmp_path / "model.pt", weights_only=True))


def test_functions_without_a_module_can_be_compared_over_ranks():
    """As those of `exec` in a namespace without a name."""
    here = {"__builtins__": {}}
    exec("init = lambda params: ()\nupdate = lambda grads, state, params: (grads, state)", here)
    trained(df.chain(df.Transform(here["init"], here["update"]), df.sgd(0.1)))


def test_after_training_the_module_is_what_it_was_and_the_page_says_how_to_evaluate():
    """docs/gotchas.md: the advice for a module, a loss and stacked parameters, which nothing can notice."""
    module, batch = nn.Linear(2, 2), (torch.ones(4, 3, 2), torch.zeros(4, 3, 2))
    params, buffers, loss = df.functional(module, nn.functional.mse_loss)
    init, step = df.adapt_while_communicate(loss, df.sgd(0.1), RING)
    state, metrics = df.simulate(step, 4)(df.stack(init(params, buffers), 4), batch, 0)
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        metrics.loss.sum().backward()
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict(df.params(state))
    x, y = (part[0] for part in batch)
    trained = df.evaluate(loss, state, [(x, y)])
    assert nn.functional.mse_loss(module(x), y) > 1.1 * trained
    for own in (df.state_dict(module, state, consensus=True), df.state_dict(module, df.worker(state, 1))):
        module.load_state_dict(own)
        torch.testing.assert_close(nn.functional.mse_loss(module(x), y).double(), trained)


# -- a step that is not compiled ---------------------------------------------------------------------------------------

TARGET = torch.tensor([1.0, 2.0])


def compiled(optimizer=None, loss_fn=loss_fn, **options):
    init, step = df.adapt_while_communicate(loss_fn, optimizer or df.sgd(0.1), df.topology("complete", 1))
    return df.compile(step, **({"backend": "eager"} | options))(init({"w": torch.zeros(2)}), TARGET, 0)


USES = {
    "math": lambda count: math.cos(count),
    "if": lambda count: 0.1 if count < 10 else 0.01,
    "float": lambda count: 0.1 / (1 + float(count)),
    "item": lambda count: 0.1 / (1 + count.item()),
    "list": lambda count: [0.1, 0.2][count],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("named", "make"),
    [
        ("sgd(learning_rate", lambda rate: df.sgd(rate)),
        ("adamw(weight_decay", lambda rate: df.adamw(weight_decay=rate)),
        ("adapt_while_communicate(gamma", lambda rate: df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 1), gamma=rate)),
        ("slowmo(learning_rate", lambda rate: df.slowmo(loss_fn, df.sgd(0.1), df.topology("complete", 1), learning_rate=rate)),
        ("join(schedule", lambda rate: schedules.join([rate], [])),
    ],
)  # fmt: skip
def test_a_schedule_that_uses_the_count_as_a_number_is_refused_where_it_is_given(use, named, make):
    with pytest.raises(ValueError) as error:
        make(USES[use])
    argument = "t" if "gamma" in named or "slowmo" in named else "count"
    assert str(error.value).startswith(named) and f"uses {argument} as a number" in str(error.value)
    assert f"torch.where({argument} < 10" in str(error.value) and "df.schedules" in str(error.value)


def test_a_schedule_of_tensors_works_as_advised():
    rate = lambda count: torch.where(count < 10, 0.1, 0.01) * torch.cos(count.double())  # noqa: E731
    _, metrics = compiled(df.sgd(rate))
    assert float(metrics.learning_rate) == pytest.approx(0.1)


def test_a_schedule_that_fails_or_returns_a_vector_is_named():
    with pytest.raises(ValueError, match=r"sgd\(learning_rate=.*raised KeyError.*returns a number"):
        df.sgd(lambda count: {}["rate"])
    with pytest.raises(ValueError, match=r"sgd\(learning_rate=.*returned \[3\] values"):
        df.sgd(lambda count: torch.ones(3))


@pytest.mark.parametrize("first", [-0.1, math.nan, math.inf])
def test_a_schedule_whose_first_value_is_no_rate_is_refused(first):
    def rate(count):
        return first + 0.1 * count

    with pytest.raises(ValueError, match=rf"sgd\(learning_rate=.*for count 0 it returned {first:g}; .*>= 0"):
        df.sgd(rate)
    with pytest.raises(ValueError, match=r"adapt_while_communicate\(gamma=.*for t 0 it returned"):
        df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 1), gamma=rate)
    assert df.sgd(lambda count: 0.1 * count)  # a warm-up starts at 0


def test_an_optimizer_that_branches_on_values_is_told_how_to_write_it():
    branching = df.Transform(lambda p: (), lambda g, s, p: (g if g[0].sum() > 0 else df.kit.each(torch.neg, g), s))
    with pytest.raises(
        RuntimeError, match=r"In the optimizer.*torch\.where.*the step before df\.compile runs as it is"
    ):
        compiled(branching)


def test_a_loss_that_branches_on_values_gets_autograd_and_that_works():
    def branching(params, batch):
        return loss_fn(params, batch) * (1 if batch.sum() > 0 else 2)

    with pytest.raises(RuntimeError, match=r"df\.autograd\(loss_fn\)"):
        compiled(loss_fn=branching)
    _, metrics = compiled(loss_fn=df.autograd(branching))
    assert float(metrics.loss) == 5.0


def without_gradients(params, batch):
    with torch.no_grad():
        return loss_fn(params, batch)


OUTSIDE = {
    "constant": (lambda params, batch: torch.tensor(1.0), "does not depend on the parameters"),
    "detached": (lambda params, batch: loss_fn(params, batch).detach(), "does not depend on the parameters"),
    "no_grad": (without_gradients, "does not depend on the parameters"),
    "NumPy, detached": (
        lambda params, batch: torch.tensor((params["w"].detach().numpy() ** 2).sum()),
        "does not depend on the parameters.*torch operations, without NumPy",
    ),
}
WAYS = {"traced": lambda loss: loss, "by autograd": df.autograd, "scaled": df.dynamic_loss_scale}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_loss_without_a_graph_is_refused_in_the_first_step(outside, way):
    loss, message = OUTSIDE[outside]
    init, step = df.adapt_while_communicate(WAYS[way](loss), df.sgd(0.1), df.topology("ring", 2))
    state = df.stack(init({"w": torch.zeros(2)}), 2)
    kind = ValueError
    if outside == "NumPy, detached" and way != "by autograd":  # torch.func refuses it first; df.autograd then names it
        kind, message = RuntimeError, r"data pointer(.|\n)*df\.autograd"
    with pytest.raises(kind, match=message) as error:
        df.simulate(step, 2)(state, torch.stack([TARGET, TARGET]), 0)
    assert "df.autograd" not in str(error.value)


def test_a_loss_without_a_graph_is_refused_compiled_and_accumulated():
    for loss in (OUTSIDE["constant"][0], OUTSIDE["no_grad"][0]):
        with pytest.raises(ValueError, match="does not depend on the parameters"):
            compiled(loss_fn=loss)
        init, step = df.adapt_while_communicate(df.accumulate(loss), df.sgd(0.1), df.topology("complete", 1))
        with pytest.raises(ValueError, match="does not depend on the parameters"):
            step(init({"w": torch.zeros(2)}), torch.ones(2, 1, 2), 0)


def test_a_gradient_of_zero_is_no_error():
    for zero in (lambda p, b: 0 * p["w"].sum(), lambda p, b: torch.sign(p["w"] - b).sum()):
        with torch.no_grad():  # around the step, not in the loss
            _, metrics = compiled(loss_fn=zero)
        assert float(metrics.grad_norm) == 0


@pytest.mark.parametrize("by_autograd", [False, True])
def test_a_failing_compiler_says_so(by_autograd):
    def failing(graph, inputs):
        raise KeyError("no such device")

    for options in ({"backend": failing}, {"backend": "inductor", "no_such_option": 1}):
        with pytest.raises(Exception, match=r"no.such(.|\n)*" + ("" if by_autograd else "check `backend`")):
            compiled(loss_fn=df.autograd(loss_fn) if by_autograd else loss_fn, **options)


def test_anomaly_mode_is_named():
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match="set_detect_anomaly is on.*Switch it off"),
    ):
        compiled(backend="aot_eager")


def test_keys_of_two_types_compile_as_they_run():
    params = {"w": torch.zeros(2), 3: torch.ones(2), "a": torch.zeros(1)}
    init, step = df.adapt_while_communicate(lambda p, b: ((p["w"] - b["x"]) ** 2).sum() + p[3].sum() * p["a"].sum(), df.sgd(0.1), df.topology("complete", 1))  # fmt: skip
    batch = {"x": TARGET, 7: TARGET}
    expected, _ = step(init(params), batch, 0)
    state, _ = df.compile(step, backend="eager")(init(params), batch, 0)
    for key, leaf in df.params(expected).items():
        assert torch.equal(df.params(state)[key], leaf)
