"""Launchers of other packages: two processes, and the law of two workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import decentfn as df
from tests.models.registry import import_package
from tests.others import program
from tests.others.rows import Differs, check

with contextlib.suppress(ImportError):
    import_package("torchvision")  # also in the processes that a launcher starts

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "others" / "program.py"
LIMIT = 120


class Refused(Exception):
    """A process ended with this library's sentence."""


def launcher(packages: str, what: str, *, special: str = "") -> Callable[[Any], Any]:
    """Register the function below, which starts two processes of `program.train(folder)`."""

    def register(start: Callable[[str], None]) -> Any:
        def attempt() -> None:
            os.environ["PYTHONPATH"] = str(ROOT)
            os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    start(folder)
                except Exception as error:
                    raise cause(error) from None
                compare(folder)

        return check("launchers", packages, what, "", special=special)(attempt)

    return register


def cause(error: Exception) -> Exception:
    """What a process raised, whose launcher passes on its traceback as text."""
    lines = [line.strip() for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Differs|Lost): ", line)]
    if isinstance(error, (Refused, Differs)) or not lines:
        return error
    name, _, said = lines[-1].partition(": ")
    return Differs(said) if name.endswith("Differs") else Refused(lines[-1])


def compare(folder: str) -> None:
    """Compare what the two workers wrote with the law."""
    found = sorted(path.name for path in Path(folder).glob("*.json"))
    if found != ["0.json", "1.json"]:
        raise Differs(f"the workers that wrote: {found}; each process may have trained alone")
    ends = torch.tensor([json.loads(Path(folder, name).read_text()) for name in found], dtype=torch.float64)
    if not torch.allclose(ends, program.law(), rtol=1e-12):
        raise Differs(f"{ends.tolist()}, the law has {program.law().tolist()}")


