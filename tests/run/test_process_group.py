"""`df.init` chooses by what is there, says so, and never makes silent single workers."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import decentfn as df
from decentfn.comm import collectives
from decentfn.comm.collectives import Channels, Identity, World, membership
from decentfn.testing import on_ranks
from decentfn.train import process_group, store
from tests.ranks import free_port

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
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, r"PMI_SIZE=2.*mpiexec.*RANK=\$PMI_RANK, WORLD_SIZE=\$PMI_SIZE"),
        (
            {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"},
            r"submitit's local executor started.*RANK=\$SUBMITIT_LOCAL_GLOBALID",
        ),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "3"}, "Flux started several"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2"}, r"Trainer started several.*WORLD_SIZE=\$PET_NNODES, LOCAL_RANK=0,"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "1:2"}, r"PET_NNODES=1:2.*start them with torchrun"),
        ({"JOB_COMPLETION_INDEX": "1"}, r"JOB_COMPLETION_INDEX=1: a Job.*RANK=\$JOB_COMPLETION_INDEX.*completions"),
        (
            {"RANK": "0"},
            r"RANK=0, WORLD_SIZE=\(not set\), MASTER_PORT=\(not set\), MASTER_ADDR=\(not set\).*torchrun sets them",
        ),
        ({"WORLD_SIZE": "2"}, r"RANK=\(not set\), WORLD_SIZE=2, MASTER_PORT=\(not set\)"),
        (TORCHRUN | {"RANK": "zero"}, "RANK=zero, .*all but the address are numbers"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1: all but the address are numbers"),
        (TORCHRUN | {"RANK": "2"}, "RANK=2, WORLD_SIZE=2, .*ranks count from 0 to WORLD_SIZE - 1"),
    ],
)
def test_what_started_several_processes_is_never_taken_for_one(environment, variables, message):
    environment(variables)
    with pytest.raises(ValueError, match=message):
        df.init()


def test_a_port_that_is_in_use_is_named_and_another_one_works(environment):
    with socket.create_server(("", free_port())) as taken:
        alone = TORCHRUN | {"WORLD_SIZE": "1", "MASTER_PORT": str(taken.getsockname()[1])}
        environment(alone)
        with pytest.raises(
            torch.distributed.DistNetworkError, match=rf"{alone['MASTER_PORT']}.*address already in use"
        ):
            df.init()
    environment(alone)
    assert df.init().size == 1
    torch.distributed.destroy_process_group()


def test_a_store_that_does_not_answer_is_named(environment):
    environment(TORCHRUN | {"RANK": "1"})
    with pytest.raises(df.errors.ExchangeTimeout, match=r"MASTER_ADDR=127.0.0.1, MASTER_PORT=1.*does not answer"):
        df.init(timeout=1)


def test_a_torchrun_that_was_killed_before_the_start_is_not_waited_for(environment, monkeypatch):
    """Its store is there before its processes, so it will not come: they waited for the whole timeout."""
    environment(TORCHRUN | {"RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"})
    monkeypatch.setattr(store, "_AGENT", timedelta(seconds=1))
    monkeypatch.setattr(store, "_SLACK_S", 60.0)  # on a busy machine PyTorch's own error comes late
    monkeypatch.setattr(process_group, "end_with_agent", lambda: None)  # nor shall this process end with its parent
    with pytest.raises(df.errors.ExchangeTimeout, match=r"MASTER_PORT=1: the store of torchrun does not answer"):
        df.init(timeout=600)


def test_a_port_that_accepts_and_is_silent_ends_in_time(environment):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment(TORCHRUN | {"RANK": "1", "MASTER_PORT": str(silent.getsockname()[1])})
        with pytest.raises(df.errors.ExchangeTimeout, match=r"nothing at 127.0.0.1:\d+ answers as a store does"):
            df.init(timeout=1)


def test_a_rank_that_is_alone_says_how_many_are_missing(environment):
    environment(TORCHRUN | {"MASTER_PORT": str(free_port())})
    with pytest.raises(df.errors.ExchangeTimeout, match="WORLD_SIZE=2, and not as many processes came.*unset RANK"):
        df.init(timeout=1)


def test_ranks_of_unequal_world_sizes_are_told_to_compare_them(environment):
    """As with `export WORLD_SIZE` on two nodes, of which one was forgotten when a third came: it was PyTorch's DistStoreError."""
    environment({})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import decentfn as df\nprint('imported', flush=True), input()\n"
        "try: df.init(timeout=4)\nexcept df.errors.ExchangeTimeout as error: print(error)"
    )
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=common | {"RANK": str(i), "WORLD_SIZE": str(2 + i)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    assert [rank.stdout.readline() for rank in ranks] == ["imported\n"] * 2  # before either waits for the other
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    for i in range(2):
        assert f"WORLD_SIZE={2 + i} on rank {i}, and not all of these ranks answered" in said[i], said


def test_an_interface_that_no_machine_has_is_named_with_those_that_it_has(environment, monkeypatch):
    environment(TORCHRUN | {"WORLD_SIZE": "1", "MASTER_PORT": str(free_port())})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth97")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME on rank 0: no interface eth97; choose of: .*\blo\b"):
        df.init()


