"""What the processes of one worker compute together, by operators that `collectives.within_worker` defines.

Where they share a worker's parameters row by row, each has a part of every leaf's rows: `gather_inside` puts the parts of a
bucket together, `scatter_inside` gives each process the mean of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
