"""The gradients of leaves that share a bucket, joined in it: at the end, or in a large bucket while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from decentfn.buckets import BucketPlan, Plan, elements
from decentfn.gradient.layout import Layout
from decentfn.torch_private.storages import copy_each, joined


class Joining:
    """The buckets of the leaves' gradients; a large leaf's `.grad` becomes its place in the bucket, and is not held twice.

    The hooks know the places and not the leaves, so that nothing is a cycle that waits for the garbage collector.
    """

    def __init__(self, form: Layout, leaves: list[Tensor]) -> None:
        self._form, self._leaves = form, leaves
        self.used = set[int]()
        """The leaves that had a gradient, of all that was collected."""
        self._started: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        """Of a bucket, its vector and the leaves' places in it."""
        self._is_watching = False

    def watch(self) -> None:
        """Copy from now on; called after the forward pass, so that what it does with gradients of its own is not seen."""
        if self._is_watching:
            return
        self._is_watching = True
        for number, index, place in self._form.large:
            self._leaves[number].register_post_accumulate_grad_hook(_hook(self._started, self._form, index, place))

    def collect(self) -> list[Tensor]:
        """The buckets; the leaves give their gradients up. A leaf without one has 0."""
        first, found = 0, []
        for index, bucket in enumerate(self._form.plan.buckets):
            leaves = self._leaves[first : first + len(bucket.segments)]
            grads = list(map(_gradient, leaves))
            self.used.update([first + i for i, grad in enumerate(grads) if grad is not None])
            first += len(leaves)
            for leaf in leaves:
                leaf.grad = None
            if not {torch.Tensor}.issuperset(map(type, grads)) or not {torch.strided}.issuperset(map(_layout, grads)):
                grads = list(map(_whole, grads, leaves))
            if index not in self._started:
                found.append(in_bucket(bucket, grads))
                continue
            vector, places = self._started.pop(index)
            late = [i for i, place in enumerate(places) if grads[i] is not place]
            if late:
                copy_each([grads[i] for i in late], [places[i] for i in late])
            found.append(vector)
        return found


def _hook(
    started: dict[int, tuple[Tensor, Sequence[Tensor]]], form: Layout, index: int, place: int
) -> Callable[[Tensor], None]:
    def copy(leaf: Tensor) -> None:
        grad = leaf.grad
        if grad is None or grad.layout != torch.strided:
            return
        if index not in started:
            bucket = form.plan.buckets[index]
            vector = torch.empty(bucket.numel, dtype=bucket.dtype, device=leaf.device)
            started[index] = vector, form.parts(index, vector)
        own = started[index][1][place]
        if grad is not own:  # it is from the second time on that a gradient arrives, and is added in place
            own.copy_(grad.detach())
            leaf.grad = own

    return copy


def in_buckets(plan: Plan, leaves: Iterable[Tensor]) -> list[Tensor]:
    """The leaves' buckets, one after another: that of a leaf alone in its bucket is the leaf itself."""
    rest = iter(leaves)
    return [in_bucket(bucket, [next(rest) for _ in bucket.segments]) for bucket in plan.buckets]


def in_bucket(bucket: BucketPlan, leaves: list[Tensor]) -> Tensor:
    """One bucket's leaves in a vector."""
    if len(leaves) == 1:
        return elements(leaves[0])
    if any([segment.is_complex for segment in bucket.segments]):
        return torch.cat([elements(leaf) for leaf in leaves])
    return joined(leaves)


_gradient, _layout = attrgetter("grad"), attrgetter("layout")


def _whole(grad: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad.to_dense() if grad.is_sparse else grad
