"""`df.join`: a new worker gets a donor's state, bit for bit, and only gradients move the mean of all from there."""

import threading
import time
from datetime import timedelta

import pytest
import torch

import decentfn as df
from decentfn.comm.collectives import World, use, world
from decentfn.testing import on_ranks
from decentfn.train.joining import wait_for_run
from tests.run import survivors
from tests.run.survivors import RATE, gradient, loss_fn, start_params
from tests.run.test_survival import leave

AFTER = 5
"""Steps after the newcomer's first one."""
ALGORITHMS = {
    "gossip": lambda loss, n: df.adapt_while_communicate(loss, df.sgd(RATE), df.topology("base", n)),
    "push-sum": lambda loss, n: df.stochastic_gradient_push(
        loss, df.sgd(RATE), df.topology("one-peer-exp-directed", n)
    ),
    "late push-sum": lambda loss, n: df.stochastic_gradient_push(
        loss, df.sgd(RATE), df.topology("one-peer-exp-directed", n), delay=2, least_delay=0
    ),
    "tracking": lambda loss, n: df.gradient_tracking(loss, df.sgd(RATE), df.topology("base", n)),
    "choco": lambda loss, n: df.choco_sgd(
        loss, df.sgd(RATE), df.topology("static-ring", n), compressor=df.compressors.top_k(0.5), gamma=0.3
    ),
    "diloco": lambda loss, n: df.diloco(
        loss, df.sgd(RATE), df.topology("complete", n), inner_steps=3, outer_learning_rate=1.0, outer_momentum=0.0
    ),
}


class Seen(dict):
    """What a worker had after each step: (x, weight of push-sum, seats, places)."""

    start = None
    state = None


def train(step, state, t, seen, newcomer, leaves=-1):
    """Take steps until `AFTER` steps after the newcomer's first one."""
    end = None
    while t != end:
        if t == leaves:
            leave(step)
            return
        state, _ = step(state, gradient(world().place, t), t)
        if end is None and newcomer in world().seats:
            end = t + AFTER
        w = getattr(state.memory, "weight", None)
        seen[t] = state.params.tensors[0].clone(), 1.0 if w is None else float(w), world().seats, world().places
        seen.state = state
        time.sleep(0.002)
        t += 1


def come(store, name, seen, seat):
    with use(wait_for_run(World(None, 0, 1), store, timedelta(seconds=20))):
        init, step = ALGORITHMS[name](loss_fn, world().num_workers)
        step = df.survive(step)
        state, first = df.join(step, init(start_params(9, name)), gradient(9, 0))
        seen.start = first, state
        train(step, state, first, seen, seat)


def run(n, name, leaves=None):
    """`n` workers, of which one may leave at step 2, and a newcomer; what each one saw, the newcomer last."""
    seen, failed = [Seen() for _ in range(n + 1)], []

    def newcomer(store):
        try:
            come(store, name, seen[n], n)
        except BaseException as error:
            failed.append(error)

    def on_this_rank(rank):
        init, step = ALGORITHMS[name](loss_fn, n)
        step = df.survive(step, patience=timedelta(seconds=20))
        thread = threading.Thread(target=newcomer, args=(world().store,))
        if rank == leaves:
            train(step, init(start_params(rank, name)), 0, seen[rank], n, 2)
            thread.start()
        elif rank == 0 and leaves is None:
            thread.start()
        if rank != leaves:
            train(step, init(start_params(rank, name)), 0, seen[rank], n)
        if thread.ident:
            thread.join()

    on_ranks(n, on_this_rank)
    assert not failed, failed
    return seen


def check_mean(seen, first):
    """The mean of all from the newcomer's first step on, which begins with the donor's copy."""
    x, donor = [its[first - 1][0] for its in seen[:-1]], seen[0][first - 1][0]
    expected = (sum(x) + donor) / len(seen)
    for t in range(first, first + AFTER):
        places = seen[0][t][3]
        expected = expected - RATE * sum(gradient(place, t) for place in places) / len(seen)
        mean = sum(its[t][0] * its[t][1] for its in seen) / len(seen)
        assert (mean - expected).abs().max() < 1e-14


