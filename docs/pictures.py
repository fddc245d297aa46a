"""Make the pictures of the docs again, from the code and from real runs.

python docs/pictures.py                writes docs/pictures/*.png; about a minute
python docs/pictures.py overview       only that one
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import decentfn as df
from decentfn.algorithms.a2cid2 import rates
from decentfn.kit.preconditions import fast_gossip_momentum

sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("examples", "")]
import heterogeneity as experiment  # noqa: E402
import skewed_digits as digits  # noqa: E402

from tests.relaysgd_records import by_run, records, replay  # noqa: E402

FOLDER = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#D55E00", "#009E73", "#8A8F98"


# -- the timeline of a step ---------------------------------------------------------------------------------------------


def _bar(axes: Any, start: float, end: float, y: float, color: str, text: str) -> None:
    shape = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((start + 0.03, y - 0.3), end - start - 0.06, 0.6, boxstyle=shape, color=color, lw=0))
    axes.text(
        (start + end) / 2,
        y,
        text,
        ha="center",
        va="center",
        color="white",
        fontsize=9.5,
        rotation=90 * (text == "wait"),
    )


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: str) -> None:
    style = f"angle,{bend},rad=3"
    axes.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=10, color=ORANGE, shrinkA=0, shrinkB=0
        )
    )


def posts_and_waits() -> Figure:
    """One step of adapt while communicate: what the worker computes, and what travels meanwhile."""
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    axes = figure.add_subplot()
    top, ends = 2.6, 7.4
    _bar(axes, 0.0, 0.7, top, ORANGE, "post")
    _bar(axes, 0.7, 3.4, top, BLUE, "forward")
    _bar(axes, 3.4, ends, top, BLUE, "backward")
    for bucket, arrival in enumerate((2.7, 4.7, 6.7)):
        y, wait = 1.4 - 0.68 * bucket, ends + 1.35 * bucket
        _bar(axes, 0.95, arrival, y, GRAY, f"bucket {bucket}")
        _bar(axes, wait, wait + 0.3, top, ORANGE, "wait")
        _bar(axes, wait + 0.3, wait + 1.35, top, GREEN, f"bucket {bucket}")
        _arrow(axes, (0.5 - 0.15 * bucket, top - 0.32), (0.97, y), "angleA=-90,angleB=0")
        _arrow(axes, (arrival, y), (wait + 0.15, top - 0.34), "angleA=0,angleB=90")
    for x, text, color in (
        (0.35, "send and receive\nare started first", ORANGE),
        (4.05, "the gradient, at this worker's own parameters", BLUE),
        (9.43, "last, bucket by bucket: wait,\nthen mix and update in one kernel", GREEN),
    ):
        axes.text(x, top + 0.45, text, ha="center", va="bottom", fontsize=9.5, color=color)
    axes.text(-0.75, top, "a worker\ncomputes", ha="right", va="center", fontsize=10)
    axes.text(-0.75, 0.72, "messages\ntravel", ha="right", va="center", fontsize=10)
    axes.annotate("", (11.5, -0.55), (0, -0.55), arrowprops={"arrowstyle": "-|>", "color": "0.35", "lw": 1})
    axes.text(11.5, -0.68, "time in one step (not to scale)", ha="right", va="top", fontsize=9, color="0.35")
    axes.set(xlim=(-1.9, 11.6), ylim=(-1.0, 3.65))
    axes.axis("off")
    return figure


# -- what this library is -------------------------------------------------------------------------------------------------

WORKERS, STEPS, EVERY, ALPHA = 8, 300, 5, 0.1


def _accuracies(algorithm: Any, topology: df.Topology) -> torch.Tensor:
    """`[T, N]`, in percent: every worker's own model on the held-out digits, every few steps of one run."""
    data, held_out = digits.load()
    parts = df.data.dirichlet_shards(data.labels, WORKERS, ALPHA, 0)
    shards = df.data.fixed_shards(parts, 16, 0)
    init, decent_step = algorithm(digits.loss_fn, df.sgd(df.schedules.cosine(0.2, STEPS), momentum=0.9), topology)
    state, decent_step = df.stack(init(digits.start()), WORKERS), df.simulate(decent_step, WORKERS)
    rows = []
    for t in range(STEPS):
        chosen = shards.stacked_at(t)
        state, _ = decent_step(state, data.take(chosen), t)
        if t % EVERY == EVERY - 1:
            logits = torch.func.vmap(digits.predict, in_dims=(0, None))(df.params(state), held_out.images)
            rows.append(100 * (logits.argmax(-1) == held_out.labels).float().mean(-1))
    return torch.stack(rows)


