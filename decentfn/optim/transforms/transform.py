"""Gradient transforms and their combinations: in a chain, on selected leaves, by parameter groups."""

from __future__ import annotations

import math
import re
from abc import ABC
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import PyTree, brief, require, trees
from decentfn.core.buckets import Buckets, Mask, Plan, cast_like

Sign = int | Callable[[str, tuple[int, ...]], int]
"""1 if updates point along the gradient, -1 if against it, 0 if that is unknown; or a function of a leaf's name and shape."""


class Transform(NamedTuple):
    """Gradient transform: a pair of pure functions.

    `init(params) -> state` and `update(grads, state, params) -> (updates, state)`, where `params`, `grads` and
    `updates` are `Buckets`. Updates are *added* to the parameters. A state is a pytree of distinct tensors.
    """

    init: Callable[[Buckets], PyTree]
    update: Callable[..., tuple[Buckets, PyTree]]


class MaskedTransform(Transform):
    """Transform that treats some leaves differently, so buckets must not mix them, or of known direction.

    Algorithms read `masks` when they lay out the parameters, `flatten(params, masks=optimizer.masks)`.
    """

    masks: tuple[Mask, ...] = ()
    sign: Sign = 0
    is_own: bool = False
    """True for this library's, whose updates read no old state after they have written over it (`buckets.into`), and whose
    state can be computed leaf by leaf."""


class Averaging(ABC):
    """State of an optimizer that trains at other parameters, of this plan, than one evaluates (`df.params`, ...).

    `evaluated(x, back)` returns one worker's parameters to evaluate, from those to train; `back`: the latter from the former.
    """

    plan: Plan
    evaluated: Callable[[Buckets, bool], Buckets]

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return hasattr(kind, "evaluated") and hasattr(kind, "plan")


def _declared(
    init: Callable[..., Any], update: Callable[..., Any], masks: tuple[Mask, ...], sign: Sign, *parts: Any
) -> MaskedTransform:
    transform = MaskedTransform(init, update)
    transform.masks, transform.sign, transform.is_own = masks, sign, all(getattr(x, "is_own", False) for x in parts)
    return transform


def sign_of(transform: Any) -> Sign:
    """Return the direction that a transform declares; 0 for those of other libraries."""
    return getattr(transform, "sign", 0)


def _at(sign: Sign, name: str, shape: tuple[int, ...]) -> int:
    return sign if isinstance(sign, int) else sign(name, shape)


def ascending(init: Callable[..., Any], update: Callable[..., Any]) -> MaskedTransform:
    """Make a transform whose updates point along the gradient; a later one in the chain must descend."""
    return _declared(init, update, (), 1)


def descending(init: Callable[..., Any], update: Callable[..., Any]) -> MaskedTransform:
    """Make a transform whose updates point against the gradient; two of them in a chain ascend."""
    return _declared(init, update, (), -1)


def require_descent(optimizer: Any, plan: Plan | None = None) -> None:
    """Raise ValueError if the optimizer's updates ascend on all leaves, or on one of the plan's."""
    sign = sign_of(optimizer)
    segments = () if plan is None else [segment for bucket in plan.buckets for segment in bucket.segments]
    leaf = next((f"leaf {s.name!r}" for s in segments if _at(sign, s.name, s.shape) == 1), None)
    leaf = "the parameters" if sign == 1 else leaf
    rule = f"its updates are added to {leaf} and point along the gradient, so the loss would grow"
    way_out = "end the chain with an optimizer, the only one in it: df.chain(df.clip_by_global_norm(1.0), df.sgd(0.1))."
    require(leaf is None, "optimizer", f"{rule}; {way_out}")


