"""Command that checks this machine: versions, devices, network, compiler, and two ranks that train."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.cuda import nccl

from decentfn.algorithms.adapt_while_communicate import adapt_while_communicate
from decentfn.cli.tables import show
from decentfn.engine.compilation import compile
from decentfn.optim.transforms import sgd
from decentfn.topologies import topology
from decentfn.train.consensus import consensus_mean
from decentfn.train.process_group import init
from decentfn.train.store import unknown_interface

_PATIENCE_S = 180


class _Check(NamedTuple):
    check: str
    found: str
    fault: str | None = None
    """What is wrong and how to fix it; None if all is well."""


def doctor(*, json: bool = False) -> None:
    """Check torch, devices, network interfaces and the compiler, and train on two ranks.

    Args:
        json: print JSON.
    """
    versions = _Check("python", platform.python_version()), _Check("torch", str(torch.__version__))
    checks = [*versions, _devices(), *_network(), _compiler(), _two_ranks()]
    rows = [{"check": c.check, "found": c.found, "ok": c.fault is None, "fix": c.fault} for c in checks]
    show(rows, as_json=json)
    if any(c.fault for c in checks):
        sys.exit(1)


def _devices() -> _Check:
    if not torch.cuda.is_available():
        return _Check("devices", f"CPU, {os.cpu_count()} cores; gloo")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    found = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
    try:
        return _Check("devices", f"{found}; NCCL {'.'.join(map(str, nccl.version()))}")
    except (AttributeError, RuntimeError):
        return _Check("devices", found, "this build of torch has no NCCL; install one that has, or train over gloo")


def _network() -> Iterator[_Check]:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if os.environ.get(variable):
            fault = unknown_interface() if variable == "GLOO_SOCKET_IFNAME" else None
            yield _Check(variable, os.environ[variable], fault)
    yield _Check("interfaces", ", ".join(name for _, name in socket.if_nameindex()))
    yield _host_name()


def _host_name() -> _Check:
    host, is_set = socket.gethostname(), bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    try:
        found = f"{host}, {socket.gethostbyname(host)}"
    except OSError:
        fix = "the name has no address, by which gloo is found; add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return _Check("host name", host, None if is_set else fix)
    if found.startswith(f"{host}, 127.") and not is_set:
        found += ": fine on one machine; on several, set GLOO_SOCKET_IFNAME to the interface between them"
    return _Check("host name", found)


def _compiler() -> _Check:
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        return _Check("compiler", "none", f"df.compile needs a C++ compiler on a CPU; install {wanted}, or set CXX")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return _Check("compiler", said.partition("\n")[0] or found)


def _two_ranks() -> _Check:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "env": environment}
    print("training on two ranks: up to a minute, for the compiler ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [*command, "--no-python", sys.executable, "-c", f"from {__name__} import train; train()"],
            timeout=_PATIENCE_S,
            **options,
        )
    except subprocess.TimeoutExpired:
        return _Check("two ranks", "no answer", f"they hung for {_PATIENCE_S} s; see the network checks above")
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines() or ["nothing"]
        )
        return _Check("two ranks", "failed", f"they said: {lines[0].strip()[:200]}")
    return _Check("two ranks", done.stdout.strip())


def train() -> None:
    """Train a step over gloo, eager and compiled, on each of the two ranks that the doctor starts."""
    world = init(backend="gloo")
    start, step = adapt_while_communicate(lambda x, batch: (x * batch).sum(), sgd(1.0), topology("base", world.size))
    seconds = {}
    for name, run in {"eager": step, "compiled": compile(step)}.items():
        since, state = time.perf_counter(), start(torch.full((1000,), float(world.rank)))
        state, _ = run(state, torch.ones(1000), 0)
        mean = consensus_mean(state)
        if not torch.equal(mean, torch.full((1000,), -0.5)):
            raise RuntimeError(f"the {name} step computed a mean of {float(mean[0])}, not -0.5")
        seconds[name] = time.perf_counter() - since
    if world.rank == 0:
        print(", ".join(f"{name} step right after {took:.1f} s" for name, took in seconds.items()))
