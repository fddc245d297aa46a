"""Building blocks of every algorithm: the start, the gradient, the optimizer's update and the gossip of one worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.profiler import record_function

from decentfn.comm import collectives, gossip
from decentfn.comm.fingerprint import require_equal
from decentfn.comm.gossip import Posted, collect
from decentfn.core import PyTree, buckets, context, trees
from decentfn.core.buckets import Buckets, each
from decentfn.gradient import (
    DynamicLossScale,
    Gradient,
    LossFn,
    Weight,
    evaluate,
    nothing_like,
    partition_of_loss,
    where_good,
)
from decentfn.kit.options import DEFAULTS, Options, require_arguments
from decentfn.kit.preconditions import fast_gossip_momentum, require_whole
from decentfn.kit.start import lay_out
from decentfn.kit.state import Local, Metrics, State, refuse_result
from decentfn.kit.step import Algorithm, Step
from decentfn.optim.transforms.basic import current_rate
from decentfn.optim.transforms.transform import wants_mix
from decentfn.topologies import Topology, complete


class Worker:
    """Building blocks of one worker's step. Stateless.

    Args:
        loss_fn: the loss, possibly accumulated or scaled.
        optimizer: a pair `(init, update)`.
        topology: the schedule.
        gossip_rounds: R, the rounds of each `mix`, >= 1; more than one need one symmetric mixing matrix.
        shows_mix: True if the algorithm collects before it updates and passes `posted` to `update`; otherwise a
            mix-aware optimizer is refused.
        options: see `Options`.

    Raises:
        ValueError, TypeError: an argument of the wrong kind.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: Any,
        topology: Topology,
        *,
        gossip_rounds: int = 1,
        shows_mix: bool = False,
        **options: Unpack[Options],
    ) -> None:
        require_arguments(loss_fn, optimizer, topology, shows_mix, options)
        require_whole("Worker", gossip_rounds=gossip_rounds)
        self.gossip_rounds = gossip_rounds
        self.gossip_momentum = fast_gossip_momentum(gossip_rounds, topology) if gossip_rounds > 1 else 0.0
        self.partition = partition_of_loss(loss_fn)
        self.scaling = loss_fn if isinstance(loss_fn, DynamicLossScale) else None
        self.loss_fn = loss_fn if self.scaling is None else self.scaling.loss_fn
        self.optimizer = optimizer
        self.wants_mix = wants_mix(optimizer)
        self.topology = topology
        self.everyone = complete(topology.num_workers)
        self._is_own = False  # the algorithm is this library's, which reads no old optimizer state after the update
        self.options: dict[str, Any] = {**DEFAULTS, **options}
        self.wire_dtype = self.options["wire_dtype"] if topology.num_workers > 1 else None  # alone, nothing is sent

    def algorithm(
        self,
        step: Callable[[State, PyTree, Tensor], tuple[State, Metrics]],
        memory: Callable[[Buckets], Any] | None = None,
        *,
        topology: Topology | None = None,
        must_equal: tuple[str, ...] = (),
        outer_optimizers: Sequence[Any] = (),
        push_sum: bool = False,
        own_steps: bool = False,
        whole_buckets: bool = False,
        schedules: Sequence[Topology] | None = None,
    ) -> Algorithm:
        """Combine an `init` with this step.

        Args:
            step: the step of one worker, t 0-d int64 on the CPU.
            memory: function from the first parameters to the algorithm's memory; None: no memory.
            topology: `Algorithm.topology`, if it differs from the worker's.
            must_equal: "params", "buffers" or both, which must start bitwise equal on all workers; "params" also after
                `df.with_params`.
            outer_optimizers: further pairs `(init, update)` that take buckets of the parameters.
            push_sum: True if the step mixes with push-sum's weight, so that column-stochastic graphs are right for it.
            own_steps: True if each worker takes its own steps, and nobody waits; for this library's, as kit has no mail.
            whole_buckets: True if the step takes a bucket for one vector: it compresses it, sends some of its places, or mails it.
            schedules: those of which `kit.rests` may be True: of the outer steps. None: `topology`.
        """
        starts_equal, topology = "params" in must_equal, topology or self.topology
        self._is_own = step.__module__.startswith("decentfn.algorithms.")
        known = (topology,) if schedules is None else tuple(schedules)

        def start(x: Buckets, buffers: PyTree) -> State:
            scale = None if self.scaling is None else self.scaling.init(x[0].device)
            local = Local(self.optimizer.init(x), trees.map(lambda b: b.detach().clone(), buffers), scale)
            return State(x, local, () if memory is None else memory(x))

        def init(params: PyTree, buffers: PyTree = None) -> State:
            optimizers, topologies = (self.optimizer, *outer_optimizers), (self.topology, self.everyone)
            x = lay_out(params, optimizers, topologies, self.options, self.partition)
            state = start(Buckets(x, replace(x.plan, starts_equal=starts_equal)), buffers)
            if must_equal:
                given = {"params": state.params.shared(), "buffers": buffers}
                require_equal("init(params, buffers)", {name: given[name] for name in must_equal})
            return state

        @functools.wraps(step)
        def with_rate(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
            result = step(state, batch, t)
            is_pair = isinstance(result, tuple) and len(result) == 2
            if not is_pair or not isinstance(result[0], State) or not isinstance(result[1], Metrics):
                refuse_result(result)
            new, metrics = result
            return new, metrics._replace(learning_rate=current_rate(new.local.opt))

        is_ours = self._is_own and all(getattr(x, "is_own", False) for x in (self.optimizer, *outer_optimizers))
        made = replace(
            Step.of(with_rate),
            loss_fn=self.scaling or self.loss_fn,
            topology=topology,
            starts_equal=starts_equal,
            pushes_sum=push_sum,
            by_leaf=is_ours and not whole_buckets,
            own_steps=own_steps,
            start=start,
            schedules=() if self.wants_mix else known,
        )
        return Algorithm(init, made)

    def gradient(
        self,
        x: Buckets,
        local: Local,
        batch: PyTree,
        t: Tensor,
        *,
        after: Posted | Sequence[Posted] | None = None,
        together: bool = False,
        weight: Weight | None = None,
    ) -> tuple[Gradient, Local]:
        """Compute the loss and its unscaled gradient at `x`, and `local` with the new buffers and the next scale.

        Args:
            x: parameters at which the gradient is taken.
            local: the worker's own data.
            batch: the batch of the loss.
            t: the step.
            after: posted messages: compiled code posts them before it computes anything from the batch, so that the
                gradient hides the communication.
            together: if True, a bad gradient on one worker counts as bad on all.
            weight: from `as_weight`, for `g.weight`. If a weight is 0, a gradient that is not finite moves nothing.
        """
        if after is not None and torch.compiler.is_dynamo_compiling():
            batch = _after(batch, after)
        scaling, scale = self.scaling, local.scale
        g = evaluate(self.loss_fn, x, local.buffers, batch, t, None if scale is None else scale.scale)
        if weight is not None:
            g = _weighed(g, weight(g), local.buffers, together)
        if scale is None and not context.guarded:
            if not torch.compiler.is_dynamo_compiling():  # the norm's squares are freed before there is an update
                g = g._replace(norm=buckets.global_norm(g.grads))
            return g, local._replace(buffers=g.buffers)
        own, norm = _judged(g, together)
        good, local = own, local._replace(buffers=where_good(own, g.buffers, local.buffers))
        if scaling is not None and scale is not None:
            common = self.everywhere(own, t) if together or scaling.agree else own
            good, local = common if together else own, local._replace(scale=scaling.advance(scale, common))
        elif together:  # the average leaves the bad ones out, so what is shared is good; a worker's own is all bad
            theirs = where_good(own, g.grads, each(lambda b: b.new_full((), torch.nan), g.grads))
            return g._replace(grads=buckets.with_own(g.grads, theirs), norm=norm), local
        grads, counts = where_good(own, g.grads, each(nothing_like, g.grads)), g.good
        return g._replace(grads=grads, good=good if counts is None else good & counts, norm=norm), local

    def update(
        self, direction: Buckets, g: Gradient, local: Local, x: Buckets, *, posted: Posted | None = None
    ) -> tuple[Buckets, Local]:
        """Compute the optimizer's update at `x`, and `local` with its new state.

        If `g` is bad or a leaf has no gradient, the update is 0 and the state stays.

        Args:
            direction: the optimizer's input in place of a gradient, in the dtypes of `x`.
            g: this step's gradient, or any whose `good` decides if this worker updates.
            local: as `gradient` returned it.
            x: the optimizer's parameters.
            posted: what `post` returned in this step, for a mix-aware optimizer (`df.transforms.MixAware`), which waits
                for its messages and receives them (`kit.mix_context`); others ignore it. Needs `shows_mix=True`.
        """
        mix = () if posted is None or not self.wants_mix else (gossip.mix_context(posted),)
        named = nullcontext() if torch.compiler.is_dynamo_compiling() else record_function("decentfn::update")
        overwrites = context.donating is not None and self._is_own and getattr(self.optimizer, "is_own", False)
        if g.good is not None or g.used is not None or context.guarded:
            overwrites = False  # the old state is read afterwards
        with named, context.having(overwriting=context.donating) if overwrites else nullcontext():
            context.used.append(g.used)
            result = self.optimizer.update(direction, local.opt, x, *mix)
            context.used.clear()  # also what an error has left
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Buckets):
            of_types = [type(part).__name__ for part in (result if isinstance(result, tuple) else [result])]
            raise ValueError(
                f"optimizer: update(grads, state, params) returned {' and '.join(of_types)}; it returns (updates, state), the "
                "updates as Buckets like grads: df.kit.each(function, grads)."
            )
        u, opt = result
        if context.guarded:
            u, opt = good_update(u, opt, local.opt, lambda: self.optimizer.init(x))
            if g.good is None:
                g = g._replace(good=buckets.all_finite(buckets.part_of(direction, True)))
        u, opt = g.move(u, opt, local.opt)
        return u, local._replace(opt=opt)

    def used_by_any(self, g: Gradient, t: Tensor) -> Gradient:
        """Return `g`, in which a leaf is used if any worker uses it; exchanges one number per leaf, for which all wait."""
        if (used := g.used) is None:
            return g
        leaves = [[s for s in plan.segments if s.numel] for plan in used.plan.buckets]
        own = torch.stack([flags[s.start] for flags, its in zip(used, leaves, strict=True) for s in its])
        any_of = iter((gossip.mean(buckets.loose([own.to(torch.float32)]), self.everyone, t)[0] > 0).unbind())
        flags = [
            torch.cat([next(any_of).expand(s.numel) for s in its]) if its else empty
            for empty, its in zip(used, leaves, strict=True)
        ]
        return g._replace(used=buckets.with_own(Buckets(flags, used.plan), used))

    def everywhere(self, claim: Tensor, t: Tensor) -> Tensor:
        """Return True (0-d bool) on all workers if `claim` holds on each; exchanges one number, for which all wait."""
        return gossip.mean(buckets.loose([(~claim).to(torch.float32).view(1)]), self.everyone, t)[0][0] == 0

    def post(self, x: Buckets, t: Tensor, topology: Topology | None = None) -> Posted:
        """Start to send `x` to the neighbors of step `t`.

        Wider values are sent in the parameters' dtypes; the worker's own share is mixed unrounded.

        Args:
            x: buckets to send, one message per bucket and neighbor.
            t: the step, 0-d int64 on the CPU.
            topology: a schedule derived from the worker's own (`df.topologies.every`, ...), to replace it.
        """
        row = collectives.look_up(x.tensors[0], topology or self.topology, t)
        return gossip.post(x, row, wire_dtype=self.wire_dtype)

    def mix(self, x: Buckets, t: Tensor, topology: Topology | None = None) -> Buckets:
        """Return `W x` of step `t`; arguments as for `post`.

        With R = `gossip_rounds` > 1 it is fast gossip averaging (Liu, Morse, 2011), R messages one after another:
        `a_{r+1} = W a_r + η (W a_r - a_{r-1})`, `a_{-1} = a_0 = x`.
        """
        if self.gossip_rounds == 1:
            return collect(self.post(x, t, topology))
        before, eta = x, self.gossip_momentum
        for _ in range(self.gossip_rounds):
            posted = self.post(x, t, topology)
            mixed = collect(posted)
            old = gossip.repaired(posted, before, mixed)
            before, x = x, each(lambda mixed, old: (mixed + eta * (mixed - old)).to(mixed.dtype), mixed, old)
        return x

    def mean(self, x: Buckets, t: Tensor, everyone: Topology | None = None, weight: Tensor | None = None) -> Buckets:
        """Average `x`, rounded as it is sent, over all workers: the same result on each, in the dtypes of `x`.

        Args:
            x: buckets to average.
            t: the step.
            everyone: a schedule of means over all workers; between means, the result is `x`, rounded.
            weight: w >= 0, 0-d, such as the number of tokens in this worker's batch, for `Σ_j w_j x_j / Σ_j w_j`; 0 leaves
                the worker out, and if all are 0, so is the result. Exchanges one number more, for which all wait.
        """
        everyone = everyone or self.everyone
        x = x if weight is None else self.weighted(x, t, everyone, weight)
        return gossip.mean(x, everyone, t, wire_dtype=self.wire_dtype)

    def weighted(self, x: Buckets, t: Tensor, everyone: Topology, weight: Tensor) -> Buckets:
        """Return `x w / mean_j w_j`, whose mean over the workers is the weighted one; arguments as for `mean`."""
        sent = [gossip.narrow(b, plan.dtype, self.wire_dtype) for b, plan in zip(x, x.plan.buckets, strict=True)]
        own = gossip.beside(sent, weight.detach().to(torch.float64))
        mean = gossip.mean(buckets.loose([own.reshape(1)]), everyone, t)[0][0]
        share = torch.where(mean != 0, own / mean, torch.zeros_like(mean))
        return buckets.with_own(buckets.scale(x, share), buckets.scale(x, share != 0))


