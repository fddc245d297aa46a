"""One table of algorithms x topologies, a small model, and a driver: what the contract tests run in every interpreter."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import decentfn as df
from decentfn.core import trees

CORE_TOPOLOGIES: dict[str, dict[str, Any]] = {
    "complete": {},
    "ring": {},
    "one-peer-exp": {},
    "alternating-exp-ring": {"local_world_size": 2},
}
"""Decent-DP's schedules, with which every core algorithm is crossed."""

OTHERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "gradient_tracking": [("ring", {}), ("static-exp", {"form": "semi-atc"}), ("one-peer-exp", {"form": "awc"})],
    "extra": [("static-ring", {})],
    "exact_diffusion": [("static-ring", {})],
    "d2": [("static-ring", {})],
    "stochastic_gradient_push": [("one-peer-exp-directed", {"rounds": 2}), ("one-peer-exp-directed", {"delay": 1})],
    "push_diging": [("one-peer-exp-directed", {})],
    "quasi_global_momentum": [("one-peer-exp", {}), ("random-matching", {"nesterov": True})],
    "quasi_global_adam": [("ring", {"eps": 1e-3})],  # 1e-8 would make 5e-5 of rounding: division by what is almost 0
    "decentlam": [("static-ring", {})],
    "momentum_tracking": [("static-exp", {})],
    "choco_sgd": [("static-ring", {"compressor": "top_k", "gamma": 0.3})],
    "deep_squeeze": [("static-ring", {"compressor": "sign", "gamma": 0.3})],
    "power_gossip": [("static-ring", {})],
    "relay_sgd": [("binary-tree", {}), ("chain", {"relay": "gradients"})],
    "slowmo": [("complete", {"inner_steps": 2})],
    "diloco": [("complete", {"inner_steps": 2})],
    "streaming_diloco": [("complete", {"inner_steps": 4, "num_fragments": 2})],
    "noloco": [("random-matching", {"inner_steps": 2})],
    "demo": [("complete", {})],
}
"""The topologies (and hyperparameters) with which each further algorithm is run."""

CORE = ("adapt_while_communicate", "adapt_then_combine", "all_reduce")


class Case(NamedTuple):
    algorithm: str
    topology: str
    hyperparameters: dict[str, Any] = {}

    def __str__(self) -> str:
        extra = "".join(f",{k}={v}" for k, v in self.hyperparameters.items())
        return f"{self.algorithm}-{self.topology}{extra}"


CASES = [Case(a, t) for a in CORE for t in CORE_TOPOLOGIES]
CASES += [
    Case("adapt_while_communicate", "one-peer-exp", {"update_at": "mixed", "gamma": 0.5}),
    Case("adapt_while_communicate", "random-matching"),
    Case("adapt_while_communicate", "ring", {"wire_dtype": torch.bfloat16}),
    Case("all_reduce", "complete", {"wire_dtype": torch.bfloat16}),
]
CASES += [Case(a, t, h) for a, runs in OTHERS.items() if hasattr(df, a) for t, h in runs]


def build(case: Case, num_workers: int, optimizer: Any = None, loss: Any = None) -> df.Algorithm:
    """The case's algorithm; with its usual optimizer and loss where none is given."""
    hyperparameters = dict(case.hyperparameters)
    if "compressor" in hyperparameters:
        from decentfn import compressors

        chosen = {"top_k": lambda: compressors.top_k(0.25), "sign": compressors.sign}
        hyperparameters["compressor"] = chosen[hyperparameters["compressor"]]()
    topology = df.topology(case.topology, num_workers, **CORE_TOPOLOGIES.get(case.topology, {}))
    # Adam would turn the rounding of a small gradient into a whole step.
    plain = case.algorithm in OTHERS or "wire_dtype" in hyperparameters
    optimizer = optimizer or (df.sgd(0.05) if plain else df.adamw(0.01, weight_decay=0.1))
    return getattr(df, case.algorithm)(loss or loss_fn, optimizer, topology, bucket_mb=0.002, **hyperparameters)


def params() -> dict[str, Any]:
    """Several buckets and two dtypes; a scalar; every gradient is different from zero."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return 0.3 * torch.randn(shape, generator=random).to(dtype)

    return {
        "hidden": {"weight": normal(12, 24), "bias": normal(24)},
        "output": [normal(24, 6), normal(6, dtype=torch.float64)],
        "scale": torch.tensor(0.7),
    }


def loss_fn(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    hidden = torch.tanh(inputs @ params["hidden"]["weight"] + params["hidden"]["bias"])
    output = hidden @ params["output"][0] * params["scale"] + params["output"][1].to(torch.float32)
    error = ((output - targets) ** 2).mean()
    return error, output.mean()


def batches(num_workers: int, t: int) -> tuple[Tensor, Tensor]:
    """Every worker's own data of step t, `[N, 8, 12]` and `[N, 8, 6]`, heterogeneous."""
    random = torch.Generator().manual_seed(1000 + t)
    shift = torch.arange(num_workers).view(-1, 1, 1) / num_workers
    inputs = torch.randn(num_workers, 8, 12, generator=random) + shift
    return inputs, torch.sin(inputs[..., :6] * (1 + shift)) + 0.1 * torch.randn(num_workers, 8, 6, generator=random)


def simulated(case: Case, num_workers: int, steps: int, **compile_options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """All leaves of the stacked state after `steps`, and the losses `[steps, N]`."""
    init, step = build(case, num_workers)
    state = df.stack(init(params()), num_workers)
    step = df.simulate(step, num_workers)
    step = df.compile(step, **compile_options) if compile_options else step
    losses = []
    for t in range(steps):
        state, metrics = step(state, batches(num_workers, t), t)
        losses.append(metrics.loss)
    return trees.leaves(state), losses


def on_this_rank(case: Case, steps: int, local: int, backend: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """The same under the process group: the leaves of this rank's state and its losses."""
    here = df.init()
    init, step = build(case, here.size * local)
    state = init(params())
    if local > 1:
        state, step = df.stack(state, local), df.simulate(step, local)
    step = df.compile(step, backend=backend) if backend else step
    rows = slice(here.rank * local, (here.rank + 1) * local) if local > 1 else here.rank
    losses = []
    for t in range(steps):
        batch = tuple(x[rows] for x in batches(here.size * local, t))
        state, metrics = step(state, batch, t)
        losses.append(metrics.loss)
    return [leaf.clone() for leaf in trees.leaves(state)], losses