@pytest.mark.parametrize("name", ["gossip", "choco", "diloco"])
def test_three_workers_become_four(name):
    seen = run(3, name)
    first, state = seen[3].start
    assert {its[first][2:] for its in seen} == {((0, 1, 2, 3), (0, 1, 2, 3))}
    assert torch.equal(state.params.tensors[0], seen[0][first - 1][0])
    if name != "diloco":  # its outer step sets all to the mean of the slow parameters
        check_mean(seen, first)
    fields = [its.state.memory._asdict() for its in seen] if name != "gossip" else []
    rows = {
        field: torch.stack([its[field].tensors[0] for its in fields]) for field in ("pull", "public") if name == "choco"
    }
    if name == "choco":
        w = df.mixing_matrix(df.topology("static-ring", 4), 0)
        torch.testing.assert_close(rows["pull"], w @ rows["public"] - rows["public"], rtol=0, atol=1e-14)
    if name == "diloco":
        phi = torch.stack([its["phi"].tensors[0] for its in fields])
        assert (phi == phi[0]).all()


@pytest.mark.parametrize("name", ["push-sum", "late push-sum", "tracking"])
def test_a_newcomer_takes_the_place_of_a_lost_worker(name):
    seen = run(4, name, leaves=1)
    left = [its for rank, its in enumerate(seen) if rank != 1]
    first, state = seen[4].start
    assert {its[first][2:] for its in left} == {((0, 2, 3, 4), (0, 2, 3, 1))}
    assert torch.equal(state.params.tensors[0], seen[0][first - 1][0])
    if name != "late push-sum":  # some of its mass is in flight
        check_mean(left, first)
    if name == "tracking":
        y, g = (torch.stack([getattr(its.state.memory, f).tensors[0] for its in left]).mean(0) for f in ("y", "g"))
        torch.testing.assert_close(y, g, rtol=0, atol=1e-14)


# -- processes ----------------------------------------------------------------------------------------------------------

JOB = {"joins": 10, "steps": 60, "pause": 0.03}


def assert_joined(lines, *, workers, graphs):
    ended = [its for its in lines if its and its[-1].get("end")]
    assert [its[-1]["end"] for its in ended] == ["done"] * workers, [its[-1] for its in ended]
    assert {its[-2]["workers"] for its in ended} == {workers}
    assert survivors.error_of_mean(lines) < 1e-14
    for its in ended:
        steps = [line for line in its if "t" in line]
        assert {line["graphs"] for line in steps} == {graphs}
        gaps = [b["at"] - a["at"] for a, b in zip(steps, steps[1:], strict=False) if b["workers"] > a["workers"]]
        assert all(gap < 2 for gap in gaps), gaps
    assert "x" in lines[-1][30], "the newcomer was admitted long after it came"


@pytest.mark.thorough
def test_a_process_joins_two_that_are_left_of_four(tmp_path):
    jobs = [
        JOB | {"algorithm": "tracking", "backend": "eager", "dies": {3: 3, 1: 6}},
        JOB | {"algorithm": "push-sum", "n": 3},
    ]
    left, three = survivors.results(tmp_path, jobs)
    assert_joined(left, workers=3, graphs=1)
    assert_joined(three, workers=4, graphs=0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_every_kind_of_algorithm_is_joined_without_a_compilation(backend, tmp_path):
    after_losses = [JOB | {"algorithm": name, "dies": {3: 3, 1: 6}} for name in survivors.ALGORITHMS]
    more = [JOB | {"algorithm": name, "n": 3} for name in ("push-sum", "choco", "diloco")]
    jobs = [job | {"backend": backend, "timeout": 120} for job in (*after_losses, *more)]
    for job, lines in zip(jobs, survivors.results(tmp_path, jobs), strict=True):
        assert_joined(lines, workers=3 if "dies" in job else 4, graphs=int(backend is not None))
