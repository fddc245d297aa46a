"""From an `nn.Module` to the three things a step is made of, and back to its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decentfn import trees
from decentfn.trees import PyTree
from decentfn.words import brief


class ModuleLoss:
    """`loss_fn(params, buffers, batch) -> (loss, (buffers, None))` of a module; made by `functional`."""

    def __init__(
        self,
        module: nn.Module,
        criterion: Callable[..., Tensor],
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        frozen: frozenset[str],
    ) -> None:
        self.module = module
        self.criterion = criterion
        self.frozen = frozen
        """Which of the buffers are frozen parameters."""
        self._shapes = _shapes(params), _shapes(buffers)

    def __call__(self, params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, tuple[PyTree, None]]:
        """Run the module with these parameters and buffers."""
        self.require_batch(batch)
        inputs, *targets = batch
        kept = {name: torch.clone(buffer) for name, buffer in buffers.items()}
        output = functional_call(self.module, {**params, **kept}, (inputs,))
        return self.criterion(output, *targets), (kept, None)

    def require_inputs(self, call: str, params: PyTree, buffers: PyTree) -> None:
        """The module's names and shapes, or an error says which are not."""
        name, expected = type(self.module).__name__, self._shapes
        if buffers is None:
            raise ValueError(
                f"{call}: there are no buffers, but the loss that df.functional made of {name} takes those that came with "
                f"it, {brief(sorted(expected[1]))}; call init(params, buffers)."
            )
        given = _shapes(params), _shapes(buffers)
        if given == expected:
            return
        if given == expected[::-1]:
            raise ValueError(f"{call}: params and buffers of {name} are swapped; call init(params, buffers).")
        differing = [
            f"{what} {leaf!r} is {found.get(leaf, 'missing')}, but {wanted.get(leaf, 'not known')} in {name}"
            for what, found, wanted in zip(("parameter", "buffer"), given, expected, strict=True)
            for leaf in (*wanted, *found)
            if found.get(leaf) != wanted.get(leaf)
        ]
        raise ValueError(
            f"{call}: {differing[0]}, of which df.functional made the loss; call init(params, buffers) with what it "
            "returned beside the loss. What shall not be trained is frozen before that, with requires_grad_(False)."
        )

    def require_batch(self, batch: Any) -> None:
        """A tuple or a list of inputs and targets: the rows of a tensor or the keys of a dict would unpack as well."""
        if not isinstance(batch, (tuple, list)):
            raise ValueError(
                f"loss_fn from df.functional: the batch is a {type(batch).__name__}, expected a tuple (inputs, *targets); "
                "pass (batch['inputs'], batch['targets']), or write loss_fn(params, buffers, batch) with "
                "torch.func.functional_call."
            )


def _shapes(tree: PyTree) -> dict[str, list[int]]:
    return {name: list(getattr(leaf, "shape", ())) for name, leaf in trees.named_leaves(tree)}


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
    return trainable, buffers, ModuleLoss(module, criterion, trainable, buffers, frozenset(frozen))
