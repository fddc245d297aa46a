"""From a training state to what `nn.Module.load_state_dict` takes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decentfn import collectives, trees
from decentfn.consensus import buffers, consensus_buffers, consensus_mean, is_stacked, params, with_params
from decentfn.kit.state import State
from decentfn.torch_private.autograd import weights


def state_dict(module: nn.Module, state: State, *, consensus: bool = False) -> dict[str, Any]:
    """What `module.load_state_dict` takes, strictly: tied names, persistent buffers, `get_extra_state`; copies.

    Args:
        module: the module of `df.functional`; it stays as it is.
        state: a training state whose parameters and buffers came from `df.functional`.
        consensus: the mean over all workers (collective: call it on every rank) in place of this worker's own replica.

    Returns:
        Names and tensors. Where a worker is several processes, shards are gathered one by one (collective) to its process 0, on the
        CPU; its other processes get an empty dict.

    Raises:
        ValueError: a stacked state, of which one worker's is meant.
    """
    if is_stacked(state) and not consensus:
        raise ValueError(
            "state_dict(module, state): the state is stacked; take one worker's, df.worker(state, i), or the mean of all, "
            "consensus=True."
        )
    own = (consensus_mean(state), consensus_buffers(state)) if consensus else (params(state), buffers(state))
    if collectives.is_sharded(module):
        return _gathered(module, _by_name(*own))
    with weights(module, _by_name(*own)):
        named = module.state_dict()
    return {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in named.items()}


def _gathered(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`state_dict` of a sharded module on process 0 of the worker, nothing on the others; collective."""
    collectives.own_shards(module)
    parameters = dict(module.named_parameters())
    wholes = collectives.whole((p, tensors[name]) for name, p in parameters.items())
    values: dict[int, Any] = {id(b): tensors[name].detach().clone() for name, b in module.named_buffers()}
    values |= {id(p): one for p, one in zip(parameters.values(), wholes, strict=True)}
    if collectives.everyone().process:
        return {}
    return {name: values.get(id(x), x) for name, x in module.state_dict(keep_vars=True).items()}


def load_state_dict(module: nn.Module, state: State, state_dict: Mapping[str, Any]) -> State:
    """The state with the parameters and buffers of a module's `state_dict`, checked as `load_state_dict` does, strictly.

    What the algorithm remembers starts anew, as by `df.with_params`: give all workers theirs in the same step.

    Args:
        module: the module of `df.functional`; it stays as it is.
        state: the state of one worker.
        state_dict: as `module.state_dict()` or `df.state_dict(module, state)` gives it.

    Raises:
        ValueError: a stacked state; a module whose parameters are sharded.
        RuntimeError: PyTorch's, where names or shapes do not fit.
    """
    if is_stacked(state):
        raise ValueError(
            "load_state_dict(module, state, state_dict): the state is stacked; df.stack(df.load_state_dict(module, one, ...), N) "
            "of one worker's."
        )
    if collectives.is_sharded(module):
        raise ValueError(
            "load_state_dict(module, state, state_dict): the module is sharded; load it into the module before df.functional, with "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict, and call init(params, buffers)."
        )
    x, b = params(state), buffers(state)
    tensors = _by_name(x, b)
    with torch.no_grad(), weights(module, tensors):
        module.load_state_dict(state_dict, strict=True)
    new = with_params(state, {name: tensors[name] for name in x})
    if b is None:
        return new
    loaded = trees.map(lambda t: t, b)
    loaded.update({name: tensors[name] for name in b})
    return new._replace(local=new.local._replace(buffers=loaded))


def _by_name(params: Any, buffers: Any) -> dict[str, Tensor]:
    return {**params, **(buffers or {})}
