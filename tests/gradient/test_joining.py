"""Gradients of leaves that share a bucket are joined in it."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import decentfn as df
from decentfn.core.buckets import flatten
from decentfn.gradient.evaluation import evaluate
from decentfn.gradient.side_channel import with_side_channel
from tests.allocations import peak_of

pytestmark = pytest.mark.thorough

WIDTH, LAYERS = 384, 15  # weights of 590 kB


class Chain(nn.Module):
    """Linear layers, the first of which is used twice."""

    def __init__(self, layers: int, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def step_and_plain(module: nn.Module, rows: int, hook=None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The negative update of one SGD step of rate 1 by the library, and `.grad` after a plain backward pass."""
    batch = torch.randn(rows, WIDTH, requires_grad=True), torch.randn(rows, WIDTH)
    if hook is not None:
        next(module.parameters()).register_post_accumulate_grad_hook(hook)
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(1.0), df.topology("complete", 1))
    state = init(params, buffers)
    before = df.params(state)
    after = df.params(step(state, batch, 0)[0])
    nn.functional.mse_loss(module(batch[0]), batch[1]).backward()
    return ({n: before[n] - after[n] for n in before}, {n: p.grad for n, p in module.named_parameters()})


def triple_in_place(p: Tensor) -> None:
    p.grad.mul_(3)


def replace(p: Tensor) -> None:
    p.grad = p.grad * 3


@pytest.mark.parametrize("hook", [None, triple_in_place, replace])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("layers", [3, LAYERS])
def test_the_gradient_is_that_of_a_plain_backward_pass(layers, reentrant, hook):
    """Also where it arrives in two parts (reentrant checkpoints of a layer used twice), and a hook changes it between."""
    torch.manual_seed(0)
    found, expected = step_and_plain(Chain(layers, reentrant), 4, hook)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=2e-7, rtol=1e-5)


def test_no_more_than_one_bucket_of_gradients_is_held_twice():
    torch.manual_seed(0)
    params, buffers, loss_fn = df.functional(Chain(LAYERS), nn.functional.mse_loss)
    loss_fn, batch = df.autograd(loss_fn), (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    x, t = flatten(params, bucket_mb=1.5), torch.tensor(0)
    size = sum(p.nbytes for p in params.values())

    def gradient():
        return with_side_channel(lambda x, hidden, t: (None, evaluate(loss_fn, x, buffers, hidden, t)), x, batch, t)

    assert size < peak_of(gradient) < size + 2**21
