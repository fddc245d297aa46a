"""torchrun starts processes again, and `df.init` joins them, whatever the dead ones left in the store."""

import json
import subprocess
import sys
import threading
from collections import Counter
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

import decentfn as df
from decentfn.train import signals
from decentfn.train.store import fresh_part
from tests.run.agents import STEPS


def at_once(calls):
    """Make the calls in threads; return their results or exceptions."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def parts(store, size, ranks=None, timeout=timedelta(seconds=60)):
    return at_once([lambda r=rank: fresh_part(store, r, size, timeout) for rank in ranks or range(size)])


def test_every_generation_has_a_part_of_the_store_of_its_own():
    """Also after one whose ranks died while they were looking for each other, and with other numbers of ranks."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    seen = set()
    for size, without in [(4, None), (2, None), (4, 0), (4, 3), (4, None), (1, None)]:
        if without is not None:
            store.set_timeout(timedelta(seconds=4))
            raised = parts(store, size, [r for r in range(size) if r != without], timedelta(seconds=4))
            assert isinstance(raised[0], df.errors.ExchangeTimeout) and raised[0].peer == without
            store.set_timeout(timedelta(seconds=60))
            continue
        found = parts(store, size)
        for rank, part in enumerate(found):
            part.set(f"name {rank}", str(size))
        assert all(part.check([f"name {rank}" for rank in range(size)]) for part in found)
        for rank in range(4):
            seen.add((found[0].check([f"name {rank}"]), rank < size))
    assert seen == {(True, True), (False, False)}


def test_who_is_missing_is_named():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=4))
    [zero, two] = parts(store, 4, [0, 2], timedelta(seconds=4))
    assert "rank 0 got no answer from ranks 1, 3" in str(zero) and (zero.process, zero.peer) == (0, 1)
    assert isinstance(two, dist.PrefixStore)  # rank 0 was there
    [alone] = parts(store, 2, [1])
    assert "rank 1 got no answer from rank 0" in str(alone) and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(alone)


def trained(num_workers, steps=STEPS, x=None):
    """x ← mean(x) − 0.1 ∇(x − i)², in float64."""
    x = np.zeros(num_workers) if x is None else x
    for _ in range(steps):
        x = x.mean() - 0.2 * (x - np.arange(num_workers))
    return x


pytestmark = [pytest.mark.xdist_group("restarts"), pytest.mark.thorough]


def require_whole(events, size):
    *events, (_, *codes) = events
    assert codes == [0] * (size // 2)
    ends = {rank: x for what, rank, _, x in events if what == "end"}
    assert [ends[rank] for rank in range(size)] == pytest.approx(trained(size), rel=1e-5)
    started = Counter(first for what, _, _, first in events if what == "start")
    assert started[0] == size and started[3] >= size  # it died at 3, and went on there


@pytest.mark.parametrize(("job", "size"), [("one node", 2), ("two nodes", 4)])
def test_a_job_whose_processes_die_ends_as_one_whose_do_not(jobs, job, size):
    require_whole(jobs[job], size)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "size"), [("one node", 2), ("two nodes", 4)])
def test_ten_deaths_of_ten_are_survived(jobs_of_ten, job, size):
    require_whole(jobs_of_ten[job], size)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "codes"), [("the first node is lost", [-9, 0]), ("the last node is lost", [0, -9])])
def test_after_the_loss_of_a_node_the_other_goes_on(lost, job, codes):
    *events, (_, *ended) = lost[job]
    assert ended == codes
    [first] = {first for what, _, size, first in events if what == "start" and size == 2}
    assert first in (4, 5)  # it died at 5, when 5 was being written
    ends = {rank: x for what, rank, _, x in events if what == "end"}
    assert [ends[0], ends[1]] == pytest.approx(trained(2, STEPS - first, trained(4, first)[:2]), rel=1e-5)


def test_the_user_s_exception_is_the_root_cause_and_who_lost_its_rank_prints_one_line(monkeypatch, tmp_path, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    signals.report_root_cause()
    pauses = []
    monkeypatch.setattr(signals.time, "sleep", pauses.append)
    lost = df.errors.PeerLost("step t=4 on worker 3: worker 1 has died", peer=1)
    sys.excepthook(type(lost), lost, None)
    assert capsys.readouterr().err == "rank 3: PeerLost: step t=4 on worker 3: worker 1 has died\n"
    assert not file.exists() and pauses == [1.0]  # torchrun sees the other one first
    mine = KeyError("of the user's loss")
    sys.excepthook(KeyError, mine, None)
    said = json.loads(file.read_text())["message"]
    assert said["message"] == 'KeyError: "of the user\'s loss"' and "KeyError" in said["extraInfo"]["py_callstack"]
    assert "KeyError" in capsys.readouterr().err


ORPHAN = """
import os, time
from decentfn.train import signals
begin, end = os.pipe()
if not os.fork():  # the agent
    if not os.fork():  # its process
        os.close(begin)
        os.environ["TORCHELASTIC_RUN_ID"] = "x"
        signals.end_with_agent()
        os.write(end, b"!")
        time.sleep(600)
        os._exit(0)
    os.read(begin, 1)
    os.kill(os.getpid(), 9)
os.close(end)
os.wait()
assert not os.read(begin, 1)  # it is gone
"""


def test_a_process_ends_when_its_agent_is_killed():
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
