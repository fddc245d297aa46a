"""Steps written by hand without any library, to measure the cost of a library."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad_and_value

import decentfn as df
from benchmarking.workloads import LEARNING_RATE, WEIGHT_DECAY, Workload

B1, B2, EPS = 0.9, 0.999, 1e-8
MESSAGE_BYTES = 25 * 2**20
MANY = 100
"""From so many tensors on, the parameters are one flat vector: compiling an update of each takes minutes."""


class ByHand:
    """A workload's parameters and moments, and its three compiled functions: gradient, update, both in one graph."""

    def __init__(self, workload: Workload) -> None:
        module = workload.module()
        params = {name: p.detach().clone() for name, p in module.named_parameters()}
        loss_fn, shapes = workload.loss_fn(module), {name: p.shape for name, p in params.items()}
        is_flat = len(params) >= MANY

        def tree(leaves: list[Tensor]) -> dict[str, Tensor]:
            pieces = leaves[0].split([prod(shape) for shape in shapes.values()]) if is_flat else leaves
            return {n: piece.view(shape) for (n, shape), piece in zip(shapes.items(), pieces, strict=True)}

        def gradient(leaves: list[Tensor], batch: Any) -> tuple[list[Tensor], Tensor]:
            return grad_and_value(lambda x, batch: loss_fn(tree(x), batch))(leaves, batch)

        def step(x: list[Tensor], m: list[Tensor], v: list[Tensor], corrections: Tensor, batch: Any) -> Tensor:
            grads, loss = gradient(x, batch)
            adamw(x, m, v, corrections, grads, None)
            return loss

        self._start([torch.cat([p.flatten() for p in params.values()])] if is_flat else list(params.values()))
        self.gradient = torch.compile(gradient, fullgraph=True)
        self.step = torch.compile(step, fullgraph=True)

    def _start(self, x: list[Tensor]) -> None:
        self.x = x
        self.m, self.v = ([torch.zeros_like(p) for p in x] for _ in range(2))
        self.count = 0
        self.update = torch.compile(adamw, fullgraph=True)
        self.nbytes = sum(p.nbytes for p in x)

    def state(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        """Inputs of the next update: parameters, moments, and bias corrections.

        The corrections are computed outside the graph, where Inductor would recompute them for every 16 elements.
        """
        self.count += 1
        return self.x, self.m, self.v, self._corrections()

    def _corrections(self) -> Tensor:
        numbers = torch.tensor([1 / (1 - B1**self.count), (1 - B2**self.count) ** -0.5])
        device = self.x[0].device
        # Pinned: a copy from other memory would wait for the GPU in every step. Nothing else refers to this memory, and
        # PyTorch's allocator does not give it out again before the copy is done.
        return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


class ShardedByHand(ByHand):
    """The same where a worker is several processes: FSDP2's gradient, and the update of the shards in FSDP2's own storage."""

    def __init__(self, workload: Workload, mesh: Any) -> None:
        module = workload.fully_sharded(mesh)
        shards: list[Any] = list(module.parameters())

        def gradient(leaves: list[Tensor], batch: Any) -> tuple[list[Tensor], Tensor]:
            inputs, targets = batch
            loss = workload.criterion(module(inputs), targets)
            loss.backward()
            grads = [p.grad.to_local() for p in shards]
            for p in shards:
                p.grad = None
            return grads, loss.detach()

        def step(x: list[Tensor], m: list[Tensor], v: list[Tensor], corrections: Tensor, batch: Any) -> Tensor:
            grads, loss = gradient(x, batch)
            self.update(x, m, v, corrections, grads, None)
            return loss

        self._start([p.detach().to_local() for p in shards])
        self.gradient, self.step = gradient, step


def adamw(
    x: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    corrections: Tensor,
    grads: list[Tensor],
    heard: list[Tensor] | None,
) -> None:
    """AdamW in place; with `heard` the parameters are averaged with it in the same pass."""
    c1, c2 = corrections
    for i, (p, mi, vi, g) in enumerate(zip(x, m, v, grads, strict=True)):
        mi.mul_(B1).add_(g, alpha=1 - B1)
        vi.mul_(B2).addcmul_(g, g, value=1 - B2)
        mixed = p if heard is None else 0.5 * p + 0.5 * heard[i]
        p.copy_(mixed - LEARNING_RATE * (mi * c1 / (torch.sqrt(vi) * c2 + EPS) + WEIGHT_DECAY * p))


class BareExchange:
    """Sends and receives of `nbytes` with this step's partner, receives first; nothing else."""

    def __init__(
        self,
        nbytes: int,
        rank: int,
        size: int,
        dtype: torch.dtype = torch.float32,
        group: Any = None,
        device: str = "cpu",
    ) -> None:
        elements = nbytes // 4  # as many as there are parameters
        per_message = MESSAGE_BYTES // dtype.itemsize
        lengths = [min(per_message, elements - start) for start in range(0, elements, per_message)]
        self.out = [torch.zeros(length, dtype=dtype, device=device) for length in lengths]
        self.inbox = [torch.zeros(length, dtype=dtype, device=device) for length in lengths]
        self.rank, self.size = rank, size
        self.group = group or dist.group.WORLD
        self.works: list[Any] = []

    def partner(self, t: int) -> int:
        """`rank XOR 2^k` for a power of two, else neighbors in turn."""
        if self.size & (self.size - 1) == 0:
            return self.rank ^ (1 << t % (self.size.bit_length() - 1))
        return (self.rank + (1 if (self.rank + t) % 2 == 0 else -1)) % self.size

    def post(self, t: int) -> None:
        if self.size == 1:
            return
        group, partner = self.group, self.partner(t)
        if self.out[0].device.type != "cpu":  # NCCL takes the messages of both directions together, or each would wait
            both = [(dist.irecv, self.inbox), (dist.isend, self.out)]
            operations = [dist.P2POp(way, x, group=group, group_peer=partner) for way, xs in both for x in xs]
            self.works = dist.batch_isend_irecv(operations)
            return
        self.works = [group.recv([tensor], partner, 0) for tensor in self.inbox]
        self.works += [group.send([tensor], partner, 0) for tensor in self.out]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def floor(kind: str, workload: Workload, rank: int, wire: torch.dtype) -> tuple[Callable[[int], Any], float]:
    """`(step, payload bytes)` of a floor: gradient, update, compute (both), exchange, allreduce, overlap or raw.

    overlap: post, gradient, wait. raw: post, gradient, wait, update with the mixing in it. allreduce: of all parameters over
    the workers and nothing else, what DDP or HSDP cannot undercut.
    """
    world, batches = df.init(), workload.batches(rank)
    if world.mesh is None:
        hand, exchange_among = ByHand(workload), None
    else:
        hand, exchange_among = ShardedByHand(workload, world.mesh["shard"]), world.mesh["worker"].get_group()
    exchange = BareExchange(hand.nbytes, world.worker, world.num_workers, wire, exchange_among, workload.device)
    is_silent = world.num_workers == 1 or kind in ("gradient", "update", "compute")
    payload = 0.0 if is_silent else float(sum(b.nbytes for b in exchange.out))
    if kind == "allreduce":
        payload *= 2 * (world.num_workers - 1) / world.num_workers
    grads = [torch.full_like(p, 1e-3) for p in hand.x]
    heard = [p.clone() for p in hand.x]

    def exchange_alone(t: int) -> None:
        exchange.post(t)
        exchange.wait()

    def allreduce(t: int) -> None:
        for tensor in exchange.out:
            dist.all_reduce(tensor, group=exchange.group)

    def overlap(t: int) -> list[Tensor]:
        exchange.post(t)
        grads, _ = hand.gradient(hand.x, batches[t % len(batches)])
        exchange.wait()
        return grads

    steps: dict[str, Callable[[int], Any]] = {
        "gradient": lambda t: hand.gradient(hand.x, batches[t % len(batches)]),
        "update": lambda t: hand.update(*hand.state(), grads, heard),
        "compute": lambda t: hand.step(*hand.state(), batches[t % len(batches)]),
        "exchange": exchange_alone,
        "allreduce": allreduce,
        "overlap": overlap,
        "raw": lambda t: hand.update(*hand.state(), overlap(t), heard),
    }
    return steps[kind], payload
