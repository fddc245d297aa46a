"""Bytes sent against bits per byte: eight simulated workers train a small language model, by several algorithms.

    python examples/compare_lm.py                    the table and the picture of docs/language_model.md
    python examples/compare_lm.py --steps 32 --periods 16 --seeds 1 --out runs/short.jsonl
    python examples/compare_lm.py --help

All see the same bytes of Python's standard library in the same order. The learning rates, inner and outer, are DiLoCo's
best for each H on a seed of its own; all other hyperparameters are those of the papers. Runs that differ in the seed or
the inner learning rate are computed at once (`df.sweep`). A run is a line of `--out`; runs that are there already are not
run again, so an interrupted comparison goes on.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from byte_transformer import Transformer, Windows, baselines, read_corpus
from matplotlib.figure import Figure
from torch import Tensor

import decentfn as df

N = 8
RATES, OUTER_RATES = (4e-3, 8e-3), (0.4, 0.7, 1.0)
TUNING_SEED = 100
ALL_REDUCE = 2 * (N - 1) / N
"""Payloads that a worker sends in an all-reduce."""
Built = tuple[df.Algorithm, float]


@dataclass(frozen=True)
class Config:
    """The whole comparison."""

    steps: int = 256
    """Of each run; a multiple of every period."""
    periods: tuple[int, ...] = (16, 64)
    """H, steps between two outer steps; methods that mix in every step take the first one's learning rate."""
    seeds: int = 2
    """Runs of each method: another start and other batches."""
    batch_size: int = 4
    """Sequences per worker and step."""
    seq_len: int = 64
    dim: int = 48
    layers: int = 2
    eval_bytes: int = 2**14
    """Held-out bytes that are predicted."""
    out: Path = Path("runs/compare_lm.jsonl")
    """One line for each run."""

    def __post_init__(self) -> None:
        for name in ("steps", "seeds", "batch_size", "seq_len", "dim", "layers", "eval_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: it is at least 1.")
        if not self.periods or any(h < 1 or self.steps % h for h in self.periods):
            raise ValueError(f"--periods {self.periods}: each is at least 1 and divides --steps {self.steps}.")


# Each returns the algorithm, and the payloads (copies of the parameters) that a worker sends in the whole run.


