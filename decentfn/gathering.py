"""What all workers have, seen from every one of them: metrics gathered and averaged, replicas compared.

As in `decentfn.consensus` the state says whether its process holds one worker or a stack of them. Not for use inside a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn import collectives, trees
from decentfn.consensus import is_stacked, params
from decentfn.errors import ReplicaMismatch
from decentfn.fingerprint import compare
from decentfn.replicas import digest
from decentfn.trees import PyTree


@collectives.calling("df.gather(state, tree)", of_state=True)
def gather(state: Any, tree: PyTree) -> PyTree:
    """What every worker has, `[N, ...]` in each leaf, worker 0's first; the same on every rank, copies. Collective.

    `df.gather(state, metrics).loss` are the losses of all workers, under torchrun and simulated.

    Args:
        state: the training state that says whether this process holds one worker, or several, stacked.
        tree: tensors or numbers, of the same shapes and dtypes on every rank; `[L, ...]` where the state is stacked of L workers.

    Raises:
        ValueError: on every rank, if the trees differ in more than their values or a leaf has not a row for each worker.
    """
    return trees.fill(trees.enumerate_leaves(tree), _gathered("gather(state, tree)", state, tree))


@collectives.calling("df.mean(state, tree)", of_state=True)
def mean(state: Any, tree: PyTree) -> PyTree:
    """The mean over all workers of what every one has, in float64 (complex: complex128); the same on every rank. Collective.

    `df.mean(state, metrics).loss` is the loss that a run is judged by. Arguments and errors are those of `gather`.
    """
    means = [
        x.to(torch.complex128 if x.is_complex() else torch.float64).mean(0)
        for x in _gathered("mean(state, tree)", state, tree)
    ]
    return trees.fill(trees.enumerate_leaves(tree), means)


@collectives.calling("df.check_replicas(state)", of_state=True)
def check_replicas(state: Any, tree: PyTree = None) -> None:
    """Raise unless all workers hold the same, bit for bit: after `init`, and at any time where `all_reduce` trains. Collective.

    Args:
        state: a training state, of one worker or stacked.
        tree: what is compared; None is the parameters. `df.buffers(state)` and `state.local.opt` are others.

    Raises:
        df.errors.ReplicaMismatch: on every rank, naming the workers that differ from most, and in which leaf first.
        ValueError: on every rank, if the trees differ in more than their values.
    """
    tree = params(state) if tree is None else tree
    rows = _rows("check_replicas(state)", state, tree)
    mine = [[digest(row) for row in leaf] for leaf in rows]
    here = collectives.everyone()
    told, size = collectives.gather_objects(mine, here), here.processes_per_worker
    shards = [[leaf for its in told[i : i + size] for leaf in its] for i in range(0, len(told), size)]
    everyone = [list(worker) for leaves in shards for worker in zip(*leaves, strict=True)]
    usual = max(everyone, key=everyone.count)
    others = [worker for worker, theirs in enumerate(everyone) if theirs != usual]
    if not others:
        return
    names = [name or "leaf" for name, _ in trees.named_leaves(tree)] * size
    differing = [name for name, one, most in zip(names, everyone[others[0]], usual, strict=True) if one != most]
    raise ReplicaMismatch(
        f"check_replicas(state): worker {others[0]} differs from worker {everyone.index(usual)} in {len(differing)} of {len(names)} "
        f"leaves, first in {differing[0]!r}; {len(others)} of {len(everyone)} workers differ from most: {others[:8]}"
        f"{' ...' if len(others) > 8 else ''}. Give all workers one start with df.broadcast before init; under decentralized "
        "algorithms replicas differ by design.",
        process=here.rank,
        peer=others[0] * here.size // len(everyone),
    )


def _gathered(call: str, state: Any, tree: PyTree) -> list[Tensor]:
    """Each leaf of all workers, `[N, ...]`, on the device that it came from."""
    rows = _rows(call, state, tree)
    if collectives.world().size == 1 or not rows:
        return [x.clone() for x in rows]
    flat = [x.cpu().contiguous().view(-1).view(torch.uint8) for x in rows]
    everyone = [told.split([x.numel() for x in flat]) for told in collectives.gather_bytes(torch.cat(flat))]
    return [
        torch.cat([part.clone().view(x.dtype).view(x.shape) for part in parts]).to(x.device)
        for x, parts in zip(rows, zip(*everyone, strict=True), strict=True)
    ]


def _rows(call: str, state: Any, tree: PyTree) -> Sequence[Tensor]:
    """The leaves as tensors with this process's workers first, once all ranks agree on what they are. Collective."""
    local = state.params[0].shape[0] if is_stacked(state) else None
    rows, lines = [], []
    for name, leaf in trees.named_leaves(tree):
        if not isinstance(leaf, (Tensor, bool, int, float, complex)):
            lines.append(f"{name or 'leaf'} of type {type(leaf).__name__}, which is no tensor and no number")
            break
        x = torch.as_tensor(leaf).detach()
        if local is not None and (x.dim() == 0 or len(x) != local):
            lines.append(f"{name or 'leaf'} {list(x.shape)}, which has no row for each of the {local} workers here")
            break
        rows.append(x if local is not None else x[None])
        lines.append(f"{name or 'leaf'} {list(x.shape)} {x.dtype}")
    compare(call, [], "pass the same tree on every rank", lines)
    if len(lines) > len(rows):
        raise ValueError(f"{call}: a leaf is {lines[-1]}.")
    return rows
