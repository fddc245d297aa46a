"""Every algorithm with its defaults on every schedule that it accepts: disagreement, mean and loss.

python -m tests.promises [ROW ...]        prints the table; exits with 1 if a cell is wrong

Eight, thirteen and sixteen simulated workers start unequal, in float64. Half of the parameters have no gradient: there
workers must not disagree more than at the start, and the mean must stay where the equations say so. The others have a
quadratic loss whose optimum differs among workers: the loss of the mean model must fall.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import decentfn as df
from decentfn import compressors, topologies
from decentfn.core import trees
from decentfn.topologies.registry import of_size

SIZES, ROUNDS, LEARNS, DIM = (8, 13, 16), 500, 60, 6
AGREED = 1e-6
"""Disagreement, relative to the start, at which a run of at least LEARNS rounds ends."""

COMPRESSED = {"compressor": compressors.top_k(0.5), "gamma": 0.3}
OPTIONS: dict[str, dict[str, Any]] = {
    "beer": COMPRESSED,
    "choco_sgd": COMPRESSED,
    "deep_squeeze": COMPRESSED,
    "motef": COMPRESSED,
    "decoupled_diloco": {"inner_steps": 1, "num_fragments": 1},
    "streaming_diloco": {"inner_steps": 2, "num_fragments": 1},
    "sparse_loco": {"inner_steps": 1, "decay": 0.95},
    **dict.fromkeys(
        ("asynchronous_diloco", "diloco", "factored_gossip_diloco", "gasloc", "k_gt", "led", "noloco", "slowmo"),
        {"inner_steps": 1},
    ),
}
"""Hyperparameters without a default, and an outer step in every step."""

FORMS: dict[str, dict[str, Any]] = {
    "gradient_tracking, atc": {"form": "atc"},
    "gradient_tracking, awc": {"form": "awc"},
    "gradient_tracking, semi-atc": {"form": "semi-atc"},
    "adapt_while_communicate, half": {"gamma": 0.5},
    "adapt_while_communicate, Decent-DP": {"update_at": "mixed"},
    "stochastic_gradient_push, delayed": {"delay": 1},
    "asynchronous_gradient_push, every 3": {"every": 3},
    "asynchronous_diloco, 3 steps": {"inner_steps": 3},
    "diloco, 4 bits": {"compressor": compressors.quantize(4)},
    "diloco, SPARTA": {"inner_steps": 4, "fraction": 0.3},
    "streaming_diloco, 2 bits": {"compressor": compressors.quantize(2)},
    "decoupled_diloco, 4 bits": {"compressor": compressors.quantize(4)},
    "sparta, 0.3": {"fraction": 0.3},
    "slowmo, 3 steps": {"inner_steps": 3},
    "slowmo, 8 bits": {"compressor": compressors.quantize(8)},
    "noloco, 3 steps": {"inner_steps": 3},
    "noloco, 8 bits": {"compressor": compressors.quantize(8)},
    "noloco, twice": {"gossip_rounds": 2},
    "gasloc, 3 steps": {"inner_steps": 3},
    "gasloc, unequal steps": {"inner_steps": [1, 2, 1, 3] * 4},
    "gasloc, 8 bits": {"compressor": compressors.quantize(8)},
    "gasloc, twice": {"gossip_rounds": 2},
    "factored_gossip_diloco, 3 steps": {"inner_steps": 3},
    "k_gt, 3 steps": {"inner_steps": 3},
    "k_gt, half": {"inner_steps": 3, "outer_learning_rate": 0.5},
    "led, 3 steps": {"inner_steps": 3},
    "choco_sgd, sign": {"compressor": compressors.sign(16), "gamma": 0.1},
    "deep_squeeze, 8 bits": {"compressor": compressors.quantize(8), "gamma": 0.5},
}
"""Other forms of an algorithm, and options of its outer steps; the name up to a comma is the function's."""

EVERYONE = {"all_reduce", "decoupled_diloco", "demo", "diloco", "sparse_loco", "streaming_diloco"}
EVERYONE |= {form for form in FORMS if form.split(",")[0] in EVERYONE}
"""They average over all workers, who start equal, whatever the topology is."""

MOVES_THE_MEAN = {
    "clipped_gossip": "clipping is not symmetric",
    "quasi_global_adam": "its difference is normalized, so motion never dies",
    "relay_sgd": "the mean of a step is that of older ones",
    "stochastic_gradient_push, delayed": "a part is on its way",
}


class Cell(NamedTuple):
    disagreement: (
        float  # the largest of the last fifth of the rounds, relative to the start (of equal starts: as it is)
    )
    mean: float  # largest move of an element without gradient, less what error feedback holds, relative to the largest start
    loss: float  # distance of the mean model from the optimum, relative to the start

    def wrong(self, name: str) -> list[str]:
        return [
            what
            for what, is_wrong in (
                ("disagreement", not self.disagreement <= (1e-12 if name in EVERYONE else 1.01)),
                ("mean", not {name, name.split(",")[0]} & MOVES_THE_MEAN.keys() and not self.mean < 1e-9),
                ("loss", not self.loss < 0.5),
            )
            if is_wrong
        ]


