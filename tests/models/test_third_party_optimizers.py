"""Optimizers of other packages through `df.from_torch`: equal to themselves in a plain loop."""

from functools import partial

import pytest
import torch

import decentfn as df
from tests.transforms.test_from_torch import BATCHES, SCHEDULERS, assert_equal, built, loss_fn, ours, plain_loop, start

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
    "SPAM": r"a step changes its \['total_step', 'current_step'\]",
    "Gravity": "remembers more than what it keeps of each parameter",
    "AliG": "need a closure",
}


def every():
    """Every optimizer of three packages, by package and name."""
    kinds = {
        f"schedulefree: {name}": kind for name, kind in vars(schedule_free).items() if name.endswith("ScheduleFree")
    }
    for name, kind in vars(collection).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            kinds[f"pytorch-optimizer: {name}"] = kind
    try:
        from timm.optim import create_optimizer_v2, list_optimizers
    except Exception:  # torchvision, which timm imports, may not fit PyTorch
        return kinds
    return kinds | {f"timm: {n}": partial(create_optimizer_v2, opt=n, lr=0.01) for n in list_optimizers()}


EVERY = every()
IN_CI = [
    name for name in EVERY if name.partition(": ")[2] in (*WORK, *vars(schedule_free), "ScheduleFreeAdamW", "lamb")
]


@pytest.mark.parametrize("scheduler", ["step", "factor"])
@pytest.mark.parametrize("name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.slow) for n in EVERY])
def test_it_equals_itself_under_a_scheduler(name, scheduler):
    """If it runs in a plain loop without more arguments. Some compute with float32 numbers, whatever the parameters."""
    make, scheduler = partial(unnamed, EVERY[name]), SCHEDULERS[scheduler]
    try:
        torch.manual_seed(0)
        expected = plain_loop(make, start(), BATCHES[:8], scheduler)
    except Exception as error:
        pytest.skip(f"in a plain loop: {error}")
    init, step = built(make, scheduler)
    try:
        state = init(start())
    except ValueError as error:
        assert str(error).startswith("from_torch(make): ") and name not in IN_CI
        pytest.skip(str(error))
    torch.manual_seed(0)
    state, _ = ours(step, state, BATCHES[:8])
    torch.testing.assert_close(dict(df.params(state)), expected, rtol=1e-6, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_what_one_evaluates_is_what_schedulefree_evaluates(kind, tmp_path):
    make, n = partial(unnamed, getattr(schedule_free, kind), lr=0.05), 2
    batches = torch.stack([BATCHES[:10], BATCHES[10:]], 1)
    init, step = built(make, n=n)
    state, _ = ours(df.simulate(step, n), df.stack(init(start()), n), batches)
    expected = [plain_loop(make, start(), batches[:, i]) for i in range(n)]
    mean = {name: (x + expected[1][name]) / 2 for name, x in expected[0].items()}
    assert_equal(df.consensus_mean(state), mean)
    torch.testing.assert_close(df.evaluate(loss_fn, state, [BATCHES[0]]), loss_fn(mean, BATCHES[0]))
    assert_equal(df.with_params(state, df.params(state)).params.tree(), state.params.tree())
    df.checkpoint.save(tmp_path, state, 10)
    again = df.checkpoint.restore(tmp_path, df.stack(built(make, n=n)[0](start()), n)).state
    assert_equal(df.consensus_mean(again), mean)


@pytest.mark.parametrize("name", [*MAKE, *WORK])
def test_it_equals_itself_in_a_plain_loop_and_resumes_from_a_checkpoint(name, tmp_path):
    make = MAKE.get(name) or partial(unnamed, getattr(collection, name))
    init, step = built(make)
    state, _ = ours(step, init(start()), BATCHES[:9])
    df.checkpoint.save(tmp_path, state, 9)
    state = df.checkpoint.restore(tmp_path, built(make)[0](start())).state
    state, _ = ours(step, state, BATCHES[9:], 9)
    assert_equal(df.params(state), plain_loop(make, start()))


@pytest.mark.parametrize("name", [*MAKE, *WORK])
def test_it_equals_itself_with_a_leaf_that_begins_with_zeros(name):
    make = MAKE.get(name) or partial(unnamed, getattr(collection, name))
    first = start() | {"a.bias": torch.zeros_like(start()["a.bias"])}
    state, _ = ours(built(make)[1], built(make)[0](first), BATCHES[:9])
    assert_equal(df.params(state), plain_loop(make, first, BATCHES[:9]))


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
