"""The gradient without PyTorch's trees is `torch.func`'s, bit by bit, at every level of torch.func."""

import pytest
import torch
from torch.utils import _pytree

import decentfn as df
from decentfn.torch_private import functorch

G = torch.Generator().manual_seed(0)
X = [torch.randn(4, 3, generator=G), torch.randn(4, 2, generator=G)]
B, SCALE = torch.randn(4, 3, generator=G), torch.randn(4, generator=G)


def loss_of(x, given):
    """The second of `x` is unused; what is given may be written over, and is returned."""
    b, power, scale, name = given
    b.mul_(2)
    assert name == "name"
    loss = (torch.nn.functional.gelu(x[0]) * b).sum() ** power * scale
    return loss * 3, (loss, [b, x[0].detach().sum(), torch.tensor(float(power))])


def ours(x, given):
    return functorch.grad_and_value(loss_of, x, given)


def theirs(x, given):
    return torch.func.grad_and_value(loss_of, has_aux=True)(x, given)


def flat(found):
    grads, (_, (loss, extras)) = found
    return (*grads, loss, *extras)


def one(how):
    return lambda x, y, b, scale: flat(how([x, y], [b.clone(), 2, scale, "name"]))


LEVELS = {
    "none": lambda f: f(*[x[0] for x in (*X, B, SCALE)]),
    "vmap": lambda f: torch.vmap(f)(*X, B, SCALE),
    "own vmap": lambda f: functorch.vmap(f, "error", *X, B, SCALE),
    "differentiated": lambda f: torch.func.jacrev(f)(*[x[0] for x in (*X, B, SCALE)]),
    "no_grad": lambda f: torch.no_grad()(f)(*[x[0] for x in (*X, B, SCALE)]),
}


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_equals_that_of_torch_func(level):
    found, expected = (LEVELS[level](one(how)) for how in (ours, theirs))
    assert len(found) == 6 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0].abs().sum() > 0 and found[1].abs().sum() == 0


def test_what_leaves_the_gradient_is_of_no_level_of_it_and_an_error_ends_its_level():
    with pytest.raises(AssertionError):
        ours([X[0][0], X[1][0]], [B[0].clone(), 2, SCALE[0], "other"])
    found = one(ours)(*[x[0] for x in (*X, B, SCALE)])
    assert all(not x.requires_grad and x.data_ptr() for x in found)
    assert torch._C._functorch.peek_interpreter_stack() is None


@pytest.mark.parametrize(
    "how", [functorch.grad_and_value, lambda f, *a: torch.func.grad_and_value(f, has_aux=True)(*a)]
)
def test_a_loss_that_asks_for_another_gradient_in_place_is_refused(how):
    def asking(x, given):
        given[0].requires_grad_()
        return x[0].sum(), (x[0].sum(), [])

    with pytest.raises(RuntimeError, match="requires_grad_"):
        how(asking, [torch.ones(2)], [torch.ones(2)])


class Sample:
    """A batch that PyTorch's trees know, and no others."""

    def __init__(self, x):
        self.x = x


_pytree.register_pytree_node(Sample, lambda s: ([s.x], None), lambda children, _: Sample(*children))


def test_a_batch_that_only_pytorchs_trees_take_apart_may_be_written_over_by_a_traced_loss():
    def loss_fn(params, batch):
        batch.x.mul_(params)  # refused for a tensor that torch.func does not know
        return batch.x.sum()

    init, step = df.all_reduce(loss_fn, df.sgd(1.0), df.topology("complete", 1))
    state, _ = step(init(torch.ones(3)), Sample(torch.tensor([1.0, 2.0, 3.0])), 0)
    assert df.params(state).tolist() == [0.0, -1.0, -2.0]
