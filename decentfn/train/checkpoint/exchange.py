"""Exchange of weights with other programs: state dicts of `nn.Module`, safetensors files, PyTorch's distributed checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from decentfn import sharded
from decentfn.comm import collectives
from decentfn.core import brief, checks_numbers, log, require, trees
from decentfn.errors import CheckpointCorrupt
from decentfn.gradient.parameter_swap import ParameterSwap, entries_of, lock_of_module, weights
from decentfn.kit.state import State
from decentfn.train.changes import with_params
from decentfn.train.checkpoint import files, layout
from decentfn.train.collective_calls import as_path, on_all, on_first
from decentfn.train.consensus import (
    buffers,
    consensus_buffers,
    is_stacked,
    mean_parameters,
    params,
    require_sharded_alike,
    to_evaluate,
)

_WRAPPED = "module."
"""What DistributedDataParallel and DataParallel put before every name."""


@checks_numbers
@collectives.calling("df.state_dict(module, state)", of_state=True)
def state_dict(module: nn.Module, state: State, *, consensus: bool = False) -> dict[str, Any]:
    """Return a strict state dict for `module.load_state_dict`: tied names, buffers, `get_extra_state`; copies.

    Args:
        module: the module of `df.functional`; it is not changed.
        state: a training state whose parameters and buffers came from `df.functional`.
        consensus: use the mean over all workers (collective) instead of this worker's own replica.

    Returns:
        Names and tensors. If a worker is several processes, shards are gathered one by one (collective) to its process
        0, on the CPU; its other processes get an empty dict.
    """
    require(isinstance(module, nn.Module), "state_dict", "the module comes first.", module=module)
    rule = "the state is stacked; take one worker's, df.worker(state, i), or the mean of all, consensus=True."
    require(consensus or not is_stacked(state), "state_dict(module, state)", rule)
    require_sharded_alike("state_dict(module, state)", state.params.plan, is_sharded=sharded.is_sharded(module))
    x, b = (mean_parameters(state), consensus_buffers(state)) if consensus else (to_evaluate(state), buffers(state))
    tensors = _named("state_dict(module, state)", module, x.tree(), b)
    if sharded.is_sharded(module):
        sharded.own_shards(module)
        parameters = dict(module.named_parameters())
        unsharded = sharded.unsharded((p, tensors[name].clone()) for name, p in parameters.items())
        if collectives.all_processes().process:
            return {}
        return _with_values(module, tensors, dict(zip(parameters, unsharded, strict=True)))
    with _holding(module, _without_criterion(module, tensors)):
        named = module.state_dict()
        return {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in named.items()}


@contextmanager
def _holding(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Context in which a module has these tensors, in its tables and, where they fit, in its own tensors (TensorDictParams)."""
    with lock_of_module(module):
        entries = entries_of(module)
        with ParameterSwap.beside_weights(entries, tensors), weights(entries, tensors):
            yield


def state_dict_in_place(module: nn.Module, state: State) -> dict[str, Any]:
    """Return the mean as a state dict whose sharded tensors are DTensors, of this process's shards. Collective."""
    if not sharded.is_sharded(module):
        return state_dict(module, state, consensus=True)
    tensors = _named("export(path, module, state)", module, mean_parameters(state).tree(), consensus_buffers(state))
    sharded.own_shards(module)
    placed = {name: sharded.as_placed(p, tensors[name]) for name, p in module.named_parameters()}
    return _with_values(module, tensors, placed)


