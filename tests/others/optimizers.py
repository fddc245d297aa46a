"""Optimizers of other packages by `df.from_torch`, against themselves in a plain loop."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.others.harness import Matrices, Net, batches, compare_optimizer, optimizer, plain_optimizer, slower
from tests.others.rows import Differs, check, is_ours

F32 = torch.float32


def kind(package: str, name: str) -> Any:
    return getattr(importlib.import_module(package), name)


def tensors(named: Any) -> list[Any]:
    return [p for _, p in named]


def put(named: Any, package: str, name: str, **options: Any) -> Any:
    return kind(package, name)(tensors(named), **options)


class Wide(torch.nn.Module):
    """Matrices of 4,096 elements or more, which optimizers of 8 bits quantize."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn((8, 1024), generator=draw, dtype=dtype))
        self.second = torch.nn.Parameter(torch.randn((1024, 4), generator=draw, dtype=dtype) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first) @ self.second


def simple(packages: str, what: str, module: str, name: str, *, net: Any = Net, dtype: Any = torch.float64, special: str = "", **options: Any) -> None:  # fmt: skip
    """A row of an optimizer that takes a list of parameters."""

    def make(named: Any) -> Any:
        return put(named, module, name, **options)

    optimizer(packages, what, net=net, dtype=dtype, special=special)(make)


simple("lion-pytorch", "`Lion`", "lion_pytorch", "Lion", lr=0.01, weight_decay=0.1)
simple("prodigyopt", "`Prodigy`", "prodigyopt", "Prodigy", weight_decay=0.1)
simple("pytorch-optimizer", "`Lamb`", "pytorch_optimizer", "Lamb", lr=0.05)
simple("pytorch-optimizer", "`AdEMAMix`", "pytorch_optimizer", "AdEMAMix", lr=0.05)
simple("pytorch-optimizer", "`Ranger`: Lookahead inside", "pytorch_optimizer", "Ranger", lr=0.05)
simple("pytorch-optimizer", "`SOAP`", "pytorch_optimizer", "SOAP", lr=0.01)
simple("timm", "`Lamb`", "timm.optim", "Lamb", lr=0.05)
simple("timm", "`Adan`", "timm.optim", "Adan", lr=0.05)
simple("timm", "`NAdamW`", "timm.optim", "NAdamW", lr=0.05)
simple("madgrad", "`MADGRAD`", "madgrad", "MADGRAD", lr=0.05)
simple("dadaptation", "`DAdaptAdam`", "dadaptation", "DAdaptAdam")
simple("dadaptation", "`DAdaptSGD`", "dadaptation", "DAdaptSGD")
simple("torch_optimizer", "`DiffGrad`", "torch_optimizer", "DiffGrad", lr=0.05)
simple("torch_optimizer", "`Shampoo`", "torch_optimizer", "Shampoo", lr=0.05)
simple("torch_optimizer", "`AdaMod`", "torch_optimizer", "AdaMod", lr=0.05)
simple("torchao", "`AdamW8bit`, small tensors in 32 bits", "torchao.optim", "AdamW8bit", dtype=F32, lr=0.05)
simple("torchao", "`AdamW8bit`, tensors of 4,096 elements in 8 bits", "torchao.optim", "AdamW8bit", net=Wide, dtype=F32, special="bitsandbytes' `AdamW8bit`", lr=0.05)  # fmt: skip
simple("bitsandbytes", "`AdamW8bit`, small tensors in 32 bits", "bitsandbytes.optim", "AdamW8bit", dtype=F32, lr=0.05)
simple(
    "bitsandbytes", "`Lion8bit`, 8 bits for all", "bitsandbytes.optim", "Lion8bit", dtype=F32, lr=0.01, min_8bit_size=1
)
simple("bitsandbytes", "`AdamW8bit`, tensors of 4,096 elements in 8 bits", "bitsandbytes.optim", "AdamW8bit", net=Wide, dtype=F32, lr=0.05)  # fmt: skip
simple("heavyball", "`AdamW`", "heavyball", "AdamW", dtype=F32, lr=0.05)
simple("heavyball", "`SFAdamW`, schedule-free", "heavyball", "SFAdamW", dtype=F32, lr=0.05)
simple("transformers", "`Adafactor` with a rate", "transformers.optimization", "Adafactor", dtype=F32, lr=0.05, relative_step=False, scale_parameter=False)  # fmt: skip
simple("transformers", "`Adafactor` with its own rate", "transformers.optimization", "Adafactor", dtype=F32)
simple("muon-optimizer", "`SingleDeviceMuon`", "muon", "SingleDeviceMuon", net=Matrices, dtype=F32, lr=0.02)
simple("mup", "`MuAdam` without shapes", "mup", "MuAdam", lr=0.05, special="`set_base_shapes`, then `MuAdam`")
simple("geoopt", "`RiemannianAdam` on flat parameters", "geoopt.optim", "RiemannianAdam", lr=0.05)
simple("torch", "`Muon`", "torch.optim", "Muon", net=Matrices, lr=0.02)
simple("torch", "`Adafactor`", "torch.optim", "Adafactor", lr=0.05)
simple("torch", "`LBFGS`", "torch.optim", "LBFGS", lr=0.5)