def _after(batch: PyTree, posted: Posted | Sequence[Posted]) -> PyTree:
    """Return the batch; compiled code posts these messages before it uses the batch."""
    several = (posted,) if isinstance(posted, Posted) else posted
    leaves = trees.leaves(batch)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if numbers := [number for one in several for number in one.numbers]:
        for i, leaf in zip(places, collectives.after([leaves[i] for i in places], numbers), strict=True):
            leaves[i] = leaf
    return trees.fill(trees.enumerate_leaves(batch), leaves)


def _weighed(g: Gradient, weight: Tensor, buffers: PyTree, together: bool) -> Gradient:
    """Return `g` with its weight; if that is 0, a gradient that is not finite is 0, and bad, as is no mean of all."""
    counts = (weight != 0) | buckets.all_finite(g.grads)
    grads, new = where_good(counts, (g.grads, g.buffers), (each(torch.zeros_like, g.grads), buffers))
    return g._replace(grads=grads, buffers=new, weight=weight, good=None if together else counts)


def _judged(g: Gradient, together: bool) -> tuple[Tensor, Tensor | None]:
    """Return True (0-d bool) for a good gradient, and its norm (None outside a guarded step)."""
    if not context.guarded:
        return buckets.all_finite(g.grads), None
    norm = buckets.global_norm(g.grads)
    good = buckets.all_finite(g.grads) if together else torch.isfinite(norm)
    context.guarded[-1].updates.append(good)
    return good, norm