def all_reduce(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    return df.all_reduce(loss_fn, optimizer, df.topology("complete", N)), steps * ALL_REDUCE


def adapt_while_communicate(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    return df.adapt_while_communicate(loss_fn, optimizer, df.topology("base", N)), steps


def diloco(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    topology = df.topology("complete", N)
    built = df.diloco(loss_fn, optimizer, topology, inner_steps=H, outer_learning_rate=outer)
    return built, steps / H * ALL_REDUCE


def gasloc(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    topology, of_diloco = df.topology("random-matching", N), {"outer_learning_rate": outer, "outer_momentum": 0.9}
    return df.gasloc(loss_fn, optimizer, topology, inner_steps=H, gossip_step=0.25, **of_diloco), steps / H


def factored_gossip_diloco(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    topology, nesterov = df.topology("random-matching", N), df.sgd(outer, momentum=0.9, nesterov=True)
    built = df.factored_gossip_diloco(loss_fn, optimizer, topology, inner_steps=H, outer_optimizer=nesterov)
    return built, 2 * steps / H


def noloco(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    return df.noloco(loss_fn, optimizer, df.topology("random-matching", N), inner_steps=H), steps / H


def sparse_loco(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    chunk, kept = 4096, 64
    message = (2 * kept + kept / 4 + 4) / (4 * chunk)  # places of 2 bytes, 2 bits each and a scale, of 4-byte values
    return df.sparse_loco(loss_fn, optimizer, df.topology("complete", N), inner_steps=H), steps / H * (N - 1) * message


def des_loc(loss_fn: Any, optimizer: Any, steps: int, H: int, outer: float) -> Built:
    def at_the_end_of(period: int) -> df.Topology:
        return df.topologies.later(period - 1, df.topologies.every(period, df.topology("complete", N)))

    algorithm = df.adapt_then_combine(loss_fn, optimizer, at_the_end_of(H))
    moments = {"mu": at_the_end_of(3 * H), "nu": at_the_end_of(6 * H)}
    means = steps // H + steps // (3 * H) + steps // (6 * H)
    return df.mix_state(algorithm, moments), means * ALL_REDUCE


METHODS: dict[str, Callable[[Any, Any, int, int, float], Built]] = {
    "DiLoCo": diloco,
    "GASLoC": gasloc,
    "Factored Gossip DiLoCo": factored_gossip_diloco,
    "SparseLoCo": sparse_loco,
    "DES-LOC": des_loc,
    "NoLoCo": noloco,
}
EVERY_STEP = {"adapt while communicate": adapt_while_communicate, "all-reduce": all_reduce}


class Experiment:
    """Text, model and held-out bytes of all runs."""

    def __init__(self, config: Config) -> None:
        self.config = config
        text, held_out, self.facts = read_corpus()
        self.pieces, held_out = Windows(text, config.seq_len), Windows(held_out, config.seq_len)
        chosen = torch.linspace(0, len(held_out) - 1, max(1, config.eval_bytes // config.seq_len)).long().unique()
        self.held_out = [torch.stack(half) for half in zip(*(held_out[int(i)] for i in chosen), strict=True)]
        self.facts |= baselines(text, *self.held_out)

    def batch(self, rows: Tensor) -> list[Tensor]:
        """The windows of these numbers, `[N, B, T]` inputs and targets."""
        halves = zip(*(self.pieces[int(i)] for i in rows.flatten()), strict=True)
        return [torch.stack(half).unflatten(0, tuple(rows.shape)) for half in halves]

    def run(self, method: str, H: int, outer: float, runs: Sequence[tuple[float, int]]) -> list[dict[str, Any]]:
        """Train once for each learning rate and seed in `runs`, all at once; the lines of the log."""
        config, started, rates = self.config, time.process_time(), [rate for rate, _ in runs]
        starts = []
        for _, seed in runs:
            torch.manual_seed(seed)
            model = Transformer(config.seq_len, config.dim, config.layers, heads=4)
            params, buffers, loss_fn = df.functional(
                model, forward=lambda m, batch: F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten())
            )
            starts.append(params)
        peaks, shape = df.schedules.per_run(rates), df.schedules.warmup_cosine(1.0, config.steps // 16, config.steps)
        adamw = df.adamw(
            lambda count: peaks(count) * shape(count), weight_decay=0.1, mask=df.transforms.not_bias_or_norm
        )
        build = (METHODS | EVERY_STEP)[method]
        built, payloads = build(loss_fn, df.chain(df.clip_by_global_norm(1.0), adamw), config.steps, H, outer)
        states = df.stack_runs([df.stack(built.init(params, buffers), N) for params in starts])
        step = df.sweep(df.simulate(built.step, N), len(runs))
        shards = [df.data.shards(len(self.pieces), N, config.batch_size, seed) for _, seed in runs]
        for t in range(config.steps):
            states, _ = step(states, df.stack_runs([self.batch(its.stacked_at(t)) for its in shards]), t)
        held_out, size = [tuple(self.held_out)], sum(p.numel() for p in starts[0].values())
        lines = []
        for r, (rate, seed) in enumerate(runs):
            state = df.worker(states, r)
            replicas = df.evaluate_replicas(loss_fn, state, held_out) / math.log(2)
            lines.append(
                {
                    "method": method,
                    "H": H,
                    "outer": outer,
                    "rate": rate,
                    "seed": seed,
                    "bits_per_byte": float(df.evaluate(loss_fn, state, held_out)) / math.log(2),
                    "replicas": [round(float(bits), 4) for bits in replicas],
                    "megabytes": 4 * size * payloads / 1e6,
                    "parameters": size,
                    "seconds": round((time.process_time() - started) / len(runs), 1),
                }
            )
        return lines


def read(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in config.out.read_text().splitlines()] if config.out.exists() else []


def compare(config: Config) -> list[dict[str, Any]]:
    """Run what is missing; returns the lines of the methods, without those of the tuning."""
    experiment, names = Experiment(config), ("method", "H", "outer", "rate", "seed")
    found = {tuple(line[name] for name in names): line for line in read(config)}
    config.out.parent.mkdir(parents=True, exist_ok=True)

    def several(method: str, H: int, outer: float, runs: Sequence[tuple[float, int]]) -> list[dict[str, Any]]:
        keys = [(method, H, outer, *run) for run in runs]
        if not set(keys) <= set(found):
            lines = experiment.run(method, H, outer, runs)
            found.update(zip(keys, lines, strict=True))
            with config.out.open("a") as log:
                log.writelines(json.dumps(line) + "\n" for line in lines)
            for key, line in zip(keys, lines, strict=True):
                print(*key, f"{line['bits_per_byte']:.3f} bits per byte", f"{line['seconds']} s", flush=True)
        return [found[key] for key in keys]

    def tuned(H: int) -> dict[str, Any]:
        tuning = [(rate, TUNING_SEED) for rate in RATES]
        tried = [line for outer in OUTER_RATES for line in several("DiLoCo", H, outer, tuning)]
        return min(tried, key=lambda line: line["bits_per_byte"])

    best = {H: tuned(H) for H in config.periods}
    runs = {H: [(best[H]["rate"], seed) for seed in range(config.seeds)] for H in config.periods}
    lines = [line for name in EVERY_STEP for line in several(name, 1, 1.0, runs[config.periods[0]])]
    for H in config.periods:
        lines += [line for name in METHODS for line in several(name, H, best[H]["outer"], runs[H])]
    print(f"held-out bits per byte of bigrams: {experiment.facts['bigram']:.3f}")
    return lines


def cells(lines: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The lines of each method and period, fewest bits first."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault((line["method"], line["H"]), []).append(line)
    return dict(sorted(found.items(), key=lambda item: mean(line["bits_per_byte"] for line in item[1])))


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row for each method and period."""
    heads = ("method", "H", "MB sent", "mean model", "of each seed", "workers' own")
    rows = [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---|---:|"]
    for (method, H), its in cells(lines).items():
        bits, own = [line["bits_per_byte"] for line in its], [mean(line["replicas"]) for line in its]
        seeds = ", ".join(f"{b:.3f}" for b in bits)
        rows.append(f"| {method} | {H} | {its[0]['megabytes']:.2f} | {mean(bits):.3f} | {seeds} | {mean(own):.3f} |")
    return "\n".join(rows)


def picture(lines: list[dict[str, Any]]) -> Figure:
    """Bits per byte of the mean model against megabytes sent: a mark for each method and period."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    panel = figure.subplots()
    colors = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "k", "0.5")
    shades = dict(zip(METHODS | EVERY_STEP, colors, strict=True))
    labeled = set()
    for (method, H), its in cells(lines).items():
        bits = [line["bits_per_byte"] for line in its]
        spread = [[mean(bits) - min(bits)], [max(bits) - mean(bits)]]
        marker = {1: "s", 16: "o", 64: "^"}.get(H, "D")
        label = method if method not in labeled else None
        labeled.add(method)
        megabytes = its[0]["megabytes"]
        panel.errorbar(megabytes, mean(bits), yerr=spread, fmt=marker, color=shades[method], markersize=8, label=label)
        if method not in EVERY_STEP:
            panel.annotate(f"H = {H}", (megabytes, mean(bits)), (6, 4), textcoords="offset points", fontsize=7)
    panel.set_xscale("log")
    panel.set_xlabel("sent by a worker in the whole run, MB")
    panel.set_ylabel("held-out bits per byte, mean model")
    panel.grid(color="0.9")
    panel.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def main(config: Config) -> list[dict[str, Any]]:
    lines = compare(config)
    print(table(lines))
    picture(lines).savefig(config.out.with_suffix(".png"), dpi=130)
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Config))
