"""A message that is lost, wherever it is lost: the state is whole, the error has names, and nobody waits for long."""

import contextlib
import functools
import itertools
import os
import signal
import threading

import pytest
import torch

import decentfn as df
from decentfn import compressors
from decentfn.comm.collectives import failures, world
from decentfn.core import trees
from decentfn.testing import on_ranks
from decentfn.testing.ranks import alone_as_rank_of
from tests.ranks import SOON, Ranks, lose_patience

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:step.state, batch, t=")]  # gaps are meant

BROKEN = "Connection closed by peer [10.0.0.1]:1"
AT = 2
"""The step in which a message is lost."""


class Breaks:
    """A group of which call `k` breaks: when it is posted, or when it is waited for. Counts its calls."""

    def __init__(self, group, k, where):
        self.group, self.k, self.where, self.calls = group, k, where, 0
        self.kept = []  # gloo stops reading a connection where nobody holds a message's work any more

    def __getattr__(self, name):
        return getattr(self.group, name)

    def _call(self, name, *args):
        is_it, self.calls = self.calls == self.k, self.calls + 1
        if is_it and self.where == "post":
            raise RuntimeError(BROKEN)
        self.kept.append(work := getattr(self.group, name)(*args))
        return BrokenWork() if is_it else work

    recv = functools.partialmethod(_call, "recv")
    send = functools.partialmethod(_call, "send")
    allreduce = functools.partialmethod(_call, "allreduce")


class BrokenWork:
    def wait(self, *timeout):
        raise RuntimeError(BROKEN)


def loss_fn(params, batch):
    return sum(((p - batch) ** 2).sum() * (i + 1) for i, p in enumerate(params.values()))


def params(rank):
    return {name: torch.arange(6.0).view(3, 2) * (i + 1) + rank for i, name in enumerate("abcd")}


def build(name, topology="ring", n=2, **hyperparameters):
    optimizer = df.adamw(0.1) if name.startswith("adapt") else df.sgd(0.1, momentum=0.9)
    init, step = getattr(df, name)(loss_fn, optimizer, df.topology(topology, n), bucket_mb=1e-5, **hyperparameters)
    return init, step, n


KINDS = {
    "messages": functools.partial(build, "adapt_while_communicate"),
    "messages after the update": functools.partial(build, "adapt_then_combine"),
    "means": functools.partial(build, "adapt_then_combine", "complete", 4),
    "choco": functools.partial(build, "choco_sgd", compressor=compressors.top_k(0.5), gamma=0.5),
    "low rank": functools.partial(build, "power_gossip"),
    "push-sum": functools.partial(build, "stochastic_gradient_push", "one-peer-exp-directed"),
}


class Case:
    """An algorithm on ranks that have taken AT steps."""

    def __init__(self, kind, backend):
        self.init, self.pure, self.n = KINDS[kind]()
        self.is_donated = backend is not None
        self.step = df.donate(self.pure) if backend == "donate" else self.pure
        if backend not in (None, "donate"):
            self.step = df.compile(self.pure, backend=backend)
        self.held = on_ranks(self.n, self._start)
        assert len(self.held[0].params) == 4
        if self.is_donated:
            with alone_as_rank_of(self.n):
                self.step(trees.map(torch.clone, self.held[0]), torch.ones(()), 0)

    def _start(self, rank):
        state = self.init(params(rank))
        for t in range(AT):
            state, _ = self.pure(state, torch.ones(()) * rank, t)
        return state

    def take(self, *, lost=(-1, ""), everyone_is=None):
        """Step AT, and the next one, on all ranks: of each its state after step AT, its calls in it, and what it raised.

        Args:
            lost: (k, where), what rank 1 loses.
            everyone_is: the rank whose state and batch all have, so that they hear themselves.
        """

        def run(rank):
            self.init(params(rank))
            me = rank if everyone_is is None else everyone_is
            state = trees.map(torch.clone, self.held[me])
            group = world().channels.group = Breaks(world().channels.group, *(lost if rank == 1 else (-1, "")))
            try:
                after, _ = self.step(state, torch.ones(()) * me, AT)
            except df.errors.RunError as error:
                return state, group.calls, error
            whole, calls = trees.map(torch.clone, after), group.calls
            if lost[1]:
                with contextlib.suppress(df.errors.RunError):
                    self.step(after, torch.ones(()) * me, AT + 1)
            return whole, calls, None

        return on_ranks(self.n, run)


