"""`df.join`: a new worker gets a donor's state, bit for bit, and only gradients move the mean of all from there."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from sklearn.datasets import load_digits
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

import decentfn
import decentfn as df
from decentfn.comm.collectives import Channels, Identity, World, use, world
from decentfn.core import trees
from decentfn.elastic import survival
from decentfn.elastic.generation import Generation, Members, generation_of
from decentfn.elastic.joining import await_admission, new_seat, open_run, wait_for_run
from decentfn.elastic.liveness import Liveness
from decentfn.testing import on_ranks
from tests.run import survivors
from tests.run.survivors import F64, RATE, gradient, loss_fn, start_params
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

    start = state = changes = None


class Linear:
    """A task whose gradients do not depend on the parameters."""

    def __init__(self, name):
        self.name = name

    def algorithm(self, n):
        return ALGORITHMS[self.name](loss_fn, n)

    def params(self, rank):
        return start_params(rank, self.name)

    def batch(self, t):
        return gradient(world().place, t)


def run(n, task, leaves=None, at=2, after=AFTER):
    """`n` workers, of which one may leave at step `at`, and a newcomer; what each one saw, the newcomer last.

    All take `after` steps after the newcomer's first one.
    """
    seen, failed = [Seen() for _ in range(n + 1)], []

    def train(step, state, t, rank):
        end = None
        while t != end:
            if rank == leaves and t == at:
                leave(step)
                return
            state, _ = step(state, task.batch(t), t)
            members = generation_of(world()).members
            if end is None and n in members.seats:
                end = t + after
            w = getattr(state.memory, "weight", None)
            x = state.params.tensors[0].clone()
            seen[rank][t] = x, 1.0 if w is None else float(w), members.seats, members.places
            seen[rank].state, seen[rank].changes = state, members.changes
            time.sleep(0.002)
            t += 1

    def come(store):
        try:
            with use(wait_for_run(World(Channels(Identity.of(0, 1))), store, timedelta(seconds=60))):
                init, step = task.algorithm(world().num_workers)
                step = df.survive(step)
                state, first = df.join(step, init(task.params(n)), task.batch(0))
                seen[n].start = first, state
                train(step, state, first, n)
        except BaseException as error:
            failed.append(error)

    def on_this_rank(rank):
        init, step = task.algorithm(n)
        step = df.survive(step, patience=timedelta(seconds=60))
        newcomer = threading.Thread(target=come, args=(world().channels.store,))
        if rank == 0 and leaves is None:
            newcomer.start()
        train(step, init(task.params(rank)), 0, rank)
        if rank == leaves:
            newcomer.start()
        if newcomer.ident:
            newcomer.join()

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
def test_three_workers_become_four(name, monkeypatch):
    monkeypatch.setattr(survival, "_LOOK_S", 0.0)  # as of steps that take longer than that
    seen = run(3, Linear(name))
    assert {its.changes for its in seen} == {1}  # the run stops once
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


@pytest.mark.parametrize(
    "name", ["push-sum", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("late push-sum", "tracking"))]
)
def test_a_newcomer_takes_the_place_of_a_lost_worker(name):
    seen = run(4, Linear(name), leaves=1)
    left = [its for rank, its in enumerate(seen) if rank != 1]
    first, state = seen[4].start
    assert {its[first][2:] for its in left} == {((0, 2, 3, 4), (0, 2, 3, 1))}
    assert torch.equal(state.params.tensors[0], seen[0][first - 1][0])
    if name != "late push-sum":  # some of its mass is in flight
        check_mean(left, first)
    if name == "tracking":
        y, g = (torch.stack([getattr(its.state.memory, f).tensors[0] for its in left]).mean(0) for f in ("y", "g"))
        torch.testing.assert_close(y, g, rtol=0, atol=1e-14)


class Digits:
    """Sorted digits, so that a lost worker's are those that nobody else has."""

    def __init__(self, n):
        data = load_digits()
        rows = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        self.images, self.labels = torch.tensor(data.images / 16).flatten(1)[rows], torch.tensor(data.target)[rows]
        self.test = slice(1400, None)
        self.shards = self.labels[:1400].argsort(stable=True).tensor_split(n)

    def loss(self, params, batch):
        return torch.nn.functional.cross_entropy(torch.relu(batch[0] @ params["in"]) @ params["out"], batch[1])

    def algorithm(self, n):
        return df.adapt_while_communicate(self.loss, df.sgd(0.2, momentum=0.9), df.topology("base", n))

    def params(self, rank):
        draw = torch.Generator().manual_seed(0)
        sizes = {"in": (64, 64), "out": (64, 10)}
        return {name: torch.randn(size, generator=draw, dtype=F64) / 8 for name, size in sizes.items()}

    def batch(self, t):
        shard = self.shards[world().place % len(self.shards)]
        rows = shard[torch.randint(len(shard), (32,), generator=torch.Generator().manual_seed(t))]
        return self.images[rows], self.labels[rows]

    def accuracy(self, buckets):
        params = trees.map(lambda *x: sum(x) / len(x), *[df.params(its) for its in buckets])
        scores = torch.relu(self.images[self.test] @ params["in"]) @ params["out"]
        return (scores.argmax(1) == self.labels[self.test]).double().mean().item()


