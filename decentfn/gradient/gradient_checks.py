"""Gradient checks: tensors that the loss was not given, which no optimizer would train or no state would hold."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from decentfn import sharded
from decentfn.core import brief, require, trees
from decentfn.gradient.parameter_swap import contents


@contextmanager
def no_other_weights(loss: Tensor) -> Iterator[None]:
    """Context of a loss's backward pass: raise if a module's own parameters take part in it.

    Activation checkpointing computes with them if `torch.func.functional_call` has restored them before.
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
            "and activation checkpointing computes again in the backward pass: make the loss with df.functional(module, criterion), "
            "or forward=..., which holds them until it is over. Parameters that the loss alone refers to belong in params. Freeze "
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
            "requires_grad_(False); of a batch, pass x.detach()."
        )


def require_apart(call: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if tensors share memory, unless they are several frozen parameters: their copies stay equal."""
    placed = [(x.data_ptr(), name) for name, x in tensors.items() if x.layout == torch.strided and x.numel()]
    end, names = 0, list[str]()
    for start, name in sorted(placed):
        x = tensors[name]
        names = [*names, name] if 0 < start < end else [name]  # 0 on the meta device
        end = max(end, start + x.element_size() * (x.numel() if x.is_contiguous() else 1))
        own = {id(tensors[n]): tensors[n] for n in names}
        is_frozen = all(isinstance(x, nn.Parameter) and not x.requires_grad for x in own.values())
        rule = f"{brief(names)} share their memory, and a state would hold them apart; make them one Parameter, or one buffer, or clone() one."
        require(len(names) == 1 or (len(own) == len(names) and is_frozen), call, rule)


def require_computed(
    call: str, modules: Iterable[nn.Module], trained: Iterable[Tensor], *, of_call: bool = False
) -> None:
    """Raise ValueError if plain attributes are views of trained parameters, which a call of the module may have left.

    spectral_norm makes its own in each call.
    """
    storages = {x.untyped_storage().data_ptr() for x in trained if x.layout == torch.strided} - {0}
    views = {
        name
        for module in modules
        for name, held in vars(module).items()
        if name not in ("_buffers", "_flat_weights") and f"{name}_orig" not in module._parameters
        for x in contents(held)
        if type(x) is Tensor and x.layout == torch.strided and x.untyped_storage().data_ptr() in storages
    }
    rule = f"the attributes {brief(sorted(views))} are views of trained parameters, and a state's would leave them behind; compute them in forward."
    if of_call:
        rule = (
            f"a call left views of trained parameters in the attributes {brief(sorted(views))}, where a later call would read old values; "
            "drop them at the end of forward, or of the one in df.functional(module, forward=...): torchrl's by module._cache.clear()."
        )
    require(not views, call, rule)


def copied(call: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy parameters and their Python attributes; raise ValueError if one is made of others, or a trained one of a class of its own."""
    own: dict[str, Tensor] = {}
    for name, p in named:
        x = sharded.local(p)
        rule = (
            f"the parameter {name!r} is a {type(x).__module__}.{type(x).__name__}; optimizers and averages see plain tensors, so it "
            "would leave what its class keeps, such as a manifold. Compute it in forward from an nn.Parameter (torch.nn.utils."
            "parametrize), or freeze it with requires_grad_(False)."
        )
        require(type(x) in (Tensor, nn.Parameter) or not p.requires_grad, call, rule)
        rule = (
            f"the frozen parameter {name!r} is a {type(x).__module__}.{type(x).__name__}, made of other tensors, and a state holds plain "
            "ones. Quantize frozen layers with bitsandbytes, whose parameters are plain, or leave them as they were."
        )
        require(type(x).__torch_dispatch__ is Tensor.__torch_dispatch__, call, rule)  # pyright: ignore
        own[name] = x.detach().clone()
        vars(own[name]).update(vars(p) if type(p) is nn.Parameter else {})
    return own


def frozen_under(module: nn.Module, word: str, frozen: Iterable[str]) -> list[str]:
    """Return the names of the frozen parameters with this name, or in the submodule with this name, or raise ValueError."""
    names = [name for name in frozen if f"{name}.".startswith(f"{word}.")]
    rule = (
        f"no frozen parameter has this name, or is in a submodule of it; the frozen ones are {brief(sorted(frozen))}. Those that "
        "are trained move by the optimizer alone."
    )
    require(len(names) > 0, f"functional({type(module).__name__}, overwritten={brief(word)})", rule)
    return names


def listed_parameters(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of the parameters in lists and other plain containers that are attributes of modules."""
    keys = {"_parameters", "_buffers", "_modules", "_flat_weights"}  # the last are of nn.RNNBase
    held = [x for m in modules for k, x in vars(m).items() if k not in keys and not isinstance(x, nn.Parameter)]
    return {id(x) for x in contents(held) if isinstance(x, nn.Parameter)}


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
