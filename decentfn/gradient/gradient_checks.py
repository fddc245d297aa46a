"""Gradient checks: tensors with a gradient that the loss was not given, which no optimizer would train."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from decentfn.core import trees
from decentfn.core.formatting import brief


@contextmanager
def no_other_weights(loss: Tensor) -> Iterator[None]:
    """Context of a loss's backward pass: raise if a module's own parameters take part in it.

    A loss that calls `torch.func.functional_call` restores the module's own weights before the backward pass;
    activation checkpointing then computes with those.
    """
    others = [x for x in _leaves(loss) if _is_trained(x)]
    hook = register_module_forward_pre_hook(
        lambda module, _: others.extend(x for x in module._parameters.values() if _is_trained(x))
    )
    try:
        yield
    finally:
        hook.remove()
    if others:
        raise RuntimeError(
            f"df.autograd(loss_fn): the gradient is one of a module's own parameters, of shapes {brief([list(x.shape) for x in others])}, "
            "which are not those that the loss was given. A torch.func.functional_call holds the given ones in the forward pass only, "
            "and activation checkpointing computes anew in the backward pass: make the loss with df.functional(module, criterion), "
            "or forward=..., which holds them until it is over. Parameters that the loss alone refers to belong into params. Freeze "
            "what is not trained, with requires_grad_(False)."
        )


def ungiven(loss: Tensor, given: Any) -> list[ref[Tensor]]:
    """Return references to the tensors with a gradient from the loss, made in it or outside, that are not `given`."""
    known = {id(x) for x in trees.leaves(trees.plain(given))}
    return [ref(x) for x in _leaves(loss) if id(x) not in known]


def require_none(refs: Sequence[ref[Tensor]]) -> None:
    """Raise ValueError if some exist after the loss is freed: they are from outside, and no optimizer trains them."""
    if any(r() is not None for r in refs):
        gc.collect()  # made in the loss and part of a cycle
    others = [x for r in refs if (x := r()) is not None]
    if others:
        raise ValueError(
            f"loss_fn: it has a gradient of {len(others)} tensor(s), of shapes {brief([list(x.shape) for x in others])}, which are not "
            "among the state's parameters: no optimizer would train them. Let the criterion be an nn.Module that has them, "
            "df.functional(module, criterion), or make them part of the module or of params; freeze what is not trained, with "
            "requires_grad_(False)."
        )


def _is_trained(x: Tensor | None) -> bool:
    return isinstance(x, nn.Parameter) and x.requires_grad


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        nodes += [before for before, _ in node.next_functions]
