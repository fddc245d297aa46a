"""`vmap` over the workers of this process, for all at once or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from decentfn.core import trees
from decentfn.core.context import context
from decentfn.core.trees import PyTree
from decentfn.torch_private import functorch


def require_rows(what: str, tree: PyTree, num_workers: int) -> None:
    """Raise ValueError unless every leaf of the state or the batch (`what`) has a row for each worker."""
    way_out = "df.stack(state, num_workers)"
    if what == "batch":
        way_out = f"stack one per worker, as tensors in dicts or tuples (of a DataLoader: collate_fn=df.data.stacked_collate({num_workers}); of one batch for all: x.unflatten(0, ({num_workers}, -1))); or, by df.autograd(loss_fn), a list of one tuple, dict or object for each"
    require_first(what, tree, num_workers, f"simulate(num_workers={num_workers})", "workers", way_out)


def batches_of(batch: PyTree, num_workers: int) -> list[PyTree]:
    """Return the workers' batches: the rows of a stacked one, or a list of one for each, none of them a bare tensor."""
    given, batch = batch, trees.plain(batch)
    if not all(_rows(leaf) == num_workers for leaf in trees.leaves(batch)):
        if type(batch) is list and len(batch) == num_workers and not any(isinstance(x, Tensor) for x in batch):
            return given  # objects keep their classes
        require_rows("batch", batch, num_workers)
    return [trees.map(lambda x, i=i: x[i], batch) for i in range(num_workers)]


def _rows(leaf: Any) -> int | None:
    """Return the length of the first axis of a tensor, or a TensorDict or another class like it; None if there is none."""
    is_tensor = hasattr(type(leaf), "__torch_function__") and not getattr(leaf, "is_nested", False)
    return next(iter(getattr(leaf, "shape", ())), None) if is_tensor else None


def require_first(what: str, tree: PyTree, size: int, call: str, rows: str, way_out: str) -> None:
    """Raise ValueError, from `call`, unless the first axis of every leaf of the tree (`what`) is that of these `rows`."""
    for index, leaf in enumerate(trees.leaves(tree)):
        if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.dim() == 0 or leaf.shape[0] != size:
            name = trees.named_leaves(tree)[index][0]  # Dynamo cannot trace optree's names through a dict
            place = f"leaf {name!r} of the {what}" if name else f"the {what}"
            if not isinstance(leaf, torch.Tensor):
                shape = type(leaf).__name__
            else:
                shape = "nested" if leaf.is_nested else list(leaf.shape)
            if isinstance(leaf, numpy.ndarray):
                way_out = "tensors are stacked, not NumPy arrays; torch.utils.data.default_convert(batch) makes them"
            raise ValueError(f"{call}: {place} is {shape}; its first axis must be the {size} {rows}: {way_out}.")


def over_workers(
    function: Callable[..., PyTree],
    num_workers: int,
    *arguments: PyTree,
    chunk_size: int | None = None,
    randomness: str = "different",
) -> PyTree:
    """Apply a function of one worker to all workers at once; every leaf of arguments and result has the workers first.

    With `chunk_size`, parts wrapped by `in_chunks` run for so many workers at a time, without random operations. The
    `randomness` of runs is the "same".
    """
    leaves, one, returned = _on_leaves(function, arguments)
    outer = context.chunks
    context.chunks = None if chunk_size is None or chunk_size >= num_workers else (num_workers, chunk_size)
    try:
        stacked = functorch.vmap(one, randomness, *leaves)
    finally:
        context.chunks = outer
    return trees.put_together(returned[0], stacked)


def in_chunks(function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Return `function(*arguments)`, evaluated for one chunk of workers after another."""
    assert context.chunks is not None
    num_workers, size = context.chunks
    leaves, one, returned = _on_leaves(function, arguments)
    rows_of_all = [functorch.all_rows(leaf, leaves[0]) for leaf in leaves]
    parts = [
        functorch.vmap(one, "error", *[leaf[first : first + size] for leaf in rows_of_all])
        for first in range(0, num_workers, size)
    ]
    joined = [functorch.row(torch.cat(rows), leaves[0]) for rows in zip(*parts, strict=True)]
    return trees.put_together(returned[0], joined)


def _on_leaves(
    function: Callable[..., PyTree], arguments: PyTree
) -> tuple[list[Tensor], Callable[..., tuple[Tensor, ...]], list[Any]]:
    """Return the leaves of arguments, `function` from leaves to leaves, and the list to which it appends its result's structure."""
    given, template = trees.take_apart(arguments)
    returned: list[Any] = []

    def one(*leaves: Tensor) -> tuple[Tensor, ...]:
        found, structure = trees.take_apart(function(*trees.put_together(template, leaves)))
        returned.append(structure)
        return tuple(found)

    return given, one, returned
