"""Flat buckets: one vector per dtype and group, and the plan that locates each leaf.

A training state is made of `Buckets`; the loss sees views of them (`Buckets.tree`). The plan is plain data,
so it can be compared, printed, stored and used inside a compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import trees
from decentfn.core.handles import by_handle, number_of
from decentfn.core.trees import PyTree
from decentfn.torch_private.dynamo import constant_while_traced

Mask = Callable[[str, tuple[int, ...]], bool]
"""A choice of leaves: `(dotted name, shape) -> bool`."""


_LARGE = 16
"""A leaf of its bucket's size divided by this, or more, is computed apart in a simulation (`BucketPlan.apart`)."""

_OWN_BUCKET = 8  # a leaf larger than a bucket's limit divided by this has a bucket of its own


class Place(NamedTuple):
    """Position of a shard in the unsharded tensor."""

    shape: tuple[int, ...]  # of the unsharded tensor
    offset: tuple[int, ...]


Places = tuple[tuple[str, Place], ...]
"""Places of the shards, by name; a tensor without an entry is unsharded."""


class Attributes(dict[str, Any]):
    """Python attributes of the user's parameter; equal if they are the same objects, numbers or strings."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attributes) or self.keys() != other.keys():
            return False
        pairs = [(x, other[name]) for name, x in self.items()]
        return all(x is y or (type(x) is type(y) and isinstance(x, (int, float, str)) and x == y) for x, y in pairs)


@dataclass(frozen=True)
class Segment:
    """Position of one leaf: elements `start : start + numel` of its bucket, read as `shape`.

    The elements of a complex leaf are real and imaginary parts in turn, as in `torch.view_as_real`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    is_complex: bool = False
    place: int = 0  # number of the leaf in the order of the user's tree, in which dicts are not sorted
    attributes: Attributes | None = field(default=None, hash=False)  # None for Dynamo, which cannot make empty ones

    def leaf(self, numbers: Tensor) -> Tensor:
        """Return the leaf, `[*workers, *shape]`, as a view of its elements `[*workers, numel]`."""
        shape = self.shape if numbers.dim() == 1 else (*numbers.shape[:-1], *self.shape)
        if self.is_complex and not self.numel:
            numbers = torch.empty_like(numbers)  # a view of no elements may begin where no complex number can
        return torch.view_as_complex(numbers.view((*shape, 2))) if self.is_complex else numbers.view(shape)


def elements(leaf: Tensor, workers: tuple[int, ...] = ()) -> Tensor:
    """Return a leaf `[*workers, *shape]` as elements `[*workers, numel]` of a bucket; the inverse of `Segment.leaf`."""
    return (torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf).reshape(*workers, -1)


@dataclass(frozen=True)
class BucketPlan:
    """Layout of one bucket: its dtype, its leaves in order and their total number of elements."""

    dtype: torch.dtype
    segments: tuple[Segment, ...]
    numel: int
    is_common: bool = False
    """True if all processes of a tensor-parallel group hold the same leaves, with equal values."""
    is_shared: bool = True
    """False if no message carries the leaves: each worker keeps its own."""

    @property
    def nbytes(self) -> int:
        """Size of the bucket in bytes."""
        return self.numel * self.dtype.itemsize

    def apart(self) -> list[BucketPlan]:
        """Return buckets of one large leaf each, a sixteenth of this one or more, and of the leaves between two of them."""

        def is_large(segment: Segment) -> int:
            return segment.start if 0 < self.numel <= _LARGE * segment.numel else -1

        parts = []
        for _, group in groupby(self.segments, is_large):
            own = tuple(group)
            moved = tuple(replace(segment, start=segment.start - own[0].start) for segment in own)
            parts.append(replace(self, segments=moved, numel=sum(segment.numel for segment in own)))
        return parts