def same(one, other):
    return [torch.equal(a, b) for a, b in zip(trees.leaves(one), trees.leaves(other), strict=True)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("messages", None),
        ("means", None),
        ("messages after the update", "donate"),
        *(pytest.param(kind, "aot_eager", marks=[pytest.mark.slow] * (kind == "messages")) for kind in KINDS),
        *(pytest.param(kind, "inductor", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_wherever_a_message_is_lost_the_state_is_whole(kind, backend):
    """Pure: bitwise as it was. Donated: every leaf is that of a step with the others, or that of a step with oneself."""
    case = Case(kind, backend)
    healthy = case.take()
    alone = [case.take(everyone_is=rank)[rank][0] for rank in range(case.n)]
    places = range(healthy[1][1])
    assert len(places) >= 4
    for lost in itertools.product(places, ("post", "wait")):
        answers = case.take(lost=lost)
        error = answers[1][2]
        assert isinstance(error, df.errors.PeerLost), (lost, error)
        assert (error.worker, error.process, error.step) == (1, 1, AT)
        assert str(error.__cause__) == BROKEN
        if case.n == 2:
            assert error.peer == 0 and "with worker 0 in slot 0" in str(error)
            assert f"exchange {lost[0] // 2 + 1} of the step" in str(error)
        for rank, (state, _, raised) in enumerate(answers):
            if raised is not None and not case.is_donated:
                assert raised.next_step == AT and all(same(state, case.held[rank])), (lost, rank)
                continue
            as_healthy, as_alone = same(state, healthy[rank][0]), same(state, alone[rank])
            assert all(a or b for a, b in zip(as_healthy, as_alone, strict=True)), (lost, rank)
            if raised is None:
                assert all(as_healthy), (lost, rank)
            else:
                assert raised.next_step == AT + 1
        if case.is_donated:
            assert not any(same(answers[1][0].params, case.held[1].params))
    assert all(x.isfinite().all() for x in trees.leaves(answers[1][0]))


class Timed:
    """A group, and a message's work, that keeps how long a wait that failed might have lasted."""

    def __init__(self, inner, failed):
        self.inner, self.failed = inner, failed

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _call(self, name, *args):
        return Timed(getattr(self.inner, name)(*args), self.failed)

    recv = functools.partialmethod(_call, "recv")
    send = functools.partialmethod(_call, "send")

    def wait(self, timeout):
        try:
            self.inner.wait(timeout)
        except RuntimeError:
            self.failed.append(timeout)
            raise


def test_after_the_first_loss_no_bucket_waits_for_its_own_timeout(monkeypatch):
    monkeypatch.setattr(failures, "_PATIENCE_S", 0.0)  # rank 0 tells nothing
    done, failed = threading.Event(), []

    def run(rank):
        init, step, _ = KINDS["messages"]()
        state = init(params(rank))
        if rank == 0:
            return done.wait(60)
        lose_patience()
        world().channels.group = Timed(world().channels.group, failed)
        with pytest.raises(
            df.errors.ExchangeTimeout, match="within the timeout of df.init.*worker 0 is late"
        ) as caught:
            step(state, torch.ones(()), 0)
        done.set()
        assert caught.value.peer == 0

    on_ranks(2, run)
    assert failed[0] == SOON and len(failed) > 1 and all(later < SOON for later in failed[1:]), failed


def test_a_loss_goes_around_the_ranks_at_once(monkeypatch):
    """In a mean over four, only two talk to the lost rank 0; no rank waits for the timeout."""
    monkeypatch.setattr(failures, "_PATIENCE_S", 10.0)  # rank 0 tells nothing

    def run(rank):
        init, step, _ = build("adapt_then_combine", "complete", 4)
        state = init(params(rank))
        if rank == 0:
            return world().hang_up()
        with pytest.raises(df.errors.PeerLost) as caught:  # not ExchangeTimeout
            step(state, torch.ones(()), 0)
        return caught.value.peer

    assert on_ranks(4, run)[1:] == [0] * 3


def train_until_killed(victim, at):
    """Return the error that ends the run, and whether leaves are unchanged."""
    here = df.init()
    init, step, _ = build("adapt_while_communicate", "static-ring", here.size)
    step = df.compile(step, backend="eager")
    state = init(params(here.rank))
    for t in range(100):
        if (here.rank, t) == (victim, at):
            os.kill(os.getpid(), signal.SIGKILL)
        before = trees.map(torch.clone, state)
        try:
            state, _ = step(state, torch.ones(()), t)
        except df.errors.RunError as error:
            with pytest.raises(RuntimeError, match=f"its step t={t} raised PeerLost"):
                step(state, torch.ones(()), t + 1)
            names = type(error).__name__, error.worker, error.step - t, error.peer, error.next_step - t
            return names, any(same(state.params, before.params))
    return None


def test_a_killed_process_is_named_by_all_others():
    processes = Ranks(3)
    for pipe in processes.pipes:
        pipe.send((train_until_killed, (2, 4)))
    for rank, pipe in enumerate(processes.pipes[:2]):
        assert pipe.poll(300)
        kind, answer = pipe.recv()
        assert kind == "ok", answer
        names, is_torn = answer
        assert names == ("PeerLost", rank, 0, 2, 1), answer
        assert not is_torn
    for process in processes.processes:
        process.kill()


def test_an_error_names_the_step_that_ran_where_an_algorithm_mixes_by_an_earlier_ones_matrix():
    """Gradient tracking completes the last step's `W y` first."""

    def run(rank):
        init, step = df.gradient_tracking(loss_fn, df.sgd(0.1), df.topology("ring", 2))
        state = init(params(rank))
        for t in range(AT + 1):
            if t == AT and rank == 1:
                world().channels.group = Breaks(world().channels.group, 0, "wait")
            try:
                state, _ = step(state, torch.ones(()), t)
            except df.errors.RunError as error:
                return error.step, error.next_step, str(error)

    for step, next_step, said in on_ranks(2, run):
        assert step == next_step == AT and "is intact (unmodified)" in said


OUTSIDE = {
    "df.consensus_mean(state)": df.consensus_mean,
    "df.consensus_distance(state)": df.consensus_distance,
    "df.mean(state, tree)": lambda state: df.mean(state, 1.0),
}


def call_outside(call, *, is_late=False):
    """Return the errors of three ranks that make a call after step 1; the last one leaves, or calls when the others gave up."""
    gave_up = threading.Semaphore(0)

    def run(rank):
        init, step, _ = build("adapt_then_combine", "complete", 3)
        state = init(params(rank))
        for t in range(2):
            state, _ = step(state, torch.ones(()), t)
        OUTSIDE[call](state)  # connected from here on
        if is_late:
            lose_patience()
        if rank == 2 and not is_late:
            return world().hang_up()
        if rank == 2:
            assert gave_up.acquire(timeout=60) and gave_up.acquire(timeout=60)
        try:
            OUTSIDE[call](state)
        except df.errors.RunError as error:
            gave_up.release()
            return error

    return on_ranks(3, run)


@pytest.mark.parametrize("call", OUTSIDE)
def test_a_call_outside_steps_names_its_step_and_the_process_that_is_gone(call):
    for error in call_outside(call)[:2]:
        assert isinstance(error, df.errors.PeerLost) and (error.step, error.peer, error.next_step) == (1, 2, 2), error
        assert str(error).startswith(f"{call} failed on process") and "after step t=1; process 2 exited" in str(error)


def test_a_process_that_is_only_late_is_never_called_dead():
    errors = call_outside("df.consensus_mean(state)", is_late=True)
    for error in errors:
        assert isinstance(error, df.errors.ExchangeTimeout) and "died" not in str(error), error
    assert [error.peer for error in errors[:2]] == [2, 2] and "gave up waiting" in str(errors[2])