def test_where_init_process_groups_arguments_go_is_said(environment):
    with pytest.raises(
        TypeError, match=r"init\(init_method=...\): there is no such argument; there are backend, timeout"
    ):
        df.init(init_method="tcp://localhost:29500")


@pytest.mark.parametrize("variables", [{}, TORCHRUN])
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("mpi", r"MPI ignores timeouts.*leave backend out"),
        ("cpu:mpi,cuda:nccl", r"MPI ignores timeouts"),
        ("nlcc", r"there is no 'nlcc'; leave backend out, or take one of gloo, nccl"),
        (3, r"there is no 3"),
    ],
)
def test_a_backend_that_cannot_work_is_refused_at_once(environment, variables, backend, said):
    environment(variables)
    with pytest.raises(ValueError, match=rf"init\(backend=.*{said}"):
        df.init(backend=backend)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "4"},
        {"PET_NODE_RANK": "0", "PET_NNODES": "1", "JOB_COMPLETION_INDEX": "0"},
    ],
)
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


# Two ranks on machines that seem to have GPUs, without NCCL: what they would start is noted instead.
ON_MACHINES = """
import json, os, sys, time, types, warnings
import torch
import torch.distributed as dist
import decentfn as df
from decentfn.comm import collectives

chosen, group = [], {}
torch.cuda.set_device = lambda device: chosen.append(str(device))
start = dist.init_process_group

def note(backend, *, device_id=None, **options):
    group.update(backend=backend, device_id=None if device_id is None else str(device_id))
    start("gloo", **options)

dist.init_process_group = note

if os.environ["RANK"] == "1":  # it hears late what all said: rank 0, which holds the store, must not have left with an error
    hear = dist.PrefixStore.multi_get
    dist.PrefixStore.multi_get = lambda store, keys: (time.sleep(0.1), hear(store, keys))[1]

results = []
for port, gpus, is_own, backend, odd in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    is_odd = os.environ["RANK"] == "1"
    df.__version__ = "0.0.9" if is_odd and odd == "version" else "0.1.0"
    machine = os.environ["RANK"] if is_own else "shared"
    torch.cuda.get_device_properties = lambda i, machine=machine: types.SimpleNamespace(uuid=f"{machine} {i}")
    torch.cuda.is_available, torch.cuda.device_count = lambda: gpus > 0, lambda: gpus
    chosen.clear(), group.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            world = df.init(backend=backend)
            result = {"device": str(world.device), "rank": world.rank, "workers": list(world.workers(3)), **group}
        except ValueError as error:
            result = {"error": str(error)}
    results.append(result | {"chosen": [*chosen], "said": [str(w.message) for w in said if "init()" in str(w.message)]})
    collectives.leave_default_group()
    if dist.is_initialized():
        dist.destroy_process_group()
print(json.dumps(results), flush=True)
"""
MACHINES = {  # GPUs that each sees, whether they are its own, backend, what is odd about rank 1
    "a GPU for each": (2, False, None, None),
    "each sees its own": (1, True, None, None),
    "too few GPUs": (1, False, None, None),
    "too few for NCCL": (1, False, "nccl", None),
    "NCCL by name": (2, False, "nccl", None),
    "two versions": (0, False, None, "version"),
}


