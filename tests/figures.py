"""The figures on the pages of algorithms, measured: `python -m tests.figures [PART ...]` prints each beside its claim.

The docstrings of `decentfn/algorithms/` claim them. Parts: drift, growth, tracking, adam, power, squeeze (minutes).
"""

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import decentfn as df
from decentfn import compressors
from decentfn.core import draws, trees

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NONE = torch.zeros(0)
Row = tuple[str, str, str]
"""What, the claim, what was measured."""


def still(params: Any, batch: Any) -> torch.Tensor:
    return sum((0.0 * x.float().sum() for x in trees.leaves(params)), torch.zeros(()))


def trained(algorithm: df.Algorithm, rows: list[Any], steps: int, batch: torch.Tensor = NONE) -> Iterator[Any]:
    """Yield the stacked state at the start and after every step."""
    state = trees.map(lambda *leaves: torch.stack(leaves), *[algorithm.init(row) for row in rows])
    step, batch = df.simulate(algorithm.step, len(rows)), batch if len(batch) else torch.zeros(len(rows))
    yield state
    for t in range(steps):
        state, _ = step(state, batch, t)
        yield state


def drift(
    name: str, n: int, steps: tuple[int, ...], dtype: torch.dtype = F32, on: str = "static-ring", **its: Any
) -> str:
    """How far the mean of an element has moved after so many steps, rms; elements between 1.5 and 2.5, unequal starts."""
    algorithm = getattr(df, name)(still, df.sgd(0.1), df.topology(on, n), **its)
    draw = torch.Generator().manual_seed(0)
    rows = [[(1.5 + torch.rand(64, generator=draw, dtype=torch.float64)).to(dtype)] for _ in range(n)]
    was, found = torch.zeros(0), []
    for t, state in enumerate(trained(algorithm, rows, max(steps))):
        mean = state.params[0].double().mean(0)
        was = mean if t == 0 else was
        if t in steps:
            found.append(f"{float((mean - was).square().mean().sqrt()):.1e}")
    return ", ".join(found)


def of_drift() -> Iterator[Row]:
    short, long = (100, 1_000, 3_000), (100, 10_000)
    yield "adapt_then_combine, 4", "1e-7, once", drift("adapt_then_combine", 4, short)
    for n in (4, 5):
        yield f"d2, {n}, 100, 1,000, 3,000 steps", "7e-8", drift("d2", n, short)
        yield f"d2, {n}, bfloat16", "7e-3", drift("d2", n, short, BF16)
        yield f"d2, {n}, float16", "7e-4", drift("d2", n, short, F16)
    yield "d2, complete of 3", "1.4e-5, 1.4e-4", drift("d2", 3, (100, 1_000), on="complete")
    yield "exact_diffusion, 4", "3e-8", drift("exact_diffusion", 4, short)
    yield "extra, 4", "2e-7", drift("extra", 4, short)
    its = {"compressor": compressors.quantize(8), "gamma": 0.3}
    yield "choco_sgd, 4, 100 and 10,000 steps", "2e-7", drift("choco_sgd", 4, long, **its)


def growth(name: str, n: int, beta: float = 0.9, alpha: float = 1.0) -> float:
    """Factor of disagreement per step without gradients; alpha < 0: DecentLaM's recursion."""
    topology = df.topology(name, n)
    x = draws.uniform(0, 0, 0, (n, 4)).double()
    m, logs = torch.zeros_like(x), []
    for t in range(1_000):
        x, m = x - x.mean(0), m - m.mean(0)
        norm = float(torch.cat([x, m]).norm())
        logs.append(math.log(norm))
        x, m = x / norm, m / norm
        mixed = df.mixing_matrix(topology, t) @ x
        if alpha < 0:
            x, m = mixed - beta * m, beta * m + x - mixed
        else:
            m = alpha * (mixed - x) + beta * m
            x = x + m
    return math.exp(sum(logs[500:]) / 500)


def of_growth() -> Iterator[Row]:
    for name, claim in (("one-peer-exp", "1.22"), ("static-exp", "1.25")):
        yield f"decentlam, β = 0.9, {name} of 16", claim, f"{growth(name, 16, alpha=-1.0):.4g}"
    for name, *claims in (("random-matching", "+9%", "-2%", "-8%"), ("one-peer-exp", "+22%", "-5%", "-7%")):
        for (gamma, alpha), claim in zip(((0.9, 1.0), (0.9, 0.25), (0.7, 0.6)), claims, strict=True):
            its = f"{growth(name, 16, gamma, alpha) - 1:+.2%}"
            yield f"gasloc, γ = {gamma:g}, α = {alpha:g}, {name} of 16", claim, its


