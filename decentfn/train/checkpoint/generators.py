"""States of the random number generators of a process, as tensors: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentfn.train.checkpoint.layout import GENERATOR


def states(device: torch.device) -> dict[str, Tensor]:
    """Return the states, by their names in files; `device` is that of the parameters."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    _, words, normal = random.getstate()
    found["python"] = _joined(words, float("nan") if normal is None else normal)
    legacy: Any = np.random.get_state()
    if isinstance(legacy, tuple) and legacy[0] == "MT19937":
        _, words, position, has_normal, normal = legacy
        found["numpy"] = _joined([*words.tolist(), position, has_normal], normal)
    return {f"{GENERATOR}{name}": state for name, state in found.items()}


def load(found: dict[str, Tensor], device: torch.device) -> None:
    """Set the states that are found."""
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
