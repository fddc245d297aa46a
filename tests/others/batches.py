"""Batches that are not plain trees of tensors."""

from __future__ import annotations

import dataclasses
import importlib
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tests.models.registry import Made, tokens
from tests.others.harness import model
from tests.others.language import llama
from tests.others.models import convolution


def linear(batch: Any, forward: Any, inputs: int = 3) -> Made:
    return Made(nn.Linear(inputs, 2), batch, forward=forward)


def numbers(draw: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw)


# -- tensors under other names ----------------------------------------------------------------------------------------


@model("tensordict", "a TensorDict", kind="batches")
def tensor_dict() -> Made:
    from tensordict import TensorDict

    def batch(draw: Generator, step: int) -> Any:
        return TensorDict({"x": numbers(draw, 5, 3), "deeper": {"y": numbers(draw, 5, 2)}}, [5])

    def forward(net: nn.Module, b: Any) -> Tensor:
        b = b.clone()
        return F.mse_loss(net(b["x"]), b["deeper", "y"]) * b.batch_size[0]

    return linear(batch, forward)


@model("tensordict", "a tensorclass", kind="batches")
def tensor_class() -> Made:
    from tests.others.classes import Sample

    def batch(draw: Generator, step: int) -> Any:
        return Sample(x=numbers(draw, 5, 3), y=numbers(draw, 5, 2), batch_size=[5])

    return linear(batch, lambda net, b: F.mse_loss(net(b.x), b.y))


@model("torchvision", "`tv_tensors.Image` through transforms v2", kind="batches")
def image_subclass() -> Made:
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    change = v2.Normalize([0.5], [0.5])

    def batch(draw: Generator, step: int) -> Any:
        return tv_tensors.Image(numbers(draw, 2, 3, 8, 8)), torch.randint(4, (2,), generator=draw)

    return Made(convolution(), batch, forward=lambda net, b: F.cross_entropy(net(change(b[0])), b[1]))


@model("monai", "`MetaTensor`", kind="batches")
def meta_tensor() -> Made:
    from monai.data.meta_tensor import MetaTensor

    def batch(draw: Generator, step: int) -> Any:
        return MetaTensor(numbers(draw, 5, 3)), numbers(draw, 5, 2)

    return linear(batch, lambda net, b: F.mse_loss(net(b[0]), b[1]))


@model("transformers", "`BatchEncoding`, as tokenizers return", kind="batches")
def encoding() -> Made:
    encoding = importlib.import_module("transformers").BatchEncoding
    return Made(llama(), lambda draw, step: encoding(tokens(50, 6)(draw, step)))


@model("torch", "named tuple", kind="batches")
def named_tuple() -> Made:
    return linear(
        lambda draw, step: Pair(numbers(draw, 5, 3), numbers(draw, 5, 2)), lambda net, b: F.mse_loss(net(b.x), b.y)
    )


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor


@model("torch", "dataclass", kind="batches")
def record() -> Made:
    return linear(
        lambda draw, step: Record(numbers(draw, 5, 3), numbers(draw, 5, 2)), lambda net, b: F.mse_loss(net(b.x), b.y)
    )


@model("torch", "`UserDict` of tensors", kind="batches")
def user_dict() -> Made:
    return linear(
        lambda draw, step: UserDict(x=numbers(draw, 5, 3), y=numbers(draw, 5, 2)),
        lambda net, b: F.mse_loss(net(b["x"]), b["y"]),
    )


@model("numpy", "arrays", kind="batches", special="`torch.from_numpy` in the loop, if traced")
def arrays() -> Made:
    def batch(draw: Generator, step: int) -> Any:
        return np.asarray(numbers(draw, 5, 3)), np.asarray(numbers(draw, 5, 2))

    def forward(net: nn.Module, b: Any) -> Tensor:
        return F.mse_loss(net(torch.as_tensor(b[0])), torch.as_tensor(b[1]))

    return linear(batch, forward)


# -- objects ----------------------------------------------------------------------------------------------------------