class MixContext(NamedTuple):
    """One worker's view of this step's mix: `x̃ = weights[0] x + Σ_k weights[1 + k] inbox_k + mean_weight mean`.

    A message is in one of K slots, as many on every worker and in every step. Where a worker has fewer neighbors (on a star
    all but the center, in `random-matching` the odd one), slots are idle: their message is 0 with weight 0.
    """

    inboxes: tuple[Tensor, ...]
    """For each bucket `[K, D]`, in the wire's dtype: row k is slot k's message, 0 in an idle slot; () if K = 0."""
    sources: Tensor
    """`[K]` int64: the sender of slot k's message, possibly the worker itself; -1: none."""
    weights: Tensor
    """`[K+1]` float64: self-weight first; slots with a positive weight count."""
    means: tuple[Tensor, ...]
    """For each bucket `[D]`, the mean over this worker's group, itself included, in place of messages (`complete`); ()
    without groups."""
    mean_weight: Tensor | None
    """0-d float64, the weight of the group's mean; None without groups."""
    plan: Plan
    """Layout of the buckets: names, shapes and places of the leaves."""


class MixAware(MaskedTransform):
    """Transform that also sees the mix: `update(grads, state, params, mix)`, `mix` a `MixContext`.

    For algorithms that hold the neighbors' parameters when they update: `df.adapt_while_communicate`.
    """

    wants_mix: bool = True


def wants_mix(transform: Any) -> bool:
    """Return True if `update` takes the mix as its fourth argument; decided by type, not by signature."""
    return getattr(transform, "wants_mix", False) is True


def masks_of(*transforms: Any) -> tuple[Mask, ...]:
    """Return the masks that these transforms declare, in order."""
    return tuple(mask for transform in transforms for mask in getattr(transform, "masks", ()))


def require_pair(call: str, transform: Any) -> None:
    """Raise ValueError unless `transform` has callable `init` and `update`."""
    kind = transform if isinstance(transform, type) else type(transform)
    if issubclass(kind, torch.optim.Optimizer):
        ours = kind.__name__.lower() if kind.__name__ in ("SGD", "Adam", "AdamW") else "adamw"
        raise ValueError(
            f"{call}: torch.optim.{kind.__name__} keeps parameters and writes over them; an optimizer here is a pair "
            f"(init, update) of pure functions: df.{ours}(learning_rate), or df.from_torch(lambda params: "
            f"torch.optim.{kind.__name__}(params, ...)), which makes one of it."
        )
    rule = "found a list; pass its transforms one by one: df.chain(df.clip_by_global_norm(1.0), df.adamw(3e-4))."
    require(not isinstance(transform, list), call, rule)
    is_call_missing = callable(transform) and not hasattr(transform, "init")
    rule = f"found the function {getattr(transform, '__name__', '')}; call it, as in df.sgd(0.1): its result is the transform."
    require(not is_call_missing, call, rule)
    for method in ("init", "update"):
        rule = f"{brief(transform)} has no {method}(); a transform is a pair (init, update), for example df.adamw(3e-4)"
        require(callable(getattr(transform, method, None)), call, f"{rule} or df.Transform(init, update).")


def _require_unaware(call: str, transform: Any) -> None:
    rule = "a MixAware transform sees all buckets; use it alone, or in df.chain, and select leaves by mix.plan."
    require(not wants_mix(transform), call, rule)


def identity() -> Transform:
    """Leave the gradients as they are."""
    return ascending(lambda params: (), lambda grads, state, params: (grads, state))


def chain(*transforms: Any) -> Transform:
    """Apply transforms one after another; the state is the tuple of their states.

    Args:
        transforms: transforms, or any objects with `init` and `update`; none at all is the identity.

    >>> from decentfn.optim.transforms import adamw, clip_by_global_norm
    >>> optimizer = chain(clip_by_global_norm(1.0), adamw(3e-4, weight_decay=0.1))
    """
    for transform in transforms:
        require_pair("chain(...)", transform)
    parts = [(transform.update, wants_mix(transform)) for transform in transforms]

    def init(params: Buckets) -> tuple[PyTree, ...]:
        return tuple(transform.init(params) for transform in transforms)

    def update(
        grads: Buckets, state: tuple[PyTree, ...], params: Buckets, *mix: Any
    ) -> tuple[Buckets, tuple[PyTree, ...]]:
        states = []
        for (change, is_aware), old in zip(parts, state, strict=True):
            grads, new = change(grads, old, params, *(mix if is_aware else ()))
            states.append(new)
        return grads, tuple(states)

    if any(is_aware for _, is_aware in parts):
        aware = MixAware(init, update)
        aware.masks = masks_of(*transforms)
        return aware
    signs = [sign_of(transform) for transform in transforms]

    def sign(name: str, shape: tuple[int, ...]) -> int:
        return math.prod(_at(part, name, shape) for part in signs)

    is_one = all(isinstance(part, int) for part in signs)
    return _declared(init, update, masks_of(*transforms), sign("", ()) if is_one else sign, *transforms)


