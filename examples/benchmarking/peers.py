"""Peers to compare, each built from a line of text, `name:key=value,key=value`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentfn as df
from benchmarking import by_hand
from benchmarking.workloads import LEARNING_RATE, WEIGHT_DECAY, Workload

PEERS = (
    "decentfn",
    "decentfn:wire=bfloat16",
    "decentfn:mode=eager",
    "decent-dp",
    "ddp",
    "ddp:mode=compiled",
    "ddp:mode=compiled,view=True,bucket_mb=5",
    "ddp:mode=compiled,view=True,hook=bf16",
    "fsdp2",
    "periodic:every=8",
    "alone:mode=eager",
)
PEERS_OF_HOSTS = (
    "decentfn:inside=sharded",
    "decentfn:inside=sharded,wire=bfloat16",
    "hsdp",
    "fsdp2",
    "ddp:mode=compiled,view=True",
)
"""Compared beside the floors, where a worker is one rank and where it is a host of several."""


class Peer(NamedTuple):
    """A way to train: `step(t)` may leave messages in flight, `drain()` waits for them."""

    step: Callable[[int], Any]
    drain: Callable[[], None] = lambda: None
    payload: float | None = None  # planned bytes sent to other workers per step and rank, where they are known


def build(spec: str, workload: Workload, rank: int, size: int) -> Peer:
    """The peer that `spec` names.

    decentfn:algorithm=adapt_while_communicate,topology=one-peer-exp,mode=compiled|donated|eager,gradient=traced|autograd|regions,
        guard=False,wire=bfloat16,bucket_mb=25,layout=True,inside=replicated|sharded,…hyperparameters    (donated: eager, over its state; regions: by autograd,
        of a module that is compiled by itself; sharded: under fully_shard over a host's ranks; layout=False: layout_optimization=False for Inductor)
    ddp:mode=…,bucket_mb=25,view=False,hook=bf16    decent-dp:topology=one-peer-exp,mode=…,bucket_mb=25
    fsdp2 (over all ranks)    hsdp:wire=bfloat16 (fully_shard within a host, gradients averaged over hosts)    periodic:every=8,mode=…    alone:mode=eager (fused AdamW)    floor:kind=overlap,wire=bfloat16
    """
    name, _, rest = spec.partition(":")
    options = dict(part.split("=", 1) for part in rest.split(",") if part)
    if name not in BUILDERS:
        raise ValueError(f"peer {spec!r}: there is no {name!r}; choose among {', '.join(BUILDERS)}.")
    return BUILDERS[name](workload, rank, size, **{key: _value(value) for key, value in options.items()})


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _compressor(text: str) -> Any:
    """`top_k(0.01)` -> that compressor of decentfn.compressors."""
    from decentfn import compressors

    found = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    if found is None:
        raise ValueError(f"compressor={text!r}: write name or name(argument).")
    name, argument = found.groups()
    return getattr(compressors, name)(*([_value(argument)] if argument else []))


def _decentfn(
    workload: Workload,
    rank: int,
    size: int,
    *,
    algorithm: str = "adapt_while_communicate",
    topology: str = "one-peer-exp",
    mode: str = "compiled",
    gradient: str = "traced",
    guard: bool = False,
    wire: str | None = None,
    inside: str = "replicated",
    layout: bool = True,
    **hyperparameters: Any,
) -> Peer:
    world, is_sharded = df.init(), inside == "sharded"
    module = workload.fully_sharded(_mesh("decentfn:inside=sharded")["shard"]) if is_sharded else workload.module()
    if gradient == "regions":
        module.compile()
    params, buffers, loss_fn = df.functional(module, workload.criterion)
    if gradient != "traced" or is_sharded:
        loss_fn = df.autograd(loss_fn)
    if "compressor" in hyperparameters:
        hyperparameters["compressor"] = _compressor(hyperparameters["compressor"])
    if wire is not None:
        hyperparameters["wire_dtype"] = getattr(torch, wire)
    schedule = df.topology(topology, num_workers=world.num_workers)
    optimizer = df.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    built = getattr(df, algorithm)(loss_fn, optimizer, schedule, **hyperparameters)
    init, step = df.guard(built) if guard else built
    options = {} if layout else {"layout_optimization": False}
    if mode == "compiled":
        step = df.compile(step, **options)
    elif mode == "donated":
        step = df.donate(step)
    held, batches = [init(params, buffers)], workload.batches(rank)
    params.clear()
    if not is_sharded:
        for p in module.parameters():  # the state holds them; the module is a template from here on
            p.data = p.new_empty(0)

    def run(t: int) -> None:
        held[0], _ = step(held[0], batches[t % len(batches)], t)

    plan, width = held[0].params.plan, 4 if wire is None else getattr(torch, wire).itemsize
    is_plain = algorithm in ("adapt_while_communicate", "adapt_then_combine") and schedule.groups is None
    payload = plan.nbytes / 4 * width * schedule.degree if is_plain and schedule.period is not None else None
    return Peer(run, payload=payload)


def _fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _loop(
    workload: Workload, rank: int, model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer | None
) -> Callable[[int], None]:
    """The training loop that everybody writes."""
    batches = workload.batches(rank)

    def run(t: int) -> None:
        inputs, targets = batches[t % len(batches)]
        workload.criterion(model(inputs), targets).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return run


def _maybe(model: Any, mode: str) -> Any:
    if mode not in ("eager", "compiled"):
        raise ValueError(f"mode={mode!r}: eager or compiled.")
    return torch.compile(model) if mode == "compiled" else model


def _alone(workload: Workload, rank: int, size: int, *, mode: str = "eager") -> Peer:
    module = workload.module()
    return Peer(_loop(workload, rank, _maybe(module, mode), _fused(module.parameters())), payload=0.0)


def rounded_to_bf16(group, bucket):  # without annotations: DDP compares them, and here they are strings
    """PyTorch's bf16_compress_hook, which refuses to run without CUDA."""
    whole = bucket.buffer()
    narrow = whole.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: whole.copy_(done.value()[0]))


