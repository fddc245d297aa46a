"""Ranks that tests look at: started together where there is a GPU, so that they compile side by side; else each when it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests import contract
from tests.gpu import training

SECONDS = float(os.environ.get("DECENTFN_TEST_SECONDS", "210"))
"""Time in which a launch begins new rows; the remaining ones are skipped and reported."""
ROWS = [row for row in contract.ROWS if row in os.environ.get("DECENTFN_TEST_ROWS", ";".join(contract.ROWS)).split(";")]
JOBS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    f"rows {n} {what}": ("rows", n, hows)
    for n in (2, 4)
    for what, hows in (
        ("plain", training.PLAIN + training.NARROW),
        ("traced", training.TRACED),
        ("regions", training.REGIONS),
    )
} | {
    "tasks": ("tasks", 2, ()),
    "sharded": ("sharded", 2, ()),
    "nccl alone": ("nccl alone", 2, ()),
}
ROOT = Path(__file__).parent.parent.parent


class Launches:
    """The ranks of each job, and what they found."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ends: dict[str, float] = {}

    def __enter__(self) -> Launches:
        if self.device == "cuda":
            for name in JOBS:
                self._start(name)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.running.values():
            process.terminate()  # torchrun ends its ranks
            process.wait(60)

    def _start(self, name: str) -> None:
        job, n, hows = JOBS[name]
        place = self.folder / name.replace(" ", "-")
        place.mkdir()
        if job == "rows":
            torch.save(references(n, hows), place / "references.pt")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "-m"]
        command = [sys.executable, "-W", "ignore", *torchrun, "tests.gpu.on_rank", job, str(place), str(SECONDS), *hows]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
        self.ends[name] = time.monotonic() + SECONDS + 120
        with open(place / "log.txt", "wb") as log:
            self.running[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def found(self, name: str) -> dict[str, Any]:
        """Return the results of a job's ranks, once they have ended or timed out."""
        if name not in self.running:
            self._start(name)
        place = self.folder / name.replace(" ", "-")
        try:
            code = self.running[name].wait(max(1.0, self.ends[name] - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.running[name].terminate()
            code = "none: it was stopped"
        results = json.loads((place / "rank0.json").read_text()) if (place / "rank0.json").exists() else {}
        keep(name, results)
        return results | {"code": code, "log": (place / "log.txt").read_text(errors="replace")[-3000:]}

    def alone(self, job: str, n: int, limit: float) -> tuple[list[int | None], list[str], float]:
        """Ranks without torchrun, which would end those that are left: exit codes, what they said last, and how long it took."""
        place = self.folder / job
        place.mkdir()
        (port,) = free_ports(1)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
        }
        shared |= {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.on_rank", job, str(place), str(SECONDS)]
        since, ranks = time.monotonic(), []
        for i in range(n):
            place_of_rank = {"RANK": str(i), "LOCAL_RANK": str(i)}
            with open(place / f"{i}.txt", "wb") as log:
                own = os.environ | shared | place_of_rank
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log))
        codes: list[int | None] = []
        for rank in ranks:
            try:
                codes.append(rank.wait(max(1.0, limit - (time.monotonic() - since))))
            except subprocess.TimeoutExpired:
                rank.kill()
                codes.append(None)
        said = [(place / f"{i}.txt").read_text(errors="replace") for i in range(n)]
        return codes, said, time.monotonic() - since


def references(n: int, hows: tuple[str, ...]) -> dict[Any, Any]:
    """By row and, where it counts, how: what the CPU computes."""
    kinds = {how if how in training.NARROW else "eager" for how in hows}
    found: dict[Any, Any] = {"rows": ROWS}
    for kind in kinds:
        for row in set(training.rows_of(kind)) & set(ROWS):
            found[row, kind] = training.reference(row, kind, n)
    return found


def free_ports(n: int) -> list[int]:
    import socket

    probes = [socket.socket() for _ in range(n)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def keep(name: str, times: Any) -> None:
    """Write times into times.json of the folder that OUT names, beside those of other launches."""
    if folder := os.environ.get("OUT"):
        file = Path(folder) / "times.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {name: times}, indent=1))