@pytest.mark.slow
def test_digits_are_learned_to_within_a_point_of_a_run_that_nobody_left():
    task = Digits(4)
    seen = run(4, task, leaves=1, at=50, after=400)
    left = [its for rank, its in enumerate(seen) if rank != 1]
    steps = max(left[0]) + 1

    def undisturbed(rank):
        init, step = task.algorithm(4)
        state = init(task.params(rank))
        for t in range(steps):
            state, _ = step(state, task.batch(t), t)
        return state

    accuracies = task.accuracy([its.state for its in left]), task.accuracy(on_ranks(4, undisturbed))
    print(steps, accuracies)
    assert min(accuracies) > 0.9 and abs(accuracies[0] - accuracies[1]) < 0.01


# -- processes ----------------------------------------------------------------------------------------------------------

JOB = {"joins": 10, "steps": 100, "pause": 0.05}


def assert_joined(lines, *, workers, graphs):
    ended = [its for its in lines if its and its[-1].get("end")]
    assert [its[-1]["end"] for its in ended] == ["done"] * workers, [its[-1] for its in ended]
    assert {its[-2]["workers"] for its in ended} == {workers}
    assert survivors.error_of_mean(lines) < 1e-14
    for its in ended:
        steps = [line for line in its if "t" in line]
        assert {line["graphs"] for line in steps} == {graphs}
        gaps = [b["at"] - a["at"] for a, b in zip(steps, steps[1:], strict=False) if b["workers"] > a["workers"]]
        assert all(gap < survivors.WAITED_S for gap in gaps), gaps
    first = next(t for t, line in enumerate(lines[-1]) if "x" in line)
    assert JOB["joins"] < first < JOB["steps"], "the newcomer was admitted before it came"


@pytest.mark.thorough
def test_a_process_joins_two_that_are_left_of_four(tmp_path):
    jobs = [
        JOB | {"algorithm": "tracking", "backend": "eager", "dies": {3: 3, 1: 6}},
        JOB | {"algorithm": "push-sum", "n": 3},
    ]
    left, three = survivors.results(tmp_path, jobs)
    assert_joined(left, workers=3, graphs=1)
    assert_joined(three, workers=4, graphs=0)


AFTER_LOSSES = [JOB | {"algorithm": name, "dies": {3: 3, 1: 6}} for name in survivors.ALGORITHMS]
MORE = [JOB | {"algorithm": name, "n": 3} for name in ("push-sum", "choco", "diloco")]


def join_all(folder, backend, jobs):
    jobs = [job | {"backend": backend} for job in jobs]
    for job, lines in zip(jobs, survivors.results(folder, jobs), strict=True):
        assert_joined(lines, workers=3 if "dies" in job else 4, graphs=int(backend is not None))


@pytest.mark.slow
def test_every_kind_of_algorithm_is_joined(tmp_path):
    join_all(tmp_path, None, [*AFTER_LOSSES, *MORE])


@pytest.mark.slow
@pytest.mark.parametrize("job", [*AFTER_LOSSES, *MORE], ids=lambda job: f"{job['algorithm']} {job.get('n', 'left')}")
def test_every_kind_of_algorithm_is_joined_without_a_compilation(job, tmp_path):
    join_all(tmp_path, "inductor", [job])


# -- what is refused ----------------------------------------------------------------------------------------------------


def a_run(state):
    """The store of a run of two workers."""
    here = World(Channels(Identity.of(0, 2), None, store=HashStore()))
    open_run(here, state)
    return here.channels.store


def test_what_cannot_join_is_refused(monkeypatch):
    init, step = ALGORITHMS["gossip"](loss_fn, 2)
    state, batch = init(start_params(0, "gossip")), gradient(0, 0)
    with pytest.raises(ValueError, match=r"join\(.*df.survive\(step\)"):
        df.join(step, state, batch)
    assert df.join(df.survive(step), state, batch) == (state, 0)
    other = {"x": torch.zeros(3, dtype=F64)}
    with use(wait_for_run(World(Channels(Identity.of(0, 1))), a_run(state), timedelta(seconds=60))):
        init, step = ALGORITHMS["gossip"](loss_fn, world().num_workers)
        with pytest.raises(df.errors.PlanMismatch, match="other leaves, shapes or dtypes"):
            df.join(df.survive(step), init(other), batch[:3])
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ValueError, match=r"init\(join=True\): MASTER_ADDR=''"):
        df.init(join=True)