def to_eval(optimizer: Any) -> None:
    optimizer.eval()


@optimizer("schedulefree", "`AdamWScheduleFree`", evaluated=to_eval)
def schedule_free_adamw(named: Any) -> Any:
    made = put(named, "schedulefree", "AdamWScheduleFree", lr=0.05, warmup_steps=3)
    made.train()
    return made


@optimizer("schedulefree", "`SGDScheduleFree`", evaluated=to_eval)
def schedule_free_sgd(named: Any) -> Any:
    made = put(named, "schedulefree", "SGDScheduleFree", lr=0.05)
    made.train()
    return made


@optimizer("adam-mini", "`Adam_mini`")
def adam_mini(named: Any) -> Any:
    return kind("adam_mini", "Adam_mini")(named, lr=0.05, dim=8, n_heads=2)


@optimizer("torch_optimizer", "`Lookahead` around Yogi", steps=7)
def lookahead(named: Any) -> Any:
    return kind("torch_optimizer", "Lookahead")(put(named, "torch_optimizer", "Yogi", lr=0.05), k=3)


@optimizer("timm", "groups of `param_groups_weight_decay`, by shape")
def groups(named: Any) -> Any:
    decayed = [p for _, p in named if p.dim() > 1]
    rest = [p for _, p in named if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=0.05)


@optimizer("torch", "one rate per layer, by position")
def by_position(named: Any) -> Any:
    return torch.optim.SGD([{"params": [p], "lr": 0.2 * 0.3**k} for k, (_, p) in enumerate(named)])


class Marked(Net):
    """With a parameter that says of itself that it does not decay."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype)
        self.second._no_weight_decay = True  # type: ignore[attr-defined]


@optimizer("mambapy", "groups by `p._no_weight_decay`, as state-space models mark parameters", net=Marked)
def by_attribute(named: Any) -> Any:
    marked = [p for _, p in named if getattr(p, "_no_weight_decay", False)]
    rest = [p for _, p in named if not getattr(p, "_no_weight_decay", False)]
    return torch.optim.AdamW(
        [{"params": marked, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}][not marked :], lr=0.05
    )


def shaped(dtype: torch.dtype) -> torch.nn.Module:
    """A module with the base shapes of mup."""
    mup = importlib.import_module("mup")
    nets = [torch.nn.Sequential(torch.nn.Linear(8, w), torch.nn.Tanh(), mup.MuReadout(w, 4)) for w in (4, 6, 8)]
    base, net, delta = (n.to(dtype) for n in nets)
    mup.set_base_shapes(net, base, delta=delta, rescale_params=False)
    torch.manual_seed(0)
    for p in net.parameters():
        torch.nn.init.normal_(p)
    return net


@optimizer("mup", "`MuAdam` with base shapes", net=shaped)
def mu_adam(named: Any) -> Any:
    return put(named, "mup", "MuAdam", lr=0.05)


@check("optimizers", "muon-optimizer", "`Muon` of several ranks, which gathers by itself", "alone")
def communicating() -> None:
    import torch.distributed as dist

    import decentfn as df

    def make(named: Any) -> Any:
        return put(named, "muon", "Muon", lr=0.02)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    params, buffers, loss_fn = df.functional(Matrices(F32), forward=lambda m, x: m(x).square().mean())
    init, step = df.adapt_then_combine(loss_fn, df.from_torch(make), df.topologies.idle(1))
    try:
        step(init(params, buffers), batches(1, 1, F32)[0, 0], 0)
    finally:
        dist.destroy_process_group()
    raise Differs("it gathers other ranks' parameters in its step, and nobody says so")


def runs(make: Any) -> bool:
    """Whether the optimizer itself takes a step in a plain loop."""
    try:
        plain_optimizer(Net, make, None, batches(1, 1, torch.float64), None)
    except Exception:
        return False
    return True


@check("optimizers", "pytorch-optimizer", "each optimizer that it exports", "alone", "with a scheduler")
def every_one(way: str) -> None:
    package, wrong, raw = importlib.import_module("pytorch_optimizer"), [], []
    every = [n for n, k in vars(package).items() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)]
    for name in sorted(set(every) - {"BaseOptimizer"}):

        def make(named: Any, name: str = name) -> Any:
            made = getattr(package, name)(tensors(named), lr=0.01)
            if name.startswith("ScheduleFree"):
                made.train()
            return made

        schedule = slower if way == "with a scheduler" else None
        try:
            evaluated = to_eval if name.startswith("ScheduleFree") else None
            compare_optimizer(Net, make, schedule, way, 5, torch.float64, evaluated)
        except Differs:
            wrong.append(name)
        except Exception as error:
            if not is_ours(error, str(error)) and runs(make):
                raw.append(f"{name}: {type(error).__name__}")
    if wrong or raw:
        raise Differs(f"{len(wrong)} wrong: {', '.join(wrong)}; {len(raw)} raw: {', '.join(raw)}")
