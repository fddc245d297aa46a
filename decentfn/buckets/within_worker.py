"""What the processes of one worker compute together, as operators that `collectives` implements.

Where they share a worker's parameters row by row, each has a part of every leaf's rows: `gather_inside` puts the parts of a
bucket together, `scatter_inside` gives each process the mean of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.torch_private import functorch, inductor

_library = torch.library.Library("decentfn", "FRAGMENT")
_library.define("sum_inside(Tensor x, int processes, Tensor? after) -> Tensor")
_library.define("gather_inside(Tensor x, int[] rows, int[] widths, Tensor? after) -> Tensor")
_library.define("scatter_inside(Tensor x, int[] rows, int[] widths, int numel, Tensor? after) -> Tensor")
_ops = torch.ops.decentfn


def sum_inside(x: Tensor, processes: int) -> Tensor:
    """The sum of `x` over processes of this worker, the same on each: `x` itself where it is one. All wait for the last.

    Args:
        x: of any shape, the same on all.
        processes: so many, next to one another: all of the worker's, or a team.
    """
    return x if processes == 1 else _ops.sum_inside(x, processes, None)


def mean_inside(x: Tensor, processes: int) -> Tensor:
    """The mean of `x` over processes of this worker; arguments as of `sum_inside`."""
    return x if processes == 1 else sum_inside(x / processes, processes)


def everywhere_inside(claim: Tensor, processes: int) -> Tensor:
    """Whether `claim` (bool) holds on all processes of this worker."""
    return claim if processes == 1 else sum_inside((~claim).to(torch.float32), processes) == 0


def gather_inside(x: Tensor, rows: Sequence[int], widths: Sequence[int]) -> Tensor:
    """A bucket whole, `[*workers, D]`, from each process's part of it; all wait for the last.

    Args:
        x: `[*workers, d]`, this process's rows of each leaf.
        rows: of each leaf whole.
        widths: elements in a row of each leaf.
    """
    return _ops.gather_inside(x, rows, widths, None)


def scatter_inside(x: Tensor, rows: Sequence[int], widths: Sequence[int], numel: int) -> Tensor:
    """This process's rows, `[*workers, numel]`, of the mean of `x` over the worker's processes; all wait for the last.

    Args:
        x: `[*workers, D]`, a bucket whole.
        rows: as for `gather_inside`.
        widths: as for `gather_inside`.
        numel: of this process's part.
    """
    return _ops.scatter_inside(x, rows, widths, numel, None)


def rows_of(process: int, processes: int, rows: int) -> range:
    """Which of a leaf's rows a process has, as `torch.chunk` (and `fully_shard`) cuts them: of five, three and two."""
    each = -(-rows // processes)
    return range(min(process * each, rows), min((process + 1) * each, rows))


def _vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Any) -> tuple[Tensor, int | None]:
    return _ops.sum_inside(x, *others), in_dims[0]


def _gather_vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Any) -> tuple[Tensor, int]:
    return _ops.gather_inside(functorch.with_workers_first(x, in_dims[0], info.batch_size), *others), 0


def _scatter_vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Any) -> tuple[Tensor, int]:
    return _ops.scatter_inside(functorch.with_workers_first(x, in_dims[0], info.batch_size), *others), 0


def _gather_fake(x: Tensor, rows: Sequence[int], widths: Sequence[int], after: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(r * w for r, w in zip(rows, widths, strict=True))))


def _scatter_fake(x: Tensor, rows: Sequence[int], widths: Sequence[int], numel: int, after: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], numel))


for _name, _fake, _rule in (
    ("sum_inside", lambda x, processes, after: torch.empty_like(x), _vmap),
    ("gather_inside", _gather_fake, _gather_vmap),
    ("scatter_inside", _scatter_fake, _scatter_vmap),
):
    torch.library.register_fake(f"decentfn::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"decentfn::{_name}", _rule, lib=_library)
    inductor.keep_in_order(_name)
