"""Content of a checkpoint: what each process writes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.core.buckets import Place
from decentfn.core.formatting import brief
from decentfn.core.numbers import at_least
from decentfn.kit.state_check import is_state
from decentfn.topologies import Topology
from decentfn.train.checkpoint import extras, generators
from decentfn.train.checkpoint.layout import (
    BUFFERS,
    algorithm_of,
    digest_of_plan,
    leaves_of,
    local_workers,
    place,
)


class Content(NamedTuple):
    """Content that this process writes."""

    tensors: dict[str, Tensor]
    loose: dict[str, Tensor]  # states of generators, and tensors of `extra`
    places: dict[str, Place]
    frozen: dict[str, Tensor]  # only their digests are written
    about: dict[str, Any]  # equal on all processes
    process: dict[str, Any]  # this process's own
    score: float | None


def content_of(
    state: Any,
    step: int,
    topology: Topology | None,
    config: Any,
    extra: Any,
    score: float | None,
    copy: bool,
    frozen: Collection[str],
) -> Content:
    """Collect what this process writes; with `copy`, the state may change at once. Raises ValueError if it cannot."""
    if not is_state(state):
        raise ValueError(
            f"save(state, step): the state is {brief(state)}; expected a training state, from init(params)."
        )
    step = at_least("save", "step", step, 0)
    if topology is not None and not isinstance(topology, Topology):
        raise ValueError(f"save(topology={brief(topology)}): expected a df.topology(...); algorithm.topology is one.")
    here, local = collectives.world(), local_workers(state)
    first, num_workers = here.worker * local, here.num_workers * local
    topology = None if topology is None else here.schedule(topology)
    if topology is not None and topology.num_workers != num_workers:
        raise ValueError(
            f"save(state, step): the topology has {topology.num_workers} workers, but the processes hold "
            f"{num_workers}; pass the topology of the algorithm."
        )
    left_out = {f"{BUFFERS}{name}" for name in frozen}
    uncopied = {id(x) for name, x in trees.named_leaves(state) if name in left_out}
    leaves = leaves_of(trees.map(lambda x: x.detach().to("cpu", copy=copy and id(x) not in uncopied), state))
    held = {leaf.name: leaf.values for leaf in leaves if leaf.name in left_out}
    if unknown := left_out - held.keys():
        raise ValueError(
            f"Saver(frozen={brief(sorted(name.removeprefix(BUFFERS) for name in unknown))}): no buffer of the state has such a "
            "name; loss_fn.frozen has those of df.functional's frozen parameters."
        )
    leaves = [leaf for leaf in leaves if leaf.name not in left_out]
    tensors = {leaf.name: leaf.values for leaf in leaves}
    places = {leaf.name: place(leaf, first, num_workers) for leaf in leaves}
    loose = generators.states(state.params[0].device)
    about = {
        "step": step,
        "num_workers": num_workers,
        "processes_per_worker": here.processes_per_worker,
        "topology": topology and {"name": topology.name, "period": topology.period},
        "algorithm": algorithm_of(state),
        "buckets": digest_of_plan(state.params.plan),
        "config": config,
    }
    process = {
        "step": step,
        "extra": extras.packed(extra, loose),
        "workers": (first, first + local),
        "buckets": about["buckets"],
    }
    return Content(tensors, loose, places, held, about, process, _number(score))


def _number(score: Any) -> float | None:
    try:
        number = math.nan if score is None else float(score)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"save(score={brief(score)}): a number, the lower the better; NaN does not count.") from error
    return number if math.isfinite(number) else None


def plain(what: str, value: Any) -> Any:
    """Return the value after a JSON round trip, or raise ValueError."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{what}: JSON holds finite numbers, strings, lists and dicts, and this is {brief(value)}; for NaN and "
            "infinity give None or a string."
        ) from error