def started():
    """Return each rank's output, and True if both succeeded."""
    runs = json.dumps([(free_port(), *machine) for machine in MACHINES.values()])
    root = str(Path(df.__file__).parent.parent)
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        command = [sys.executable, "-c", ON_MACHINES, runs]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd=root, env=environment, **pipes))
    watch = threading.Timer(120, lambda: [process.kill() for process in ranks])
    watch.start()
    outputs = [process.communicate() for process in ranks]
    watch.cancel()
    return outputs, not any(process.returncode for process in ranks)


@pytest.fixture(scope="module")
def found():
    """Return the values found by the two ranks on each machine."""
    outputs, ended_well = started()
    if not ended_well:  # somebody else may have taken a port
        outputs, ended_well = started()
    assert ended_well, outputs
    results = [json.loads(said) for said, _ in outputs]
    return dict(zip(MACHINES, zip(*results, strict=True), strict=True))


pytestmark = [pytest.mark.xdist_group("process group"), pytest.mark.thorough]


@pytest.mark.parametrize(("machine", "indices"), [("a GPU for each", (0, 1)), ("each sees its own", (0, 0))])
def test_with_a_gpu_for_each_rank_nccl_joins_them(found, machine, indices):
    for rank, (result, index) in enumerate(zip(found[machine], indices, strict=True)):
        assert result["backend"] == "cpu:gloo,cuda:nccl" and result["said"] == []
        assert result["device"] == result["device_id"] == f"cuda:{index}" and result["chosen"] == [f"cuda:{index}"]
        assert result["workers"] == list(range(3 * rank, 3 * rank + 3))


def test_nccl_by_name_leaves_the_cpu_to_gloo(found):
    for rank, result in enumerate(found["NCCL by name"]):
        assert result["backend"] == "cpu:gloo,cuda:nccl" and result["device"] == f"cuda:{rank}"


def test_with_too_few_gpus_all_ranks_take_the_cpu_and_one_says_so(found):
    results = found["too few GPUs"]
    for result in results:
        assert (result["backend"], result["device_id"], result["device"], result["chosen"]) == ("gloo", None, "cpu", [])
    [said] = results[0]["said"] + results[1]["said"]
    assert "rank 1 has LOCAL_RANK=1, but its machine shows 1 GPUs (1 such ranks)" in said


def test_too_few_gpus_for_nccl_are_an_error_on_every_rank(found):
    for result in found["too few for NCCL"]:
        assert result["error"].startswith("init(backend='nccl'): rank 1 has LOCAL_RANK=1, but its machine shows 1 GPUs")
        assert result["chosen"] == []


def test_ranks_of_different_versions_say_which_has_which(found):
    for result in found["two versions"]:
        assert result["error"] == (
            "init(): the ranks run different versions of decentfn: 0.1.0 on rank 0, 0.0.9 on rank 1; install the same everywhere."
        )


def test_workers_are_dealt_out_in_order_and_each_has_one_process():
    dealt = on_ranks(3, lambda rank: list(collectives.world().workers(2)))
    assert sum(dealt, []) == list(range(6))
    alone = World(Channels(Identity.of(0, 1)))
    assert list(alone.workers()) == [0] and alone.device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"world.workers\(local=0\).*>= 1"):
        alone.workers(0)


def test_process_0_says_the_world_once_at_level_info(environment, caplog):
    port = free_port()
    environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with caplog.at_level(logging.INFO, "decentfn"):
        df.init(backend="gloo")
        df.init()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("world: 1 processes, ") and "gloo" in said and said.endswith("on cpu, timeout 0:10:00")


