"""Weights that a loss was not given, but takes a gradient of: a module's own, where the loss lends it other ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from decentfn.words import brief


@contextmanager
def no_other_weights(loss: Tensor) -> Iterator[None]:
    """Around the backward pass of a loss: raises where a module's own parameters take part in it.

    A loss that calls `torch.func.functional_call` gives the module its own weights back before the backward pass; activation
    checkpointing then computes with those.
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
            "or forward=..., which holds them until it is over. Freeze what is not trained, with requires_grad_(False)."
        )


@contextmanager
def no_own_weights(loss: Tensor, own: Iterable[Tensor]) -> Iterator[None]:
    """Around the backward pass of a loss: raises where it takes part in a gradient of these, in whose places others stand."""
    others = set(map(id, own)).intersection(map(id, filter(_is_trained, _leaves(loss))))
    yield
    if others:
        raise RuntimeError(
            f"df.autograd(loss_fn): the loss takes a gradient of {len(others)} of the module's own parameters, through a list or an "
            "attribute that was made before; the worker's stand in their places while the loss is computed. Look them up in "
            "the loss, as in forward=lambda module, batch: ... module.parameters()."
        )


def _is_trained(x: Tensor | None) -> bool:
    return isinstance(x, nn.Parameter) and x.requires_grad


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """What the gradient of a loss arrives at."""
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
