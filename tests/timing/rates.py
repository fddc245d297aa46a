"""Learning rates of to_accuracy.py's language model, of each method: simulated seconds to 3.6 bits per byte, one worker slow.

python -m tests.timing.rates 2 3                       these seeds; minutes for each line
python -m tests.timing.rates 2 3 DDP                   one method

`TUNED` in to_accuracy.py has the best of each method. The clock counts 0.1 s for a step, and 0.3 s of one worker.
"""

import math
import sys

import torch

import decentfn as df
from decentfn.timing import Exchange
from tests.timing.to_accuracy import COMPUTE_S, METHODS, ONE_PEER, SLOWER, TASKS, N

SETTINGS = [
    (1.4e-3, 0),
    (2e-3, 0),
    (4e-3, 0),
    (8e-3, 0),
    (2.8e-3, 30),
    (4e-3, 30),
    (4e-3, 60),
    (5.6e-3, 60),
    (8e-3, 60),
]
CLOCK = df.clock(
    [COMPUTE_S] * (N - 1) + [SLOWER * COMPUTE_S], df.planning.Cluster(N, df.planning.Link(10, latency_ms=1))
)


def first(method, schedule, peak, warmup, seed, seconds):
    """Seconds until the mean of all workers' parameters is this good at so many evaluations in a row."""
    task, topology, make = TASKS["language"], df.topology(schedule, N), METHODS[method] or df.all_reduce
    module = task.module(seed)
    params, buffers, of_module = df.functional(module, lambda loss, _: loss)
    loss = df.autograd(lambda params, buffers, batch: of_module(params, buffers, (batch, None)))
    sends = Exchange(
        topology,
        sum(4 * p.numel() for p in module.parameters()),
        begins=float(method == "DDP"),
        is_awaited=method != "asynchronous",
    )
    optimizer = task.optimizers[1](df.schedules.linear(0.0, peak, warmup) if warmup else peak)
    init, step = make(loss, optimizer, topology)
    line = CLOCK.timeline(sends, round(seconds / (COMPUTE_S if method == "asynchronous" else SLOWER * COMPUTE_S)))
    at_once = [[(i, k) for i in range(N)] for k in range(len(line.end))]
    batches = [task.batches(seed, i) for i in range(N)]
    now = [next(its) for its in batches]
    state, step = df.stack(init(params, buffers), N, arrivals=line.trace), df.simulate(step, N, arrivals=line.trace)
    ended, x, at, in_a_row = [0.0] * N, [None] * N, task.every_s, 0
    waiting = []  # parameters at the ends of steps that are later than the present evaluation
    for level, events in enumerate(at_once if line.trace is None else line.trace.levels):
        for i, k in events:
            now[i] = next(batches[i]) if k else now[i]
        state, _ = step(state, tuple(map(torch.stack, zip(*now, strict=True))), level)
        for i, k in events:
            ended[i] = line.end[k, i]
            waiting.append((ended[i], i, {name: leaf[i].clone() for name, leaf in df.params(state).items()}))
        while at < min(ended):
            waiting.sort(key=lambda its: its[0])
            while waiting[0][0] <= at:
                _, i, x[i] = waiting.pop(0)
            if all(x):
                module.load_state_dict({name: torch.stack([its[name] for its in x]).mean(0) for name in x[0]})
                in_a_row = in_a_row + 1 if task.score(module) >= task.target else 0
                if in_a_row == task.in_a_row:
                    return at - (in_a_row - 1) * task.every_s
            at += task.every_s
    return math.inf


if __name__ == "__main__":
    torch.set_num_threads(1)
    seeds = [int(word) for word in sys.argv[1:] if word.isdigit()]
    for method in [word for word in sys.argv[1:] if word in METHODS] or METHODS:
        for schedule in {"asynchronous": (ONE_PEER, "static-exp"), "DDP": ("complete",)}.get(method, (ONE_PEER,)):
            for peak, warmup in SETTINGS:
                most = TASKS["language"].seconds["one slow"]
                took = [f"{first(method, schedule, peak, warmup, seed, most):.1f}" for seed in seeds]
                print(f"{method:12} {schedule:12} {peak:g} after {warmup:2}: {', '.join(took)} s", flush=True)