ONE_KIND = """
import sys
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
import decentfn as df
from decentfn.comm import collectives
rank = int(sys.argv[1])
dist.init_process_group("cuda:fake", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
world = df.init()
told = collectives.gather_objects(rank)
mean = collectives.process_mean(torch.full((3,), float(rank))).tolist()
init, _ = df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.1), df.topology("one-peer-exp", 2))
try:
    init(torch.zeros(3))
except ValueError as error:
    print(told, mean, error)
"""


def test_ranks_of_a_group_for_gpus_alone_tell_each_other_over_gloo_and_refuse_a_state_on_the_cpu(tmp_path):
    """As of `dist.init_process_group("nccl")`; here messages from GPUs go nowhere, and nothing but gloo can carry the others."""
    root = str(Path(df.__file__).parent.parent)
    commands = [[sys.executable, "-W", "ignore", "-c", ONE_KIND, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    ranks = [subprocess.Popen(c, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    for rank in ranks:
        said, wrong = rank.communicate(timeout=600)
        assert said.startswith(
            "[0, 1] [0.5, 0.5, 0.5] init(params): the parameters are on cpu, and the process group (cuda:fake) carries messages "
            "from cuda only; move the model there first, model.to('cuda')"
        ), wrong


class Group:
    def __init__(self, device):
        self.bound_device_id = device


def test_the_device_of_a_group_is_the_one_that_it_is_bound_to_or_the_current_one(monkeypatch):
    monkeypatch.setattr(membership.dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert membership._device_of(Group(torch.device("cuda", 1))) == torch.device("cuda", 1)
    assert membership._device_of(Group(None)) == torch.device("cuda", 2)
    monkeypatch.setattr(membership.dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert membership._device_of(Group(None)) == torch.device("cpu")


def test_parameters_on_several_devices_are_refused(monkeypatch):
    monkeypatch.setattr("decentfn.core.buckets.plan._check_leaf", lambda name, leaf: None)  # meta stands for a GPU
    init, _ = df.adapt_while_communicate(lambda p, b: p["w"].sum(), df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(
        ValueError, match=r"init\(params\): 'v' on meta, 'w' on cpu; a worker's parameters are on one device"
    ):
        init({"v": torch.ones(2, device="meta"), "w": torch.ones(2)})

    def on_rank(rank):
        init, _ = df.adapt_while_communicate(lambda p, b: p.sum(), df.sgd(0.1), df.topology("one-peer-exp", 2))
        with pytest.raises(df.errors.PlanMismatch, match="'parameters on cpu', rank 1 has 'parameters on meta'"):
            init(torch.zeros(2, device="meta" if rank else "cpu"))

    on_ranks(2, on_rank)


LEAVES = """
import sys
import torch.distributed as dist
import decentfn as df
from decentfn.comm import collectives
if sys.argv[1] == "own":
    dist.init_process_group("gloo")
df.init()
group = dist.group.WORLD
import torch._dynamo
collectives.leave_default_group()
print(sys.getrefcount(group))
"""


@pytest.mark.parametrize("group", ["own", "of df.init"])
def test_whoever_compiles_after_init_does_not_keep_the_group_past_its_end(group):
    """A gloo thread that outlives the interpreter aborts the process."""
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    finished = subprocess.run(
        [sys.executable, "-c", LEAVES, group], env=env, capture_output=True, text=True, timeout=600
    )
    assert finished.stdout == "2\n", finished.stderr  # the variable, and the argument of getrefcount


def test_a_printed_world_says_rank_size_backend_and_device_in_one_line(environment):
    environment({})
    assert repr(df.init()) == "World(rank=0, size=1, backend=None, device='cpu')"
    for rank, line in enumerate(on_ranks(2, lambda rank: repr(df.init()))):
        assert line == f"World(rank={rank}, size=2, backend='gloo', device='cpu')"
