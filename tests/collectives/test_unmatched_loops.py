"""Loops of ranks that part: another step, call or file, named by all."""

import re
import threading
import time
from functools import partial

import pytest
import torch

import decentfn as df
from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.testing import on_ranks
from tests.ranks import lose_patience

pytestmark = pytest.mark.thorough

ALGORITHMS = {
    "all_reduce": (df.all_reduce, "complete", {}),
    "diloco": (partial(df.diloco, inner_steps=3), "complete", {}),
    "streaming_diloco": (partial(df.streaming_diloco, inner_steps=4, num_fragments=2), "complete", {}),
    "push_sum": (df.stochastic_gradient_push, "one-peer-exp-directed", {}),
    "groups": (df.adapt_then_combine, "alternating-exp-ring", {"local_world_size": 2}),
}


def square(params, batch):
    return ((params["a"] - batch) ** 2).sum()


def train(rank, name, n, steps, loss_fn=square, between=lambda rank, state, t: None, part=None):
    """Train; after `part` steps the ranks part."""
    algorithm, topology, options = ALGORITHMS[name]
    init, step = algorithm(loss_fn, df.sgd(0.1), df.topology(topology, n, **options))
    state = init({"a": torch.ones(5, dtype=torch.float64)})
    for taken, t in enumerate(steps, 1):
        state = trees.map(torch.clone, state)  # without the step that made it, whose rank alone would refuse a wrong t
        state, _ = step(state, torch.full((5,), float(rank), dtype=torch.float64), t)
        if taken == part:
            lose_patience()
        between(rank, state, t)
    return state


def begins_again(rank, name, n, directory):
    """Rank 1's loop starts again from t=0 after five steps."""
    return train(rank, name, n, [*range(5), *(range(9) if rank == 1 else range(5, 14))], part=5)


def is_a_period_ahead(rank, name, n, directory):
    """The phase is the same, the step is not."""
    period = df.topology(ALGORITHMS[name][1], n, **ALGORITHMS[name][2]).period
    return train(rank, name, n, [t + period * (rank >= 2 and t >= 3) for t in range(8)], part=3)


def takes_a_step_more(rank, name, n, directory):
    return df.consensus_distance(train(rank, name, n, range(7 + (rank == 1)), part=7))


def one_group_stops(rank, name, n, directory):
    return df.consensus_distance(train(rank, name, n, range(4 if rank < 2 else 6), part=4))


def saves_and_another_restores(rank, name, n, directory):
    state = train(rank, name, n, range(2), part=2)
    return df.checkpoint.restore(directory, state) if rank == 1 else df.checkpoint.save(directory, state, 2)


def saves_and_another_has_a_saver(rank, name, n, directory):
    state = train(rank, name, n, range(2), part=2)
    if rank:
        return df.checkpoint.save(directory, state, 2)
    with df.checkpoint.Saver(directory) as saver:
        return saver.save(state, 2)


def savers_save_after_other_steps(rank, name, n, directory):
    with df.checkpoint.Saver(directory) as saver:
        with collectives.use(saver._world):
            lose_patience()  # its channels are its own
        between = lambda rank, state, t: t == 1 + 3 * rank and saver.save(state, t + 1)  # noqa: E731
        train(rank, name, n, range(6), between=between, part=2)


CALL, STEP = "CallMismatch", "StepMismatch"
UNMATCHED = [
    (begins_again, "all_reduce", 3, STEP, r"rank 1 (is )?at t=0"),
    (begins_again, "diloco", 3, STEP, r"rank 1 (is )?at t=\d"),
    (begins_again, "streaming_diloco", 3, STEP, r"rank 1 (is )?at t=\d"),
    (begins_again, "push_sum", 3, STEP, r"rank 1 (is )?at t=0"),
    (is_a_period_ahead, "groups", 4, STEP, r"rank \d is at t=\d, rank \d at t=\d"),
    (takes_a_step_more, "diloco", 3, CALL, r"process 0 calls it after step t=6 .*, process 1 after step t=7"),
    (takes_a_step_more, "push_sum", 3, "ExchangeTimeout PeerLost", r"df.consensus_distance\(state\)"),
    (one_group_stops, "groups", 4, "ExchangeTimeout PeerLost", r"df.consensus_distance\(state\)"),
    (saves_and_another_restores, "diloco", 3, CALL, r"checkpoint.save\(.*checkpoint.restore\("),
    (saves_and_another_has_a_saver, "diloco", 2, CALL, r"checkpoint.Saver\(.*checkpoint.save\("),
    (savers_save_after_other_steps, "diloco", 2, "ExchangeTimeout PeerLost", r"save"),
]