@dataclass(frozen=True)
class Plan:
    """Layout of a tree of tensors in flat buckets; plain data.

    `template` is the user's tree with each leaf replaced by the position of its segment, counted through all buckets.
    A leaf that occurs in several places (a tied parameter) has one segment.
    """

    buckets: tuple[BucketPlan, ...]
    template: PyTree
    processes: int = 1
    """Processes of one worker; each holds a tree like this one, and their leaves together are the worker's."""
    tp_size: int = 1
    """Size of a tensor-parallel group: consecutive processes of a worker that compute one batch together."""
    places: Places = ()
    """Places of this process's shards of the parameters and of the module's buffers."""
    starts_equal: bool = field(default=False, compare=False)
    """True if all workers must start with equal parameters, because the algorithm would never make them equal."""
    topology: str | None = field(default=None, compare=False)
    """Description of the run's schedule, equal iff the schedule is; None for other trees than parameters."""
    run: int = field(default=0, compare=False)
    """Number of the `init` on these ranks that made the state, from 1: messages of two states never meet. 0: no ranks."""
    part_of: tuple[Plan, tuple[bool, ...]] | None = field(default=None, compare=False, repr=False)
    """The plan of all leaves of which this one is a part, and which of its buckets; None: it is no part."""

    def number(self) -> int:
        """Return the number under which `by_handle` finds an equal plan, while this one lives: operators take integers."""
        whole, taken = self.part_of or (self, None)
        return whole.number_of_part(taken)

    @constant_while_traced
    def number_of_part(self, taken: tuple[bool, ...] | None) -> int:
        """Return the number of a part, which traced code makes again in each step; None: of the whole."""
        plan = self if taken is None else vars(self).setdefault("parts", {}).setdefault(taken, self.part(taken))
        number = number_of(plan)
        if (equal := by_handle(number)) is not plan:
            vars(plan)["equal"] = equal  # which somebody else may drop
        return number

    def part(self, taken: tuple[bool, ...]) -> Plan:
        """Return the plan of the buckets that are taken, whose tree is a dict of leaves by dotted name."""
        plans = tuple([bucket for bucket, take in zip(self.buckets, taken, strict=True) if take])
        names = [segment.name for bucket in plans for segment in bucket.segments]
        whole, outer = self.part_of or (self, (True,) * len(taken))
        own = iter(taken)
        its = tuple([is_in and next(own) for is_in in outer])
        tree = {name: index for index, name in enumerate(names)}
        return replace(self, buckets=plans, template=tree, part_of=(whole, its))

    @property
    def is_sharded(self) -> bool:
        """Return True if the leaves are shards."""
        return bool(self.places)

    @property
    def nbytes(self) -> int:
        """Total size of all buckets in bytes."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def lay_out(self, tree: PyTree, workers: tuple[int, ...] = ()) -> list[Tensor]:
        """Copy a tree of leaves `[*workers, ...]` into vectors `[*workers, D]`; a tied leaf's first place counts."""
        leaf: dict[int, Tensor] = {}
        for position, value in zip(trees.leaves(self.template), trees.leaves(tree), strict=True):
            leaf.setdefault(position, value)
        vectors, first = [], 0
        for bucket in self.buckets:
            segments = range(first, first + len(bucket.segments))
            parts = [elements(leaf[k], workers) for k in segments]
            # Under vmap, the cat of empty vectors has no workers.
            vectors.append(torch.cat(parts, dim=-1) if bucket.numel else parts[0].clone())
            first = segments.stop
        return vectors

    def without_values(self, workers: Sequence[int] = ()) -> Buckets:
        """Return buckets `[*workers, D]` of this plan on the meta device."""
        return Buckets([torch.empty((*workers, b.numel), dtype=b.dtype, device="meta") for b in self.buckets], self)

    def describe(self) -> list[str]:
        """Return one line per leaf: bucket, dtype, name, shape and place. Equal on two workers iff their plans are."""
        parts = [f"{name} is a part of {list(shape)} from {list(offset)} on" for name, (shape, offset) in self.places]
        return parts + [
            f"bucket {index} {bucket.dtype}: {s.name} {list(s.shape)}{' complex' * s.is_complex} at {s.start}"
            + ", not shared" * (not bucket.is_shared)
            for index, bucket in enumerate(self.buckets)
            for s in bucket.segments
        ]


