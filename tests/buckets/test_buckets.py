"""The plan of buckets: every leaf has its place, and comes back as it went."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentfn.core import trees
from decentfn.core.buckets import flatten
from decentfn.core.handles import by_handle

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    wide = torch.complex64 if dtype.is_complex else torch.float32
    tensor = torch.randn(shape, dtype=wide, generator=random).to(dtype).conj()
    return tensor.mT if tensor.dim() >= 2 and draw(st.booleans()) else tensor


TREES = st.recursive(
    tensors(),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("zyxabc"), children, min_size=1, max_size=3),
        st.builds(Layer, children, children),
        st.tuples(children, st.none()),
    ),
    max_leaves=8,
)


@given(tree=TREES, bucket_mb=st.sampled_from([25.0, 1e-4, 1e-5]))
def test_a_tree_comes_back_as_it_went(tree, bucket_mb):
    buckets = flatten(tree, bucket_mb=bucket_mb)
    again = buckets.tree()
    assert trees.flatten(again)[1] == trees.flatten(tree)[1]
    for got, given_ in zip(trees.leaves(again), trees.leaves(tree), strict=True):
        assert got.dtype == given_.dtype and torch.equal(got, given_)


@given(tree=TREES, bucket_mb=st.sampled_from([1e-3, 1e-4]))
def test_buckets_hold_one_dtype_and_at_most_their_size(tree, bucket_mb):
    buckets = flatten(tree, bucket_mb=bucket_mb)
    for vector, plan in zip(buckets, buckets.plan.buckets, strict=True):
        assert (
            vector.dim() == 1
            and vector.dtype == plan.dtype
            and plan.dtype.is_floating_point
            and vector.numel() == plan.numel
        )
        assert plan.nbytes <= bucket_mb * 2**20 or len(plan.segments) == 1
        ends = [segment.start + segment.numel for segment in plan.segments]
        assert [segment.start for segment in plan.segments] == [0, *ends[:-1]] and ends[-1] == plan.numel
    assert buckets.plan.nbytes == sum(leaf.nbytes for leaf in trees.leaves(tree))


def test_a_tied_parameter_is_stored_and_updated_once():
    shared = torch.randn(3, 2)
    buckets = flatten({"embed": shared, "head": [shared], "bias": torch.ones(2)})
    assert sum(vector.numel() for vector in buckets) == 8
    doubled = trees.map(lambda vector: 2 * vector, buckets).tree()
    assert torch.equal(doubled["embed"], 2 * shared) and torch.equal(doubled["head"][0], 2 * shared)


def test_masks_keep_leaves_with_other_answers_apart():
    tree = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2), "b.weight": torch.ones(3, 1)}
    buckets = flatten(tree, masks=[lambda name, shape: len(shape) > 1])
    assert [[s.name for s in plan.segments] for plan in buckets.plan.buckets] == [["a.weight", "b.weight"], ["a.bias"]]


def test_a_large_leaf_has_a_bucket_of_its_own_and_the_largest_bucket_comes_first():
    tree = {"small": torch.ones(10), "large": torch.ones(2000), "larger": torch.ones(3000), "tiny": torch.ones(3)}
    assert [vector.numel() for vector in flatten(tree, bucket_mb=0.04)] == [3000, 2000, 13]


def test_flattening_copies():
    tree = [torch.zeros(3)]
    buckets = flatten(tree)
    tree[0] += 1
    assert buckets[0].tolist() == [0, 0, 0]


def test_a_stacked_tree_is_read_with_its_worker_axis():
    stacked = trees.map(
        lambda vector: vector.repeat(5, 1),
        flatten({"w": torch.ones(2, 3), "s": torch.tensor(2.0), "z": torch.tensor([1j])}),
    )
    tree = stacked.tree()
    assert tree["w"].shape == (5, 2, 3) and tree["s"].shape == (5,) and tree["z"].tolist() == [[1j]] * 5


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "no leaves"),
        (
            {"n": torch.tensor([1, 2])},
            "'n' has dtype torch.int64; parameters must be floating point or complex.*buffers",
        ),
        ({"x": 1.5}, "'x' is float, not a tensor"),
    ],
)
def test_what_cannot_be_trained_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        flatten(tree)


def test_dynamo_walks_trees_as_optree_does():
    tree = {"z": [torch.ones(1), None], "a": Layer(torch.zeros(2), {"k": torch.ones(3)}), "b": flatten([torch.ones(2)])}

    def walk(tree):
        return trees.leaves(tree), trees.map(lambda leaf: leaf + 1, tree), trees.enumerate_leaves(tree)

    leaves, mapped, positions = torch.compile(walk, backend="eager", fullgraph=True)(tree)
    expected_leaves, expected_mapped, expected_positions = walk(tree)
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in expected_leaves]
    assert all(torch.equal(x, y) for x, y in zip(trees.leaves(mapped), trees.leaves(expected_mapped), strict=True))
    assert trees.leaves(positions) == trees.leaves(expected_positions) == [0, 1, 2, 3]


def test_equal_plans_have_one_number_by_which_an_operator_finds_them():
    first, same, other = (flatten({"w": torch.zeros(n)}).plan for n in (3, 3, 4))
    assert first.number() == same.number() != other.number()
    assert by_handle(same.number()) == first and by_handle(other.number()) is other
