"""Calls that only some ranks make: nothing is summed with something else, no process aborts, and every rank's error names the calls."""

import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import decentfn as df
from decentfn.comm import collectives
from decentfn.comm.collectives import Channels, Identity, World, failures, outside, use
from decentfn.testing import on_ranks
from tests.ranks import TIMEOUT, Ranks, free_port, lose_patience

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:step.state, batch, t=")]  # gaps are meant

STEPS = 12


def square(params, batch):
    return ((params["a"] - batch) ** 2).sum() + (params["b"] ** 2).sum()


def mean_of_squares(params, batch):
    return ((params["a"] - batch) ** 2).mean()


def start(dtype=torch.float32):
    return {"a": torch.ones(5, dtype=dtype), "b": torch.ones(400, dtype=dtype)}


ALGORITHMS = {
    "all_reduce": df.all_reduce,
    "diloco": partial(df.diloco, inner_steps=3),
    "streaming_diloco": partial(df.streaming_diloco, inner_steps=4, num_fragments=2, bucket_mb=1e-5),
    "adapt_then_combine": df.adapt_then_combine,
}

CALLS = {
    "df.consensus_mean(state)": df.consensus_mean,
    "df.consensus_distance(state)": df.consensus_distance,
    "df.consensus_buffers(state)": lambda state: df.consensus_buffers(
        state._replace(local=state.local._replace(buffers={"seen": torch.ones(3)}))
    ),
    "df.mean(state, tree)": lambda state: df.mean(state, {"loss": torch.ones(2)}),
    "df.gather(state, tree)": lambda state: df.gather(state, 1.0),
    "df.check_replicas(state)": df.check_replicas,
    "df.broadcast(tree)": lambda state: df.broadcast(df.params(state)),
    "df.evaluate(metric, state, batches)": lambda state: df.evaluate(mean_of_squares, state, [torch.ones(5)]),
    "df.evaluate_replicas(metric, state, batches)": lambda state: df.evaluate_replicas(
        mean_of_squares, state, [torch.ones(5)]
    ),
    "df.checkpoint.save(directory, state, step)": lambda state: df.checkpoint.save("nowhere", state, 1),
}


def range_of_steps(rank):
    return range(STEPS)


def numbers(culprit, first, last, rank):
    return [t + (rank == culprit and first <= t <= last) for t in range(STEPS)]


def train(rank, name, n, *, calls=(), steps=range_of_steps, dtype=torch.float32, part=None):
    """Train; after step t, `calls` has what the ranks do: (t, ranks, call). After step `part` they part.

    Returns:
        "ok" and the parameters, or the error's name and text.
    """
    topology = df.topology("static-ring" if name == "adapt_then_combine" else "complete", n)
    init, step = ALGORITHMS[name](square, df.sgd(0.1), topology)
    state = init(start(dtype))
    try:
        for i, t in enumerate(steps(rank)):
            state, _ = step(state, torch.full((5,), float(rank), dtype=dtype), t)
            if i == part:
                lose_patience()
            for at, who, call in calls:
                if at == i and rank in who:
                    CALLS[call](state)
        df.consensus_mean(state)
    except df.errors.RunError as error:
        return type(error).__name__, str(error)
    return "ok", df.params(state)["a"]


def in_processes(name, n, off=None, calls=(), part=None):
    """`train` on the first `n` processes, in a group of their own, which may be broken afterwards.

    Args:
        off: (rank, first, last), whose t is too large by one from step `first` to `last`.
    """
    here = df.init()
    group = dist.new_group(list(range(n)), timeout=TIMEOUT)
    if here.rank >= n:
        return None
    world, steps = (
        World(Channels(Identity.of(here.rank, n), group, TIMEOUT)),
        partial(numbers, *off) if off else range_of_steps,
    )
    with use(world), patch.object(failures, "_PATIENCE_S", 60.0):
        try:
            return train(here.rank, name, n, calls=calls, steps=steps, part=part)
        finally:
            world.hang_up()


@pytest.fixture(scope="module")
def four():
    processes = Ranks(4)
    yield processes
    processes.close()


def assert_named(answers, *names):
    """All ranks have failed, and each error names all of these."""
    for rank, (kind, text) in enumerate(answers):
        assert kind != "ok", (rank, text)
        for name in names:
            assert name in text, (rank, name, text)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["all_reduce", "adapt_then_combine", "diloco"])