class Buckets:
    """Tree of tensors as flat vectors, `[D]` each (`[N, D]` when stacked), with its plan as static context.

    A pytree whose leaves are the bucket tensors: `trees.map` and `vmap` go through it. Parameters that a step returned
    have the number of that step as `taken_at`, and so has the state of the same run with other parameters, another
    learning rate, or from a checkpoint; copies have none, and may go on from any step.
    """

    __slots__ = ("__weakref__", "plan", "taken_at", "tensors")

    def __init__(self, tensors: Iterable[Tensor], plan: Plan) -> None:
        self.tensors = tuple(tensors)
        self.plan = plan
        self.taken_at: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Buckets, (self.tensors, self.plan)  # so copies and pickles have no `taken_at`

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]

    def __repr__(self) -> str:
        return f"Buckets({', '.join(f'{t.dtype}{list(t.shape)}' for t in self.tensors)})"

    def leaves(self) -> list[Tensor]:
        """Return every segment as a view of its bucket, `[*shape]`, or `[N, *shape]` when stacked."""
        views: list[Tensor] = []
        for tensor, bucket in zip(self.tensors, self.plan.buckets, strict=True):
            # Also for a leaf alone in its bucket: the derivative of a split is a new vector, with a vector's strides.
            pieces = tensor.split_with_sizes([segment.numel for segment in bucket.segments], dim=-1)
            is_stacked = tensor.dim() > 1
            views += [
                segment.leaf(piece) if is_stacked or segment.is_complex else piece.view(segment.shape)
                for piece, segment in zip(pieces, bucket.segments, strict=True)
            ]
        return views

    def tree(self) -> PyTree:
        """Return the user's tree, with views of the buckets as leaves."""
        return trees.fill(self.plan.template, self.leaves())

    def shared(self) -> dict[str, Tensor]:
        """Return views of the leaves that workers exchange, by name."""
        are_shared = [bucket.is_shared for bucket in self.plan.buckets for _ in bucket.segments]
        pairs = zip(trees.named_leaves(self.tree()), trees.leaves(self.plan.template), strict=True)
        return {name: leaf for (name, leaf), position in pairs if are_shared[position]}


def loose(tensors: Iterable[Tensor], of: Sequence[BucketPlan] = ()) -> Buckets:
    """Wrap vectors `[..., D]` as buckets of one segment each, shared as those `of` which they are parts; `()`: all."""
    tensors = tuple(tensors)
    are_shared = [bucket.is_shared for bucket in of] or [True] * len(tensors)
    plans = tuple(
        BucketPlan(x.dtype, (Segment(str(i), (n := x.shape[-1],), 0, n),), n, is_shared=is_shared)
        for i, (x, is_shared) in enumerate(zip(tensors, are_shared, strict=True))
    )
    return Buckets(tensors, Plan(plans, tuple(range(len(tensors)))))


trees.register_node(
    Buckets,
    lambda node: (node.tensors, node.plan),
    lambda plan, tensors: Buckets(tensors, plan),
    in_c=attrgetter("tensors", "plan"),
)