def loss(params: Any, target: torch.Tensor) -> torch.Tensor:
    return ((params["learns"] - target) ** 2).sum() / 2 + 0.0 * params["rests"].sum()


def built(name: str, topology: df.Topology, **options: Any) -> df.Algorithm:
    function = name.split(",")[0]
    given = OPTIONS.get(function, {}) | FORMS.get(name, {}) | options
    if isinstance(given.get("inner_steps"), list):
        given["inner_steps"] = given["inner_steps"][: topology.num_workers]
    return getattr(df, function)(loss, df.sgd(0.1), topology, **given)


def schedules(n: int) -> dict[str, df.Topology]:
    """All registered ones of this size, and some that others combine; of those with the same matrices the first."""
    found: dict[str, df.Topology] = {}
    seen: set[bytes] = set()
    combined = {
        f"sampled({n // 2})": topologies.sampled(n, n // 2),
        "every(3, static-ring)": topologies.every(3, df.topology("static-ring", n)),
        "lossy(random-matching, 0.2)": topologies.lossy(df.topology("random-matching", n), 0.2),
    }
    for name, topology in (of_size(n, local_world_size=4 if n % 4 == 0 else None) | combined).items():
        rounds = [df.mixing_matrix(topology, t) for t in range(topology.period or 8)]
        key = torch.stack(rounds).numpy().tobytes()
        if key not in seen:
            found[name] = topology
        seen.add(key)
    return found


def held(name: str, state: Any) -> torch.Tensor | float:
    """Mean of what SparseLoCo's error holds of the elements without gradient.

    Two bits have no zero, so these are sent and move, too. By e⁺ = β e - q and φ⁺ = φ - mean q,

        mean φ⁺ - mean e⁺ = mean φ - mean e + (1 - β) mean e.
    """
    return df.params(state._replace(params=state.memory.error))["rests"].mean(0) if name == "sparse_loco" else 0.0


def run(name: str, topology: df.Topology, rounds: int = ROUNDS, **options: Any) -> Cell:
    """Train; raises ValueError if the algorithm refuses the topology."""
    algorithm, n = built(name, topology, **options), topology.num_workers
    draw = torch.Generator().manual_seed(n)
    x = {leaf: torch.randn(n, DIM, generator=draw, dtype=torch.float64) for leaf in ("rests", "learns")}
    if name in EVERYONE:
        x = {leaf: values[:1].expand(n, -1) for leaf, values in x.items()}
    targets = torch.randn(n, DIM, generator=draw, dtype=torch.float64) + 3
    states = [algorithm.init({leaf: values[i].clone() for leaf, values in x.items()}) for i in range(n)]
    state, step = trees.map(lambda *leaves: torch.stack(leaves), *states), df.simulate(algorithm.step, n)
    start, optimum = x["rests"].mean(0), targets.mean(0)
    apart = 1.0 if name in EVERYONE else float((x["rests"] - start).norm())
    sizes: list[float] = []
    lost, kept = torch.zeros_like(start), OPTIONS.get(name, {}).get("decay", 1.0)
    for t in range(rounds):
        lost = lost + (1 - kept) * held(name, state)
        state, _ = step(state, targets, t)
        rests = df.params(state)["rests"]
        sizes.append(float((rests - rests.mean(0)).norm()) / apart)
        if sizes[-1] > 1e6 or (t + 1 >= LEARNS and max(sizes[-5:]) < AGREED):
            break
    params = df.params(state)
    away = (params["learns"].mean(0) - optimum).norm() / (x["learns"].mean(0) - optimum).norm()
    moved = (params["rests"].mean(0) - held(name, state) - lost - start).abs().max() / x["rests"].abs().max()
    return Cell(max(sizes[-(len(sizes) // 5) :]), float(moved), float(away))


def cells(names: tuple[str, ...], sizes: tuple[int, ...] = SIZES) -> Iterator[tuple[str, int, str, Cell | str]]:
    """Yield algorithm, workers, schedule, and its cell or the reason of the refusal."""
    for n in sizes:
        its = schedules(n)
        for name in names:
            for schedule, topology in its.items():
                if name in EVERYONE and schedule != "complete":
                    continue
                try:
                    yield name, n, schedule, run(name, topology)
                except ValueError as error:
                    yield name, n, schedule, str(error)


def main() -> None:
    torch.set_num_threads(1)
    failed = 0
    for name, n, schedule, cell in cells(tuple(sys.argv[1:]) or (*df.algorithms.__all__, *FORMS)):
        if isinstance(cell, str):
            print(f"{name:36} {n:3} {schedule:28} refused", flush=True)
            continue
        wrong = cell.wrong(name)
        failed += bool(wrong)
        numbers = f"disagreement {cell.disagreement:.1e}  mean {cell.mean:.1e}  loss {cell.loss:.1e}"
        print(f"{name:36} {n:3} {schedule:28} {numbers}  {'WRONG: ' + ', '.join(wrong) if wrong else ''}", flush=True)
    print(f"{failed} wrong")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