def _with_values(module: nn.Module, tensors: dict[str, Tensor], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sharded module's state dict with these parameters, and its buffers from `tensors`."""
    values: dict[int, Any] = {id(b): tensors[name].detach().clone() for name, b in module.named_buffers()}
    values |= {id(p): parameters[name] for name, p in module.named_parameters()}
    return {name: values.get(id(x), x) for name, x in module.state_dict(keep_vars=True).items()}


@collectives.calling("df.load_state_dict(module, state, state_dict)")
@torch.inference_mode(False)
def load_state_dict(module: nn.Module, state: State, state_dict: Mapping[str, Any]) -> State:
    """Return the state with the parameters and buffers of a `state_dict`, checked like a strict `load_state_dict`.

    The algorithm's memory restarts, as with `df.with_params`: set all workers in the same step.

    Args:
        module: the module of `df.functional`; it is not changed, except by its own `set_extra_state`.
        state: the state of one worker.
        state_dict: the result of `module.state_dict()` or `df.state_dict(module, state)`, or of the module in
            DistributedDataParallel, whose `module.` before every name is dropped. If a worker is several processes, its
            process 0 sends its own to the others, tensor by tensor (collective), which may pass `{}`. Values of
            `get_extra_state` are then ignored.

    Raises:
        ValueError: a stacked state; a plain module with a state of a sharded one; a module that loads another shape.
        RuntimeError: PyTorch's, if names or shapes do not fit; on every process of the worker.
    """
    require(isinstance(module, nn.Module), "load_state_dict", "the module comes first.", module=module)
    rule = "the state is stacked; df.stack(df.load_state_dict(module, one, ...), N) of one worker's."
    require(not is_stacked(state), "load_state_dict(module, state, state_dict)", rule)
    is_sharded = sharded.is_sharded(module)
    require_sharded_alike("load_state_dict(module, state, state_dict)", state.params.plan, is_sharded=is_sharded)
    state_dict = _with_every_name(module, state_dict)
    x, b = params(state), buffers(state)
    tensors = _named("load_state_dict(module, state, state_dict)", module, x, b)
    if is_sharded:
        tensors |= _shards(module, state_dict)
    else:
        loaded, shapes = _without_criterion(module, tensors), {name: x.shape for name, x in tensors.items()}
        with torch.no_grad(), _holding(module, loaded):
            module.load_state_dict(state_dict, strict=True)
        for name, new in loaded.items():
            rule = f"the module has loaded another shape into {name!r} than the state's, {list(shapes[name])}."
            is_same_shape = new is not None and new.shape == shapes[name]
            require(is_same_shape, "load_state_dict(module, state, state_dict)", rule)
            if new is not tensors[name]:  # assigned by the module's own _load_from_state_dict
                tensors[name] = new.detach().to(tensors[name], copy=True)
    new = with_params(state, {name: tensors[name] for name in x})
    if b is None:
        return new
    held = trees.map(lambda x: x, b)  # of the same type
    held.update({name: tensors[name] for name in b})
    return new._replace(local=new.local._replace(buffers=held))


def _named(call: str, module: nn.Module, x: Any, b: Any) -> dict[str, Tensor]:
    """Return the state's tensors by name, or raise ValueError unless they are those of the module."""
    tensors = {**x, **(b or {})} if isinstance(x, Mapping) and isinstance(b, Mapping | None) else {}
    own = {name for name, _ in module.named_parameters()}
    unknown = _without_criterion(module, tensors).keys() - own - {name for name, _ in module.named_buffers()}
    if own - tensors.keys() or unknown:
        raise ValueError(
            f"{call}: the state's tensors are {brief(sorted(tensors))}, the module's parameters {brief(sorted(own))}; pass the "
            "module of df.functional, whose parameters and buffers went to init(params, buffers)."
        )
    return tensors


def _with_every_name(module: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict with the module's own names: without a wrapper's prefix, and a tied tensor under each name."""
    if not isinstance(given, Mapping):
        return given  # which load_state_dict refuses, on every process
    own = {layout.without_compiled(name): (name, x) for name, x in module.state_dict(keep_vars=True).items()}
    plain = {layout.without_compiled(name): x for name, x in given.items()}
    while plain and not plain.keys() & own.keys() and all(name.startswith(_WRAPPED) for name in plain):
        plain = {name.removeprefix(_WRAPPED): x for name, x in plain.items()}
    of_tensor = {id(x): plain[key] for key, (_, x) in own.items() if key in plain}
    return {name: plain.pop(key, of_tensor[id(x)]) for key, (name, x) in own.items() if id(x) in of_tensor} | plain


def _shards(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return this process's shards of the state dict on its worker's process 0, by the module's names; collective."""
    sharded.own_shards(module)
    own = module.state_dict(keep_vars=True)
    has_it = collectives.all_processes().process == 0
    check = _require_fit if has_it else lambda *_: None
    on_all("load_state_dict(module, state, state_dict)", check, module, own, state_dict)
    wanted = {name: x for name, x in own.items() if isinstance(x, torch.Tensor)}
    parts = sharded.sharded((x, state_dict[name] if has_it else None) for name, x in wanted.items())
    # The last name of a tied tensor counts.
    by_tensor = {id(x): part for x, part in zip(wanted.values(), parts, strict=True)}
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: by_tensor[id(x)] for name, x in named if id(x) in by_tensor}


def _require_fit(module: nn.Module, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    shapes = [{k: list(x.shape) for k, x in named.items() if isinstance(x, torch.Tensor)} for named in (own, given)]
    wrong = [name for name in shapes[0] if name in given and shapes[0][name] != shapes[1].get(name)]
    found = [
        f"{what} key(s): {sorted(names)}"
        for what, names in {"Missing": own.keys() - given.keys(), "Unexpected": given.keys() - own.keys()}.items()
        if names
    ]
    found += [f"{name} is {shapes[1].get(name)} there and {shapes[0][name]} in the module" for name in wrong]
    if found:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: {'; '.join(found)}.")


def _without_criterion(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {name: x for name, x in tensors.items() if name in own or not name.startswith("criterion.")}


@collectives.calling("df.checkpoint.export(path, module, state)", of_state=True)
def export(path: str | Path, module: nn.Module, state: State, *, format: str = "safetensors") -> None:
    """Write the mean over all workers as a safetensors file, or for `torch.distributed.checkpoint`. Collective.

    As by safetensors' `save_model`, a tied tensor has one name in the file, so `load_model(module, path)` reads it, and
    `import_(path)` gives all names, for a strict `module.load_state_dict`. Names are those of a module that is not
    compiled. Process 0 writes the file and then replaces an older one of that name. Parameters that are not shared have no
    mean: worker 0's are written, and the log names them at WARNING.

    Args:
        path: path of the file; of a new directory for "dcp".
        module: the module of `df.functional`; it is not changed.
        state: a training state, of one worker or stacked; `df.ema_state(state)` for the average of `df.ema`.
        format: "safetensors", or "dcp" for `torch.distributed.checkpoint.load(module.state_dict(), checkpoint_id=path)`,
            sharded in any way: tied tensors under each name, and each process of worker 0 writes its own shards.

    Raises:
        ValueError: the module's `state_dict` contains non-tensors (`get_extra_state`) or other shapes than the state;
            another format.
        OSError: on all processes, if the file cannot be written, or the directory has a checkpoint.
    """
    path = as_path("export(path, module, state)", path)
    if not isinstance(module, nn.Module):
        raise ValueError(f"export(module={brief(module)}): expected the nn.Module of df.functional.")
    require(format in ("safetensors", "dcp"), "export", '"safetensors" or "dcp".', format=format)
    own = sorted(s.name for b in state.params.plan.buckets if not b.is_shared for s in b.segments)
    if own and collectives.all_processes().rank == 0:
        log.warning(
            f"export: no message carries {brief(own).strip('[]')} (shared=), so they have no mean, and {path} has worker 0's; those of "
            "each worker are in df.state_dict(module, state), df.worker(state, i) of a stacked one"
        )
    if format == "safetensors":
        on_first("export", _write, path, state_dict(module, state, consensus=True), module.state_dict(keep_vars=True))
        return
    on_all("export", _write_shards, path, state_dict_in_place(module, state), module.state_dict(keep_vars=True))


def import_(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a safetensors file.

    Tied tensors come back under each name that the file's metadata have, as `export` and `save_model` write them.

    `df.load_state_dict(module, state, df.checkpoint.import_(path))` starts from it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file of PyTorch's own `save`.
        CheckpointCorrupt: not a safetensors file, or truncated. (A flipped bit is not detected.)
    """
    path = as_path("import_(path)", path)
    try:
        named: dict[str, Any] = load_file(path)
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
        named |= {name: named[kept] for name, kept in about.items() if name not in named and kept in named}
    except SafetensorError as error:
        with path.open("rb") as file:
            start = file.read(2)
        if start in (b"PK", b"\x80\x02"):  # a zip archive, or the former format
            raise ValueError(
                f"import_({str(path)!r}): a file of PyTorch's own `save`, not of safetensors; give df.load_state_dict what "
                "PyTorch's `load(path, weights_only=True)` returns, or the state dict in it."
            ) from error
        raise CheckpointCorrupt(f"{path}: {error}; write it again.") from error
    return named


def _require_tensors(path: Path, named: dict[str, Any], own: dict[str, Any]) -> None:
    for name, x in named.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in layout.DTYPES:
            raise ValueError(
                f"export({str(path)!r}): {name!r} is {getattr(x, 'dtype', type(x).__name__)}, which safetensors files "
                "do not hold; store df.state_dict(module, state, consensus=True) in a way of your own."
            )
        if own[name].numel() and x.shape != own[name].shape:  # else its memory is freed
            raise ValueError(
                f"export(path, module, state): {name!r} is {list(x.shape)} in the state and {list(own[name].shape)} in "
                "the module; give the module of df.functional."
            )


def _write(path: Path, named: dict[str, Any], own: dict[str, Any]) -> None:
    _require_tensors(path, named, own)
    first: dict[int, str] = {}
    names = {name: layout.without_compiled(first.setdefault(id(own[name]), name)) for name in named}
    tied = {plain: kept for name, kept in names.items() if (plain := layout.without_compiled(name)) != kept}
    kept = {layout.without_compiled(name): named[name].cpu().contiguous() for name in first.values()}
    files.replace(path, layout.encoded(kept, tied=tied))


def _write_shards(path: Path, named: dict[str, Any], own: dict[str, Any]) -> None:
    """Write the state dict by PyTorch's distributed checkpoint, on the processes of worker 0; its metadata come last."""
    from torch.distributed.checkpoint.api import CheckpointException  # takes a second
    from torch.distributed.checkpoint.state_dict_saver import save

    here = collectives.all_processes()
    if here.worker:
        return
    if (path / ".metadata").exists():
        raise FileExistsError(f"export({str(path)!r}, format='dcp'): it exists; give a new directory.")
    _require_tensors(path, named, own)
    named, group = {layout.without_compiled(name): x for name, x in named.items()}, here.channels.intra_worker
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        try:
            save(named, checkpoint_id=path, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception
            cause, _ = next(iter(error.failures.values()))
            raise OSError(f"export(format='dcp'): {cause}") from error
