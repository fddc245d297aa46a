"""Threads that use one module at a time: each has what it would have alone."""

import copy
import functools
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import decentfn as df
from tests.gradient.test_one_rule import AROUND

pytestmark = pytest.mark.thorough

BATCH = (torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 4)[:, None])
WAYS = pytest.mark.parametrize("around", [AROUND["traced"], AROUND["autograd"]], ids=["traced", "autograd"])


class Slow(nn.Module):
    """Waits within its forward pass, where another thread comes in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.start, self.norm, self.end = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.inside = threading.Event()

    def forward(self, x):
        h = self.norm(self.start(x))
        if not torch.compiler.is_compiling():
            self.inside.set()
            time.sleep(0.1)
        return self.end(h)


def trained(around, backend, other=None):
    """Parameters and buffers after two steps, and what another thread got that called `other` within the first one."""
    net = Slow()
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state, start = init(params, buffers), init(params, buffers)
    run = step if backend is None else df.compile(step, backend=backend, donate=False)
    got = []

    def work():
        assert net.inside.wait(60)
        try:
            got.append(other(net, loss_fn, start, run))
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=work) if other is not None else None
    if thread is not None:
        thread.start()
    if backend is not None and around is AROUND["traced"]:  # compiled, it is the other one that lends
        net.inside.set()
        time.sleep(0.05)
    for t in range(2):
        state, _ = run(state, BATCH, t)
    if thread is not None:
        thread.join()
    assert type(net.end.weight) is nn.Parameter and not net._forward_pre_hooks and net.training
    return (df.params(state), df.buffers(state)), got


OTHERS = {
    "evaluates": lambda net, loss_fn, state, step: df.evaluate(loss_fn, state, [BATCH]),
    "evaluates a function": lambda net, loss_fn, state, step: df.evaluate(lambda *of: loss_fn(*of), state, [BATCH]),
    "calls the loss": lambda net, loss_fn, state, step: loss_fn(df.params(state), df.buffers(state), BATCH)[0],
    "steps": lambda net, loss_fn, state, step: df.params(step(state, BATCH, 0)[0]),
    "reads a state dict": lambda net, loss_fn, state, step: df.state_dict(net, state),
}


@functools.cache
def alone(around, backend):
    return trained(around, backend)[0]


@pytest.mark.one_in(3)
@WAYS
@pytest.mark.parametrize(
    ("name", "backend"), [*((name, None) for name in OTHERS), ("evaluates", "eager"), ("steps", "eager")]
)
def test_each_of_two_threads_has_what_it_would_have_alone(name, backend, around):
    other, expected = OTHERS[name], alone(around, backend)
    found, got = trained(around, backend, other)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    net = Slow()
    params, buffers, loss_fn = df.functional(net, mse_loss)
    init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    torch.testing.assert_close(got, [other(net, loss_fn, init(params, buffers), step)])


@WAYS
def test_a_compiled_step_does_not_see_that_another_thread_evaluates(around):
    """It lent the module its tensors, in eval mode: a step would be traced anew, without batch statistics."""

    def after(evaluations):
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        params, buffers, loss_fn = df.functional(net, mse_loss)
        params = {name: torch.full_like(x, 0.1) for name, x in params.items()}
        init, step = df.all_reduce(around(loss_fn), df.sgd(0.01), df.topology("complete", 1))
        step, state, ends = df.compile(step, backend="eager", donate=False), init(params, buffers), threading.Event()
        start = state

        def evaluate():
            while not ends.is_set():
                df.evaluate(loss_fn, start, [BATCH] * 5)
                evaluations.append(1)

        thread = threading.Thread(target=evaluate)
        if evaluations is not None:
            thread.start()
        try:
            for t in range(60):
                state, _ = step(state, BATCH, t)
                while evaluations is not None and thread.is_alive() and len(evaluations) <= t // 10:
                    time.sleep(0.001)
        finally:
            ends.set()
        if evaluations is not None:
            thread.join()
        return df.params(state), df.buffers(state)

    evaluations = []
    torch.testing.assert_close(after(evaluations), after(None), rtol=0, atol=0)
    assert len(evaluations) > 5  # one in ten steps


@WAYS
def test_one_thread_may_use_a_module_within_itself(around):
    """The loss of a module that is called within another loss of it, computed again in the backward pass where it can be."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    inner = df.functional(net, mse_loss)[2]

    def forward(module, batch):
        again = inner(dict(module.named_parameters()), {}, batch)[0]
        h = checkpoint(module[0], batch[0], use_reentrant=False) if around is df.autograd else module[0](batch[0])
        return mse_loss(module[1](h), batch[1]) + again

    params, buffers, loss_fn = df.functional(net, forward=forward)
    init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    state, _ = step(init(params, buffers), BATCH, 0)
    plain = copy.deepcopy(net)
    (2 * mse_loss(plain(BATCH[0]), BATCH[1])).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(df.params(state)[name], (p - 0.1 * p.grad).detach())