@model("torch_geometric", "`Batch` of graphs of different sizes", kind="batches")
def graphs() -> Made:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    def batch(draw: Generator, step: int) -> Any:
        sizes = (3 + step, 5 + int(draw.initial_seed()) % 3)
        edges = [torch.stack([torch.arange(n - 1), torch.arange(1, n)]) for n in sizes]
        return Batch.from_data_list(
            [Data(x=numbers(draw, n, 3), edge_index=e) for n, e in zip(sizes, edges, strict=True)]
        )

    def forward(net: Any, b: Any) -> Tensor:
        return global_mean_pool(net(b.x, b.edge_index), b.batch).square().mean()

    return Made(GCNConv(3, 2), batch, forward=forward)


@model("networkx", "a graph, from which the loss reads", kind="batches")
def network() -> Made:
    import networkx as nx

    def batch(draw: Generator, step: int) -> Any:
        return nx.path_graph(3 + step + int(draw.initial_seed()) % 2)

    def forward(net: nn.Module, graph: Any) -> Tensor:
        x = torch.tensor([[float(graph.degree[n]), float(n), 1.0] for n in graph])
        return net(x).square().mean()

    return linear(batch, forward)


@model("torch", "lists of strings", kind="batches")
def strings() -> Made:
    def batch(draw: Generator, step: int) -> list[str]:
        return ["ab" * (1 + step), "c" * (1 + int(draw.initial_seed()) % 5)]

    def forward(net: nn.Module, texts: Any) -> Tensor:
        return net(torch.tensor([[float(len(text)), float(text.count("a")), 1.0] for text in texts])).square().mean()

    return linear(batch, forward)


@model("torch", "packed sequences of different lengths", kind="batches")
def packed() -> Made:
    from torch.nn.utils.rnn import pack_sequence

    def batch(draw: Generator, step: int) -> Any:
        return pack_sequence([numbers(draw, n + step, 3) for n in (4, 2)])

    return Made(nn.GRU(3, 4), batch, forward=lambda net, b: net(b)[1].square().mean())


@model("torch", "nested tensors, jagged", kind="batches")
def nested() -> Made:
    def batch(draw: Generator, step: int) -> Any:
        return torch.nested.nested_tensor([numbers(draw, n, 3) for n in (4, 2)], layout=torch.jagged)

    def forward(net: nn.Module, b: Any) -> Tensor:
        return net(b).values().square().mean()

    return linear(batch, forward)


@model("torch", "sparse COO features", kind="batches")
def sparse() -> Made:
    def batch(draw: Generator, step: int) -> Any:
        return (numbers(draw, 5, 3) * (numbers(draw, 5, 3) > 0)).to_sparse(), numbers(draw, 5, 2)

    def forward(net: Any, b: Any) -> Tensor:
        return F.mse_loss(torch.sparse.mm(b[0], net.weight.T) + net.bias, b[1])

    return linear(batch, forward)


@model("pandas", "a data frame, from which the loss reads", kind="batches")
def frame() -> Made:
    pd = importlib.import_module("pandas")

    def batch(draw: Generator, step: int) -> Any:
        return pd.DataFrame(np.asarray(numbers(draw, 5, 3)), columns=["a", "b", "c"])

    def forward(net: nn.Module, b: Any) -> Tensor:
        return net(torch.tensor(b[["a", "b", "c"]].to_numpy())).square().mean()

    return linear(batch, forward)


@model("torch", "targets of detection: a list of dicts of different sizes", kind="batches")
def boxes() -> Made:
    def batch(draw: Generator, step: int) -> Any:
        targets = [{"boxes": numbers(draw, n, 2)} for n in (1 + step, 2)]
        return [numbers(draw, 2, 3), targets]

    def forward(net: nn.Module, b: Any) -> Tensor:
        points = net(b[0])
        return torch.stack([(p - t["boxes"]).square().mean() for p, t in zip(points, b[1], strict=True)]).mean()

    return linear(batch, forward)


@model("torch", "micro-batches", kind="batches", special="`df.accumulate(loss_fn)` for gradients of their mean")
def micro_batches() -> Made:
    def batch(draw: Generator, step: int) -> Any:
        return [numbers(draw, 5, 3), numbers(draw, 5, 3)]

    return linear(batch, lambda net, b: torch.stack([net(x).square().mean() for x in b]).mean())
