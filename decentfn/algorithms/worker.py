"""What every algorithm is made of: the loss and its gradient on buckets, the start, and the gossip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from decentfn import collectives, gossip, noise, trees
from decentfn.algorithms.expected import checked, require_order
from decentfn.algorithms.hyperparameters import at
from decentfn.buckets import Buckets, Plan, all_finite, flatten, global_norm, require_bucket_mb
from decentfn.fingerprint import agree, fingerprint
from decentfn.gradient import LossFn, evaluate, require_loss
from decentfn.replicas import require_equal
from decentfn.scalars import as_step
from decentfn.topologies import Topology, complete
from decentfn.torch_private import functorch
from decentfn.transforms.basic import Scalar
from decentfn.transforms.loss_scale import DynamicLossScale
from decentfn.transforms.transform import require_pair, wants_mix
from decentfn.trees import PyTree
from decentfn.words import brief

__all__ = [
    "Algorithm",
    "Gradient",
    "LossFn",
    "Metrics",
    "Options",
    "State",
    "Worker",
    "as_step",
]


Step = Callable[[Any, PyTree, "int | Tensor"], tuple[Any, Any]]
"""`(state, batch, t) -> (state, metrics)`, pure."""


class _Pair(NamedTuple):
    init: Callable[..., Any]
    step: Callable[[Any, PyTree, int | Tensor], tuple[Any, Metrics]]


class Algorithm(_Pair):
    """A training algorithm: `init(params, buffers=None) -> state` and the pure `step(state, batch, t)`.

    What the step draws from PyTorch's generators follows from torch's seed, `t` and the worker.
    """

    def __new__(cls, init: Callable[..., Any], step: Step) -> Algorithm:
        """The pair, whose step draws by itself where it is not compiled (`df.compile` sees to that)."""
        if getattr(step, "draws", False):
            return super().__new__(cls, init, step)

        @functools.wraps(step)
        def drawing(state: Any, batch: PyTree, t: int | Tensor) -> tuple[Any, Metrics]:
            if torch.compiler.is_compiling():
                return step(state, batch, t)
            require_order(state, batch, t)
            t = as_step(t)
            if functorch.has_no_value(t):
                return step(state, batch, t)
            with noise.torch_draws(t, collectives.world().rank):
                return step(state, batch, t)

        drawing.__dict__["draws"] = True
        return super().__new__(cls, init, drawing)


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

    def with_params(self, x: Buckets) -> State:
        """Nothing else knows parameters."""
        return self._replace(params=x)


class Gradient(NamedTuple):
    """One evaluation of the loss and its gradient."""

    grads: Buckets
    buffers: PyTree
    loss: Tensor
    aux: PyTree

    @property
    def metrics(self) -> Metrics:
        """What a step reports. Ask last: where the norm is computed after the update, one loop does both."""
        return Metrics(self.loss, self.aux, global_norm(self.grads))


class Options(TypedDict, total=False):
    """What all algorithms take beside their own hyperparameters."""

    bucket_mb: float
    """Largest bucket in MiB (25); one message travels per bucket and neighbour."""
    wire_dtype: torch.dtype | None
    """Dtype of what is exchanged, if narrower than the parameters' (None: as they are). Trackers, corrections and other
    memory are kept in float32 or wider, but travel no wider than the parameters."""
    average_buffers: bool
    """Mix floating-point buffers (BatchNorm's statistics) as the parameters are mixed, in their own dtype (False: every
    worker keeps its own; `df.consensus_buffers` averages them for an evaluation). Frozen parameters are left alone."""


DEFAULTS = {"bucket_mb": 25.0, "wire_dtype": None, "average_buffers": False}


class Worker:
    """One worker's means: its start, its gradient and its gossip. Holds no training state.

    Args:
        loss_fn: the loss, perhaps accumulated.
        optimizer: a pair `(init, update)`.
        topology: the schedule.
        understands: what the algorithm can do beside the plain: "loss_scale" (it updates by the gradient itself, with
            `self.update`), "mix" (it passes `heard` to `self.update`), "average_buffers" (its step is wrapped by
            `self.mixing_buffers` or `self.then_mixing_buffers`). Asking another algorithm for these is an error.
        options: see `Options`.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: Any,
        topology: Topology,
        *,
        understands: Collection[str] = (),
        **options: Unpack[Options],
    ) -> None:
        require_loss("loss_fn", loss_fn)
        require_pair("optimizer", optimizer)
        if not isinstance(topology, Topology):
            raise ValueError(
                f"topology={brief(topology)}: expected a Topology, for example df.topology('ring', num_workers=4)."
            )
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            raise TypeError(f"unknown options {unknown}; known: {sorted(Options.__annotations__)}.")
        _require_understood(understands, optimizer, options)
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.average_buffers = options.get("average_buffers", DEFAULTS["average_buffers"])
        self.topology = topology
        self.everyone = complete(topology.num_workers)
        self.bucket_mb = options.get("bucket_mb", DEFAULTS["bucket_mb"])
        require_bucket_mb(self.bucket_mb)
        self.wire_dtype = options.get("wire_dtype")
        _require_floating(self.wire_dtype)

    def algorithm(self, init: Callable[..., Any], step: Step) -> Algorithm:
        """The pair, which looks at what it is given: the state is one that this `init` would lay out."""
        return Algorithm(*checked(init, step, self.loss_fn))

    def init(self, params: PyTree, buffers: PyTree = None) -> State:
        """The plain start: parameters, the optimizer's state, buffers. Collective."""
        x = self.start(params)
        return State(x, self.optimizer.init(x), trees.map(torch.clone, buffers))

    def init_equal(self, params: PyTree, buffers: PyTree = None) -> State:
        """The plain start of replicas that must be equal, checked bit by bit. Collective."""
        state = self.init(params, buffers)
        if isinstance(params, Plan):
            return state
        require_equal("all_reduce: init(params, buffers)", {"params": params, "buffers": buffers})
        return state

    def start(self, params: PyTree) -> Buckets:
        """Lay out a copy of `params`; collective: makes the process groups and checks that all ranks agree.

        Of a plan, its buckets without values, and nothing is collective: what a state of that plan looks like.
        """
        if isinstance(params, Plan):
            return Buckets([torch.empty(b.numel, dtype=b.dtype, device="meta") for b in params.buckets], params)
        masks = getattr(self.optimizer, "masks", ())
        x = flatten(params, bucket_mb=self.bucket_mb, masks=masks)
        _require_narrower(self.wire_dtype, x)
        size = collectives.world().size
        if self.topology.num_workers % size:
            raise ValueError(
                f"init: the topology has num_workers={self.topology.num_workers}, but {size} processes run; "
                f"use num_workers={size}, or a multiple of it with df.simulate."
            )
        agree(fingerprint(x.plan, self.topology, masks))
        for topology in (self.topology, self.everyone):
            if topology.groups is not None:
                collectives.make_groups(topology.groups)
        collectives.compare_steps()
        return x

    def gradient(self, params: Buckets, buffers: PyTree, batch: PyTree, opt_state: PyTree = None) -> Gradient:
        """The loss and its gradient at `params`, which the loss sees as the user's tree.

        `opt_state` is needed where the optimizer scales the loss; loss and gradient come back unscaled.
        """
        scale = opt_state.scale if isinstance(self.optimizer, DynamicLossScale) else None
        e = evaluate(self.loss_fn, params, buffers, batch, scale)
        return Gradient(e.grads, e.buffers, e.loss, e.aux)

    def update(
        self, grads: Buckets, opt_state: PyTree, x: Buckets, t: Tensor, *, heard: gossip.Posted | None = None
    ) -> tuple[Buckets, PyTree]:
        """The optimizer's update and new state at `x`, with what its type asks for beside the gradient.

        Args:
            grads: the gradient.
            opt_state: the optimizer's state.
            x: where the optimizer sees the parameters.
            t: 0-d int64 on the CPU.
            heard: what was posted in this step and is now waited for; for optimizers that look at the mix.
        """
        optimizer = self.optimizer
        mix = (gossip.mix_context(heard, self.topology, t),) if wants_mix(optimizer) and heard is not None else ()
        if isinstance(optimizer, DynamicLossScale) and optimizer.agree:
            update: Callable[..., Any] = optimizer.update
            return update(grads, opt_state, x, *mix, overflow=self._anyone(~all_finite(grads), t))
        return optimizer.update(grads, opt_state, x, *mix)

    def _anyone(self, claim: Tensor, t: Tensor) -> Tensor:
        """Whether `claim` (0-d bool) holds on any worker, the same on each."""
        ones = gossip.mean(_bare([claim.to(torch.float32).view(1)]), self.everyone, t)
        return ones[0][0] > 0

    def mixing_buffers(self, step: Step, gamma: Scalar) -> Step:
        """The step; where the options say so, buffers are mixed while it runs, b' being the loss's:

        `b⁺ = (1 - γ) b + γ W b + (b' - b)`.
        """

        @functools.wraps(step)
        def mixing(state: Any, batch: PyTree, t: int | Tensor) -> tuple[Any, Metrics]:
            t = as_step(t)
            old = self._floats(state.buffers)
            if not old:
                return step(state, batch, t)
            travelling = gossip.post(_by_dtype(old), self.topology, t)
            state, metrics = step(state, batch, t)
            mixed = _pieces(gossip.collect(travelling, at(gamma, t)), old)
            heard = zip(mixed, old, self._floats(state.buffers), strict=True)
            return self._with_floats(state, [m + (new - b) for m, b, new in heard]), metrics

        return mixing if self.average_buffers else step

    def then_mixing_buffers(self, step: Step, topology: Topology) -> Step:
        """The step; where the options say so, buffers are mixed after it: `b⁺ = W b'`, b' the loss's, W the topology's."""

        @functools.wraps(step)
        def mixing(state: Any, batch: PyTree, t: int | Tensor) -> tuple[Any, Metrics]:
            state, metrics = step(state, batch, t)
            new = self._floats(state.buffers)
            if not new:
                return state, metrics
            mixed = gossip.collect(gossip.post(_by_dtype(new), topology, as_step(t)))
            return self._with_floats(state, [m.clone() for m in _pieces(mixed, new)]), metrics

        return mixing if self.average_buffers else step

    def _travels(self, buffers: PyTree) -> list[bool]:
        """For every leaf of the buffers whether it is averaged: floating point and not frozen."""
        leaves, frozen = trees.leaves(buffers), getattr(self.loss_fn, "frozen", frozenset())
        names = sorted(buffers) if frozen and isinstance(buffers, dict) else [None] * len(leaves)
        return [leaf.is_floating_point() and name not in frozen for leaf, name in zip(leaves, names, strict=True)]

    def _floats(self, buffers: PyTree) -> list[Tensor]:
        pairs = zip(trees.leaves(buffers), self._travels(buffers), strict=True)
        return [leaf for leaf, travels in pairs if travels]

    def _with_floats(self, state: Any, new: list[Tensor]) -> Any:
        left = iter(new)
        pairs = zip(trees.leaves(state.buffers), self._travels(state.buffers), strict=True)
        leaves = [next(left) if travels else leaf for leaf, travels in pairs]
        return state._replace(buffers=trees.fill(trees.enumerate_leaves(state.buffers), leaves))

    def post(self, x: Buckets, t: Tensor, *, when: Tensor | None = None) -> gossip.Posted:
        """Start to send `x` to the neighbours of step `t`; where `when` (0-d bool) is False, rest instead.

        What is kept wider than the parameters travels in their dtypes; the own share is mixed unrounded.
        """
        pairs = zip(x, x.plan.buckets, strict=True)
        told = Buckets([gossip.narrow(Buckets([b], x.plan), plan.dtype)[0] for b, plan in pairs], x.plan)
        return gossip.post(told, self.topology, t, wire_dtype=self.wire_dtype, when=when)._replace(own=x)

    def mix(self, x: Buckets, t: Tensor, *, when: Tensor | None = None) -> Buckets:
        """`W x` of step `t`; `x` itself where `when` is False."""
        return gossip.collect(self.post(x, t, when=when))

    def mean(self, x: Buckets, t: Tensor, *, when: Tensor | None = None) -> Buckets:
        """The mean of `x` over all workers, the same on each (of the values rounded to the wire's dtype).

        Where `when` is False nothing travels, and the result is `x`, rounded.
        """
        return gossip.mean(x, self.everyone, t, wire_dtype=self.wire_dtype, when=when)


