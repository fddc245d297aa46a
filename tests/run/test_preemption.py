"""A signal to one process stops all of them after the same step, and none leaves alone or waits for the dead."""

import json
import os
import signal
import threading
import time

import pytest
from torch.utils.data import DataLoader

import decentfn as df

pytestmark = [pytest.mark.xdist_group("restarts"), pytest.mark.thorough]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def leaves(marker, cases):
    """For every case (told, at, every): after which step this rank left, with which code, and whose the handlers are."""
    rank, results = df.init().rank, []
    for told, at, every in cases:
        left, code, before = None, None, [signal.getsignal(number) for number in SIGNALS]
        try:
            with df.preemption(marker, every=every) as stop:
                for t in range(100, 160):
                    if rank == told and t == at:
                        os.kill(os.getpid(), SIGNALS[every % 2])
                    time.sleep(0.001 * rank)
                    if stop(t):
                        left = t
                        stop.leave()
        except SystemExit as leaving:
            code = leaving.code
        results.append((left, code, before == [signal.getsignal(number) for number in SIGNALS]))
    return results


def test_a_handler_of_the_users_own_stays(tmp_path):
    def mine(*_):
        """Nothing."""

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with df.preemption(tmp_path / "preempted"):
            assert signal.getsignal(signal.SIGUSR1) is not mine
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_all_processes_leave_after_the_same_step_whoever_is_told(ranks, tmp_path):
    cases = [(0, 100, 10), (1, 109, 10), (1, 123, 1), (0, 135, 7), (None, None, 3)]
    zero, one = ranks(2).run(leaves, tmp_path / "run" / "preempted", cases)
    assert zero == one
    for (told, at, every), (left, code, is_put_back) in zip(cases, zero, strict=True):
        assert is_put_back
        if told is None:
            assert (left, code) == (None, None)
        else:
            assert at <= left < at + 2 * every and code == 0
    assert not (tmp_path / "run" / "preempted").exists()  # the last run removed it
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    [[(left, *_)], _] = ranks(2).run(leaves, tmp_path / "run" / "preempted", cases[:1])
    assert json.loads((tmp_path / "run" / "preempted").read_text()) == {"step": left + 1}


def is_left_alone(marker, how):
    """Return the error of the other rank, if one fails or leaves."""
    rank = df.init().rank
    try:
        with df.preemption(marker, every=2) as stop:
            for t in range(10):
                if rank == 1 and t == 5:
                    if how == "fails":
                        raise KeyError
                    return "leaves"
                stop(t)
    except (KeyError, df.errors.RunError) as error:
        return type(error).__name__
    return "nothing"


def test_nobody_waits_for_a_process_that_has_failed_or_is_gone(ranks, tmp_path):
    failed, _ = ranks(2).run(is_left_alone, tmp_path / "preempted", "fails")
    gone, _ = ranks(2).run(is_left_alone, tmp_path / "preempted", "leaves")
    assert failed == gone == "PeerLost"
    assert not (tmp_path / "preempted").exists()


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"preemption\(every=0\)"), df.preemption(tmp_path / "marker", every=0):
        pass
    refused = []

    def enter():
        try:
            with df.preemption(tmp_path / "marker"):
                pass
        except ValueError as error:
            refused.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in refused[0]


@pytest.mark.parametrize(("job", "codes"), [("its agent is told", [1]), ("a process is told", [0])])
def test_a_job_that_is_told_leaves_as_a_whole_and_is_not_started_again(jobs, job, codes):
    *events, (_, marker), (_, *ended) = jobs[job]
    assert ended == codes  # torchrun's own code is 1 whatever its processes do
    assert sorted(event[:2] for event in events) == [["start", 0], ["start", 1], ["stop", 0], ["stop", 1]]
    [(t, early), (other, too_early)] = [event[2:] for event in events if event[0] == "stop"]
    assert t == other and not early and not too_early
    assert marker == {"step": t + 1}


@pytest.mark.parametrize(
    ("case", "code"),
    [("once", 0), ("at once from two sides", 0), ("two kinds", 0), ("again", -signal.SIGUSR1)],
)
def test_the_same_signal_again_ends_a_process_at_once(jobs, case, code):
    """But not its echo from torchrun, nor SIGTERM after SIGUSR1; a fork of the process hears its parent alone."""
    assert jobs[case] == [["fork", -signal.SIGTERM], ["code", code, code == 0]]


def test_a_loaders_process_that_its_parent_ends_has_not_failed(tmp_path):
    """PyTorch raises an error in the parent for one that a signal ended: at exit, where a loader outlives its loop."""
    with df.preemption(tmp_path / "preempted.json"):
        batches = iter(DataLoader(range(8), num_workers=1, multiprocessing_context="fork"))
        next(batches)
        [process] = batches._workers
        process.terminate()
        process.join()
        assert process.exitcode == 0


def test_a_file_that_is_no_marker_is_never_deleted(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    with pytest.raises(ValueError, match="this file is not a marker; choose another name"), df.preemption(script):
        pass
    assert script.read_text() == "print('hello')\n"