def overview() -> Figure:
    """Whom a worker meets, and what comes of it: decentralized, over everyone and alone, on labels that differ by worker."""
    schedule = df.topology("one-peer-exp", WORKERS)
    nobody = torch.zeros(1, WORKERS, 0, dtype=torch.int64)
    alone = df.Topology("alone", WORKERS, nobody, torch.ones(1, WORKERS, 1, dtype=torch.float64))
    figure = Figure(figsize=(10.5, 3.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    left.suptitle("In each step a worker meets one other", fontsize=12)
    for t, axes in enumerate(left.subplots(1, 3)):
        df.plots.graph(schedule, t, axes)
        axes.set_title(f"step {t}, {t + 3}, {t + 6}, ...", fontsize=10)
    left.supxlabel("After these three steps each has heard of all eight. There is no center.", fontsize=10)
    axes = right.subplots()
    at = range(EVERY, STEPS + 1, EVERY)
    runs = (
        ("one peer in each step", df.adapt_while_communicate, schedule, BLUE, "-"),
        ("all-reduce over everyone", df.all_reduce, df.topology("complete", WORKERS), "black", "--"),
        ("each worker alone", df.adapt_while_communicate, alone, ORANGE, "-"),
    )
    for name, algorithm, topology, color, style in runs:
        found = _accuracies(algorithm, topology)
        axes.plot(at, found, color=color, linewidth=0.6, alpha=0.3)
        axes.plot(at, found.mean(1), style, color=color, linewidth=2.2, label=name)
    axes.set(xlabel="step", ylabel="held-out accuracy of a worker, %", ylim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.62), fontsize=9)
    right.suptitle("Eight workers, each with a few of ten digits", fontsize=12)
    return figure


def topologies() -> Figure:
    """A gallery: sixteen workers, the first phases of eight schedules."""
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    panels = figure.subplots(2, 5)
    shown = [(name, 0) for name in ("static-ring", "torus", "binary-tree", "static-exp", "ring")]
    shown += [("one-peer-exp", 1), ("one-peer-exp-directed", 2), ("base", 1), ("random-matching", 0)]
    for (name, t), axes in zip([*shown, ("hierarchical", 0)], panels.flat, strict=True):
        topology = experiment.topology(name, 16)
        df.plots.graph(topology, t, axes)
        axes.set_title(f"{name}\n{axes.get_title().replace(chr(10), ', ')}", fontsize=10)
    return figure


def heterogeneity() -> Figure:
    """The table of heterogeneity.md."""
    config = experiment.Config()
    results = {
        name: {
            alpha: [experiment.train(method, config, alpha, seed) for seed in range(config.seeds)]
            for alpha in config.alphas
        }
        for name, method in experiment.METHODS.items()
    }
    return experiment.picture(results)


# -- gossip alone ---------------------------------------------------------------------------------------------------------

SIZES, MESSAGES = (16, 32, 64), 400


def _disagreement(algorithm: Any, topology: df.Topology, steps: int, **options: Any) -> list[float]:
    """Distance of random vectors to their mean after each step, relative to the start."""
    built = algorithm(lambda x, batch: (0 * x).sum(), df.sgd(1.0), topology, **options)
    n = topology.num_workers
    vectors = torch.randn(n, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, step = df.with_params(df.stack(built.init(vectors[0]), n), vectors), df.simulate(built.step, n)
    found = [df.consensus_distance(state).item()]
    for t in range(steps):
        state, _ = step(state, torch.zeros(n, 1), t)
        found.append(df.consensus_distance(state).item())
    return [distance / found[0] for distance in found]


def accelerated_gossip() -> Figure:
    """How fast a ring agrees: pairs and A²CiD², all neighbors and fast gossip averaging, and what theory says."""
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    rounds = range(0, MESSAGES // 2 + 1, 10)
    for axes, n in zip(figure.subplots(1, len(SIZES), sharey=True), SIZES, strict=True):
        pairs, both = df.topologies.shuffled(df.topology("ring", n)), df.topology("static-ring", n)
        eta = rates(pairs)[0]
        beta = 1 - df.topologies.certificate(both).spectral_gap
        root = math.sqrt(fast_gossip_momentum(MESSAGES // 2, both))
        fast = [1.0] + [_disagreement(df.adapt_then_combine, both, 1, gossip_rounds=r)[1] for r in rounds[1:]]
        gap = 2 * (1 - math.cos(2 * math.pi / n)) / 2  # of the Laplacian of the expected meetings
        curves = (
            ("random pairs", GRAY, range(MESSAGES + 1), _disagreement(df.a2cid2, pairs, MESSAGES, eta=0.0)),
            ("A²CiD² on them", BLUE, range(MESSAGES + 1), _disagreement(df.a2cid2, pairs, MESSAGES)),
            (
                "both neighbors",
                ORANGE,
                range(0, MESSAGES + 1, 2),
                _disagreement(df.adapt_then_combine, both, MESSAGES // 2),
            ),
            ("fast gossip averaging", GREEN, [2 * r for r in rounds], fast),
        )
        theory = (
            (GRAY, lambda m, gap=gap: (1 - gap / 2) ** (m / 2)),
            (BLUE, lambda m, eta=eta: math.exp(-eta * m)),
            (ORANGE, lambda m, beta=beta: beta ** (m / 2)),
            (GREEN, lambda m, root=root: root ** (m / 2) * (1 + m / 2 * (1 - root))),
        )
        for name, color, at, found in curves:
            axes.semilogy(at, found, color=color, linewidth=2, label=name)
        for color, bound in theory:
            axes.semilogy(range(MESSAGES + 1), list(map(bound, range(MESSAGES + 1))), ":", color=color, linewidth=1)
        axes.set(xlabel="messages sent by a worker", ylim=(1e-6, 1.5), title=f"{n} workers on a ring")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9")
    figure.axes[0].set_ylabel("disagreement")
    figure.axes[-1].legend(frameon=False, loc="lower left", fontsize=9)
    return figure


# -- figures of papers ----------------------------------------------------------------------------------------------------


def _contraction(topology: df.Topology, rounds: int) -> list[float]:
    """Distance of a random vector to its mean after each round, relative to the start."""
    x = torch.randn(topology.num_workers, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, found = x - x.mean(0), []
    for t in range(rounds + 1):
        found.append(max(float(x.norm()), 1e-16))
        x = torch.as_tensor(df.mixing_matrix(topology, t)) @ x
    return [distance / found[0] for distance in found]


def _curves(axes: Any, curves: dict[str, df.Topology], rounds: int) -> None:
    for name, topology in curves.items():
        axes.semilogy(range(rounds + 1), _contraction(topology, rounds), linewidth=2, label=name)
    axes.set(xlabel="rounds", ylim=(1e-14, 2))
    axes.legend(frameon=False, fontsize=8)


def published() -> Figure:
    """Synthetic figures of three papers: Base-(k + 1) graphs, EquiTopo, and RelaySGD, whose published points are hollow."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    base, equi, relay = figure.subplots(1, 3)
    n = 25
    named = {"ring": "static-ring", "torus": "torus", "static exponential": "static-exp"}
    curves = {name: df.topology(registered, n) for name, registered in named.items()}
    curves |= {"one-peer exponential": df.topology("one-peer-exp-directed", n)}
    curves |= {f"Base-{k + 1}": df.topology("base", n, k=k) for k in (1, 2, 4)}
    _curves(base, curves, 30)
    base.set(title=f"Base-(k + 1) graphs, {n} workers", ylabel="disagreement")
    n = 300
    curves = {"ring": df.topology("static-ring", n), "one-peer exponential": df.topology("one-peer-exp-directed", n)}
    curves |= {"OD-EquiDyn": df.topology("equitopo-od-dyn", n), "OU-EquiDyn": df.topology("equitopo-ou-dyn", n)}
    curves |= {"D-EquiStatic": df.topology("equitopo-d-static", n), "U-EquiStatic": df.topology("equitopo-u-static", n)}
    _curves(equi, curves, 60)
    equi.set(title=f"EquiTopo, {n} workers")
    shown = {
        ("All-reduce", "ring"): "All-reduce",
        ("RelaySum/Model", "chain"): "RelaySGD, chain",
        ("RelaySum/Model", "tree"): "RelaySGD, tree",
        ("D2", "ring"): "D², ring",
        ("Gradient tracking", "ring"): "Gradient tracking, ring",
    }
    runs = by_run([record for record in records() if record.heterogeneity == 1 and record.num_workers <= 48])
    for (algorithm, graph), name in shown.items():
        mine = sorted((run for run in runs if run[0][:2] == (algorithm, graph)), key=lambda run: run[0].num_workers)
        sizes = [run[0].num_workers for run in mine]
        (line,) = relay.loglog(sizes, [sum(replay(run)) / len(run) for run in mine], ".-", label=name)
        theirs = [sum(record.steps for record in run) / len(run) for run in mine]
        relay.plot(sizes, theirs, "o", markersize=9, fillstyle="none", color=line.get_color())
    relay.set_xticks(sizes, map(str, sizes))
    relay.minorticks_off()
    relay.set(title="RelaySGD, random quadratics, ζ² = 1", xlabel="workers", ylabel="steps to an error of 1e-6")
    relay.legend(frameon=False, fontsize=8)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9")
    return figure


PICTURES = {
    make.__name__: make
    for make in (posts_and_waits, overview, topologies, heterogeneity, accelerated_gossip, published)
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(FOLDER / f"{name}.png", dpi=105)


if __name__ == "__main__":
    main()