def _bare(tensors: list[Tensor]) -> Buckets:
    """Vectors that travel like buckets, without a tree behind them."""
    return Buckets(tensors, Plan((), None))


def _require_floating(wire_dtype: object) -> None:
    if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
        raise ValueError(
            f"wire_dtype={brief(wire_dtype)}: expected a floating-point torch.dtype narrower than the parameters', such as "
            "torch.bfloat16, or None to send them as they are."
        )


def _require_narrower(wire_dtype: torch.dtype | None, x: Buckets) -> None:
    if wire_dtype is not None and all(bucket.dtype.itemsize < wire_dtype.itemsize for bucket in x):
        raise ValueError(
            f"wire_dtype={wire_dtype} is wider than every parameter ({x[0].dtype}), so all travel as they are; leave it out."
        )


def _by_dtype(tensors: list[Tensor]) -> Buckets:
    """One vector for each dtype, the tensors of it one after another: a message for each, not for each tensor."""
    return _bare([torch.cat([x.reshape(-1) for x in tensors if x.dtype == d]) for d in _dtypes(tensors)])


def _pieces(vectors: Buckets, like: list[Tensor]) -> list[Tensor]:
    """The tensors again that `_by_dtype(like)` put together."""
    split = {
        d: iter(vector.split([x.numel() for x in like if x.dtype == d]))
        for d, vector in zip(_dtypes(like), vectors, strict=True)
    }
    return [next(split[x.dtype]).view(x.shape) for x in like]


