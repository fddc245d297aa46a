"""Processes of a run that loses some of them, for tests of `df.survive`. `python -m tests.run.survivors SPEC` is one of them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch

import decentfn as df
from decentfn import compressors

F64 = torch.float64
RATE = 0.01
ALGORITHMS = {
    "gossip": lambda loss, n: df.adapt_while_communicate(loss, df.sgd(RATE), df.topology("one-peer-exp", n)),
    "push-sum": lambda loss, n: df.stochastic_gradient_push(
        loss, df.sgd(RATE), df.topology("one-peer-exp-directed", n)
    ),
    "tracking": lambda loss, n: df.gradient_tracking(loss, df.sgd(RATE), df.topology("one-peer-exp", n)),
    "diloco": lambda loss, n: df.diloco(
        loss, df.sgd(RATE), df.topology("complete", n), inner_steps=3, outer_learning_rate=1.0, outer_momentum=0.0
    ),
    "choco": lambda loss, n: df.choco_sgd(
        loss, df.sgd(RATE), df.topology("static-ring", n), compressor=compressors.top_k(0.5), gamma=0.3
    ),
}


def gradient(seat, t):
    """Gradient of step t, whatever the parameters are: the loss is linear."""
    return torch.randn(64, generator=torch.Generator().manual_seed(1000 * seat + t), dtype=F64)


def loss_fn(params, batch):
    return (params["x"] * batch).sum()


def start_params(seat, name):
    """Unequal starts, but for DiLoCo's common outer parameters."""
    return {"x": torch.full((64,), 0.0 if name == "diloco" else float(seat), dtype=F64)}


def main(spec):
    """Take `steps` steps; write a line for each one, and one for the end."""
    out = Path(spec["folder"]) / f"{os.environ['RANK']}.jsonl"
    world = df.init(timeout=timedelta(seconds=spec["timeout"]))
    seat = world.place

    def say(**what):
        with out.open("a") as file:
            file.write(json.dumps(what | {"at": time.time()}) + "\n")

    init, step = ALGORITHMS[spec["algorithm"]](loss_fn, world.num_workers)
    graphs = []

    def counted(graph, inputs, **kwargs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(spec["backend"])(graph, inputs, **kwargs)

    if spec["backend"]:
        step = df.compile(step, donate=False, backend=counted)
    if spec.get("survives", True):
        step = df.survive(step, patience=timedelta(seconds=spec["patience"]))
    state = init(start_params(seat, spec["algorithm"]))
    dies = {int(rank): t for rank, t in spec["dies"].items()}
    try:
        for t in range(spec["steps"]):
            if dies.get(seat) == t:
                if spec.get("within"):  # while the others are in the step, and this one too
                    threading.Timer(spec["within"], os.kill, (os.getpid(), signal.SIGKILL)).start()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            if spec.get("pause"):
                time.sleep(spec["pause"])
            state, _ = step(state, {"g": gradient(seat, t)}["g"], t)
            w = getattr(state.memory, "weight", None)
            say(
                t=t,
                x=state.params.tensors[0].tolist(),
                weight=1.0 if w is None else float(w),
                workers=world.num_workers,
                seats=list(world.seats),
                generation=world.generation,
                graphs=len(graphs),
            )
        say(end="done")
    except BaseException as error:
        say(end=type(error).__name__, message=str(error))
        if spec.get("trace"):
            raise


@contextlib.contextmanager
def started(folder, n, *, store=True, **spec):
    """Start n processes and a store that outlives them; yield the processes."""
    spec = {"timeout": 20, "patience": 10, "steps": 12, "dies": {}, "backend": None, "folder": str(folder)} | spec
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keeper = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(n):
        place = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.run.survivors", json.dumps(spec)]
        processes.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        del keeper


def said(folder, n):
    """What each process has written."""
    files = [Path(folder) / f"{rank}.jsonl" for rank in range(n)]
    return [[json.loads(line) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]


def error_of_mean(lines, name):
    """Largest deviation of the survivors' mean from that which only their gradients have moved, in every step of a run.

    Of push-sum it is the mean of w z, since each generation starts with w = 1.
    """
    worst, before = 0.0, None
    n = max((len(its) for its in lines), default=0)
    for t in range(n):
        now = {seat: its[t] for seat, its in enumerate(lines) if len(its) > t and its[t].get("t") == t}
        seats = next(iter(now.values()))["seats"]
        if set(now) < set(seats) or before is None:  # one has died in this step
            before = None if set(now) < set(seats) else now
            continue
        mean = sum(torch.tensor(now[i]["x"], dtype=F64) * now[i]["weight"] for i in seats) / len(seats)
        is_new = now[seats[0]]["generation"] != before[seats[0]]["generation"]
        was = sum(torch.tensor(before[i]["x"], dtype=F64) * (1 if is_new else before[i]["weight"]) for i in seats)
        moved = -RATE * sum(gradient(i, t) for i in seats) / len(seats)
        if name == "diloco" and t % 3 != 2 or name != "diloco" or len(seats) == len(before):
            worst = max(worst, float((mean - was / len(seats) - moved).abs().max()))
        before = now
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
