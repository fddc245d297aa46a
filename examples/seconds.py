"""Accuracy against seconds: five methods on four clusters, simulated; no cluster is needed, and no second is measured.

python examples/seconds.py                     the table and the picture of docs/clock.md
python examples/seconds.py --alpha 0.1         with skewed labels

A step computes for 0.1 s, and parameters of 100 MB travel at 10 Gbit/s. The clock says when each step ends and, for workers
that wait for nobody, what has arrived by then; digits and a small network stand in for the model.
"""

from pathlib import Path
from typing import NamedTuple

import command_line
import skewed_digits as digits
import torch
from matplotlib.figure import Figure

import decentfn as df
from decentfn.timing import Exchange, Links, Timeline

N, H, NBYTES, COMPUTE = 4, 10, 1e8, 0.1
CLUSTERS = {
    "equal workers": df.clock(COMPUTE, Links([10.0] * N)),
    "one is three times slower": df.clock([COMPUTE] * (N - 1) + [3 * COMPUTE], Links([10.0] * N)),
    "each is four times slower in a tenth of its steps": df.clock(
        lambda u: COMPUTE * (1 + 3 * (u < 0.1)), Links([10.0] * N)
    ),
    "one has a tenth of the bandwidth": df.clock(COMPUTE, Links([10.0] * (N - 1) + [1.0])),
}


class Method(NamedTuple):
    algorithm: df.Algorithm
    sends: Exchange


def methods(learning_rate: float) -> dict[str, Method]:
    everyone, one_peer = df.topology("complete", N), df.topology("one-peer-exp", N)
    loss_fn, inner = digits.loss_fn, df.sgd(learning_rate, momentum=0.9)
    outer = {"inner_steps": H, "outer_learning_rate": 0.7, "outer_momentum": 0.5}
    return {
        "all-reduce": Method(df.all_reduce(loss_fn, inner, everyone), Exchange(everyone, NBYTES, begins=2 / 3)),
        "D-PSGD": Method(df.adapt_while_communicate(loss_fn, inner, one_peer), Exchange(one_peer, NBYTES)),
        "DiLoCo": Method(
            df.diloco(loss_fn, inner, everyone, **outer), Exchange(after_local_steps(everyone), NBYTES, begins=1)
        ),
        "asynchronous push": Method(
            df.asynchronous_gradient_push(loss_fn, inner, one_peer), Exchange(one_peer, NBYTES, is_awaited=False)
        ),
        "asynchronous DiLoCo": Method(
            df.asynchronous_diloco(loss_fn, inner, one_peer, **outer),
            Exchange(after_local_steps(one_peer), NBYTES, is_awaited=False),
        ),
    }


def after_local_steps(topology: df.Topology) -> df.Topology:
    """A round at the end of every H steps."""
    return df.topologies.later(H - 1, df.topologies.every(H, topology))


class Curve(NamedTuple):
    seconds: list[float]
    accuracy: list[float]  # of the mean of all workers' parameters, held out

    def first(self, accuracy: float) -> float:
        """Seconds until the mean is this accurate at two evaluations in a row; inf: never."""
        both = zip(self.seconds, self.accuracy, self.accuracy[1:], strict=False)
        return next((s for s, now, after in both if min(now, after) >= accuracy), float("inf"))


