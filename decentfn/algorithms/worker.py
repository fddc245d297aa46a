"""What every algorithm is made of: the loss and its gradient on buckets, the start, and the gossip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.func import grad_and_value
from typing_extensions import Unpack

from decentfn import collectives, gossip, trees
from decentfn.buckets import Buckets, flatten
from decentfn.fingerprint import agree, fingerprint
from decentfn.topologies import Topology, complete
from decentfn.trees import PyTree

LossFn = Callable[..., Any]
"""`(params, batch) -> loss` or `(loss, aux)`; with buffers `(params, buffers, batch) -> (loss, (buffers, aux))`."""


class Algorithm(NamedTuple):
    """A training algorithm: `init(params, buffers=None) -> state` and the pure `step(state, batch, t)`."""

    init: Callable[..., Any]
    step: Callable[[Any, PyTree, int | Tensor], tuple[Any, Metrics]]


class Metrics(NamedTuple):
    """What a step reports; each `[N]` first when simulated."""

    loss: Tensor  # 0-d, this worker's, at the parameters that the gradient was taken at
    aux: PyTree  # what the loss returned beside it, or None
    grad_norm: Tensor  # 0-d, l2 norm of this worker's gradient over all parameters, before clipping


class State(NamedTuple):
    """The state of one worker where an algorithm needs no more than this."""

    params: Buckets
    opt_state: PyTree
    buffers: PyTree = None


class Gradient(NamedTuple):
    """One evaluation of the loss and its gradient."""

    grads: Buckets
    buffers: PyTree
    metrics: Metrics


class Options(TypedDict, total=False):
    """What all algorithms take beside their own hyperparameters."""

    bucket_mb: float
    """Largest bucket in MiB (25); one message travels per bucket and neighbour."""
    wire_dtype: torch.dtype | None
    """Dtype of what is exchanged, if narrower than the parameters' (None: as they are)."""


class Worker:
    """One worker's means: its start, its gradient and its gossip. Holds no training state."""

    def __init__(self, loss_fn: LossFn, optimizer: Any, topology: Topology, **options: Unpack[Options]) -> None:
        if not callable(loss_fn):
            raise ValueError(f"loss_fn={loss_fn!r}: expected a function (params, batch) -> loss.")
        for method in ("init", "update"):
            if not callable(getattr(optimizer, method, None)):
                raise ValueError(
                    f"optimizer={optimizer!r} has no {method}(): an optimizer is a pair (init, update) as in optax, "
                    "for example df.adamw(3e-4)."
                )
        if not isinstance(topology, Topology):
            raise ValueError(
                f"topology={topology!r}: expected a Topology, for example df.topology('ring', num_workers=4)."
            )
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            raise TypeError(f"unknown options {unknown}; known: {sorted(Options.__annotations__)}.")
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.topology = topology
        self.everyone = complete(topology.num_workers)
        self.bucket_mb = options.get("bucket_mb", 25.0)
        self.wire_dtype = options.get("wire_dtype")

    def init(self, params: PyTree, buffers: PyTree = None) -> State:
        """The plain start: parameters, the optimizer's state, buffers. Collective."""
        x = self.start(params)
        return State(x, self.optimizer.init(x), trees.map(torch.clone, buffers))

    def start(self, params: PyTree, **agreed: Any) -> Buckets:
        """Lay out a copy of `params`; collective: makes the process groups and checks that all ranks agree.

        `agreed`: hyperparameters that decide what travels when, on which all ranks must agree too.
        """
        x = flatten(params, bucket_mb=self.bucket_mb, masks=getattr(self.optimizer, "masks", ()))
        size = collectives.world().size
        if self.topology.num_workers % size:
            raise ValueError(
                f"init: the topology has num_workers={self.topology.num_workers}, but {size} processes run; "
                f"use num_workers={size}, or a multiple of it with df.simulate."
            )
        agree(fingerprint(x.plan, self.topology, wire_dtype=self.wire_dtype, **agreed))
        for topology in (self.topology, self.everyone):
            if topology.groups is not None:
                collectives.make_groups(topology.groups)
        return x

    def gradient(self, params: Buckets, buffers: PyTree, batch: PyTree) -> Gradient:
        """The loss and its gradient at `params`, which the loss sees as the user's tree."""
        templates: list[PyTree] = []

        # Buffers and batch are arguments, not captured: torch.func forbids writing to what is captured.
        def loss_of(x: Buckets, buffers: PyTree, batch: PyTree) -> tuple[Tensor, list[Tensor]]:
            if buffers is not None:
                loss, (new_buffers, aux) = self.loss_fn(x.tree(), buffers, batch)
            else:
                returned = self.loss_fn(x.tree(), batch)
                (loss, aux), new_buffers = returned if isinstance(returned, tuple) else (returned, None), None
            if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
                shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise ValueError(
                    f"loss_fn returned {shape}: the loss is a 0-d floating-point tensor, or (loss, aux); take its mean."
                )
            # torch.func takes tensors only, so the tree around them is kept aside.
            templates.append(trees.enumerate_leaves((new_buffers, aux)))
            return loss, [torch.as_tensor(leaf) for leaf in trees.leaves((new_buffers, aux))]

        grads, (loss, extras) = grad_and_value(loss_of, has_aux=True)(params, buffers, batch)
        new_buffers, aux = trees.fill(templates[0], extras)
        return Gradient(grads, new_buffers, Metrics(loss, aux, norm(grads)))

    def post(self, x: Buckets, t: Tensor, *, when: Tensor | None = None) -> gossip.Posted:
        """Start to send `x` to the neighbours of step `t`; where `when` (0-d bool) is False, rest instead."""
        return gossip.post(x, self.topology, t, wire_dtype=self.wire_dtype, when=when)

    def mix(self, x: Buckets, t: Tensor, *, when: Tensor | None = None) -> Buckets:
        """`W x` of step `t`; `x` itself where `when` is False."""
        return gossip.collect(self.post(x, t, when=when))

    def mean(self, x: Buckets, t: Tensor, *, when: Tensor | None = None) -> Buckets:
        """The mean of `x` over all workers, the same on each (of the values rounded to the wire's dtype).

        Where `when` is False nothing travels, and the result is `x`, rounded.
        """
        return gossip.mean(x, self.everyone, t, wire_dtype=self.wire_dtype, when=when)


def norm(x: Buckets) -> Tensor:
    """The l2 norm over all buckets, 0-d float32 (float64 where a bucket is)."""
    squares = [(b.to(torch.promote_types(b.dtype, torch.float32)) ** 2).sum() for b in x]
    return torch.sqrt(sum(squares[1:], squares[0]))


def add(x: Buckets, y: Buckets) -> Buckets:
    """`x + y`, in the dtypes of `x`."""
    return trees.map(lambda a, b: (a + b).to(a.dtype), x, y)


def as_step(t: int | Tensor) -> Tensor:
    """Step numbers inside a step are 0-d int64 tensors on the CPU."""
    return torch.as_tensor(t, dtype=torch.int64)
