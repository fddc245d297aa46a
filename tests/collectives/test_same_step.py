"""The same `t` everywhere: a rank at another step is named, for every kind of message, and equal steps cost nothing."""

import re
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import decentfn as df
from decentfn.comm import gossip
from decentfn.comm.collectives import Channels, Identity, World, exchange, failures, look_up, use, wait
from decentfn.comm.collectives.session import Session
from decentfn.core.buckets import loose
from decentfn.testing import on_ranks
from decentfn.testing.ranks import alone_as_rank_of, on_kept_ranks
from tests.collectives.test_collectives import schedule
from tests.ranks import TIMEOUT, lose_patience

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:step.state, batch, t=")]  # gaps are meant


def square(x, batch):
    return ((x - batch) ** 2).sum()


def algorithm(name, n, **hyperparameters):
    topology = df.topology(name, n, **({"local_world_size": 2} if name == "alternating-exp-ring" else {}))
    return df.adapt_then_combine(square, df.sgd(0.1), topology, **hyperparameters)


def train(step, state, ts, parts=None, local=None):
    """Train at the steps `ts`, of which the ranks part at number `parts`; how many were taken, and the error that ended it."""
    batch = torch.ones(3) if local is None else torch.ones(local, 3)
    for taken, t in enumerate(ts):
        if taken == parts:
            lose_patience()
        try:
            state, _ = step(state, batch, t)
        except RuntimeError as error:
            return taken, str(error)
    return len(ts), ""


def skips(rank, culprit, at, steps):
    """The steps of a rank: the culprit leaves out step `at`."""
    return [t + (rank == culprit and t >= at) for t in range(steps)]


def assert_all_name_both(answers, culprit, at):
    for rank, (_, error) in enumerate(answers):
        assert "every rank must call the step with the same t" in error, (rank, error)
        other = r"\d" if rank == culprit else culprit
        found = re.search(
            rf"rank {rank} is at t=(\d+), rank {other} at t=(\d+)(?: \((\d+) calls.*?, and (\d+) of)?", error
        )
        assert found, error
        mine, theirs, my_calls, their_calls = (int(value or 0) for value in found.groups())
        # At the same t, which a rank reaches if it met nobody else before, the numbers of calls differ.
        assert (mine - my_calls) - (theirs - their_calls) == (1 if rank == culprit else -1), error


@pytest.mark.parametrize("topology", ["ring", "complete", "alternating-exp-ring", "random-matching"])
def test_a_rank_that_starts_a_step_ahead_is_named_before_a_step_is_done(topology):
    def run(rank):
        init, step = algorithm(topology, 4)
        return train(step, init(torch.full((3,), float(rank))), skips(rank, 2, 0, 5), 0)

    answers = on_ranks(4, run)
    assert_all_name_both(answers, 2, 0)
    assert all(taken <= 1 for taken, _ in answers)  # who meets nobody else in step 0 notices in step 1


@pytest.mark.parametrize("topology", ["ring", "random-matching"])
def test_messages_of_different_steps_never_meet(topology):
    def run(rank):
        init, step = algorithm(topology, 4)
        return train(step, init(torch.full((3,), float(rank))), skips(rank, 2, 4, 50), 4)

    answers = on_ranks(4, run)
    assert_all_name_both(answers, 2, 4)
    assert all(4 <= taken <= 6 for taken, _ in answers)


@pytest.mark.parametrize("topology", ["complete", "alternating-exp-ring"])
def test_means_of_different_steps_are_found_by_a_comparison(topology):
    def run(rank):
        init, step = algorithm(topology, 4)
        return train(step, init(torch.full((3,), float(rank))), skips(rank, 2, 4, 300), 4)

    answers = on_ranks(4, run)
    assert_all_name_both(answers, 2, 4)
    assert all(4 <= taken <= 8 for taken, _ in answers)


def of_diloco(rank, left_out):
    init, step = df.diloco(square, df.sgd(0.1), df.topology("complete", 3), inner_steps=20)
    return train(
        step,
        init(torch.ones(3)),
        [t + left_out * (rank == 1 and t >= 5) for t in range(60)],
        5 if left_out > 1 else None,
    )


@pytest.mark.filterwarnings("ignore:step.state, batch, t=6. after step t=4")
def test_a_rank_that_leaves_out_an_inner_step_meets_the_others_in_the_round_of_their_t():
    assert on_ranks(3, of_diloco, 1) == [(60, "")] * 3