@pytest.mark.parametrize(("does", "name", "n", "error", "said"), UNMATCHED, ids=lambda x: getattr(x, "__name__", None))
def test_what_only_one_rank_does_is_named_by_all(does, name, n, error, said, tmp_path):
    def run(rank):
        try:
            does(rank, name, n, tmp_path / "run")
        except (df.errors.RunError, ValueError) as caught:
            return type(caught).__name__, str(caught)
        return "nothing", ""

    for kind, text in on_ranks(n, run):
        assert kind in error.split() and re.search(said, text), (kind, text)


def test_a_rank_whose_loss_raised_and_that_goes_on_is_named_by_the_others():
    def run(rank):
        seen = []

        def loss_fn(params, batch):
            if rank == 1 and len(seen) == 2:
                raise ZeroDivisionError
            return square(params, batch)

        try:
            train(rank, "all_reduce", 3, range(5), loss_fn, between=lambda rank, state, t: seen.append(state), part=2)
        except ZeroDivisionError:
            with pytest.raises(df.errors.ExchangeTimeout, match=r"waited in its step t=2"):
                df.consensus_mean(seen[-1])
            return "df.consensus_mean(state)"
        except df.errors.RunError as caught:
            return str(caught)

    assert all("df.consensus_mean(state)" in text for text in on_ranks(3, run))


def test_a_rank_that_swallows_a_mismatch_may_go_on_with_the_others():
    def run(rank):
        state = train(rank, "diloco", 3, range(2))
        with pytest.raises(df.errors.CallMismatch):
            (df.gather if rank == 1 else df.mean)(state, {"x": 1.0})
        return df.mean(state, {"x": float(rank)})["x"].item()

    assert on_ranks(3, run) == [1.0] * 3


def test_a_thread_that_takes_a_mean_while_its_rank_trains_changes_nothing():
    """Between two rounds of DiLoCo: rank 0's thread waits for the others' calls, and its steps go on."""

    def run(rank, threads):
        def between(rank, state, t):
            if t == 3 and threads:
                means.append(df.consensus_mean(state)["a"]) if rank else thread(state)

        def thread(state):
            started.append(threading.Thread(target=mean, args=(df.kit.State(*state), collectives.world())))
            started[0].start()
            turn = collectives.world().all_processes.channels.turn
            while started[0].is_alive() and not turn.locked():  # until it has noted how many exchanges there were
                time.sleep(0.001)

        def mean(state, world):
            with collectives.use(world):
                means.append(df.consensus_mean(state)["a"])

        means, started = [], []
        state = train(rank, "diloco", 3, range(9), between=between)
        for one in started:
            one.join()
        return df.params(state)["a"], means

    alone, together = on_ranks(3, run, False), on_ranks(3, run, True)
    for (one, _), (other, means) in zip(alone, together, strict=True):
        assert torch.equal(one, other) and torch.equal(means[0], together[0][1][0])


def test_two_savers_of_which_each_rank_uses_another_first_write_both(tmp_path):
    def run(rank):
        with df.checkpoint.Saver(tmp_path / "a") as a, df.checkpoint.Saver(tmp_path / "b") as b:
            state = train(
                rank,
                "all_reduce",
                2,
                range(3),
                between=lambda rank, state, t: [saver.save(state, t + 1) for saver in ((a, b), (b, a))[rank]],
            )
        restored = [df.checkpoint.restore(tmp_path / name, state) for name in "ab"]
        return all(torch.equal(df.params(r.state)["a"], df.params(state)["a"]) and r.step == 3 for r in restored)

    assert on_ranks(2, run) == [True, True]