def _ddp(
    workload: Workload,
    rank: int,
    size: int,
    *,
    mode: str = "eager",
    bucket_mb: float = 25,
    view: bool = False,
    hook: str | None = None,
) -> Peer:
    module = workload.module()
    model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=view)
    if hook == "bf16":
        model.register_comm_hook(None, rounded_to_bf16)
    optimizer = _fused(module.parameters())
    return Peer(_loop(workload, rank, _maybe(model, mode), optimizer))


def _decent_dp(
    workload: Workload,
    rank: int,
    size: int,
    *,
    topology: str = "one-peer-exp",
    mode: str = "eager",
    bucket_mb: int = 25,
) -> Peer:
    try:
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Decent-DP is not installed: pip install decent-dp==0.2.3 loguru") from None

    logger.remove()
    module = workload.module()
    model = DecentralizedDataParallel(
        _maybe(module, mode),
        lambda named: _fused([p for _, p in named]),
        topology=topology,
        bucket_size_in_mb=bucket_mb,
        _local_world_size=1 if topology != "alternating-exp-ring" else None,
    )

    def drain() -> None:
        for work in model._comm_ops:
            if work is not None:
                work.wait()  # as its own global_avg does; waiting twice is harmless

    return Peer(_loop(workload, rank, model, None), drain, float(sum(p.nbytes for p in module.parameters())))


def _fsdp2(workload: Workload, rank: int, size: int) -> Peer:
    from torch.distributed.device_mesh import init_device_mesh

    model = workload.fully_sharded(init_device_mesh(workload.device, (size,)))
    return Peer(_loop(workload, rank, model, _fused(model.parameters())))


def _hsdp(workload: Workload, rank: int, size: int, *, wire: str = "float32") -> Peer:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = workload.fully_sharded(_mesh("hsdp"), mp_policy=MixedPrecisionPolicy(reduce_dtype=getattr(torch, wire)))
    return Peer(_loop(workload, rank, model, _fused(model.parameters())))


def _mesh(spec: str) -> Any:
    mesh = df.init().mesh
    if mesh is None:
        raise ValueError(f"peer {spec}: a worker is several ranks; say --ranks-per-host 2 or more.")
    return mesh


def _periodic(workload: Workload, rank: int, size: int, *, every: int = 8, mode: str = "eager") -> Peer:
    """Local steps, and the mean of all parameters every so many of them (local SGD)."""
    module = workload.module()
    params = [p.data for p in module.parameters()]
    local = _loop(workload, rank, _maybe(module, mode), _fused(module.parameters()))

    def run(t: int) -> None:
        local(t)
        if (t + 1) % every == 0 and size > 1:
            flat = torch.cat([p.flatten() for p in params]).div_(size)
            dist.all_reduce(flat)
            for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.copy_(mean.view_as(p))

    return Peer(run, payload=2 * (size - 1) / size * sum(p.nbytes for p in params) / every)


def _floor(workload: Workload, rank: int, size: int, *, kind: str, wire: str = "float32") -> Peer:
    step, payload = by_hand.floor(kind, workload, rank, getattr(torch, wire))
    return Peer(step, payload=payload)


BUILDERS: dict[str, Callable[..., Peer]] = {
    "decentfn": _decentfn,
    "ddp": _ddp,
    "decent-dp": _decent_dp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "periodic": _periodic,
    "alone": _alone,
    "floor": _floor,
}


def wires(specs: list[str]) -> list[str]:
    """The dtypes that travel among these peers, so that each finds its floor."""
    found = {re.search(r"wire=(\w+)", spec) for spec in specs}
    return ["float32", *sorted({f.group(1) for f in found if f} - {"float32"})]


def with_floors(specs: list[str], size: int) -> list[str]:
    """The floors first, then the peers."""
    floors = [f"floor:kind={kind}" for kind in ("gradient", "update", "compute")]
    if size > 1:
        for wire in wires(specs):
            tail = "" if wire == "float32" else f",wire={wire}"
            floors += [f"floor:kind={kind}{tail}" for kind in ("exchange", "overlap", "raw")]
    return [*dict.fromkeys([*floors, *specs])]