@pytest.mark.filterwarnings("ignore:step.state, batch, t=25. after step t=4")
def test_rounds_of_different_t_are_compared_though_no_message_goes_between_them():
    answers = on_ranks(3, of_diloco, 20)
    assert [taken for taken, _ in answers] == [19, 19, 19]
    for _, error in answers:
        assert "every rank must call the step with the same t" in error
        assert {int(t) for t in re.findall(r"t=(\d+)", error)} >= {19, 39}, error


def test_processes_of_several_workers_are_compared():
    def run(rank):
        init, step = algorithm("ring", 4)
        state, step = df.stack(init(torch.ones(3)), 2), df.simulate(step, 2)
        return train(step, state, skips(rank, 1, 0, 5), 0, local=2)

    assert_all_name_both(on_ranks(2, run), 1, 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "topology", "hyperparameters"),
    [
        ("adapt_while_communicate", "ring", {}),
        ("adapt_then_combine", "complete", {}),
        ("noloco", "random-matching", {"inner_steps": 3}),
        ("gradient_tracking", "one-peer-exp", {}),
        ("stochastic_gradient_push", "one-peer-exp-directed", {"rounds": 2}),
        ("stochastic_gradient_push", "one-peer-exp-directed", {"delay": 1}),
        ("slowmo", "random-matching", {"inner_steps": 3}),
        ("relay_sgd", "chain", {}),
    ],
)
def test_ranks_at_the_same_step_are_left_alone(name, topology, hyperparameters):
    """Whatever an algorithm makes of t (t - 1, t // H, 2 t + k), idle steps included."""

    def run(rank):
        build = getattr(df, name)
        init, step = build(square, df.sgd(0.1), df.topology(topology, 4), **hyperparameters)
        return train(step, init(torch.ones(3)), range(7, 150))

    assert on_ranks(4, run) == [(143, "")] * 4


def test_ranks_at_the_same_step_are_left_alone_over_600_calls():
    def run(rank):
        init, step = algorithm("ring", 2)
        return train(step, init(torch.ones(3)), range(2**20 - 300, 2**20 + 300))

    assert on_ranks(2, run) == [(600, "")] * 2


def test_a_new_start_counts_anew():
    """One rank called an operator alone (here: nobody is named in its table); after `init` the counts agree again."""
    silence, x = schedule(torch.full((1, 2, 2, 1), -1)), torch.ones(2)

    def run(rank):
        init, step = algorithm("ring", 2)
        state = init(torch.ones(3))
        for t in range(3 * rank):
            wait(exchange(x, look_up(x, silence, torch.tensor(t))))
        state = init(torch.ones(3))
        return train(step, state, range(40))

    assert on_ranks(2, run) == [(40, "")] * 2


def test_the_tag_is_the_step_for_every_schedule():
    """Of a state that no `init` has counted; for tables and for draws, in which the phase is always 0."""

    class Recorder:
        def __init__(self):
            self.tags = []

        def recv(self, tensors, rank, tag):
            self.tags.append(tag)
            return self

        send = recv

        def wait(self, timeout=None):
            pass

    for name in ("ring", "random-matching"):
        for t in (5, 2**20 + 5):
            recorder = Recorder()
            with use(World(Channels(Identity.of(0, 2), recorder))):
                x = torch.ones(3)
                gossip.collect(gossip.post(loose([x]), look_up(x, df.topology(name, 2), torch.tensor(t))))
            assert recorder.tags == [t, t]


def test_a_store_that_is_gone_ends_the_comparison_and_not_the_run():
    class Gone:
        def compare_set(self, *arguments):
            raise RuntimeError("Connection reset by peer")

    session = Session(1, Gone())
    assert [session.call("exchange", t)[1] for t in range(5)] == [None] * 5


def test_what_was_compared_is_forgotten_in_the_end():
    store = dist.HashStore()
    session = Session(0, store)
    for t in range(70 * 256):
        session.call("exchange", t)
    assert store.num_keys() <= 64 + 9


# -- compiled, on processes ------------------------------------------------------------------------------------------


def compiled_ahead(topology, at):
    """A short-lived group of its own, for it is broken afterwards."""
    here = df.init()
    group = dist.new_group(list(range(here.size)), timeout=TIMEOUT)
    with (
        use(World(Channels(Identity.of(here.rank, here.size), group, TIMEOUT))),
        patch.object(failures, "_PATIENCE_S", 60.0),
    ):
        init, step = algorithm(topology, here.size)
        step = df.compile(step, backend="aot_eager")
        return train(step, init(torch.full((3,), float(here.rank))), skips(here.rank, 1, at, 40), at)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("topology", "at"), [("ring", 0), ("ring", 4), ("complete", 4)])