def flatten(
    params: PyTree,
    *,
    bucket_mb: float = 25.0,
    masks: Sequence[Mask] = (),
    processes: int = 1,
    tp_size: int = 1,
    places: Places = (),
    common: frozenset[str] = frozenset(),
    left_out: frozenset[str] = frozenset(),
) -> Buckets:
    """Copy a tree of floating-point or complex tensors, of any shapes and strides, into flat buckets.

    A bucket holds leaves of one dtype, one device and one answer to every mask (a choice by name and shape), in order,
    at most `bucket_mb` MiB of them; complex ones as real numbers, and the same tensor in two places once. A leaf larger
    than an eighth of that has its own: its gradient is then the bucket's, while those of smaller leaves are copied
    together. The largest bucket comes first, so that little is left to update when the last message arrives; before it
    those of leaves in `common`, so that all processes of a tensor-parallel group draw alike for them; last those in
    `left_out`, which are not shared.
    """
    named = trees.named_leaves(params)
    if not named:
        raise ValueError("init(params): the tree has no leaves, so there is nothing to train; pass a tree of tensors.")
    for name, leaf in named:
        _check_leaf(name, leaf)

    distinct: dict[object, tuple[str, Tensor]] = {}
    for name, leaf in named:
        distinct.setdefault(_memory(leaf), (name, leaf))
    own = {_memory(leaf) for name, leaf in named if name in left_out}  # under any of a tied leaf's names
    order = {key: place for place, key in enumerate(dict.fromkeys(map(_memory, trees.unsorted(params))))}
    limit = int(bucket_mb * 2**20)
    open_bucket: dict[object, tuple[list[object], int]] = {}
    groups: list[list[object]] = []
    for key, (name, leaf) in distinct.items():
        answers = [bool(mask(name, tuple(leaf.shape))) for mask in masks]
        kind = (leaf.dtype, leaf.device, name in common, key in own, *answers)
        size = leaf.numel() * leaf.element_size()
        if size > limit // _OWN_BUCKET:
            groups.append([key])
            continue
        group, filled = open_bucket.get(kind, ([], 0))
        if not group or filled + size > limit:
            group, filled = [], 0
            groups.append(group)
        group.append(key)
        open_bucket[kind] = group, filled + size

    def rank(group: list[object]) -> tuple[bool, bool, int]:
        return distinct[group[0]][0] not in common, group[0] in own, -sum(distinct[key][1].nbytes for key in group)

    groups.sort(key=rank)

    position = {key: index for index, key in enumerate(key for group in groups for key in group)}
    plans = tuple(
        replace(_plan_bucket([(*distinct[key], order[key]) for key in group], common), is_shared=group[0] not in own)
        for group in groups
    )
    template = trees.map(lambda leaf: position[_memory(leaf)], params)
    plan = Plan(plans, template, processes, tp_size, places)
    return Buckets([x.detach() for x in plan.lay_out(params)], plan)


def _memory(leaf: Tensor) -> object:
    """Return a key that is equal for two places of a tied parameter; empty tensors share nothing."""
    return (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) if leaf.numel() else id(leaf)


def _check_leaf(name: str, leaf: object) -> None:
    if not isinstance(leaf, torch.Tensor):
        why = (
            f"is {type(leaf).__name__}, not a tensor; pass a tree of tensors with names, such as the params of `params, buffers, loss_fn "
            "= df.functional(module, criterion)` or dict(module.named_parameters())."
        )
    elif kind := trees.not_dense(leaf):
        why = f"is a {kind} tensor; parameters are dense: x.to_dense(), or nn.Embedding(..., sparse=False)."
    elif type(leaf) is not torch.nn.Parameter and trees.unclassed(leaf) is not leaf:
        why = (
            f"is a {type(leaf).__module__}.{type(leaf).__name__}; a state holds plain tensors, which would leave what its class keeps, "
            "such as a manifold. Compute it in the loss from a plain tensor."
        )
    elif leaf.is_meta:
        why = (
            "is on the meta device and has no values; module.to_empty(device=...) and its initialization, or a state dict, give it "
            "some."
        )
    elif leaf.is_floating_point() and leaf.dtype.itemsize < 2:
        why = f"has dtype {leaf.dtype}, too narrow to accumulate in; keep parameters in bfloat16 or wider, and let the loss cast them."
    elif not leaf.is_floating_point() and not leaf.is_complex():
        why = (
            f"has dtype {leaf.dtype}; parameters must be floating point or complex. Pass integer and boolean tensors as buffers: "
            "init(params, buffers)."
        )
    else:
        return
    raise ValueError(f"init(params): leaf {name!r} {why}")


def _plan_bucket(named: list[tuple[str, Tensor, int]], common: frozenset[str]) -> BucketPlan:
    segments, start = [], 0
    for name, leaf, place in named:
        shape = tuple(leaf.shape)
        numel = prod(shape) * (1 + leaf.is_complex())
        own = Attributes(vars(leaf)) if type(leaf) in (Tensor, torch.nn.Parameter) and vars(leaf) else None
        segments.append(Segment(name, shape, start, numel, leaf.is_complex(), place, own))
        start += numel
    return BucketPlan(named[0][1].dtype.to_real(), tuple(segments), start, named[0][0] in common)