def _dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return list(dict.fromkeys(x.dtype for x in tensors))


def _require_understood(understands: Collection[str], optimizer: Any, options: Mapping[str, Any]) -> None:
    """What the user asks for must be what the algorithm can do."""
    asked = {
        "loss_scale": isinstance(optimizer, DynamicLossScale),
        "mix": wants_mix(optimizer),
        "average_buffers": bool(options.get("average_buffers", False)),
    }
    for feature, is_asked in asked.items():
        if is_asked and feature not in understands:
            raise ValueError(_NOT_UNDERSTOOD[feature])


_NOT_UNDERSTOOD = {
    "loss_scale": "optimizer=dynamic_loss_scale(...): this algorithm does not scale its loss yet, nor keep an overflowing "
    "gradient out of what it remembers and sends; use bfloat16, which needs no scale, or adapt_while_communicate, "
    "adapt_then_combine or all_reduce.",
    "mix": "optimizer=MixAware(...): this algorithm updates before it has heard its neighbours; use "
    "adapt_while_communicate.",
    "average_buffers": "average_buffers=True: this algorithm does not mix parameters themselves in every step, so neither "
    "does it mix buffers; average them where you evaluate, with df.consensus_buffers(state), or use "
    "adapt_while_communicate, adapt_then_combine or all_reduce.",
}
