"""Processes of a run that loses some of them, for tests of `df.survive`. `python -m tests.run.survivors JOBS` forks those of some
jobs, one job after another, from a process that has imported everything.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import decentfn as df
from decentfn import compressors
from decentfn.elastic.generation import Generation, generation_of
from tests.ranks import free_port, lose_patience

F64 = torch.float64
RATE = 0.01
START_S = 120
"""Time in which the processes of a job have to start."""
ALGORITHMS = {
    "gossip": lambda loss, n: df.adapt_while_communicate(loss, df.sgd(RATE), df.topology("one-peer-exp", n)),
    "push-sum": lambda loss, n: df.stochastic_gradient_push(
        loss, df.sgd(RATE), df.topology("one-peer-exp-directed", n)
    ),
    "tracking": lambda loss, n: df.gradient_tracking(loss, df.sgd(RATE), df.topology("one-peer-exp", n)),
    "diloco": lambda loss, n: df.diloco(
        loss, df.sgd(RATE), df.topology("complete", n), inner_steps=3, outer_learning_rate=1.0, outer_momentum=0.0
    ),
    "d2": lambda loss, n: df.d2(loss, df.sgd(RATE), df.topology("ring", n)),
    "choco": lambda loss, n: df.choco_sgd(
        loss, df.sgd(RATE), df.topology("static-ring", n), compressor=compressors.top_k(0.5), gamma=0.3
    ),
}

ALONE = {
    "asynchronous": lambda loss, n: df.asynchronous_gradient_push(loss, df.sgd(RATE), df.topology("one-peer-exp", n)),
}
"""Algorithms that lose a worker without `df.survive`."""


def gradient(seat, t):
    """Gradient of step t, whatever the parameters are: the loss is linear."""
    return torch.randn(64, generator=torch.Generator().manual_seed(1000 * seat + t), dtype=F64)


def loss_fn(params, batch):
    return (params["x"] * batch).sum()


class Fault(Exception):
    """Error of a user's loss."""


def failing_loss(params, batch):
    raise Fault("a sample could not be read")


def start_params(seat, name):
    """Unequal starts, but for DiLoCo's common outer parameters."""
    return {"x": torch.full((64,), 0.0 if name == "diloco" else float(seat), dtype=F64)}


def killed(run, seat, at, me):
    """A step within which this process is killed."""

    def step(state, batch, t):
        result = run(state, batch, t)
        if me == seat and int(t) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return step


DEFAULTS = {
    "n": 4,
    "timeout": 120,
    "patience": 60,
    "steps": 12,
    "dies": {},
    "backend": None,
    "pause": 0.0,
    "joins": None,
    "local": 1,
    "within": None,
}
"""Longer than a busy machine needs for a healthy step. `local`: workers of each process, with the same start and batches. `within`: a worker and a step within which it dies, compiled
or not, when it has sent all. `joins`: a step before which the others wait for a newcomer that has compiled its step and is about to join.
`calls`: after each step, the workers also call what is called outside steps; `dies_in`: a worker, a step and one of these.
`stops`: a worker and a step before which it stops; the others wait 2 s for it. `signals`: rank, after how many seconds, or "the others"
have ended, and number."""
WAITED_S = 50.0
"""A step in which nobody waits for a timeout or for patience to end is shorter."""


def members(world):
    """Seats and places of the processes, which without `df.survive` are their ranks."""
    return (
        generation_of(world).members[1:]
        if isinstance(world.hooks, Generation)
        else (range(world.size), range(world.size))
    )


def evaluated(state, place):
    """The mean over all workers' samples, of which each has one; its metric is its place."""
    return df.evaluate(lambda x, batch: batch.double().mean(), state, [torch.full((1,), place)])


def outcomes(calls, dies_in):
    """Call all of them in order: for each its value or its error, and its seconds."""
    for name, call in calls.items():
        if name == dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        since = time.monotonic()
        try:
            value, error = call(), None
        except Exception as raised:
            value, error = str(raised), type(raised).__name__
        yield {"call": name, "value": value, "error": error, "seconds": time.monotonic() - since}


