"""Do all ranks run the same plan? gloo checks nothing, so they compare before anything is exchanged."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from decentfn import collectives
from decentfn.buckets import Plan
from decentfn.topologies import Topology

_STEPS_COMPARED = 4


def fingerprint(plan: Plan, topology: Topology, **options: Any) -> list[str]:
    """Lines that are equal on two ranks iff they can exchange: versions, leaves and their places, tables, options."""
    tables = [topology.sources, topology.weights, topology.groups, topology.mean_weights]
    if topology.draw is not None:
        tables = [table for t in range(_STEPS_COMPARED) for table in topology.round(t)]
    return [
        f"torch {torch.__version__}",
        f"topology {topology.name!r}, num_workers {topology.num_workers}, tables {_digest(tables)}",
        *(f"{name} {value}" for name, value in options.items()),
        *plan.describe(),
    ]


def agree(lines: list[str]) -> None:
    """Compare what ranks are about to train; collective.

    Raises:
        ValueError: on every rank, naming the first rank and line that differ from rank 0's.
    """
    compare("init(params)", lines, "every rank must build the same model, topology and options")


def compare(call: str, lines: list[str], rule: str) -> None:
    """Compare `lines` over all ranks; collective.

    Raises:
        ValueError: on every rank, naming the first rank and line that differ from rank 0's, and the `rule`.
    """
    everyone = collectives.gather_objects(lines)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            width = max(len(theirs), len(everyone[0]))
            pairs = zip(_padded(everyone[0], width), _padded(theirs, width), strict=True)
            mine, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(f"{call}: ranks disagree. Rank 0 has {mine!r}, rank {rank} has {other!r}; {rule}.")


def _padded(lines: list[str], width: int) -> list[str]:
    return lines + ["nothing"] * (width - len(lines))


def _digest(tables: list[Tensor | None]) -> str:
    content = hashlib.sha256()
    for table in tables:
        content.update(b"none" if table is None else str(table.shape).encode() + table.numpy().tobytes())
    return content.hexdigest()[:16]