def test_compiled_ranks_at_different_steps_name_both(ranks, topology, at):
    answers = ranks(2).run(compiled_ahead, topology, at)
    assert_all_name_both(answers, 1, at)
    assert all(taken <= 8 for taken, _ in answers)


# -- what a step number is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "t", [1.5, -1, True, "3", None, torch.tensor(1.5), torch.tensor(-1), torch.tensor([1]), torch.tensor(True), 2**63]
)
def test_what_is_no_step_number_is_refused(t):
    init, step = algorithm("complete", 1)
    state = init(torch.ones(3))
    simulated = df.simulate(step, 1)
    for run, of in (
        (step, lambda x: x),
        (df.compile(step, backend="eager"), lambda x: x),
        (simulated, lambda x: df.stack(x, 1)),
        (df.compile(simulated, backend="eager"), lambda x: df.stack(x, 1)),
    ):
        with pytest.raises(ValueError, match=r"third argument numbers the steps, from 0; pass an int"):
            run(of(state), of(torch.ones(3)), t)


@pytest.mark.parametrize("t", [3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)])
def test_what_is_a_step_number_is_taken(t):
    init, step = algorithm("complete", 1)
    for run in (step, df.compile(step, backend="eager", donate=False)):
        state, _ = run(init(torch.zeros(3)), torch.ones(3), t)
        assert torch.equal(df.params(state), torch.full((3,), 0.2))


@pytest.mark.parametrize("topology", ["static-ring", "complete"])
def test_messages_of_two_states_never_meet(topology):
    """Of one algorithm, at equal t and of equal size, whose steps one rank takes in another order."""

    def run(rank):
        init, step = algorithm(topology, 3)
        states = [init(torch.zeros(3)), init(torch.full((3,), 9.0))]
        for t in range(5):
            if t == 4:
                lose_patience()
            for i in (1, 0) if (rank, t) == (1, 4) else (0, 1):
                try:
                    states[i], _ = step(states[i], torch.full((3,), 9.0 * i), t)
                except RuntimeError as error:
                    return t, str(error)
        return 5, ""

    for rank, (t, error) in enumerate(on_ranks(3, run)):
        other, mine = ("[02]", 2) if rank == 1 else ("1", 1)
        named = (
            f"rank {rank} is at t=4 of the state of init {mine}, rank {other} at t=4 of the state of init {3 - mine}"
        )
        assert t == 4 and re.search(named, error), (rank, t, error)


def test_two_states_of_one_compiled_step_keep_the_plans_by_which_their_messages_are_told_apart():
    init, step = algorithm("complete", 1)
    step, states = df.compile(step, backend="eager", donate=False), [init(torch.zeros(3)), init(torch.ones(3))]
    for state in states:
        assert step(state, torch.ones(3), 0)[0].params.plan is state.params.plan


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_two_algorithms_in_turns_compute_what_each_does_alone(backend):
    """Gossip in two of three steps, and DiLoCo, whose t counts its own steps, in the others."""
    makes = [
        lambda: algorithm("one-peer-exp", 4),
        lambda: df.diloco(square, df.sgd(0.1), df.topology("complete", 4), inner_steps=2),
    ]
    turns = [(0, 0), (0, 1), (1, 0), (0, 3), (0, 4), (1, 1), (0, 6), (1, 2), (1, 3)]

    def batch(rank, t):
        return torch.full((3,), float(rank * t))

    def compiled(step):
        return step if backend is None else df.compile(step, backend=backend, donate=False)

    built = [make() for make in makes]
    steps = [compiled(step) for _, step in built]

    def run(rank):
        states = list(starts[rank])
        for i, t in turns:
            states[i], _ = steps[i](states[i], batch(rank, t), t)
        return [df.params(state) for state in states]

    def alone(i):
        init, step = makes[i]()
        state, step = df.stack(init(torch.zeros(3)), 4), df.simulate(step, 4)
        for t in [t for its, t in turns if its == i]:
            state, _ = step(state, torch.stack([batch(rank, t) for rank in range(4)]), t)
        return df.params(state)

    starts = on_kept_ranks(4, lambda rank: [init(torch.zeros(3)) for init, _ in built])
    if backend is not None:
        with alone_as_rank_of(4):
            run(0)
    for i, found in enumerate(zip(*on_kept_ranks(4, run), strict=True)):
        torch.testing.assert_close(torch.stack(found), alone(i), rtol=1e-6, atol=1e-6)
