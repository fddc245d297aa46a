"""Where torch.func cannot follow a loss, the error names `df.autograd`, which then works; a user's own mistake stays one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decentfn as df
from decentfn.core import trees

N = 2


def _ctc(params, batch):
    log_probs = (batch["x"] * params["w"]).log_softmax(-1)
    return F.ctc_loss(log_probs, batch["y"], (5, 5), (2, 2))


def _branches(params, batch):
    loss = (params["w"] * batch["x"]).square().sum()
    return loss if loss > 0 else -loss


def _reads(params, batch):
    return (params["w"] * batch["x"]).square().sum() * (1 + 0 * batch["x"].sum().item())


_kept = torch.zeros(4)


def _writes_outside(params, batch):
    _kept.copy_((params["w"] * batch["x"]).detach().sum((0, 1)))
    return (params["w"] * batch["x"]).square().sum()


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


def _old_function(params, batch):
    return _Old.apply(params["w"] * batch["x"]).sum()


def _asserts(params, batch):
    assert bool((batch["x"].square() >= 0).all()), "negative squares"
    return (params["w"] * batch["x"]).square().sum()


class _Refusing(Exception):
    pass


def _refuses_subclasses(params, batch):
    """As packages do that look for the class of what they get, or for its memory."""
    try:
        params["w"].data_ptr()
    except RuntimeError:
        raise _Refusing("no memory") from None
    return (params["w"] * batch["x"]).square().sum()


LOSSES = {
    "ctc with lengths as tuples": _ctc,
    "a branch on a value": _branches,
    "item": _reads,
    "a write to a tensor outside": _writes_outside,
    "an old autograd function": _old_function,
    "an assertion on values": _asserts,
    "an error of a package": _refuses_subclasses,
}


BOTH = ("a branch on a value", "an error of a package")
"""Of PyTorch and of the loss: CI traces a simulation of these."""


def tier_of(name, mode):
    if mode == "compiled, simulated" and name not in BOTH:
        return [pytest.mark.slow]
    return [pytest.mark.thorough] if "compiled" in mode and name != BOTH[0] else []


def _batch():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 4, generator=draw)
    return {"x": x, "y": torch.randint(1, 4, (2, 2), generator=draw)}


def _step(loss_fn, mode):
    n = 1 if mode in ("eager", "compiled") else N
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", n))
    state, batch = init({"w": torch.ones(4)}), _batch()
    if n > 1:
        state, batch, step = df.stack(state, n), df.stack(batch, n), df.simulate(step, n)
    if "compiled" in mode:
        step = df.compile(step, backend="eager")
    return lambda: step(state, batch, 0)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=tier_of(name, mode))
        for name in LOSSES
        for mode in ("eager", "simulated", "compiled", "compiled, simulated")
    ],
)
def test_an_error_of_torch_func_names_autograd_and_that_works(name, mode):
    loss_fn = LOSSES[name]
    _, expected = _step(df.autograd(loss_fn), mode)()
    try:
        _, metrics = _step(loss_fn, mode)()
    except Exception as error:
        assert "df.autograd(loss_fn)" in "\n".join([str(error), *getattr(error, "__notes__", [])])
    else:
        torch.testing.assert_close(metrics.loss, expected.loss)


@pytest.mark.parametrize("mode", ["eager", "simulated", "compiled", "compiled, simulated"])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, batch: (params["w"] @ batch["x"]).sum(),
        lambda params, batch: params["v"].sum(),
        lambda params, batch: _Refusing("my own")._missing,
    ],
)
def test_a_mistake_of_the_loss_itself_is_raised_as_it_is_and_the_advice_is_conditional(loss_fn, mode):
    with pytest.raises((RuntimeError, KeyError, AttributeError)) as error:
        _step(loss_fn, mode)()
    assert all("Where the loss runs in a plain PyTorch loop" in note for note in getattr(error.value, "__notes__", []))


def test_batch_norm_without_momentum_simulated_is_sent_to_autograd():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=None))
    params, buffers, loss_fn = df.functional(net, F.mse_loss)
    batch = df.stack((torch.randn(4, 3), torch.randn(4, 2)), N)
    for around in (lambda loss: loss, df.autograd):
        init, step = df.adapt_then_combine(around(loss_fn), df.sgd(0.1), df.topology("complete", N))
        run = lambda: df.simulate(step, N)(df.stack(init(params, buffers), N), batch, 0)  # noqa: B023, E731
        if around is df.autograd:
            assert run()[1].loss.isfinite().all()
        else:
            with pytest.raises(RuntimeError) as error:
                run()
            assert any("df.autograd(loss_fn)" in note for note in error.value.__notes__)


def test_a_sweep_is_sent_to_autograd_too():
    init, step = df.adapt_then_combine(_branches, df.sgd(0.1), df.topology("complete", N))
    step = df.sweep(df.simulate(step, N), 2)
    state, batch = df.stack(init({"w": torch.ones(4)}), N), df.stack(_batch(), N)
    with pytest.raises(RuntimeError) as error:
        step(df.stack_runs([state] * 2), df.stack_runs([batch] * 2), 0)
    assert any("df.autograd(loss_fn)" in note for note in error.value.__notes__)


class _Lazy(nn.Module):
    """As transformers models that return hidden states: the first forward pass takes a lock to install hooks."""

    def __init__(self):
        super().__init__()
        self.linear, self.is_ready = nn.Linear(3, 1), False

    def forward(self, x):
        if not self.is_ready:
            with open("/dev/null"):  # noqa: PTH123 (what Dynamo does not trace)
                self.is_ready = True
        return self.linear(x)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_that_compiles_only_after_an_eager_call_is_tried_again(backend):
    net = _Lazy()
    params, buffers, loss_fn = df.functional(net, F.mse_loss)
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    batch = torch.randn(4, 3), torch.randn(4, 1)
    state, metrics = df.compile(step, backend=backend)(init(params, buffers), batch, 0)
    expected, _ = step(init(params, buffers), batch, 0)
    torch.testing.assert_close(df.params(state), df.params(expected))
    assert metrics.loss.isfinite()


def test_a_wrong_optimizer_in_a_compiled_step_speaks_for_itself():
    class Wrong:
        def init(self, params):
            return ()

        def update(self, grads, state, params):
            raise ValueError("my_optimizer: the rate is -1, but it is positive; pass 0.1.")

    init, step = df.adapt_then_combine(lambda p, b: p.sum(), Wrong(), df.topology("complete", 1))
    with pytest.raises(ValueError, match="^my_optimizer: the rate is -1, but it is positive; pass 0.1.$"):
        df.compile(step, backend="eager")(init(torch.zeros(3)), torch.zeros(1), 0)


def test_nothing_is_changed_by_a_loss_that_fails():
    seen = []

    def loss_fn(params, batch):
        seen.append(1)
        return _branches(params, batch)

    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", N))
    state, batch = df.stack(init({"w": torch.ones(4)}), N), df.stack(_batch(), N)
    kept = trees.map(torch.clone, (state, batch))
    with pytest.raises(RuntimeError):
        df.simulate(step, N)(state, batch, 0)
    assert len(seen) == 1
    for a, b in zip(trees.leaves(kept), trees.leaves((state, batch)), strict=True):
        assert torch.equal(a, b)


def test_a_batch_that_cannot_be_taken_apart_keeps_the_losss_own_error():
    """A packed sequence has no tensor in each place."""
    net = nn.LSTM(3, 4, batch_first=True)
    params, buffers, loss_fn = df.functional(net, forward=lambda m, batch: m(batch)[1][0].square().mean())
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
    for around in (lambda loss: loss, df.autograd):
        init, step = df.adapt_then_combine(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
        if around is df.autograd:
            assert step(init(params, buffers), packed, 0)[1].loss.isfinite()
        else:
            try:
                step(init(params, buffers), packed, 0)
            except Exception as error:
                assert "has no attribute 'device'" not in str(error)
                assert any("df.autograd(loss_fn)" in note for note in getattr(error, "__notes__", []))


class _Rounded(torch.autograd.Function):
    """Weights for a straight-through gradient."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("shapes", [[()], [(3,)], [(3,), (2, 2)]])
def test_the_backward_pass_of_a_function_of_weights_is_taken_compiled_too(shapes, backend):
    """PyTorch's compiled `torch.func.grad` leaves it out where the function takes the argument itself (its issue 193279)."""
    init, step = df.all_reduce(
        lambda params, batch: sum(2 * _Rounded.apply(x).sum() for x in params) * batch,
        df.sgd(1.0),
        df.topology("complete", 1),
    )
    step = step if backend is None else df.compile(step, backend=backend)
    state, _ = step(init([torch.ones(shape) for shape in shapes]), torch.ones(()), 0)
    assert all((x == -1).all() for x in df.params(state))