def main(spec, rank):
    """Take `steps` steps; write a line for each one, and one for the end."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    out, due, ready = (Path(spec["folder"]) / name for name in (f"{rank}.jsonl", "due", "ready"))
    joins = rank >= spec["n"]
    world = df.init(timeout=timedelta(seconds=spec["timeout"]), join=joins)
    seat = rank

    def say(**what):
        with out.open("a") as file:
            file.write(json.dumps(what | {"at": time.time(), "cpu": time.process_time()}) + "\n")

    build = (ALGORITHMS | ALONE)[spec["algorithm"]]
    local = spec["local"]
    algorithm, failing = (build(loss, world.num_workers * local) for loss in (loss_fn, failing_loss))
    init, step = df.guard(algorithm) if "nan" in spec else algorithm
    failing = failing.step
    if local > 1:
        step = df.simulate(step, local)
    if spec["backend"]:
        step = df.compile(step, donate=False, backend=spec["backend"])
    if spec["within"]:
        step = replace(step, run=killed(step.run, *spec["within"], seat))
    if spec.get("survives", True):
        patience = timedelta(seconds=spec["patience"])
        step = df.survive(step, patience=patience)
    state = init(start_params(seat, spec["algorithm"]))
    state = df.stack(state, local) if local > 1 else state
    dies, first = {int(rank): t for rank, t in spec["dies"].items()}, 0
    folder = Path(spec["folder"]) / "saved"
    saver = df.checkpoint.Saver(folder, keep=None) if spec.get("calls") else None
    preemption = df.preemption(folder / "marker", every=3)
    stop = preemption.__enter__() if saver else None  # the process ends within it
    try:
        if joins:
            step(state, gradient(seat, 0), 0)
            while not due.exists():
                time.sleep(0.01)
            ready.touch()
            state, first = df.join(step, state, gradient(seat, 0))
            for _ in range(first):
                say()
        for t in range(first, spec["steps"]):
            while t == spec["joins"] and not ready.exists():
                due.touch()
                time.sleep(0.01)
            if dies.get(seat) == t:
                os.kill(os.getpid(), signal.SIGKILL)
            if spec.get("stops") == [seat, t]:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif spec.get("stops", [0, t + 1])[1] == t:
                lose_patience(timedelta(seconds=2))
            elif spec.get("stops", [0, t])[1] == t - 1:
                lose_patience(timedelta(seconds=spec["timeout"]))
            if spec.get("slow") == [seat, t]:
                time.sleep(1.5)
            time.sleep(spec["pause"])
            batch = gradient(seat, t) * (torch.nan if spec.get("nan") == [seat, t] else 1)
            batch = batch.expand(local, -1).clone() if local > 1 else batch
            state, _ = (failing if spec.get("fails") == [seat, t] else step)(state, batch, t)
            w = getattr(state.memory, "weight", None)
            calls = {
                "mean": lambda state=state: df.consensus_mean(state)["x"].tolist(),
                "distance": lambda state=state: float(df.consensus_distance(state)),
                "gather": lambda state=state: df.gather(state, torch.tensor(float(seat))).tolist(),
                "evaluate": lambda state=state: float(evaluated(state, world.place)),
                "save": lambda state=state, t=t: saver.save(state, t + 1),
                "stop": lambda t=t: stop(t),
            }
            its_end = spec["dies_in"][2] if spec.get("dies_in", [])[:2] == [seat, t] else None
            said = list(outcomes(calls, its_end)) if saver else []
            say(
                t=t,
                x=state.params.tensors[0].view(local, -1).mean(0).tolist(),
                weight=1.0 if w is None else float(w.mean()),
                workers=world.num_workers,
                seats=list(members(world)[0]),
                generation=world.hooks.changes,
                places=list(members(world)[1]),
                graphs=counters["stats"]["unique_graphs"],
                calls=said,
            )
        if saver:
            saver.close()
        say(end="done")
    except BaseException as error:
        say(end=type(error).__name__, message=str(error))


def run(job):
    """Fork the processes of a job and a store that outlives them; wait for all of them."""
    folder = Path(job["folder"])
    folder.mkdir(parents=True)
    port = free_port()
    place = {"WORLD_SIZE": job["n"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    keeper = _forked(keep, port)
    ranks = [_forked(main, job, rank) for rank in range(num_processes(job))]
    try:
        end = time.monotonic() + START_S
        while job.get("signals") and not all((folder / f"{rank}.jsonl").exists() for rank in range(job["n"])):
            time.sleep(0.02)  # until all have ended a step
            if time.monotonic() > end:
                raise TimeoutError(f"not all processes of {folder.name} have ended a step within {START_S} s")
        codes = {}
        for rank, after, number in job.get("signals", ()):
            if after == "the others":
                codes |= {other: os.waitpid(ranks[other], 0)[1] for other in range(len(ranks)) if other != rank}
            else:
                time.sleep(after)
            os.kill(ranks[rank], number)
        codes |= {rank: os.waitpid(ranks[rank], 0)[1] for rank in range(len(ranks)) if rank not in codes}
        (folder / "codes").write_text(json.dumps([codes[rank] for rank in range(len(ranks))]))
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def num_processes(job):
    return job["n"] + (job["joins"] is not None)


def keep(port):
    """Keep the store."""
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(600)
    del store


def _forked(function, *arguments):
    if (child := os.fork()) == 0:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return child


def results(folder, jobs):
    """Run these jobs, one after another, in a process of their own; return the lines of each rank of each job."""
    jobs = [DEFAULTS | job | {"folder": str(folder / str(i))} for i, job in enumerate(jobs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.run.survivors", json.dumps(jobs)]
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=True, timeout=1200)
    return [said(job["folder"], num_processes(job)) for job in jobs]


def said(folder, n):
    """Records that each process has written."""
    files = [Path(folder) / f"{rank}.jsonl" for rank in range(n)]
    return [[json.loads(line) for line in f.read_text().splitlines()] if f.exists() else [] for f in files]


def error_of_mean(lines, skipped=None):
    """Largest deviation of the mean over each step's workers from one that only their gradients have moved.

    The step of a loss begins with the step before, or repeats the last one. Of push-sum it is the mean of w z; each
    generation starts with w = 1. `skipped`: the worker and step of a gradient that was not taken.
    """
    steps = range(max(map(len, lines)))
    by_seat = [{seat: its[t] for seat, its in enumerate(lines) if len(its) > t and "x" in its[t]} for t in steps]
    worst = 0.0
    for t in range(1, len(by_seat)):
        if (now := _of_one_generation(by_seat[t])) is None:
            continue
        seats, errors = now[0]["seats"], []
        for before in range(max(0, t - 2), t):
            was = _of_one_generation({seat: by_seat[before].get(seat) for seat in seats}, seats=None)
            if was is not None and (before == t - 1 or was[0]["generation"] != now[0]["generation"]):
                is_new = was[0]["generation"] != now[0]["generation"]
                start = sum(torch.tensor(its["x"], dtype=F64) * (1 if is_new else its["weight"]) for its in was)
                steps = [[seat, s] for seat in seats for s in range(before + 1, t + 1)]
                moved = sum((RATE * gradient(*one) for one in steps if one != skipped), torch.zeros(64, dtype=F64))
                end = sum(torch.tensor(its["x"], dtype=F64) * its["weight"] for its in now)
                errors.append(float((end - start + moved).abs().max()) / len(seats))
        worst = max(worst, min(errors, default=0.0))
    return worst


def _of_one_generation(lines, seats="theirs"):
    """Lines of a step by seat, if all have ended it in one generation, and with `seats` if no other has."""
    its = [lines[seat] for seat in sorted(lines) if lines[seat]]
    is_whole = its and len(its) == len(lines) and len({line["generation"] for line in its}) == 1
    return its if is_whole and (seats is None or sorted(lines) == its[0]["seats"]) else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in json.loads(sys.argv[1]):
        run(one)