def masked(transform: Any, mask: Mask) -> Transform:
    """Apply `transform` to the leaves that `mask` selects; the others pass through unchanged.

    The inner transform sees only the selected buckets (as a tree: a dict of leaves by dotted name), so its state and
    its norms cover only these.

    Args:
        transform: any transform.
        mask: `(dotted name, shape) -> bool`, deterministic.

    Raises:
        ValueError: when called, a bucket mixes selected leaves with others.
    """
    require_pair("masked(transform, mask)", transform)
    _require_unaware("masked(transform, mask)", transform)
    require(callable(mask), "masked", "a mask is a function (dotted name, shape) -> bool.", mask=mask)

    def init(params: Buckets) -> PyTree:
        return transform.init(_take(params, _answers(params.plan, mask)))

    def update(grads: Buckets, state: PyTree, params: Buckets) -> tuple[Buckets, PyTree]:
        taken = _answers(params.plan, mask)
        updates, state = transform.update(_take(grads, taken), state, _take(params, taken))
        own = iter(updates)
        return Buckets([next(own) if take else g for g, take in zip(grads, taken, strict=True)], grads.plan), state

    inner = sign_of(transform)

    def sign(name: str, shape: tuple[int, ...]) -> int:
        return _at(inner, name, shape) if mask(name, shape) else 1

    return _declared(init, update, (mask, *masks_of(transform)), 1 if inner == 1 else sign, transform)


def _answers(plan: Plan, mask: Mask) -> list[bool]:
    answers = []
    for index, bucket in enumerate(plan.buckets):
        takes = [bool(mask(segment.name, segment.shape)) for segment in bucket.segments]
        if any(takes) and not all(takes):
            names = [segment.name for segment in bucket.segments]
            raise ValueError(
                f"masked(transform, mask): bucket {index} holds {names[takes.index(True)]!r}, which the mask selects, "
                f"and {names[takes.index(False)]!r}, which it does not; a bucket is updated as a whole. Lay the "
                "parameters out with flatten(params, masks=optimizer.masks), as algorithms do; a wrapper written by "
                "hand must pass `masks` on."
            )
        answers.append(all(takes))
    return answers


def _take(x: Buckets, taken: list[bool]) -> Buckets:
    own = [tensor for tensor, take in zip(x, taken, strict=True) if take]
    return Buckets(own, x.plan.part(tuple(taken)))


def partition(transforms: Mapping[Hashable, Any], labels: Callable[[str, tuple[int, ...]], Hashable]) -> Transform:
    """Parameter groups: every leaf gets the transform of its label.

    The state is the tuple of the groups' states, in the order of `transforms`.

    Args:
        transforms: the transform of each label; a label that no leaf has is allowed.
        labels: `(dotted name, shape) -> label`, deterministic; `init` refuses one that has no transform.
    Source: optax.partition.

    >>> from decentfn.optim.transforms import adamw, sgd
    >>> optimizer = partition({True: adamw(1e-3), False: sgd(1e-2)}, lambda name, shape: name.startswith("head"))
    """
    rule = "a transform for each label, such as {'decay': df.adamw(1e-3), 'bias': df.adamw(1e-3, weight_decay=0.0)}."
    require(isinstance(transforms, Mapping), "partition", rule, transforms=transforms)
    for label, transform in transforms.items():
        require_pair(f"partition(transforms[{label!r}])", transform)
    require(callable(labels), "partition", "labels are a function (dotted name, shape) -> label.", labels=labels)
    # The groups are disjoint and pass other leaves through, so the order of the transforms does not matter.
    groups = chain(*(masked(transform, _has_label(label, labels)) for label, transform in transforms.items()))

    def init(params: Buckets) -> PyTree:
        for bucket in params.plan.buckets:
            for segment in bucket.segments:
                label = labels(segment.name, segment.shape)
                rule = f"labels({segment.name!r}, {segment.shape}) is {label!r}, which has no transform; known labels:"
                way_out = f"{list(transforms)}. Add it; df.transforms.scale(0.0) freezes a group."
                require(label in transforms, "partition", f"{rule} {way_out}")
        return groups.init(params)

    return _declared(init, groups.update, masks_of(groups), sign_of(groups), groups)


