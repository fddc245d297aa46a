"""What the processes of one worker do together in a step: the operators that `buckets.inside` defines. Each waits for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.buckets import rows_of
from decentfn.collectives.membership import world
from decentfn.collectives.processes import naming

_library = torch.library.Library("decentfn", "FRAGMENT")


def _sum_inside(x: Tensor, processes: int, after: Tensor | None) -> Tensor:
    here = world()
    total = x.clone(memory_format=torch.contiguous_format)
    if here.inside is not None:
        with naming(here, "a sum over a worker's processes"):
            here.team(processes).allreduce([total]).wait()
    return total


def _gather_inside(x: Tensor, rows: Sequence[int], widths: Sequence[int], after: Tensor | None) -> Tensor:
    here, group = world(), _group()
    sizes = _sizes(rows, widths, here.processes_per_worker)
    longest = max(map(sum, sizes))
    parts = x.new_empty((len(sizes), *x.shape[:-1], longest))
    own = x.contiguous()
    if x.shape[-1] < longest:
        own = x.new_zeros((*x.shape[:-1], longest))
        own[..., : x.shape[-1]] = x
    if longest:
        with naming(here, "gathering a worker's parameters"):
            group._allgather_base(parts.view(-1), own.view(-1)).wait()
    if len(rows) == 1 and x.dim() == 1:  # whole already: only the last part that is not empty may be a short one
        return parts.view(-1)[: rows[0] * widths[0]]
    of_each = [part[..., : sum(its)].split(its, dim=-1) for part, its in zip(parts, sizes, strict=True)]
    return torch.cat([piece for of_leaf in zip(*of_each, strict=True) for piece in of_leaf], dim=-1)


def _scatter_inside(x: Tensor, rows: Sequence[int], widths: Sequence[int], numel: int, after: Tensor | None) -> Tensor:
    here, group = world(), _group()
    sizes = _sizes(rows, widths, here.processes_per_worker)
    longest = max(map(sum, sizes))
    parts = x.new_zeros((len(sizes), *x.shape[:-1], longest))
    pieces = iter(x.split([size for of_leaf in zip(*sizes, strict=True) for size in of_leaf], dim=-1))
    of_leaves = [[next(pieces) for _ in sizes] for _ in rows]
    for part, its, of_one in zip(parts, sizes, zip(*of_leaves, strict=True), strict=True):
        part[..., : sum(its)] = torch.cat(of_one, dim=-1)
    parts /= len(sizes)
    mean = torch.empty_like(parts[0])
    if longest:
        with naming(here, "averaging a worker's gradients"):
            group._reduce_scatter_base(mean.view(-1), parts.view(-1)).wait()
    return mean if numel == longest else mean[..., :numel].clone(memory_format=torch.contiguous_format)


def _group() -> Any:
    """The processes of this worker, of which the state that a step was given has several."""
    group = world().inside
    if group is None:
        raise ValueError(
            "a state of workers of several processes, but a worker is one process now; say df.init(processes_per_worker=...) as when "
            "the state was made."
        )
    return group


def _sizes(rows: Sequence[int], widths: Sequence[int], processes: int) -> list[list[int]]:
    """For each process how many elements of each leaf it has."""
    return [
        [len(rows_of(process, processes, r)) * w for r, w in zip(rows, widths, strict=True)]
        for process in range(processes)
    ]


for _name, _kernel in (
    ("sum_inside", _sum_inside),
    ("gather_inside", _gather_inside),
    ("scatter_inside", _scatter_inside),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
