"""From an `nn.Module` to the three things a step is made of, and back to its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decentfn.trees import PyTree

V = TypeVar("V")

_PREFIX = "module."


class ModuleLoss:
    """`loss_fn(params, buffers, batch) -> (loss, (buffers, None))` of a module; made by `functional`."""

    def __init__(self, module: nn.Module, criterion: Callable[..., Tensor], frozen: frozenset[str]) -> None:
        self.module = module
        self.criterion = criterion
        self.frozen = frozen
        """Which of the buffers are frozen parameters."""

    def __call__(self, params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, tuple[PyTree, None]]:
        """Run the module with these parameters and buffers."""
        inputs, *targets = batch
        kept = {name: torch.clone(buffer) for name, buffer in buffers.items()}
        output = functional_call(self.module, {**params, **kept}, (inputs,))
        return self.criterion(output, *targets), (kept, None)


def functional(
    module: nn.Module, criterion: Callable[..., Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], ModuleLoss]:
    """`params, buffers, loss_fn = functional(module, criterion)`.

    Args:
        module: any module; parameters that do not require a gradient are frozen: they come with the buffers.
        criterion: `(output, *targets) -> 0-d loss`.

    Returns:
        Three things: `params`, name -> parameter, copies, a tied parameter once; `buffers`, name -> buffer or frozen
        parameter, copies (perhaps none); and `loss_fn(params, buffers, batch) -> (loss, (buffers, None))` for batches
        `(inputs, *targets)`, which leaves the module and the buffers that it is given as they are.
    """
    trainable = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()} | frozen
    return trainable, buffers, ModuleLoss(module, criterion, frozenset(frozen))


def strip_module_prefix(state_dict: Mapping[str, V]) -> dict[str, V]:
    """A state dict without the `module.` that DistributedDataParallel puts before every name; one without stays as it is.

    Raises:
        ValueError: some names have the prefix and others have not.

    >>> strip_module_prefix({"module.weight": 1, "module.bias": 2})
    {'weight': 1, 'bias': 2}
    """
    prefixed = [name for name in state_dict if name.startswith(_PREFIX)]
    if prefixed and len(prefixed) < len(state_dict):
        other = next(name for name in state_dict if not name.startswith(_PREFIX))
        raise ValueError(
            f"strip_module_prefix(state_dict): {prefixed[0]!r} begins with 'module.', {other!r} does not; a wrapped "
            "model's names all do. If a submodule is called 'module', there is no prefix to strip."
        )
    return {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}


def add_module_prefix(state_dict: Mapping[str, V]) -> dict[str, V]:
    """A state dict with `module.` before every name, as a model wrapped in DistributedDataParallel expects it.

    >>> add_module_prefix({"weight": 1})
    {'module.weight': 1}
    """
    return {_PREFIX + name: value for name, value in state_dict.items()}