def _has_label(label: Hashable, labels: Callable[[str, tuple[int, ...]], Hashable]) -> Mask:
    return lambda name, shape: labels(name, shape) == label


def by_leaf(transform: Any) -> Transform:
    """Show `transform` the tree of leaves in their shapes, instead of flat buckets.

    For transforms that need shapes, and for those written for trees (as in optax). It costs one concatenation of the
    updates. A tied leaf appears in all its places; the update of the first one counts. A transform with masks
    (`masked`, `partition`, a `mask=`) needs buckets: put it outside, `masked(by_leaf(transform), mask)`. Complex leaves
    stay complex; all other transforms see their real and imaginary parts.

    Args:
        transform: `init(tree) -> state`, `update(grads, state, params) -> (updates, state)` on trees of tensors.

    Raises:
        ValueError: `transform` has masks; when called, updates whose leaves differ from the parameters'; in `init`, a
            worker of several processes, none of which has whole leaves.
    """
    require_pair("by_leaf(transform)", transform)
    _require_unaware("by_leaf(transform)", transform)
    rule = "it has masks, which select buckets; put the mask outside: masked(by_leaf(transform), mask)."
    require(not masks_of(transform), "by_leaf(transform)", rule)

    def init(params: Buckets) -> PyTree:
        require_one_process("by_leaf(transform)", params, "it needs whole leaves")
        # Copy: a state that keeps parameters must not share their memory, nor that of a tied leaf twice.
        return transform.init(trees.map(torch.clone, params.tree()))

    def update(grads: Buckets, state: PyTree, params: Buckets) -> tuple[Buckets, PyTree]:
        updates, state = transform.update(grads.tree(), state, params.tree())
        return _flatten_like(grads, updates), state

    return Transform(init, update)


def require_one_process(call: str, params: Buckets, why: str) -> None:
    """Raise ValueError if the leaves are sharded over the processes of a worker."""
    rule = f"{why}, but a worker is {params.plan.processes} processes with a shard each; use an elementwise transform"
    require(params.plan.processes == 1, call, f"{rule}, such as df.adamw, or df.init() with one process per worker.")


def _flatten_like(x: Buckets, tree: PyTree) -> Buckets:
    """Return the tree's leaves as buckets with the plan of `x`, a tied leaf from its first place."""
    positions, values = trees.leaves(x.plan.template), trees.leaves(tree)
    rule = f"update returned {len(values)} leaves for {len(positions)} parameters; updates are a tree like these."
    require(len(positions) == len(values), "by_leaf(transform)", rule)
    vectors = x.plan.lay_out(tree, tuple(x[0].shape[:-1]) if len(x) else ())
    return cast_like(Buckets(vectors, x.plan), x)


def not_bias_or_norm(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for leaves to decay: two or more axes, not a bias, not a parameter of a norm.

    >>> not_bias_or_norm("layers.0.weight", (4, 4)), not_bias_or_norm("layers.0.bias", (4,))
    (True, False)
    >>> not_bias_or_norm("block.layer_norm.scale", (1, 4, 1)), not_bias_or_norm("subnet.weight", (4, 4))
    (False, True)
    """
    return len(shape) > 1 and not re.search(r"bias|norm|(^|[._])bn\d*([._]|$)", name.lower())