@pytest.mark.parametrize(
    "call",
    ["df.consensus_mean(state)", "df.evaluate(metric, state, batches)", "df.checkpoint.save(directory, state, step)"],
)
def test_a_call_of_one_rank_alone_is_named_by_all(name, call):
    """It enters no mean of a step: it waits, the others wait for it in their step, and all say where the other was."""

    def run(rank):
        return train(rank, name, 3, calls=[(4, (0,), call)], dtype=torch.float64, part=4)

    answers = on_ranks(3, run)
    assert_named(answers, call)
    assert "waited in its step t=" in answers[0][1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "call", "n"),
    [
        ("all_reduce", "df.consensus_distance(state)", 3),
        ("all_reduce", "df.consensus_distance(state)", 4),
        ("diloco", "df.mean(state, tree)", 2),
    ],
)
def test_a_call_of_one_process_alone_aborts_none(four, name, call, n):
    answers = four.run(partial(in_processes, name, n, calls=[(2, (0,), call)], part=2))[:n]
    assert_named(answers, call)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "last", "n"),
    [
        ("all_reduce", 5, 2),
        ("diloco", 5, 3),
        ("diloco", STEPS, 4),
        ("streaming_diloco", 5, 4),
        ("streaming_diloco", STEPS, 2),
        ("streaming_diloco", STEPS, 3),
    ],
)
def test_a_process_whose_t_is_off_by_one_aborts_none(four, name, last, n):
    """Whatever the others send meanwhile, of whatever size."""
    together = [(5, range(n), "df.consensus_distance(state)")]
    answers = four.run(partial(in_processes, name, n, off=(1, 5, last), calls=together, part=4))[:n]
    assert_named(answers)
    assert any("at t=" in text or "t=5" in text or "t=6" in text for _, text in answers), answers


def test_a_mean_of_unequal_steps_is_never_taken():
    """The rank that is ahead by a step is named before the first mean, not in some later call."""

    def run(rank):
        return train(rank, "all_reduce", 4, steps=partial(numbers, 2, 9, STEPS), part=8)

    answers = on_ranks(4, run)
    assert [kind for kind, _ in answers] == ["StepMismatch"] * 4
    for rank, (_, text) in enumerate(answers):
        mine, theirs = (10, 9) if rank == 2 else (9, 10)
        other = "[013]" if rank == 2 else "2"
        assert re.search(f"rank {rank} is at t={mine}, rank {other} at t={theirs}", text), text


@pytest.mark.parametrize("mine", ["df.consensus_mean(state)", *list(CALLS)[2:]])
def test_two_calls_that_differ_are_both_named_and_leave_the_run_whole(mine):
    """Nothing has been sent, so the ranks may go on."""
    other = next(call for call in CALLS if call != mine)

    def run(rank):
        init, step = df.all_reduce(square, df.sgd(0.1), df.topology("complete", 3))
        state = init(start())
        with pytest.raises(df.errors.CallMismatch) as caught:
            CALLS[mine if rank == 1 else other](state)
        for t in range(3):
            state, _ = step(state, torch.ones(5), t)
        return str(caught.value), caught.value.peer, df.consensus_distance(state).item()

    for rank, (text, peer, distance) in enumerate(on_ranks(3, run)):
        assert f"process 0 calls {other}: " in text and f"process 1 calls {mine}: " in text
        assert peer == (0 if rank == 1 else 1) and distance == 0


def test_one_call_of_different_shapes_or_dtypes_is_refused():
    def run(rank):
        said = []
        for x in (torch.ones(2 + rank), torch.ones(3, dtype=[torch.float32, torch.float64][rank])):
            for call in (collectives.process_mean, collectives.process_broadcast):
                with pytest.raises(df.errors.CallMismatch) as caught:
                    call(x)
                said.append(str(caught.value))
        return said, collectives.process_mean(torch.tensor(float(rank))).item()

    for said, mean in on_ranks(2, run):
        assert all("[2]" in text and "[3]" in text for text in said[:2])
        assert all("float32" in text and "float64" in text for text in said[2:])
        assert mean == 0.5


