"""The type of a case, and the table that the sibling files fill."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

SEED = 0


class Made(NamedTuple):
    """A module, batches of it, and at most one of the two ways in which `df.functional` is told of a loss."""

    module: nn.Module
    batch: Callable[[Generator, int], Any]  # of a generator and a step
    criterion: Callable[..., Tensor] | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    overwritten: tuple[str, ...] = ()

    @property
    def loss(self) -> dict[str, Any]:
        return {"criterion": self.criterion, "forward": self.forward, "overwritten": self.overwritten}


class Case(NamedTuple):
    name: str
    package: str
    build: Callable[[], Made]
    random: bool  # the loss draws random numbers
    tolerance: float

    def make(self) -> Made:
        """The same module in every call."""
        import_package(self.package)
        torch.manual_seed(SEED)
        return self.build()


CASES: dict[str, Case] = {}
KEPT: list[Any] = []


def case(
    package: str, *, random: bool = False, tolerance: float = 1e-4
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Registers the function below it, whose name is the case's."""

    def register(build: Callable[[], Made]) -> Callable[[], Made]:
        name = build.__name__.replace("_", "-")
        assert name not in CASES, name
        CASES[name] = Case(name, package, build, random, tolerance)
        return build

    return register


def batch_of(made: Made, step: int, worker: int) -> Any:
    """The batch of one worker in one step, the same in every call."""
    return made.batch(Generator().manual_seed(1000 * worker + step + 1), step)


def import_package(name: str) -> None:
    """Import it, also where torchvision is built for CUDA and PyTorch is not."""
    if name in ("torchvision", "timm", "transformers", "peft"):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:  # its compiled operators did not load; it asks for two by name
            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(library)
            importlib.import_module("torchvision")
        except ImportError:
            if name == "torchvision":
                raise
    importlib.import_module(name.replace("-", "_"))


def images(size: int, classes: int = 4, count: int = 2) -> Callable[[Generator, int], tuple[Tensor, Tensor]]:
    """Batches of images and labels."""

    def batch(draw: Generator, step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, size, size, generator=draw), torch.randint(classes, (count,), generator=draw)

    return batch


def vectors(inputs: int, outputs: int, count: int = 4) -> Callable[[Generator, int], tuple[Tensor, Tensor]]:
    """Batches for a regression."""

    def batch(draw: Generator, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, inputs, generator=draw)
        return x, torch.sin(x.cumsum(1))[:, :outputs]

    return batch


def tokens(
    vocabulary: int, length: int, count: int = 2, *, name: str = "input_ids"
) -> Callable[[Generator, int], dict[str, Tensor]]:
    """Batches whose labels are the inputs."""

    def batch(draw: Generator, step: int) -> dict[str, Tensor]:
        ids = torch.randint(2, vocabulary, (count, length), generator=draw)
        return {name: ids, "labels": ids.clone()}

    return batch
