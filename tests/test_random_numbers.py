"""Random numbers of a loss are a function of torch's seed, the step and the worker, in both interpreters."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

import decentfn as df
from decentfn.core import draws

pytestmark = pytest.mark.thorough

STEPS = 3
HOW = [None, "aot_eager", "inductor"]


def dropping(params, batch):
    """A loss that shows its dropout mask."""
    mask = torch.nn.functional.dropout(torch.ones_like(batch))
    return (params * batch * mask).sum(), mask


def masks(how=None, *, num_workers, local=0, loss_fn=dropping, shape=(48,), seed=0):
    """`[STEPS, (local,) ...]`: what is dropped in each step, by a step that leaves torch's generator as it was."""
    torch.manual_seed(seed)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", num_workers))
    state, batch = init(torch.ones(48)), torch.ones(shape)
    if local:
        state, batch, step = df.stack(state, local), df.stack(batch, local), df.simulate(step, local)
    if how:
        step = df.compile(step, backend=how)
    before = torch.get_rng_state()
    drawn = []
    for t in range(STEPS):
        state, metrics = step(state, batch, t)
        drawn.append(metrics.aux)
    assert torch.equal(torch.get_rng_state(), before), "the step drew from the user's generator"
    return torch.stack(drawn)


def all_differ(rows):
    return all(not torch.equal(a, b) for a, b in itertools.combinations(rows, 2))


def on_this_rank(how, local=0):
    return masks(how, num_workers=2 * (local or 1), local=local), masks(how, num_workers=2 * (local or 1), local=local)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOW)
def test_ranks_with_one_seed_drop_differently_in_every_step_and_the_same_when_run_again(how, ranks):
    (first, again), (second, second_again) = ranks(2).run(on_this_rank, how)
    assert all_differ([*first, *second])
    assert torch.equal(first, again) and torch.equal(second, second_again)


def test_workers_spread_over_ranks_drop_differently(ranks):
    (first, again), (second, _) = ranks(2).run(on_this_rank, None, 2)
    assert all_differ([*first.flatten(0, 1), *second.flatten(0, 1)])
    assert torch.equal(first, again)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOW)
def test_simulated_workers_drop_differently_in_every_step_and_the_same_when_run_again(how):
    drawn = masks(how, num_workers=3, local=3)
    assert all_differ(drawn.flatten(0, 1))
    assert torch.equal(drawn, masks(how, num_workers=3, local=3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOW)
def test_micro_batches_drop_differently(how):
    drawn = masks(how, num_workers=1, loss_fn=df.accumulate(dropping), shape=(4, 48))
    assert all_differ(drawn.flatten(0, 1))


def test_the_place_for_the_seed_is_torchs():
    assert all_differ([*masks(num_workers=1), *masks(num_workers=1, seed=1)])


@pytest.mark.parametrize("how", ["aot_eager", "inductor"])
def test_an_undonated_step_that_draws_is_a_pure_function(how):
    init, step = df.adapt_while_communicate(dropping, df.sgd(0.1), df.topology("complete", 1))
    step, state = df.compile(step, backend=how, donate=False), init(torch.ones(48))
    results = []
    for _ in range(2):
        torch.rand(7)
        new, metrics = step(state, torch.ones(48), 5)
        results.append((df.params(new), metrics.aux))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_loss_that_fails_leaves_the_generator_as_it_was():
    def failing(params, batch):
        raise ArithmeticError(torch.rand(()))

    init, step = df.all_reduce(failing, df.sgd(0.1), df.topology("complete", 1))
    state, before = init(torch.ones(2)), torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        step(state, torch.ones(2), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seeds_of_workers_steps_and_runs_are_all_different():
    keys = list(itertools.product(range(-8, 8), range(16), range(16)))
    seeds = {df.data.worker_seed(seed, worker, t) for seed, worker, t in keys}
    assert len(seeds) == len(keys)
    assert len({seed % 2**32 for seed in seeds}) == len(keys)  # of which the CPU's generator takes 32 bits
    for seed in seeds:
        assert 0 <= seed < 2**63


def test_one_that_cannot_begin_leaves_nothing_behind(monkeypatch):
    class Captured:
        def get_state(self):
            raise RuntimeError("a CUDA graph is captured")

    def drawn():
        with draws.torch_draws(2, 0):
            return torch.rand(1).item()

    torch.manual_seed(1)
    before, first = torch.get_rng_state(), drawn()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", int)
    monkeypatch.setattr(torch.cuda, "default_generators", (Captured(),))
    with pytest.raises(RuntimeError, match="captured"):
        drawn()
    monkeypatch.undo()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert drawn() != first


def test_a_gpu_that_the_loss_is_the_first_to_use_gets_its_generators_state_back(monkeypatch):
    gpu, is_initialized = torch.Generator().manual_seed(5), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(is_initialized))
    monkeypatch.setattr(torch.cuda, "current_device", int)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    before = gpu.get_state()
    with draws.torch_draws(0, 0):
        is_initialized.append(True)
        with draws.torch_draws(0, 0, 1):
            torch.rand(3, generator=gpu)
    assert torch.equal(gpu.get_state(), before)


@pytest.mark.parametrize("by", [df.autograd, lambda loss_fn: loss_fn])
def test_threads_of_one_process_draw_what_each_would_alone_and_keep_torchs_seed(by):
    """A step of one waits for that of the other: PyTorch has one set of generators."""

    def program(begins):
        def loss_fn(params, batch):
            begins.set()
            time.sleep(0.01)  # long enough for the other thread's step, but for its turn
            return dropping(params, batch)

        init, step = df.adapt_while_communicate(by(loss_fn), df.sgd(0.1), df.topology("complete", 2))
        step, batch = df.simulate(step, 2), torch.ones(2, 48)
        state, drawn = df.stack(init(torch.ones(48)), 2), []
        for t in range(STEPS):
            state, metrics = step(state, batch, t)
            drawn.append(metrics.aux)
        return torch.stack(drawn)

    torch.manual_seed(5)
    alone, before = program(Event()), torch.get_rng_state()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(program, begins := Event())
        begins.wait(60)
        second = threads.submit(program, Event())
        assert torch.equal(first.result(), alone) and torch.equal(second.result(), alone)
    assert torch.initial_seed() == 5 and torch.equal(torch.get_rng_state(), before)
