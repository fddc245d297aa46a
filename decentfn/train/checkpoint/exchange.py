"""Export and import of weights: plain state dicts in safetensors files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from decentfn.comm import collectives
from decentfn.core.formatting import brief
from decentfn.errors import CheckpointCorrupt
from decentfn.kit.state import State
from decentfn.train.checkpoint import files
from decentfn.train.checkpoint.layout import DTYPES, encoded
from decentfn.train.state_dicts import state_dict, without_compiled
from decentfn.train.together import as_path, on_first


@collectives.calling("df.checkpoint.export(path, module, state)", of_state=True)
def export(path: str | Path, module: nn.Module, state: State) -> None:
    """Write the mean over all workers as a safetensors file. Collective.

    As by safetensors' `save_model`, a tied tensor has one name in the file, so `load_model(module, path)` reads it, and
    `import_(path)` gives all names, for a strict `module.load_state_dict`. Names are those of a module that is not
    compiled. Process 0 writes the file and then replaces an older one of that name.

    Args:
        path: path of the file.
        module: the module of `df.functional`; it is not changed.
        state: a training state, of one worker or stacked; `df.ema_state(state)` for the average of `df.ema`.

    Raises:
        ValueError: the module's `state_dict` contains non-tensors (`get_extra_state`) or other shapes than the state.
        OSError: on all processes, if the file cannot be written.
    """
    path = as_path("export(path, module, state)", path)
    if not isinstance(module, nn.Module):
        raise ValueError(f"export(module={brief(module)}): expected the nn.Module of df.functional.")
    on_first("export", _write, path, state_dict(module, state, consensus=True), module.state_dict(keep_vars=True))


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


def _write(path: Path, named: dict[str, Any], own: dict[str, Any]) -> None:
    for name, x in named.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
            raise ValueError(
                f"export({str(path)!r}): {name!r} is {getattr(x, 'dtype', type(x).__name__)}, which safetensors files "
                "do not hold; store df.state_dict(module, state, consensus=True) in a way of your own."
            )
        if x.shape != own[name].shape:
            raise ValueError(
                f"export(path, module, state): {name!r} is {list(x.shape)} in the state and {list(own[name].shape)} in "
                "the module; give the module of df.functional."
            )
    first: dict[int, str] = {}
    names = {name: without_compiled(first.setdefault(id(own[name]), name)) for name in named}
    tied = {without_compiled(name): kept for name, kept in names.items() if without_compiled(name) != kept}
    kept = {without_compiled(name): named[name].cpu() for name in first.values()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        files.write(temporary, encoded(kept, tied=tied))
        files.publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
