"""A checkpoint is the whole state, bit for bit: of every algorithm, for other buckets and other processes."""

import pytest
import torch

import decentfn as df
from decentfn import trees
from decentfn.buckets import Buckets
from decentfn.run.checkpoint.layout import leaves_of
from decentfn.testing import problem
from tests.contract import ROWS

N = 4


def built(row, **options):
    """The row's algorithm with everything that a state can hold: buffers, a loss scale, an average."""
    algorithm = ROWS[row].build(loss_fn=df.dynamic_loss_scale(problem.loss_with_buffers, 8.0), **options)
    return df.ema(algorithm, 0.9)


def start(row, algorithm, workers=range(N)):
    return ROWS[row].start(algorithm, workers, stacked=True, with_buffers=True)


def trained(row, algorithm, state, steps, workers=range(N)):
    step = df.simulate(algorithm.step, len(workers))
    for t in steps:
        state, _ = step(state, problem.stacked([problem.batch(i, t) for i in workers]), t)
    return state


def by_name(state):
    """What users see of a state, without its buckets: a dict of tensors."""
    opened = trees.map_nodes(Buckets, lambda node: {"": node.tree()}, state)
    return dict(trees.named_leaves(opened))


def assert_same(got, expected):
    got, expected = by_name(got), by_name(expected)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype and got[name].shape == x.shape, name
        same_bits = got[name].contiguous().view(-1).view(torch.uint8) == x.contiguous().view(-1).view(torch.uint8)
        assert bool(same_bits.all()), name


@pytest.mark.parametrize("row", ROWS)
def test_what_is_restored_is_what_was_saved_and_goes_on_alike(row, tmp_path):
    algorithm = built(row)
    state = trained(row, algorithm, start(row, algorithm), range(2))
    df.checkpoint.save(tmp_path, state, 2, topology=algorithm.topology)
    restored = df.checkpoint.restore(tmp_path, start(row, algorithm))
    assert restored.step == 2
    assert_same(restored.state, state)
    assert_same(*(trained(row, algorithm, s, range(2, 3)) for s in (restored.state, state)))

    template = start(row, built(row, bucket_mb=1e-4))
    assert len(template.params) > len(state.params)
    if any(leaf.is_by_bucket for leaf in leaves_of(state)):
        with pytest.raises(ValueError, match="is kept for each bucket, and .* has other buckets"):
            df.checkpoint.restore(tmp_path, template)
    else:
        assert_same(df.checkpoint.restore(tmp_path, template).state, state)


def test_what_is_kept_for_each_bucket_is_little():
    by_bucket = {row: [x.name for x in leaves_of(start(row, built(row))) if x.is_by_bucket] for row in ROWS}
    assert {row for row, names in by_bucket.items() if names} == {"stochastic_gradient_push, delayed", "power_gossip"}
