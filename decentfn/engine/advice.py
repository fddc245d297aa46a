"""Advice where a step is not compiled: whose fault it is, and what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decentfn.core import PyTree, brief_error, over_workers, trees
from decentfn.core.buckets import Buckets
from decentfn.gradient import DynamicLossScale, evaluate
from decentfn.kit.state import is_state, kind_of
from decentfn.kit.step import Step
from decentfn.torch_private.autograd import allow_saved_tensors_hooks
from decentfn.torch_private.dynamo import first_error, guards_fail, is_not_compiled, is_of_too_many_graphs


def explain(step: Step, error: Exception, state: Any, batch: PyTree, graphs: int, *, is_first: bool) -> bool:
    """Raise an explanation of a compiled step's error, if it needs one; else return True if another try may succeed.

    Some modules cannot be compiled before their first eager call, such as transformers models that return hidden
    states, so the loss is evaluated eagerly, and the first of two errors may be of that kind.
    """
    if is_of_too_many_graphs(error):
        raise RuntimeError(
            f"df.compile(step): more than {graphs} kinds of batches (structures, dtypes, shapes that the compiler takes for "
            "different ones), or values of what the loss, the optimizer or the topology reads from outside (a number, a flag, a "
            "function that changes in every step); each is compiled. Pad the batches to a few shapes and leave dynamic=None; "
            "read what changes from a tensor that is filled in place; or write df.autograd(loss_fn), whose loss is not compiled."
        ) from error
    if isinstance(error, AssertionError) and guards_fail(error):
        raise RuntimeError(
            "df.compile(step): torch.compile cannot guard a NumPy array, of the batch or from outside the loss; make it a tensor "
            "with torch.from_numpy before the first step."
        ) from error
    if not is_not_compiled(error):
        return False
    allow_saved_tensors_hooks()
    said, raised = first_error(error), getattr(error, "inner_exception", error)
    for told in (said, raised):
        if isinstance(told, ValueError):  # raised by the loss, an optimizer, an algorithm or a wrapper
            _raise_own(step, state, batch)
            raise told from None
    if torch.is_anomaly_enabled():
        raise RuntimeError(
            "df.compile(step): torch.autograd.set_detect_anomaly is on, which looks for NaN in every gradient and is not compiled: "
            f"{brief_error(said)}. Switch it off, or look for the NaN with the step before df.compile."
        ) from error
    if step.is_by_autograd:
        return False
    _raise_own(step, state, batch)
    if is_first and step.loss_fn is not None:
        return True
    made = f" If another init made the state, a {kind_of(state)}, call this algorithm's." if is_state(state) else ""
    raise RuntimeError(
        f"df.compile(step): torch.compile could not trace the step: {brief_error(said)}. Where the loss runs in a plain PyTorch loop, "
        "let PyTorch's autograd take the gradient: df.autograd(loss_fn); the rest of the step is compiled. In the optimizer, γ, the "
        "algorithm or a wrapper, compute on tensors, with torch.where in place of `if`, and without float(x), x.item() or math; the "
        f"step before df.compile runs as it is. If nothing compiles, check `backend` and the options of df.compile.{made}"
    ) from error


def _raise_own(step: Step, state: Any, batch: PyTree) -> None:
    """Raise the error of a traced loss, with its advice, if it fails without the compiler, too."""
    if step.is_by_autograd or step.loss_fn is None or not is_state(state):
        return
    try:
        loss_fn = step.loss_fn.loss_fn if isinstance(step.loss_fn, DynamicLossScale) else step.loss_fn
        t, plan = torch.zeros((), dtype=torch.int64), state.params.plan

        def gradient(x: list[Tensor], buffers: PyTree, batch: PyTree) -> tuple[Tensor, ...]:
            return evaluate(loss_fn, Buckets(x, plan), buffers, batch, t).grads.tensors

        def leaf(x: Any) -> Any:
            return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

        given, simulated = (list(state.params), state.buffers, batch), step.had("simulate")
        given = trees.map(leaf, trees.map(lambda x: x[0], given) if step.had("sweep") else given)  # of one run
        if simulated is None or simulated.size is None:
            gradient(*given)
        else:
            over_workers(gradient, simulated.size, *given)
    except Exception as own:
        raise own from None