def test_calls_after_different_steps_are_no_pair():
    """Between two rounds of DiLoCo nobody waits: a call of rank 0 alone would meet the others' next one, of a later step."""

    def run(rank):
        where = [(4, (0,)), (5, (1, 2))]
        return train(rank, "diloco", 3, calls=[(at, who, "df.consensus_mean(state)") for at, who in where], part=4)

    answers = on_ranks(3, run)
    assert_named(answers, "df.consensus_mean(state)")


def test_nothing_is_left_of_a_call_that_all_make():
    """The same run with and without calls in between, bit for bit."""

    def run(rank, calls):
        return train(rank, "all_reduce", 3, calls=[(t, (0, 1, 2), call) for t in range(3) for call in calls])

    calls = [call for call in CALLS if "checkpoint" not in call]
    for (_, one), (kind, other) in zip(on_ranks(3, run, ()), on_ranks(3, run, calls), strict=True):
        assert kind == "ok" and torch.equal(one, other)


def in_half_of_a_gathering(kind):
    """On rank 0 another thread calls, or an interrupt comes, when the headers of a gathering have arrived."""
    here = df.init()
    group = dist.new_group([0, 1], timeout=TIMEOUT)
    if here.rank > 1:
        return None
    world, plain, said = World(Channels(Identity.of(here.rank, 2), group, TIMEOUT)), outside._require_same, []

    def call(function, *arguments):
        with use(world):
            try:
                said.append(str(function(*arguments)))
            except (KeyboardInterrupt, df.errors.RunError) as error:
                said.append(type(error).__name__)

    second = threading.Thread(target=call, args=(collectives.process_mean, torch.ones(1)))

    def then(*arguments):
        plain(*arguments)
        outside._require_same = plain
        if kind == "interrupt":
            lose_patience()
        if here.rank == 0 and kind == "interrupt":
            raise KeyboardInterrupt
        if here.rank == 0:
            second.start()
            time.sleep(0.3)

    outside._require_same = then
    call(collectives.gather_bytes, torch.zeros(1000, dtype=torch.uint8))
    if second.ident is None:
        second.start()
    second.join()
    world.hang_up()
    return said


@pytest.mark.parametrize("kind", ["thread", "interrupt"])
def test_half_of_a_gathering_meets_no_other_call(four, kind):
    """It has the size of nobody's header, so the process that received one in its place was aborted."""
    first, second = four.run(in_half_of_a_gathering, kind)[:2]
    if kind == "thread":
        assert sorted(first) == sorted(second) and len(first) == 2 and "tensor([1.])" in first
    else:
        assert first[0] == "KeyboardInterrupt" and {*first[1:], *second} <= {"PeerLost", "ExchangeTimeout"}


# -- what is left behind ---------------------------------------------------------------------------------------------


def savers(directory):
    """Descriptors and threads after each of 20 Savers, on processes: in a group of torch.distributed's."""
    df.init()
    init, _ = df.all_reduce(square, df.sgd(0.1), df.topology("complete", 4))
    state, left = init(start()), []
    for i in range(20):
        with df.checkpoint.Saver(directory) as saver:
            saver.save(state, i)
        collectives.process_mean(torch.ones(1))
        left.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        collectives.process_mean(torch.ones(1))
    return left


def test_savers_leave_no_group_behind(four, tmp_path):
    for left in four.run(savers, str(tmp_path / "run")):
        for before, after in zip(left[2], left[-1], strict=True):
            assert after <= before + 6  # what another process has not closed yet


ENDS = """
import atexit, pathlib, sys
def count():
    print(sum("gloo" in name.read_text() for name in pathlib.Path("/proc/self/task").glob("*/comm")))
atexit.register(count)  # called last
import torch, decentfn as df
world = df.init()
kept = df.broadcast({"a": torch.ones(5)})
saver = df.checkpoint.Saver(sys.argv[1])
saver.save(df.all_reduce(lambda x, batch: x.sum(), df.sgd(0.1), df.topology("complete", 2)).init(torch.ones(3)), 1)
print("gloo" in "".join(name.read_text() for name in pathlib.Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.slow
def test_a_script_that_keeps_its_world_ends_with_no_thread_of_gloos(tmp_path):
    """One that outlives the interpreter aborts the process: one in seven did."""
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", ENDS, str(tmp_path / "run")]
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["True\n0\n"] * 2
    assert [process.returncode for process in processes] == [0, 0]
