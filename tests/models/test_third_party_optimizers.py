"""Optimizers of other packages through `df.from_torch`: equal to themselves in a plain loop."""

from functools import partial

import pytest
import torch

import decentfn as df
from tests.transforms.test_from_torch import BATCHES, assert_equal, built, loss_fn, ours, plain_loop, start

lion = pytest.importorskip("lion_pytorch")
prodigy = pytest.importorskip("prodigyopt")
schedule_free = pytest.importorskip("schedulefree")
collection = pytest.importorskip("pytorch_optimizer")

pytestmark = pytest.mark.thorough


def unnamed(kind, params, **options):
    return kind([p for _, p in params], **options)


MAKE = {
    "lion-pytorch": partial(unnamed, lion.Lion, lr=0.01, weight_decay=0.1),
    "prodigyopt": partial(unnamed, prodigy.Prodigy, weight_decay=0.1),
    "schedulefree": partial(unnamed, schedule_free.AdamWScheduleFree, lr=0.05, warmup_steps=5),
    "pytorch-optimizer: Ranger": partial(unnamed, collection.Ranger, lr=0.05),
}
WORK = ("AdaBelief", "Adan", "AdEMAMix", "Amos", "CAME", "Grams", "Lamb", "LaProp", "StableAdamW", "Tiger", "Yogi")
REFUSED = {
    "SOAP": "keeps a list under 'GG'",
    "SWATS": "keeps other things after later steps",
    "Gravity": "remembers more than what it keeps of each parameter",
    "AliG": "need a closure",
}


@pytest.mark.parametrize("name", [*MAKE, *WORK])
def test_it_equals_itself_in_a_plain_loop_and_resumes_from_a_checkpoint(name, tmp_path):
    make = MAKE.get(name) or partial(unnamed, getattr(collection, name))
    init, step = built(make)
    state, _ = ours(step, init(start()), BATCHES[:9])
    df.checkpoint.save(tmp_path, state, 9)
    state = df.checkpoint.restore(tmp_path, built(make)[0](start())).state
    state, _ = ours(step, state, BATCHES[9:], 9)
    assert_equal(df.params(state), plain_loop(make, start()))


@pytest.mark.parametrize("name", ["prodigyopt", "schedulefree"])
def test_compiled_and_simulated_workers_equal_their_plain_loops(name):
    n, batches = 2, torch.stack([BATCHES[:10], BATCHES[10:]], 1)
    init, step = built(MAKE[name], n=n)
    step = df.compile(df.simulate(step, n), backend="aot_eager")
    state, _ = ours(step, df.stack(init(start()), n), batches)
    for i in range(n):
        assert_equal(df.params(df.worker(state, i)), plain_loop(MAKE[name], start(), batches[:, i]))


def on_a_rank(local):
    """Four workers on a ring, `local` of them in each process; return the parameters of all, for each optimizer."""
    first = torch.distributed.get_rank() * local if torch.distributed.is_initialized() else 0
    ends = {}
    for name, make in MAKE.items():
        topology = df.topology("ring", num_workers=4)
        init, step = df.adapt_while_communicate(loss_fn, df.from_torch(make), topology)
        state, step = df.stack(init(start()), local), df.simulate(step, local)
        for t in range(4):
            state, _ = step(state, BATCHES[first : first + local] + t, t)
        ends[name] = {leaf: x.tolist() for leaf, x in df.params(state).items()}
    return ends


@pytest.mark.thorough
def test_workers_on_ranks_equal_simulated_ones(ranks):
    expected, halves = on_a_rank(4), ranks(2).run(on_a_rank, 2)
    for name, end in expected.items():
        for leaf, rows in end.items():
            assert rows == halves[0][name][leaf] + halves[1][name][leaf]


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_keeps_more_than_a_state_can_hold_says_so(name):
    init, _ = built(partial(unnamed, getattr(collection, name)))
    with pytest.raises(ValueError, match=rf"from_torch\(make\): .*{name}.*{REFUSED[name]}"):
        init(start())
