"""Export and import of weights: plain state dicts in safetensors files, or as PyTorch's distributed checkpoint."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from decentfn.comm import collectives
from decentfn.core import brief, require
from decentfn.errors import CheckpointCorrupt
from decentfn.kit.state import State
from decentfn.train.checkpoint import files, layout
from decentfn.train.collective_calls import as_path, on_all, on_first
from decentfn.train.state_dicts import state_dict, state_dict_in_place, without_compiled

_log = logging.getLogger("decentfn")


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
        OSError: on all processes, if the file cannot be written, or the directory exists and is not empty.
    """
    path = as_path("export(path, module, state)", path)
    if not isinstance(module, nn.Module):
        raise ValueError(f"export(module={brief(module)}): expected the nn.Module of df.functional.")
    require(format in ("safetensors", "dcp"), "export", '"safetensors" or "dcp".', format=format)
    own = sorted(s.name for b in state.params.plan.buckets if not b.is_shared for s in b.segments)
    if own and collectives.all_processes().rank == 0:
        _log.warning(
            "export: no message carries %s (shared=), so they have no mean, and %s has worker 0's; those of each worker are in "
            "df.state_dict(module, state), df.worker(state, i) of a stacked one",
            brief(own).strip("[]"),
            path,
        )
    if format == "safetensors":
        on_first("export", _write, path, state_dict(module, state, consensus=True), module.state_dict(keep_vars=True))
        return
    named, its = state_dict_in_place(module, state), module.state_dict(keep_vars=True)
    temporary = Path(on_first("export", _begin_directory, path))
    try:
        on_all("export", _write_shards, temporary, named, its)
        on_first("export", files.publish, temporary, path)
    finally:
        if collectives.all_processes().rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


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
        if files.is_from_torch_save(path):
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
    names = {name: without_compiled(first.setdefault(id(own[name]), name)) for name in named}
    tied = {without_compiled(name): kept for name, kept in names.items() if without_compiled(name) != kept}
    kept = {without_compiled(name): named[name].cpu().contiguous() for name in first.values()}
    files.replace(path, layout.encoded(kept, tied=tied))


def _begin_directory(path: Path) -> str:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"export({str(path)!r}, format='dcp'): it exists; give a new directory.")
    return str(path.with_name(f".{path.name}.{os.getpid()}"))


def _write_shards(path: Path, named: dict[str, Any], own: dict[str, Any]) -> None:
    """Write the state dict by PyTorch's distributed checkpoint, on the processes of worker 0."""
    from torch.distributed.checkpoint.api import CheckpointException  # takes a second
    from torch.distributed.checkpoint.state_dict_saver import save

    here = collectives.all_processes()
    if here.worker:
        return
    _require_tensors(path, named, own)
    named, group = {without_compiled(name): x for name, x in named.items()}, here.channels.intra_worker
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        try:
            save(named, checkpoint_id=path, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception
            cause, _ = next(iter(error.failures.values()))
            raise OSError(f"export(format='dcp'): {cause}") from error
