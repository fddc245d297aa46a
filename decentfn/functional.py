"""From an `nn.Module` to the three things a step is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decentfn.trees import PyTree


def functional(
    module: nn.Module, criterion: Callable[..., Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Callable[[PyTree, PyTree, Any], Any]]:
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

    def loss_fn(params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, tuple[PyTree, None]]:
        inputs, *targets = batch
        kept = {name: torch.clone(buffer) for name, buffer in buffers.items()}
        output = functional_call(module, {**params, **kept}, (inputs,))
        return criterion(output, *targets), (kept, None)

    return trainable, buffers, loss_fn