def train(algorithm: df.Algorithm, line: Timeline, seconds: float, seed: int, alpha: float) -> Curve:
    """Take the steps of a timeline, and evaluate after every half second of it."""
    data, held_out = digits.load()
    shards = df.data.fixed_shards(df.data.dirichlet_shards(data.labels, N, alpha, seed), batch_size=16, seed=seed)
    at_once = tuple(tuple((i, t) for i in range(N)) for t in range(len(line.end)))
    levels = at_once if line.trace is None else line.trace.levels
    state = df.stack(algorithm.init(digits.start(seed)), N, arrivals=line.trace)
    step = df.simulate(algorithm.step, N, arrivals=line.trace)
    own, found = [0] * N, []
    for level, events in enumerate(levels):
        for i, k in events:
            own[i] = k
        rows = torch.stack([shards.batch_at(k, i) for i, k in enumerate(own)])
        state, _ = step(state, data.take(rows), level)
        x = df.params(state)
        found += [(line.end[k, i], i, {name: leaf[i] for name, leaf in x.items()}) for i, k in events]
    found.sort(key=lambda one: one[0])  # a level's steps end at different times
    curve, now = Curve([], []), {}
    for at in torch.arange(0.5, seconds + 0.25, 0.5).tolist():
        while found and found[0][0] <= at + 1e-9:
            _, i, x = found.pop(0)
            now[i] = x
        if len(now) == N:  # all have taken a step
            mean = {name: torch.stack([x[name] for x in now.values()]).mean(0) for name in now[0]}
            curve.seconds.append(at)
            curve.accuracy.append(digits.accuracy(mean, held_out))
    return curve


def timeline(clock: df.timing.Clock, sends: Exchange, seconds: float) -> Timeline:
    """The steps that all of a synchronous run, or the first of other workers, take in so many seconds."""
    line = clock.timeline(sends, max(1, round(seconds / COMPUTE)))
    if line.trace is not None:
        return line
    steps = max(1, int((line.end.max(1) <= seconds).sum()))
    return Timeline(line.start[:steps], line.end[:steps], line.waited[:steps])


def picture(curves: dict[str, dict[str, Curve]]) -> Figure:
    figure = Figure(figsize=(10, 7), layout="constrained")
    for panel, (cluster, its) in zip(figure.subplots(2, 2, sharey=True).flat, curves.items(), strict=True):
        for number, (name, curve) in enumerate(its.items()):
            panel.plot(curve.seconds, curve.accuracy, color=f"C{number}", label=name)
        panel.set(title=cluster, xlabel="seconds", ylabel="held-out accuracy", ylim=(0.4, 1))
    figure.axes[0].legend(frameon=False)
    return figure


def main(
    seconds: float = 30.0,
    alpha: float = 10.0,
    learning_rate: float = 0.05,
    target: float = 0.93,
    seeds: tuple[int, ...] = (0, 1),
    path: Path = Path("runs/seconds.png"),
) -> dict[str, dict[str, list[Curve]]]:
    """Returns the curves by cluster, method and seed.

    Args:
        seconds: of a run, on the clock; at least 3, as a step over the slow link takes more than 1.
        alpha: of the labels' Dirichlet distribution; 0.1: each worker has few digits.
        learning_rate: of every method's (inner) optimizer.
        target: held-out accuracy to which the seconds are shown.
        seeds: of the start and the data.
        path: of the picture, of the first seed.
    """
    if seconds < 3:
        raise ValueError(f"--seconds {seconds}: it is at least 3.")
    found: dict[str, dict[str, list[Curve]]] = {}
    for cluster, clock in CLUSTERS.items():
        print(f"{cluster:52}{f'to {target:.0%}, s':>14}{'at the end':>15}{'steps':>7}")
        for name, (algorithm, sends) in methods(learning_rate).items():
            line = timeline(clock, sends, seconds)
            curves = [train(algorithm, line, seconds, seed, alpha) for seed in seeds]
            found.setdefault(cluster, {})[name] = curves
            times = ", ".join(f"{curve.first(target):.1f}" for curve in curves)
            ends = ", ".join(f"{curve.accuracy[-1]:.3f}" for curve in curves)
            taken = len(line.end) if line.trace is None else max(line.trace.num_steps)
            print(f"    {name:48}{times:>14}{ends:>15}{taken:>7}")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture({cluster: {name: its[0] for name, its in by.items()} for cluster, by in found.items()}).savefig(
        path, dpi=130
    )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line.run(main)
