"""Real ranks, NCCL where there is a GPU: every row of the contract as the CPU computes it, and what is around a step."""

import json

import pytest

from tests.gpu import training
from tests.gpu.launched import JOBS, ROWS, keep
from tests.run import survivors


def require(found, name):
    result = found.get(name, f"not run; exit code {found['code']}: {found['log']}")
    if result == "not reached":
        pytest.skip("out of time; DECENTFN_TEST_SECONDS gives more")
    assert not isinstance(result, str), result


@pytest.mark.parametrize(
    ("job", "row", "how"),
    [
        (name, row, how)
        for name, (job, _, hows) in JOBS.items()
        if job == "rows"
        for how in hows
        for row in training.rows_of(how)
        if row in ROWS
    ],
)
def test_ranks_compute_what_the_cpu_does_and_wait_for_nothing(launches, job, row, how):
    require(launches.found(job), f"{row} | {how}")


@pytest.mark.parametrize(
    "task",
    [
        "mixed devices are refused",
        "checkpoint and resume",
        "guard and loss scale in float16",
        "DataLoader with pinned memory",
        "what ranks tell each other",
    ],
)
@pytest.mark.parametrize("job", ["tasks", "nccl alone"])
def test_what_is_around_a_step_works(launches, device, job, task):
    if device.type == "cpu" and (job == "nccl alone" or task == "mixed devices are refused"):
        pytest.skip("needs a GPU, a device of another kind or NCCL")
    found = launches.found(job)
    assert job != "nccl alone" or "gloo" not in found["backend"]
    require(found, task)


def test_two_processes_are_one_worker_under_fully_shard(launches):
    require(launches.found("sharded"), "fully_shard over two processes")


def test_a_rank_whose_peer_is_killed_ends_within_the_timeout(launches, device):
    codes, said, seconds = launches.alone("killed", 2, limit=120)
    assert codes[1] == -9 and codes[0] not in (0, None) and seconds < 120, (codes, said[0][-2000:])
    if device.type == "cpu":
        assert "step t=3 on worker 0" in said[0] or "step t=2 on worker 0" in said[0], said[0][-2000:]
    else:  # NCCL's watchdog ends the process, and says so in its own words
        assert "rank" in said[0].lower(), said[0][-2000:]


def test_those_that_are_left_abort_their_communicators_and_make_new_ones(launches):
    codes, said, seconds = launches.alone("left", 3, limit=120)
    assert codes == [0, 0, -9] and seconds < 120, (codes, [text[-2000:] for text in said])
    for rank in range(2):
        found = json.loads((launches.folder / "left" / f"left-{rank}.json").read_text())
        assert found["heard"] == [1.0 - rank] * 2 and found["sum"] == [1.0] * 2, found
        assert found["seconds"] < 30, found


def test_two_of_four_ranks_survive_and_only_gradients_move_their_mean(launches, device):
    codes, said, seconds = launches.alone("survive", 4, limit=240)
    assert codes == [0, 0, -9, -9], (codes, seconds, [text[-2000:] for text in said])
    lines = survivors.said(launches.folder / "survive", 4)
    assert [its[-1]["seats"] for its in lines[:2]] == [[0, 1]] * 2 and survivors.error_of_mean(lines) < 1e-12
    if device.type == "cuda":
        assert "nccl" in lines[0][-1]["backend"]
    keep("survive", {"seconds": [b["at"] - a["at"] for a, b in zip(lines[0], lines[0][1:], strict=False)]})