def run(*command: object, here: str | None = None, **variables: object) -> None:
    """Run a command, in this folder; raise what its processes said last if it fails."""
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    said = {"capture_output": True, "text": True, "timeout": LIMIT}
    finished = subprocess.run([*map(str, command)], env=environment, cwd=here, **said)
    said = [line for line in (finished.stdout + finished.stderr).splitlines() if "Error: " in line]
    if finished.returncode:
        raise Refused((said or [finished.stderr[-300:]])[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranked(rank: int, folder: str, port: int) -> None:
    """One process to which nobody has told its rank, but this function's caller."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    program.train(folder)


def with_a_group(rank: int, folder: str, port: int, **options: Any) -> None:
    """One process that makes its group by itself."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        program.train(folder, **options)
    finally:
        dist.destroy_process_group()


def of_the_page(packages: str, heading: str, *, special: str = "", pods: int = 0) -> None:
    """Register a row: the block under a heading of docs/started_by.md, as it stands, with this program as `training`.

    With `pods` the block is one pod's, which a Job numbers.
    """

    def start(folder: str) -> None:
        page = (ROOT / "docs" / "started_by.md").read_text()
        [(language, block)] = re.findall(
            r"```(bash|python)\n(.*?)```", page.split(f"\n## {heading}\n")[1].split("\n## ")[0], re.DOTALL
        )
        with tempfile.TemporaryDirectory() as here:
            main = f"def main():\n    train({folder!r})\n\n\nif __name__ == '__main__':\n    main()\n"
            Path(here, "training.py").write_text(f"from tests.others.program import train\n\n\n{main}")
            patch = "import contextlib\n\nfrom tests.models.registry import import_package\n\n"  # as above
            patch += "with contextlib.suppress(ImportError):\n    import_package('torchvision')\n"
            Path(here, "sitecustomize.py").write_text(patch)
            script = Path(here, f"start.{language}")
            script.write_text(block.replace("29500", str(free_port())).replace("JOB-0.SERVICE", "127.0.0.1"))
            command = ["env", "-u", "LOCAL_RANK", sys.executable if language == "python" else "bash", script]
            start = functools.partial(run, *command, PYTHONPATH=f"{here}:{ROOT}", here=here)
            if pods:
                at_once([functools.partial(start, JOB_COMPLETION_INDEX=i) for i in range(pods)])
            else:
                start()

    def attempt(folder: str) -> None:
        start(folder)
        if heading != "torchrun" and (found := _ends(folder)) != (expected := _of_torchrun()):
            raise Differs(f"{found}, torchrun's are {expected}")

    launcher(packages, f"{heading}, as on its page", special=special)(attempt)


def at_once(starts: list[Callable[[], None]]) -> None:
    """Call each, like pods that a cluster starts."""
    with concurrent.futures.ThreadPoolExecutor(len(starts)) as pool:
        for started in [pool.submit(start) for start in starts]:
            started.result()


def _ends(folder: str) -> list[str]:
    return [path.read_text() for path in sorted(Path(folder).glob("*.json"))]


@functools.cache
def _of_torchrun() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, PROGRAM, folder)
        return _ends(folder)


of_the_page("torch", "torchrun")
of_the_page("accelerate", "accelerate", special="leave `Accelerator()` out")
of_the_page("lightning", "Lightning Fabric", special="leave `fabric.setup` out")
of_the_page("ray", "Ray Train", special="leave `prepare_model` out; timeouts are `TorchConfig`'s")
of_the_page("submitit", "submitit", special="`TorchDistributedEnvironment().export()` before `df.init()`")
of_the_page("mpich", "mpiexec and srun", special="export RANK=$PMI_RANK, WORLD_SIZE=$PMI_SIZE, LOCAL_RANK and MASTER_*")
of_the_page("pyspark", "Spark", special="a module that is not named `train`")
of_the_page("torch", "torch.multiprocessing", special="set the variables in the function")
of_the_page("torch", "Kubernetes", special="an indexed Job: export RANK, WORLD_SIZE and MASTER_*", pods=2)


@launcher("torch", "the variables of Kubeflow's PyTorchJob, one process in a pod, without LOCAL_RANK")
def of_a_pytorch_job(folder: str) -> None:
    variables = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    pod = functools.partial(run, "env", "-u", "LOCAL_RANK", sys.executable, PROGRAM, folder, **variables)
    at_once([functools.partial(pod, RANK=i) for i in range(2)])
    if (found := _ends(folder)) != (expected := _of_torchrun()):
        raise Differs(f"{found}, torchrun's are {expected}")


@launcher("torch", "`torch.multiprocessing.spawn`, a group of one's own", special="`df.init()` takes the group over")
def spawned(folder: str) -> None:
    torch.multiprocessing.spawn(with_a_group, (folder, free_port()), nprocs=2)


@launcher("torch", "a group of one's own and `df.init(timeout=...)`", special="give the timeout to the group")
def another_timeout(folder: str) -> None:
    torch.multiprocessing.spawn(_with_a_timeout, (folder, free_port()), nprocs=2)


def _with_a_timeout(rank: int, folder: str, port: int) -> None:
    """The bound that was asked for must be the one that holds: rank 1 stays away, and rank 0 measures."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    world = df.init(timeout=timedelta(seconds=3))
    state = df.adapt_then_combine(program.distance, df.sgd(0.1), df.topology("ring", 2)).init({"w": torch.zeros(2)})
    program.train(folder)
    if world.rank:
        time.sleep(20)
        return
    began = time.monotonic()
    with contextlib.suppress(Exception):
        df.consensus_mean(state)
    if time.monotonic() - began > 15:
        raise Differs("df.init(timeout=3 s) was accepted, and a lost rank was waited for longer than 15 s")


@launcher("pytorch-ignite", "`idist.Parallel`")
def ignite(folder: str) -> None:
    idist = importlib.import_module("ignite.distributed")
    with idist.Parallel(backend="gloo", nproc_per_node=2, master_port=free_port(), start_method="spawn") as parallel:
        parallel.run(_of_ignite, folder)


def _of_ignite(local_rank: int, folder: str) -> None:
    program.train(folder)


def submitted(function: Any, folder: str) -> None:
    submitit = importlib.import_module("submitit")
    executor = submitit.AutoExecutor(folder=tempfile.mkdtemp(), cluster="local")
    executor.update_parameters(tasks_per_node=2, nodes=1, timeout_min=2)
    job = executor.submit(function, folder)
    try:
        job.results()
    except Exception as error:
        said = [line for line in str(error).splitlines() if "Error: " in line]
        raise Refused((said or [str(error)])[-1]) from None


@launcher("submitit", "local executor, without variables")
def bare_submitit(folder: str) -> None:
    submitted(program.train, folder)


@launcher("mpich", "`mpiexec -n 2`, without variables")
def bare_mpi(folder: str) -> None:
    run("mpiexec", "-n", 2, sys.executable, PROGRAM, folder)


@launcher(
    "mpi4py, mpich",
    "ranks of `MPI.COMM_WORLD`",
    special="set the variables from the communicator, and broadcast the port",
)
def of_mpi4py(folder: str) -> None:
    script = Path(folder, "script.py")
    script.write_text(
        "import sys\nfrom mpi4py import MPI\nfrom tests.others.launchers import free_port, ranked\n"
        "world = MPI.COMM_WORLD\nranked(world.rank, sys.argv[1], world.bcast(free_port()))\n"
    )
    run("mpiexec", "-n", 2, sys.executable, script, folder)


@launcher("joblib", "`Parallel` with loky's processes", special="set the variables in the function")
def of_joblib(folder: str) -> None:
    joblib, port = importlib.import_module("joblib"), free_port()
    joblib.Parallel(n_jobs=2)(joblib.delayed(ranked)(rank, folder, port) for rank in range(2))


@launcher("torch", "`ProcessPoolExecutor` of the standard library", special="set the variables in the function")
def of_a_pool(folder: str) -> None:
    port, context = free_port(), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        for future in [pool.submit(ranked, rank, folder, port) for rank in range(2)]:
            future.result(LIMIT)


@launcher(
    "hydra-core",
    "`@hydra.main` under torchrun",
    special="`hydra.run.dir=. hydra.output_subdir=null hydra/job_logging=none`",
)
def hydra(folder: str) -> None:
    script = Path(folder, "script.py")
    script.write_text(
        "import hydra\nfrom tests.others import program\n\n@hydra.main(version_base=None, config_path=None)\n"
        f"def main(config):\n    program.train({folder!r})\n\nmain()\n"
    )
    options = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, *options)
