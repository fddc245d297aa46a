"""Workarounds for Inductor."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._inductor.utils import fresh_cache

import decentfn as df
from decentfn.comm.collectives import operators
from decentfn.compressors import Key
from decentfn.core.buckets import flatten
from decentfn.engine import cache as compile_cache
from decentfn.torch_private import inductor

pytestmark = pytest.mark.thorough


@pytest.fixture
def as_pytorch_is(monkeypatch):
    """Leave PyTorch its fault; a fault that no longer shows is one that decentfn need not keep Inductor from."""

    def change(where, name, value):
        monkeypatch.setattr(where, name, value)
        torch._dynamo.reset()
        return fresh_cache()

    return change


def test_a_loop_is_not_split_by_what_does_not_divide_it(as_pytorch_is):
    """620 values in chunks of 256: Inductor on a CPU would compute the first two chunks and forget the rest."""
    compressor = df.compressors.quantize(8)
    x = flatten({"a": torch.randn(620, generator=torch.Generator().manual_seed(0))})

    def there_and_back(x, me, t):
        message = compressor.compress(x, plan, Key(t, me, 0))
        return x, compressor.decompress(message, plan)

    (bucket,), (plan,) = x, x.plan.buckets
    expected = there_and_back(bucket, torch.tensor(1), torch.tensor(3))[1]
    _, heard = df.compile(there_and_back, donate=False)(bucket, torch.tensor(1), 3)
    torch.testing.assert_close(heard, expected)
    with as_pytorch_is(compile_cache, "without_faults", nullcontext):
        _, heard = df.compile(there_and_back, donate=False)(bucket, torch.tensor(1), 3)
    assert not torch.allclose(heard, expected)


def test_a_tensor_written_over_and_read_in_the_same_loop_is_compiled(as_pytorch_is):
    """Inductor on a CPU would fail with a KeyError, as it did in quasi-global Adam's update on two ranks."""

    def written_over(x, batch, t):
        mask = batch.clone()
        mask[torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(1)] = 0
        return x, torch.softmax(x + mask, dim=-1)

    x, batch = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    _, chances = df.compile(written_over, donate=False)(x, batch, 0)
    torch.testing.assert_close(chances, torch.softmax(x, dim=-1))
    with as_pytorch_is(compile_cache, "without_faults", nullcontext), pytest.raises(RuntimeError, match="KeyError"):
        df.compile(written_over, donate=False)(x, batch, 0)


def test_a_donated_leaf_that_moves_to_another_place_is_read_before_it_is_written_over(as_pytorch_is):
    def swapped(state, batch, t):
        return {"a": state["b"].clone(), "b": state["a"].clone()}, batch.sum()

    def run():
        state = {"a": torch.zeros(3), "b": torch.ones(3)}
        return {name: x.tolist() for name, x in df.compile(swapped)(state, torch.ones(3), 0)[0].items()}

    assert run() == {"a": [1.0] * 3, "b": [0.0] * 3}
    with as_pytorch_is(inductor, "compile_options", dict):
        assert run() != {"a": [1.0] * 3, "b": [0.0] * 3}


def shifted(x):
    x[1:] = x[:-1].clone()


def filled_and_shifted(x):
    x[torch.tensor([0, 3])] = 7.0
    x[1:] = x[:-1].clone()


def put_and_flipped(x):
    x.index_put_((torch.arange(8),), x * 2)
    x.add_(x.flip(0))


def scattered_and_zeroed(x):
    scattered = torch.slice_scatter(x, x[:1] + 5, 0, 1, 2)
    x.zero_()
    return scattered


def filled_and_clamped(x):
    filled = x.index_fill_(0, torch.tensor([1]), 7.0).clone()
    x.clamp_(0, 3)
    return filled


def put_and_kept(x):
    x[torch.tensor([0, 2])] += 1
    return x.clone()


def put_in_reverse(x):
    return torch.index_copy(x, 0, torch.arange(7, -1, -1), x)


def added_as_a_list(x):
    torch._foreach_add_([x], [x.flip(0)])


_IN_PLACE = [
    shifted,
    filled_and_shifted,
    put_and_flipped,
    scattered_and_zeroed,
    filled_and_clamped,
    put_and_kept,
    put_in_reverse,
    added_as_a_list,
]


def test_a_leaf_changed_by_indices_and_slices_is_read_before_it_is_written_over(as_pytorch_is):
    def changed(state, batch, t):
        new = {name: x.clone() for name, x in state.items()}
        return new, {change.__name__: change(new[change.__name__]) for change in _IN_PLACE}

    def run(step):
        state, kept = {change.__name__: torch.arange(24.0).view(8, 3) + 1 for change in _IN_PLACE}, []
        for t in range(2):
            state, metrics = step(state, torch.ones(1), t)
            kept.append(metrics)
        return state, kept

    expected = run(changed)
    torch.testing.assert_close(run(df.compile(changed)), expected)
    with as_pytorch_is(inductor, "compile_options", dict):
        state, kept = run(df.compile(changed))

    def is_right(name):
        metrics = zip(kept, expected[1], strict=True)
        is_kept = [a[name] is None or torch.equal(a[name], b[name]) for a, b in metrics]
        return torch.equal(state[name], expected[0][name]) and all(is_kept)

    assert not [name for name in state if is_right(name)]


