"""Equal replicas: made by `broadcast`, and checked before a method relies on them. Not for use inside a step."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.comm.fingerprint import compare
from decentfn.core import trees
from decentfn.core.trees import PyTree


@collectives.calling("df.broadcast(tree)")
def broadcast(tree: PyTree) -> PyTree:
    """Worker 0's tree (process 0's) on every rank, bit for bit; copies. Collective.

    `params, buffers = df.broadcast((params, buffers))` before `init` gives all workers one start. Where a worker is several
    processes, each gets what worker 0's process of its number has.

    Raises:
        ValueError: on every rank, if the trees differ in more than their values.
    """
    kinds = [_kind(name, leaf) for name, leaf in trees.named_leaves(tree)]
    compare("broadcast(tree)", [], "pass the same tree", kinds)
    return trees.map(collectives.process_broadcast, tree)


_RULE = "replicas must start equal: `params, buffers = df.broadcast((params, buffers))` before init"


def require_equal(call: str, tree: PyTree) -> None:
    """Raise ValueError on every rank unless all hold the same tree, bit for bit. Collective."""
    if collectives.world().size > 1:
        lines = [f"{_kind(name, leaf)} with digest {digest(leaf)}" for name, leaf in trees.named_leaves(tree)]
        compare(call, [], _RULE, lines)


def require_equal_rows(call: str, tree: PyTree) -> None:
    """Raise ValueError unless all workers of this process hold the same, bit for bit; each leaf is `[N, ...]`."""
    for name, leaf in trees.named_leaves(tree):
        digests = [digest(row) for row in leaf]
        for worker, one in enumerate(digests):
            if one != digests[0]:
                raise ValueError(f"{call}: workers 0 and {worker} of this process differ in {name!r}; {_RULE}.")


def _kind(name: str, leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(f"leaf {name!r} is {type(leaf).__name__}, not a tensor; state and data are trees of tensors.")
    return f"{name or 'leaf'} {list(leaf.shape)} {leaf.dtype}"


def digest(leaf: Tensor) -> str:
    """Equal for two tensors iff their bytes are."""
    raw = leaf.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(raw.numpy().data).hexdigest()[:16]