def limit(name: str, form: str, beta: float, n: int = 16) -> float:
    """Largest η a below which disagreement under gradient tracking shrinks over a period."""
    topology = df.topology(name, n)
    basis = np.linalg.svd(np.eye(n) - 1 / n)[0][:, : n - 1]
    rounds = [basis.T @ df.mixing_matrix(topology, p).numpy() @ basis for p in range(topology.period or 1)]
    eye, zero = np.eye(n - 1), np.zeros((n - 1, n - 1))

    def radius(eta: float) -> float:
        product = np.eye(3 * (n - 1))
        for w in rounds:  # of (x, y, b): b⁺ = β b + y
            b = np.hstack([zero, eye, beta * eye])
            x = np.hstack([w, zero, zero]) - eta * (eye if form == "awc" else w) @ b
            changed = x - np.hstack([eye, zero, zero])  # a = 1
            y = np.hstack([zero, w, zero]) + (w if form == "atc" else eye) @ changed
            product = np.vstack([x, y, b]) @ product
        return float(np.abs(np.linalg.eigvals(product)).max())

    etas = np.geomspace(1e-3, 8, 400)
    return next((float(eta) for eta in etas if radius(eta) > 1 + 1e-9), math.inf)


def of_tracking() -> Iterator[Row]:
    claims = {
        ("one-peer-exp", "atc"): "2 (never)",
        ("one-peer-exp", "semi-atc"): "0.065 (1)",
        ("one-peer-exp", "awc"): "0.065 (0.5)",
        ("ring", "atc"): "2 (2.1)",
        ("ring", "semi-atc"): "0.0079 (0.076)",
        ("ring", "awc"): "0.0079 (0.076)",
    }
    for (name, form), claim in claims.items():
        yield (
            f"gradient_tracking, {form}, {name}",
            claim,
            f"{limit(name, form, 0.9):.3g} ({limit(name, form, 0.0):.3g})",
        )


def of_adam() -> Iterator[Row]:
    draw = torch.Generator().manual_seed(0)
    rows = [[torch.randn(64, generator=draw)] for _ in range(8)]
    algorithm = df.quasi_global_adam(still, df.sgd(0.05), df.topology("static-ring", 8))
    states = [s.params[0].mean(0) for s in trained(algorithm, rows, 300)]
    yield "quasi_global_adam, rate 0.05, 300 steps", "13", f"largest {float((states[-1] - states[0]).abs().max()):.3g}"


def of_power() -> Iterator[Row]:
    draw, ends = torch.Generator().manual_seed(0), []
    rows, targets, noise = (torch.randn(4, 8, 5, generator=draw, dtype=torch.float64) for _ in range(3))
    for size in (0, 1e-10):
        algorithm = df.power_gossip(
            lambda x, target: ((x - target) ** 2).sum() / 2, df.sgd(0.1), df.topology("static-ring", 4)
        )
        *_, end = trained(algorithm, list(rows + size * noise), 96, targets)
        ends.append(end.params[0])
    yield "power_gossip, from 1e-10, 96 steps", "over 1e-3", f"{float((ends[0] - ends[1]).abs().max()):.1e}"


def of_squeeze() -> Iterator[Row]:
    for its, claim in ((compressors.random_k(0.5), "48 ulp"), (compressors.quantize(8), "382 ulp")):
        moved = drift("deep_squeeze", 4, (10_000,), torch.float64, compressor=its, gamma=0.3)
        yield f"deep_squeeze, {its.name}", claim, f"{float(moved) / 4.4e-16:.0f} ulp, {moved}"


PARTS = {
    "drift": of_drift,
    "growth": of_growth,
    "tracking": of_tracking,
    "adam": of_adam,
    "power": of_power,
    "squeeze": of_squeeze,
}


def main() -> None:
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        for what, claim, measured in PARTS[part]():
            print(f"{what:44} claimed {claim:16} measured {measured}", flush=True)


if __name__ == "__main__":
    main()
