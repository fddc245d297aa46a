"""Operators under `vmap`: a rule is called at each level that batches one of its arguments, and at no other."""

import pytest
import torch

from decentfn.comm.collectives import on_device
from decentfn.core import operator
from decentfn.torch_private import functorch

told = []


def _rule(info, in_dims, x, others, count):
    told.append((info.batch_size, tuple(in_dims[1]), in_dims[2]))
    first = [
        functorch.with_workers_first(a, dim, info.batch_size)
        for a, dim in zip((x, *others), (in_dims[0], *in_dims[1]), strict=True)
    ]
    return noted(first[0], first[1:], count), [0] * len(first)


noted = operator(
    "noted_by_a_test(Tensor x, Tensor[] others, int count) -> Tensor[]",
    lambda x, others, count: [x + count, *map(torch.clone, others)],
    lambda x, others, count: [torch.empty_like(one) for one in (x, *others)],
    _rule,
)


@pytest.mark.parametrize("vmap", [torch.vmap, lambda f: lambda *rows: functorch.vmap(f, "error", *rows)])
def test_a_rule_is_called_once_for_each_level_that_batches_an_argument(vmap):
    x, y = torch.randn(3, 2), torch.randn(4, 2)
    told.clear()
    found = vmap(lambda x: vmap(lambda y: tuple(noted(x, [y, x], 5)))(y))(x)
    assert told == [(4, (0, None), None), (3, (None, 0), None)]
    expected = x[:, None].expand(3, 4, 2) + 5, y.expand(3, 4, 2), x[:, None].expand(3, 4, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_operator_of_what_only_the_outer_level_batches_is_not_batched_by_the_inner_one():
    t, x, y = torch.tensor(7), torch.zeros(3, 2), torch.arange(4)
    found = torch.vmap(lambda x: torch.vmap(lambda y: on_device(x, t) + y)(y))(x)
    assert found.tolist() == [[7, 8, 9, 10]] * 3


def test_workers_of_unequal_numbers_are_refused():
    with pytest.raises(ValueError, match="same size"):
        functorch.vmap(lambda x, y: (x + y,), "error", torch.zeros(3, 1), torch.zeros(1, 1))