def test_gradients_that_share_memory_are_not_added_up_in_place(as_pytorch_is):
    """Simulated and compiled, Inductor would give each of four workers the sum of all gradients."""

    def loss_fn(x, batch):
        return torch.stack([x[0], x[1]]).index_select(0, torch.tensor([1])).sum()

    init, step = df.adapt_while_communicate(loss_fn, df.sgd(1.0), df.topology("complete", 4))

    def run():
        return df.params(df.compile(df.simulate(step, 4))(df.stack(init(torch.zeros(2)), 4), torch.zeros(4), 0)[0])

    assert run().tolist() == [[0.0, -1.0]] * 4
    if torch.__version__.startswith("2.13"):  # 2.14 does not
        with as_pytorch_is(inductor, "compile_options", dict):
            assert run().tolist() == [[0.0, -4.0]] * 4


def test_frozen_attention_is_the_one_that_was_written(as_pytorch_is):
    """Inductor would permute the keys in another order, and normalize over another axis."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, 4, 4, 8, generator=draw)  # batch, length, heads, size of a head

    def attended(q, k, v, axis):
        return torch.matmul(q.permute(0, 2, 1, 3), k).mul(8**-0.5).softmax(axis).matmul(v.permute(0, 2, 1, 3))

    def loss_fn(x, batch):
        permuted = attended(q, k.permute(0, 2, 3, 1), v, -1)
        over_queries = attended(k, q.permute(0, 2, 1, 3).transpose(-2, -1), v, -2)
        return ((permuted + 2 * over_queries) @ x).sin().sum() * batch

    init, step = df.adapt_while_communicate(loss_fn, df.sgd(1.0), df.topology("complete", 1))

    def run(step):
        return df.params(step(init(torch.ones(8)), torch.ones(()), 0)[0])

    torch.testing.assert_close(run(df.compile(step)), run(step), atol=1e-4, rtol=1e-4)
    with as_pytorch_is(inductor, "compile_options", dict):
        assert (run(df.compile(step)) - run(step)).abs().max() > 0.1


def test_the_largest_element_is_counted_in_rows(as_pytorch_is):
    """Inductor would count the elements of a transposed tensor as they lie in memory."""
    x = torch.arange(6.0).reshape(2, 3)  # [[0, 3], [1, 4], [2, 5]] transposed: the largest is last, the smallest first

    def extrema(state, batch, t):
        h = (batch.T - 2).abs()  # [[2, 1], [1, 2], [0, 3]]
        return state, (h.argmax(), h.argmin(), h.argmin(keepdim=True))

    def run():
        return df.compile(extrema, donate=False)(torch.zeros(()), x, 0)[1]

    assert [y.tolist() for y in run()] == [5, 4, [[4]]]
    with as_pytorch_is(inductor, "compile_options", dict):
        assert run()[1].tolist() == 2


def test_what_was_compiled_with_other_sources_is_not_used(monkeypatch):
    """PyTorch's cache knows a graph by its operators' names, and not the rules by which `vmap` sees them."""
    topology = df.topology("ring", num_workers=4)
    init, step = df.adapt_while_communicate(lambda p, batch: ((p - batch) ** 2).mean(), df.sgd(0.1), topology)
    step = df.simulate(step, 4)

    def run(step):
        torch._dynamo.reset()
        return step(df.stack(init(torch.ones(8)), 4), torch.zeros(4, 8), 0)[0].params[0].tolist()

    with fresh_cache():
        before, rows_of = run(df.compile(step)), operators.with_workers_first
        other = lambda x, *more: rows_of(x, *more) * (2 if x.is_floating_point() else 1)  # noqa: E731
        monkeypatch.setattr(operators, "with_workers_first", other)
        assert run(df.compile(step)) == before != run(step)
        monkeypatch.setattr(inductor, "_digest_of_sources", lambda: "other sources")
        assert run(df.compile(step)) == run(step)


def test_ranks_that_are_threads_may_prepare_the_compiler_at_once():
    """PyTorch refuses a rule that is given twice."""
    code = """
import threading
from decentfn.torch_private import batching

keys, both, failed = batching.BATCHING.find(), threading.Barrier(2), []
class Slow:
    def find(self):
        try:
            both.wait(2)  # for the other thread, if it comes this far
        except threading.BrokenBarrierError:
            pass
        return keys
batching.BATCHING = Slow()
def prepare():
    try:
        batching.install()
    except RuntimeError as error:
        failed.append(str(error))
threads = [threading.Thread(target=prepare) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("failed", failed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "failed []", done.stdout + done.stderr
