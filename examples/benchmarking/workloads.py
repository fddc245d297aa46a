"""Workloads: networks of different shapes, on random data that changes from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

BATCHES = 16
WORKLOADS = ("mlp", "gpt", "conv", "lstm", "lstm64", "thousand", "tiny", "gpt124m", "resnet18")
LEARNING_RATE, WEIGHT_DECAY = 1e-6, 0.01  # so small that every step does the same work


class Thousand(nn.Module):
    """1,000 parameters of 1,000 elements each, in 25 residual blocks of 40."""

    def __init__(self, tensors: int = 1000, width: int = 1000, blocks: int = 25) -> None:
        super().__init__()
        each = tensors // blocks
        rows = [nn.ParameterList(torch.randn(width) / width**0.5 for _ in range(each)) for _ in range(blocks)]
        self.blocks = nn.ModuleList(rows)

    def forward(self, x: Tensor) -> Tensor:
        for rows in self.blocks:
            w = torch.stack(list(rows))
            x = x + torch.tanh(x @ w.T) @ w / len(rows)
        return x


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder; `is_tied`: the embedding is also the head, as in GPT-2."""

    def __init__(
        self, vocabulary: int, dim: int, layers: int, heads: int, length: int, *, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(0, -2))


class MLP(nn.Module):
    """A class of its own: the forward of a bare `nn.Sequential` within DDP is left alone by torch.compile."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Residual(nn.Module):
    """Two convolutions with batch norm, and the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ConvNet(nn.Module):
    """A small residual network for images of 32 x 32."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.start(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Basic(nn.Module):
    """ResNet's block of two convolutions; where the shape changes, a third one takes the input along."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.along: nn.Module = nn.Identity()
        if stride > 1:
            self.along = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.along(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet18(nn.Module):
    """He et al., CVPR 2016; with `width` 64 and 1000 classes 11.7M parameters."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.start, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        blocks, before = [], width
        for stage in range(4):
            channels = width << stage
            blocks += [Basic(before, channels, 1 + (stage > 0)), Basic(channels, channels, 1)]
            before = channels
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.start(x))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Narrow(nn.Module):
    """A module under autocast to bfloat16; its result is float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def blocks(self) -> Any:
        return self.inner.blocks

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out = self.inner(x)
        return out.float()


class Recurrent(nn.Module):
    """A two-layer LSTM that reads a sequence and says what it was."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@dataclass(frozen=True)
class Workload:
    """A network, its loss and its data."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  # (batch size, generator) -> (inputs, targets)
    criterion: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    device: str = "cpu"

    def module(self) -> nn.Module:
        """The same start on every rank."""
        torch.manual_seed(0)
        return self.build().to(self.device)

    def fully_sharded(self, mesh: Any, **options: Any) -> nn.Module:
        """The module under PyTorch's `fully_shard`, block by block, over this mesh; with its options."""
        from torch.distributed.fsdp import fully_shard  # takes a second

        module = self.module()
        for block in getattr(module, "blocks", ()):
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(module, mesh=mesh, **options)

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Random batches of this rank's own, taken in turn."""
        generator = torch.Generator().manual_seed(1000 + rank)
        drawn = [self.draw(self.batch_size, generator) for _ in range(BATCHES)]
        return [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in drawn]

    def loss_fn(self, module: nn.Module) -> Callable[[Any, Any], Tensor]:
        """The loss as a function of (parameters by name, batch)."""

        def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
            inputs, targets = batch
            return self.criterion(functional_call(module, params, (inputs,)), targets)

        return loss_fn


def _classes(width: int, classes: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    return lambda n, g: (torch.randn(n, width, generator=g), torch.randint(classes, (n,), generator=g))


def _labeled(*shape: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    return lambda n, g: (torch.randn(n, *shape, generator=g), torch.randint(10, (n,), generator=g))


def _vectors(width: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    return lambda n, g: (torch.randn(n, width, generator=g), torch.randn(n, width, generator=g))


def _tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (n, length + 1), generator=generator)
        return text[:, :-1], text[:, 1:].flatten()

    return draw


def workload(name: str, *, small: bool = False, batch_size: int | None = None, device: str = "cpu") -> Workload:
    """One of `mlp` (10.5M parameters), `gpt` (13.9M), `conv` (0.08M), `lstm` (0.86M), `lstm64` (0.07M), `thousand` (1M in 1,000
    tensors) and `tiny` (9.6e3); for GPUs, with bfloat16 autocast, `gpt124m` (124M) and `resnet18` (11.2M).

    `small`: a hundredth of the size, for trying out. `batch_size`: per rank, None for the workload's own. `device`: of modules and batches.
    """
    cross_entropy, mse = F.cross_entropy, F.mse_loss
    wide = 128 if small else 2048
    dim, layers, vocabulary, length = (32, 2, 64, 16) if small else (384, 6, 4096, 64)
    tensors, width = (50, 20) if small else (1000, 1000)
    made = {
        "mlp": Workload(
            "mlp", lambda: MLP(wide // 2, wide, wide, wide, 10), _classes(wide // 2, 10), cross_entropy, 16
        ),
        "gpt": Workload(
            "gpt",
            lambda: GPT(vocabulary, dim, layers, dim // 16 if small else 6, length),
            _tokens(vocabulary, length),
            cross_entropy,
            2,
        ),
        "thousand": Workload("thousand", lambda: Thousand(tensors, width), _vectors(width), mse, 16),
        "conv": Workload(
            "conv",
            lambda: ConvNet(8 if small else 32, 1 if small else 4),
            _labeled(3, 32, 32),
            cross_entropy,
            4 if small else 16,
        ),
        "lstm": Workload(
            "lstm", lambda: Recurrent(64, 16 if small else 256), _labeled(32, 64), cross_entropy, 4 if small else 16
        ),
        "lstm64": Workload(
            "lstm64", lambda: Recurrent(64, 8 if small else 64), _labeled(32, 64), cross_entropy, 4 if small else 16
        ),
        "gpt124m": Workload(
            "gpt124m",
            lambda: Narrow(
                GPT(64, 32, 2, 2, 16, is_tied=True) if small else GPT(50304, 768, 12, 12, 1024, is_tied=True)
            ),
            _tokens(64, 16) if small else _tokens(50257, 1024),
            cross_entropy,
            2 if small else 8,
        ),
        "resnet18": Workload(
            "resnet18",
            lambda: Narrow(ResNet18(8 if small else 64, 100)),
            _labeled(3, 32, 32) if small else _labeled(3, 96, 96),
            cross_entropy,
            4 if small else 128,
        ),
        "tiny": Workload("tiny", lambda: MLP(64, 128, 10), _classes(64, 10), cross_entropy, 32),
    }[name]
    return replace(made, batch_size=made.batch_size if batch_size is None else batch_size, device=device)
