"""Problem and cases that Decent-DP and this library both train. Needs only numpy and torch.

A network Linear(6, 16) tanh Linear(16, 12) tanh Linear(12, 3), mean squared error, and data that every rank draws by itself.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SIZES = (6, 16, 12, 3)
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
MOMENTUM = 0.9


class Optimizer(NamedTuple):
    kind: str  # "..._ready" are the library's ready optimizers, with its decay groups
    lr: float
    weight_decay: float
    accum_iter: int = 1


class Cosine(NamedTuple):
    t_max: int
    t_warmup: int
    eta_min: float = 1e-6
    warmup_decay: float = 0.01


class Average(NamedTuple):
    after: int  # updates
    will_revert: bool
    reverts: bool


class Case(NamedTuple):
    topology: str
    local_world_size: int
    optimizer: Optimizer
    steps: int = 12
    bucket_mb: float = 25
    views: bool = True
    clip: float = 0.0
    micro: int = 1
    gamma: float = 1.0
    cosine: Cosine | None = None
    average: Average | None = None
    edges: tuple[tuple[tuple[tuple[int, int], float], ...], ...] | None = None


OPTIMIZERS = {
    "sgdm": Optimizer("sgdm", 0.1, 1e-2),
    "adamw": Optimizer("adamw", 1e-2, 0.1),
    "adamw_ready": Optimizer("adamw_ready", 1e-2, 0.1),
    "adam_ready": Optimizer("adam_ready", 1e-2, 1e-2),
    "accum_adam_ready": Optimizer("accum_adam_ready", 1e-2, 1e-2, 3),
    "accum_adamw_ready": Optimizer("accum_adamw_ready", 1e-2, 0.1, 3),
    "accum_adamw": Optimizer("accum_adamw", 1e-2, 0.1, 4),
}


def cases(n: int) -> dict[str, Case]:
    """Every case on `n` ranks: 39 on 2, 50 on 4."""
    topologies = {"complete": n, "ring": n, "one-peer-exp": n}
    if n >= 4:
        topologies["alternating-exp-ring"] = n // 2  # two nodes
    sgdm, adamw, accum = OPTIMIZERS["sgdm"], OPTIMIZERS["adamw"], OPTIMIZERS["accum_adamw_ready"]
    found = {f"{t}/{o}": Case(t, size, spec) for t, size in topologies.items() for o, spec in OPTIMIZERS.items()}
    for t, size in topologies.items():
        if t != "complete":
            found[f"{t}/sgdm_clip_1bucket"] = Case(t, size, sgdm, clip=0.2)
            found[f"{t}/sgdm_clip_2buckets"] = Case(t, size, sgdm, clip=0.2, bucket_mb=0.0005)
            found[f"{t}/adamw_accum3"] = Case(t, size, adamw, micro=3)
            found[f"{t}/accum_adamw_accum2_clip_buckets"] = Case(t, size, accum, micro=2, clip=0.2, bucket_mb=0)
    exp = Case("one-peer-exp", n, sgdm)
    pairs = [(2 * i, 2 * i + 1) for i in range(n // 2)]

    def custom(*weights: float) -> Case:
        return Case("custom", n, sgdm, edges=tuple(tuple((pair, w) for pair in pairs) for w in weights))

    return found | {
        "bucket/sgdm_per_param": exp._replace(bucket_mb=0),
        "bucket/adamw_not_a_view": exp._replace(optimizer=adamw, views=False),
        "gamma/sgdm_0.3": exp._replace(gamma=0.3),
        "gamma/adamw_0.0": exp._replace(optimizer=adamw, gamma=0.0),
        "sched/adamw_cosine": exp._replace(optimizer=adamw, cosine=Cosine(6, 3), steps=14),
        "avg/sgdm_revert": exp._replace(average=Average(6, will_revert=True, reverts=True)),
        "avg/sgdm_keep": exp._replace(average=Average(6, will_revert=False, reverts=False)),
        "avg/sgdm_forgot_revert": exp._replace(average=Average(6, will_revert=True, reverts=False)),
        "custom/same_weight_0.7": custom(0.7),
        "custom/weights_differ_by_step": custom(0.9, 0.6, 0.8),
    }


def initial_params() -> dict[str, Tensor]:
    random = np.random.RandomState(20241)
    drawn = []
    for fan_in, fan_out in zip(SIZES[:-1], SIZES[1:], strict=True):
        drawn.append(random.standard_normal((fan_out, fan_in)) / math.sqrt(fan_in))
        drawn.append(0.1 * random.standard_normal(fan_out))
    return {name: torch.from_numpy(v.astype(np.float32)) for name, v in zip(NAMES, drawn, strict=True)}


def batch(rank: int, t: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """`[8, 6]` and `[8, 3]`, other ones on every rank, in every step and micro-batch."""
    teacher = np.random.RandomState(555).standard_normal((SIZES[0], SIZES[-1]))
    random = np.random.RandomState(7 + 10000 * rank + 10 * t + micro)
    x = random.standard_normal((8, SIZES[0])) + 0.25 * rank
    y = np.tanh(x @ teacher) + 0.1 * random.standard_normal((8, SIZES[-1]))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))


def forward(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for layer in ("0", "2"):
        x = torch.tanh(x @ params[f"{layer}.weight"].mT + params[f"{layer}.bias"])
    return x @ params["4.weight"].mT + params["4.bias"]


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return ((forward(params, x) - y) ** 2).mean()


def vector(params: dict[str, Any]) -> Tensor:
    """The parameters as one vector `[355]` (`[N, 355]` when stacked), in the order of `NAMES`."""
    leaves = [params[name] for name in NAMES]
    rows = leaves[1].shape[:-1]  # a bias has one axis
    return torch.cat([leaf.reshape(*rows, -1) for leaf in leaves], dim=-1)
