"""`df.init` chooses by what is there, says so, and never makes silent single workers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import decentfn as df
from decentfn import collectives
from decentfn.collectives import World
from decentfn.testing import on_ranks

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


@pytest.fixture
def environment(monkeypatch):
    """Set exactly these of the variables by which processes are started."""

    def be(variables):
        for name in (*TORCHRUN, *SRUN, "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield be
    collectives.leave_default_group()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SRUN, r"init\(\): SLURM_PROCID=1 and SLURM_NTASKS=4.*srun.*RANK=\$SLURM_PROCID, WORLD_SIZE=\$SLURM_NTASKS"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_SIZE=2.*mpirun"),
        ({"RANK": "0"}, r"has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT.*torchrun"),
        ({"WORLD_SIZE": "2"}, r"has WORLD_SIZE but not RANK"),
        (TORCHRUN | {"MASTER_PORT": ""}, r"has RANK, WORLD_SIZE, MASTER_ADDR but not MASTER_PORT"),
    ],
)
def test_what_started_several_processes_is_never_taken_for_one(environment, variables, message):
    environment(variables)
    with pytest.raises(ValueError, match=message):
        df.init()


@pytest.mark.parametrize("variables", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4"}])
def test_one_process_is_one_worker(environment, variables):
    environment(variables)
    world = df.init()
    assert (world.rank, world.size, world.device.type) == (0, 1, "cpu")


@pytest.mark.parametrize(("backend", "expected"), [(None, "cuda:0"), ("gloo", "cpu")])
def test_one_process_takes_the_gpu_that_is_there(environment, monkeypatch, backend, expected):
    environment({})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert df.init(backend=backend).device == torch.device(expected)


# Two ranks on a machine that seems to have GPUs, without NCCL: what they would start is noted instead.
ON_A_MACHINE = """
import json, sys, warnings
import torch
import torch.distributed as dist

gpus, asked = int(sys.argv[1]), None if sys.argv[2] == "None" else sys.argv[2]
torch.cuda.is_available, torch.cuda.device_count = lambda: gpus > 0, lambda: gpus
chosen, group = [], {}
torch.cuda.set_device = lambda device: chosen.append(str(device))
start = dist.init_process_group

def note(backend, *, device_id=None, **options):
    group.update(backend=backend, device_id=None if device_id is None else str(device_id))
    start("gloo", **options)

dist.init_process_group = note
import decentfn as df

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        world = df.init(backend=asked)
        result = {"device": str(world.device), "rank": world.rank, "workers": list(world.workers(3)), **group}
    except ValueError as error:
        result = {"error": str(error)}
    result |= {"chosen": chosen, "said": [str(w.message) for w in said if "init()" in str(w.message)]}
print("\\n" + json.dumps(result) + "\\n", end="", flush=True)
"""


def on_a_machine(tmp_path, gpus, backend=None):
    script = tmp_path / "start.py"
    script.write_text(ON_A_MACHINE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [*command, str(script), str(gpus), str(backend)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(df.__file__).parent.parent,
    )
    assert finished.returncode == 0, finished.stderr
    results = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    return sorted(results, key=lambda result: result.get("rank", 0))


def test_with_a_gpu_for_each_rank_nccl_joins_them(tmp_path):
    for rank, result in enumerate(on_a_machine(tmp_path, gpus=2)):
        assert result["backend"] == "cpu:gloo,cuda:nccl" and result["said"] == []
        assert result["device"] == result["device_id"] == f"cuda:{rank}" and result["chosen"] == [f"cuda:{rank}"]
        assert result["workers"] == list(range(3 * rank, 3 * rank + 3))


def test_with_too_few_gpus_all_ranks_take_the_cpu_and_one_says_so(tmp_path):
    results = on_a_machine(tmp_path, gpus=1)
    for result in results:
        assert (result["backend"], result["device_id"], result["device"], result["chosen"]) == ("gloo", None, "cpu", [])
    [said] = results[0]["said"] + results[1]["said"]
    assert "rank 1 has LOCAL_RANK=1, but its machine shows 1 GPUs (1 such ranks)" in said


def test_too_few_gpus_for_nccl_are_an_error_on_every_rank(tmp_path):
    for result in on_a_machine(tmp_path, gpus=1, backend="nccl"):
        assert result["error"].startswith("init(backend='nccl'): rank 1 has LOCAL_RANK=1, but its machine shows 1 GPUs")
        assert result["chosen"] == []


def test_workers_are_dealt_out_in_order_and_each_has_one_process():
    dealt = on_ranks(3, lambda rank: list(collectives.world().workers(2)))
    assert sum(dealt, []) == list(range(6))
    assert list(World(None, 0, 1).workers()) == [0] and World(None, 0, 1).device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"world.workers\(local=0\).*>= 1"):
        World(None, 0, 1).workers(0)
