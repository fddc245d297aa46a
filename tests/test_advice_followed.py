"""Habits from elsewhere and arguments in the wrong place: the error's advice, followed, works."""

import numpy as np
import pytest
import torch
from torch import nn

import decentfn as df

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


WRAPPED = {f"module._orig_mod.{name}": x for name, x in NET.state_dict().items()}
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
        r"init\(params=<generator .*init\(params, buffers\), or .*dict\(module.named_parameters\(\)\)",
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
    "an update of two arguments": (
        lambda: trained(df.Transform(lambda params: (), lambda grads, state: (grads, state))),
        r"called as update\(grads, state, params\)",
        lambda: trained(HALF),
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
    "names of two wrappers": (
        lambda: df.load_state_dict(NET, module_state(), WRAPPED),
        r"name\.removeprefix\('module\._orig_mod\.'\)",
        lambda: df.load_state_dict(
            NET, module_state(), {name.removeprefix("module._orig_mod."): x for name, x in WRAPPED.items()}
        ),
    ),
    "a topology without its name": (
        lambda: df.register_topology(lambda num_workers: RING),
        r'@register_topology\("mine"\)',
        lambda: df.register_topology("mine"),
    ),
    "world_size": (
        lambda: df.simulate(trained, world_size=4),
        "write num_workers=",
        lambda: df.simulate(trained, num_workers=4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_works(name):
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
        with pytest.raises(NotADirectoryError, match=r"df\.load_state_dict\(module, state, \.\.\.\)"):
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
