"""What a process saves beside its state: `extra`, a tree as JSON with its tensors, and random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentfn.core.arguments import brief
from decentfn.train.checkpoint.layout import DTYPES

EXTRA = "extra/"
"""Prefix of the tensors' names in files."""

GENERATOR = "generator/"
"""Prefix of the names of generators' states."""

_KIND = "decentfn kind"


def packed(value: Any, tensors: dict[str, Tensor], path: str = "extra") -> Any:
    """Return what JSON holds of the value, and add its tensors; raise ValueError, with the path, for anything else."""

    def beside(kind: str, x: Tensor) -> dict[str, str]:
        name = f"{EXTRA}{path}"
        tensors[name] = x.detach().to("cpu", copy=True)
        return {_KIND: kind, "name": name}

    def each(items: Any) -> list[Any]:
        return [packed(item, tensors, f"{path}[{i}]") for i, item in enumerate(items)]

    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value) in (bool, int, str) or (type(value) is float and value - value == 0):
        return value
    if type(value) is Tensor and value.dtype in DTYPES and value.layout == torch.strided:
        return beside("tensor", value)
    if isinstance(value, bytes):
        return beside("bytes", torch.tensor(list(value), dtype=torch.uint8))
    if type(value) is np.ndarray and value.dtype.isnative and value.dtype.kind in "biuf":
        x = torch.from_numpy(np.array(value, order="C"))
        if x.dtype in DTYPES:
            return beside("array", x)
    if type(value) is list:
        return each(value)
    if type(value) is tuple:
        return {_KIND: "tuple", "items": each(value)}
    if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        values = {key: packed(item, tensors, f"{path}[{key!r}]") for key, item in value.items()}
        if _KIND not in value and all(type(key) is str for key in value):
            return values
        return {_KIND: "dict", "items": [[key, item] for key, item in values.items()]}
    raise ValueError(
        f"save(extra=...): {path} is {brief(value)}; a checkpoint holds finite numbers, strings, None, tensors, arrays and bytes in "
        "lists, tuples and dicts whose keys are strings or integers; for NaN and infinity give None or a string."
    )


def unpacked(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the tree that was packed; `tensor(name)` reads one that is beside it."""
    if isinstance(value, list):
        return [unpacked(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: unpacked(item, tensor) for key, item in value.items()}
    if kind == "dict":
        return {key: unpacked(item, tensor) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(unpacked(item, tensor) for item in value["items"])
    x = tensor(value["name"])
    return x if kind == "tensor" else x.numpy() if kind == "array" else bytes(x.tolist())


def generators(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random number generators, by name; `device`: the parameters'."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    _, words, normal = random.getstate()
    found["python"] = _joined(words, float("nan") if normal is None else normal)
    legacy: Any = np.random.get_state()
    if isinstance(legacy, tuple) and legacy[0] == "MT19937":
        _, words, position, has_normal, normal = legacy
        found["numpy"] = _joined([*words.tolist(), position, has_normal], normal)
    return found


def set_generators(found: dict[str, Tensor], device: torch.device) -> None:
    """Set the states of generators that were found."""
    torch.set_rng_state(found["cpu"])
    if "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
    words, normal = _parted(found["python"])
    random.setstate((3, tuple(words), None if normal != normal else normal))
    if "numpy" in found:
        (*words, position, has_normal), normal = _parted(found["numpy"])
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_normal, normal))


def _joined(words: tuple[int, ...] | list[int], normal: float) -> Tensor:
    return torch.tensor([*words, torch.tensor(normal, dtype=torch.float64).view(torch.int64).item()])


def _parted(state: Tensor) -> tuple[list[int], float]:
    return state[:-1].tolist(), state[-1].view(torch.float64).item()
