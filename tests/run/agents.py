"""torchrun's agents, forked from one process that has imported everything: restarts for the price of a fork.

python -m tests.run.agents folder restarts        each job leaves its events in folder/JOB/events; 0: two jobs that lose a node
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import decentfn as df
from decentfn.comm.collectives import gather_objects
from decentfn.train import process_group
from tests.ranks import free_port

STEPS = 12


def make(num_workers):
    """Workers that pull toward their own number, on a graph of any number of workers."""

    def loss_fn(params, target):
        return ((params["x"] - target) ** 2).sum()

    return df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", num_workers=num_workers))


def die(folder, deaths, rank, when):
    """Die, if the next of `deaths` is this rank's and now."""
    done = len(list(folder.glob("death *")))
    if deaths[done : done + 1] == [[rank, when]]:
        (folder / f"death {done}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def tell(folder, *event):
    with (folder / "events").open("a") as events:
        events.write(json.dumps(event) + "\n")


def train(folder, deaths, lost=None):
    """A job that goes on where its file says.

    Of `deaths`, [[rank, "before init" | "in init" | t], ...], one is died in each generation. At t = 5 of the first
    generation the node with the number `lost` dies with its agent and all its processes.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forked, it would be the agent's
    folder, rank = Path(folder), int(os.environ["RANK"])
    die(folder, deaths, rank, "before init")
    connect = process_group.dist.init_process_group
    process_group.dist.init_process_group = lambda *a, **k: (die(folder, deaths, rank, "in init"), connect(*a, **k))
    world = df.init(timeout=timedelta(seconds=60))
    init, step = make(world.size)
    saved = folder / "saved.json"
    first, x = json.loads(saved.read_text()) if saved.exists() else (0, [0.0] * world.size)
    tell(folder, "start", rank, world.size, first)
    state = init({"x": torch.tensor([x[rank]])})
    for t in range(first, STEPS):
        die(folder, deaths, rank, t)
        if t == 5 and int(os.environ["GROUP_RANK"]) == lost and world.size == 4:
            os.killpg(0, signal.SIGKILL)
        state, _ = step(state, torch.tensor([float(rank)]), t)
        everyone = [value for values in gather_objects(df.params(state)["x"].tolist()) for value in values]
        if rank == 0:
            written = saved.with_suffix(".new")
            written.write_text(json.dumps([t + 1, everyone]))
            written.replace(saved)
    tell(folder, "end", rank, world.size, df.params(state)["x"].item())


def train_until_told(folder, to_agent):
    """A job that leaves when it is told: at t = 20 its agent, or its rank 1, gets a signal."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder, world = Path(folder), df.init(timeout=timedelta(seconds=60))
    init, step = make(world.size)
    state = init({"x": torch.zeros(1)})
    try:
        with df.preemption(folder / "preempted.json") as stop:
            tell(folder, "start", world.rank)
            for t in range(1000):
                if t == 20 and world.rank == 1:
                    os.kill(os.getppid() if to_agent else os.getpid(), signal.SIGTERM if to_agent else signal.SIGUSR1)
                time.sleep(0.01)
                state, _ = step(state, torch.tensor([float(world.rank)]), t)
                if stop(t):
                    tell(folder, "stop", world.rank, t, (folder / "preempted.json").exists())
                    stop.leave()
    except SystemExit as leaving:
        if to_agent:  # a fork that ends waits for its agent, which waits for it
            os._exit(leaving.code)
        raise


def signaled(folder, *signals):
    """A process alone that gets `(signal, seconds until the next)`, and its fork that gets SIGTERM; how both ended."""
    folder.mkdir()
    child = os.fork()
    if not child:
        code = 1
        try:
            with df.preemption(folder / "preempted.json") as stop:
                assert not stop(0)
                its_end, my_end = os.pipe()
                grandchild = os.fork()
                if not grandchild:
                    os.write(my_end, b"!")
                    time.sleep(60)
                    os._exit(1)
                os.read(its_end, 1)
                subprocess.run(["kill", "-USR1", str(grandchild)], check=True)  # as torchrun does: not its parent
                os.kill(grandchild, signal.SIGTERM)
                tell(folder, "fork", os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
                for number, seconds in signals:
                    os.kill(os.getpid(), number)
                    time.sleep(seconds)
                if stop(1):
                    stop.leave()
        except SystemExit as leaving:
            code = leaving.code
        os._exit(code)
    tell(folder, "code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (folder / "preempted.json").exists())


def agent(function, number, folder, nodes, endpoint, host, restarts, *arguments):
    """Torchrun's agent of two processes, in a process group of its own; its id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        config = LaunchConfig(
            *nodes,
            nproc_per_node=2,
            run_id="job",
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            rdzv_configs={"is_host": number == host},
            local_addr=f"127.0.0.{number + 1}",  # nodes are ranked by it
            max_restarts=restarts,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(),
        )
        elastic_launch(config, function)(str(folder), *arguments)
    except BaseException as error:
        print(f"agent of {folder}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def start(folder, nodes, restarts, *arguments, host=0, function=train):
    """A job on so many nodes, (least, most), of which `host` keeps the rendezvous; what to wait for."""
    folder.mkdir()
    endpoint = f"localhost:{free_port()}"
    return folder, [agent(function, i, folder, nodes, endpoint, host, restarts, *arguments) for i in range(nodes[1])]


def wait(folder, agents):
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in agents]
    for marker in folder.glob("preempted.json"):
        tell(folder, "marker", json.loads(marker.read_text()))
    tell(folder, "codes", *codes)


def main():
    folder, restarts = Path(sys.argv[1]), int(sys.argv[2])
    if not restarts:
        lost = [
            start(folder / "the first node is lost", (1, 2), 2, [], 0, host=1),
            start(folder / "the last node is lost", (1, 2), 2, [], 1),
        ]
        for job in lost:
            wait(*job)
        return
    when = [3, "in init", "before init", *range(4, STEPS)]
    wait(*start(folder / "one node", (1, 1), restarts, [[i % 2, when[i]] for i in range(restarts)]))
    wait(*start(folder / "two nodes", (2, 2), 2 * restarts, [[3 * i % 4, when[i]] for i in range(restarts)]))
    wait(*start(folder / "its agent is told", (1, 1), 2, True, function=train_until_told))
    wait(*start(folder / "a process is told", (1, 1), 2, False, function=train_until_told))
    signaled(folder / "once", (signal.SIGTERM, 0))
    signaled(folder / "at once from two sides", (signal.SIGTERM, 0), (signal.SIGTERM, 0))
    signaled(folder / "two kinds", (signal.SIGUSR1, 1.2), (signal.SIGTERM, 0))
    signaled(folder / "again", (signal.SIGUSR1, 1.2), (signal.SIGUSR1, 0))


if __name__ == "__main__":
    main()