def good_update(u: Buckets, opt: PyTree, old: PyTree, start: Callable[[], PyTree]) -> tuple[Buckets, PyTree]:
    """Remove infinite and NaN values from an optimizer's update and new state, element by element, and note them.

    A bad element keeps its moments from the `old` state; if those were bad before, they are reset to the start's.
    """
    if collectives.processes_per_worker() == 1 and buckets.known_finite([*u, *trees.leaves(opt)]):
        return u, opt
    first, shapes = start(), [b.shape for b in u]

    def moments(state: PyTree) -> list[Buckets]:
        return [node for node in trees.nodes_of(Buckets, state) if [b.shape for b in node] == shapes]

    good, olds = _all_finite(u, *moments(opt)), moments(old)
    was_good = _all_finite(*olds) if olds else good
    context.guarded[-1].updates.append(gossip.are_finite(list(u)))

    def settle(node: Buckets, new: Buckets, old: Buckets, first: Buckets) -> Buckets:
        return (
            buckets.where(good, new, buckets.where(was_good, old, first)) if [b.shape for b in new] == shapes else node
        )

    others = trees.map(finite_or, opt, old, first)
    opt = trees.map_nodes(Buckets, settle, others, opt, old, first)
    return buckets.where(good, u, each(torch.zeros_like, u)), opt


def finite_or(new: Tensor, old: Tensor, first: Tensor) -> Tensor:
    """Return the first finite one of `new`, `old` and `first`, element by element; other dtypes return `new`."""
    if not (new.is_floating_point() or new.is_complex()):
        return new
    return torch.where(buckets.is_finite(new), new, torch.where(buckets.is_finite(old), old, first))


def _all_finite(*several: Buckets) -> Buckets:
    return each(lambda *tensors: functools.reduce(torch.logical_and, map(buckets.is_finite, tensors)), *several)