def test_a_newcomer_does_not_wait_for_a_run_that_has_ended(monkeypatch):
    monkeypatch.setattr("decentfn.elastic.joining._LOOK_S", 0.05)
    init, step = ALGORITHMS["gossip"](loss_fn, 2)
    state = init(start_params(0, "gossip"))
    with use(wait_for_run(World(Channels(Identity.of(0, 1))), a_run(state), timedelta(seconds=60))) as here:
        member = Liveness(PrefixStore("survive", generation_of(here).run), 1)
        since = time.monotonic()
        threading.Timer(1.0, member.close).start()
        with pytest.raises(df.errors.PeerLost, match=r"join\(.*no process of the run answers: it has ended"):
            df.join(df.survive(step), state, gradient(0, 0))
        assert time.monotonic() - since > 1.0


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_newcomer_that_dies_before_it_has_the_state_is_left_out(is_admitted):
    task, gone, end = Linear("gossip"), threading.Event(), {}

    def on_this_rank(rank):
        init, step = task.algorithm(3)
        step, state = df.survive(step), init(task.params(rank))
        store = world().channels.store
        t = 0
        while t != end.get("t"):
            if rank == 0 and t == 2:
                newcomer = wait_for_run(World(Channels(Identity.of(0, 1))), store, timedelta(seconds=60))
                run = generation_of(newcomer).run
                seat = new_seat(newcomer, run)
                probed = Liveness(PrefixStore("survive", run), seat)
                threading.Thread(target=die, args=(run, seat, probed)).start()
                if not is_admitted:
                    assert gone.wait(60)
            if rank == 0 and t > 2 and not gone.is_set():
                time.sleep(0.1)
            elif rank == 0 and t > 2:
                time.sleep(0.4)  # who is left out is noticed within two looks at the door
                end.setdefault("t", t + 6)
            state, _ = step(state, task.batch(t), t)
            t += 1
        return generation_of(world()).members.seats, world().hooks.changes, state.params.tensors[0]

    def die(run, seat, probed):
        if is_admitted:
            await_admission(run, seat, probed)
        probed.close()
        if not is_admitted:  # else a worker that looks at once would reach it
            run.set(f"waiting {seat}", "")
        gone.set()

    seats, generations, x = zip(*on_ranks(3, on_this_rank), strict=True)
    # A second roll call may find it still announced, and leave it out again.
    assert set(seats) == {(0, 1, 2)} and set(generations) in ([{2}, {3}] if is_admitted else [{0}])
    moved = RATE * sum(gradient(i, t) for i in range(3) for t in range(end["t"]))
    assert (sum(x) - sum(task.params(i)["x"] for i in range(3)) + moved).abs().max() < 1e-13


def refusal(members, newcomer):
    """Two members meet a newcomer that is refused; return its error. All members take their steps undisturbed."""
    refused, end = [], {}

    def come(store):
        with use(wait_for_run(World(Channels(Identity.of(0, 1))), store, timedelta(seconds=60))):
            init, step = newcomer(world().num_workers)
            try:
                df.join(df.survive(step), init(start_params(2, "gossip")), gradient(2, 0))
            except ValueError as error:
                refused.append(error)

    def on_this_rank(rank):
        init, step = members(2)
        step, state, t = df.survive(step), init(start_params(rank, "gossip")), 0
        thread = threading.Thread(target=come, args=(world().channels.store,))
        if rank == 0:
            thread.start()
        while t != end.get("t"):
            if refused:
                end.setdefault("t", t + 10)
            state, _ = step(state, gradient(rank, t), t)
            t += 1
            time.sleep(0 if refused else 0.1)
        if rank == 0:
            thread.join()
        return world().hooks.changes

    assert on_ranks(2, on_this_rank) == [0, 0]
    assert len(refused) == 1
    return refused[0]


def test_a_newcomer_with_another_learning_rate_is_refused_and_the_others_go_on():
    def of(rate):
        return lambda n: df.adapt_while_communicate(loss_fn, df.sgd(rate), df.topology("base", n))

    error = refusal(of(0.01), of(0.02))
    assert isinstance(error, df.errors.PlanMismatch) and "0.02" in str(error) and "0.01" in str(error)


def test_a_newcomer_of_another_version_is_refused(monkeypatch):
    run = a_run(ALGORITHMS["gossip"](loss_fn, 2).init(start_params(0, "gossip")))
    monkeypatch.setattr(decentfn, "__version__", "0.0.1")
    with pytest.raises(
        df.errors.PlanMismatch, match=r"init\(join=True\): the run has decentfn .*, and this process 0.0.1"
    ):
        wait_for_run(World(Channels(Identity.of(0, 1))), run, timedelta(seconds=60))


def test_a_worker_too_many_for_the_compiled_schedule_is_refused_and_the_others_go_on():
    """Two workers of `complete` exchange messages; three would need a group average."""

    def of_two(n):
        return df.adapt_then_combine(loss_fn, df.sgd(RATE), df.topology("complete", n))

    assert "cannot have 3 workers" in str(refusal(of_two, of_two))
    here, two = World(Channels(Identity.of(0, 2))), Members(0, (0, 1), (0, 1))
    generation = Generation(here, two, 0, HashStore())
    generation.schedule(of_two(2).topology)
    assert not generation.has_schedules(3) and not generation.next(two).has_schedules(3)  # before its first step
