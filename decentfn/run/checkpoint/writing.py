"""Write one checkpoint: every process its own workers, into one directory that gets its name when all is on the disk."""

from __future__ import annotations

import contextlib
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

import decentfn
from decentfn import collectives
from decentfn.buckets import Place
from decentfn.kit.expected import is_state
from decentfn.run.checkpoint import files, manifest
from decentfn.run.checkpoint.layout import algorithm_of, digest_of_plan, encoded, leaves_of, local_workers, place
from decentfn.run.checkpoint.together import on_first, together
from decentfn.run.paths import private_directory
from decentfn.topologies import Topology
from decentfn.words import brief

GENERATOR = "generator/"
"""How the names of the states of torch's generators begin."""


class Content(NamedTuple):
    """What this process writes."""

    tensors: dict[str, Tensor]
    places: dict[str, Place]
    workers: tuple[int, int]  # from, to
    about: dict[str, Any]  # what all processes say alike
    own: dict[str, Any]


def attempted(make: Callable[[], Content]) -> Content | ValueError:
    """The content, or why there is none, which `write` lets all processes raise."""
    try:
        return make()
    except ValueError as error:
        return error


def content_of(
    state: Any,
    copy: Callable[[Any], Any],
    step: int,
    own_step: int,
    topology: Topology | None,
    config: Any,
    extra: Any,
    score: float | None,
) -> Content:
    """What to write of a state; `copy` brings it to the CPU. `own_step` is this process's, where `step` is that of the furthest.

    Raises:
        ValueError: a leaf or an argument that cannot be saved.
    """
    if not is_state(state):
        raise ValueError(
            f"save(state, step): the state is {brief(state)}; expected a training state, from init(params)."
        )
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"save(step={brief(step)}): the t of the next step, an integer >= 0.")
    if topology is not None and not isinstance(topology, Topology):
        raise ValueError(f"save(topology={brief(topology)}): expected a df.topology(...); algorithm.topology is one.")
    here, local = collectives.world(), local_workers(state)
    first, num_workers = here.worker * local, here.num_workers * local
    if topology is not None and topology.num_workers != num_workers:
        raise ValueError(
            f"save(state, step): the topology has {topology.num_workers} workers, but the processes hold {num_workers}; "
            "pass the topology of the algorithm."
        )
    leaves = leaves_of(copy(state))
    tensors = {leaf.name: leaf.values for leaf in leaves}
    places = {leaf.name: place(leaf, first, num_workers) for leaf in leaves}
    tensors[f"{GENERATOR}cpu"] = torch.get_rng_state()
    device = state.params[0].device
    if device.type == "cuda":
        tensors[f"{GENERATOR}cuda"] = torch.cuda.get_rng_state(device)
    about = {
        "step": step,
        "num_workers": num_workers,
        "processes_per_worker": here.processes_per_worker,
        "topology": _phase(topology, step),
        "algorithm": algorithm_of(state),
        "buckets": digest_of_plan(state.params.plan),
        "config": config,
    }
    own = {
        "process": {"step": own_step, "extra": plain("save(extra=...)", extra)},
        "score": _number(score),
    }
    return Content(tensors, places, (first, first + local), about, own)


def _number(score: Any) -> float | None:
    if score is None:
        return None
    try:
        number = None if isinstance(score, bool) else float(score)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None:
        raise ValueError(f"save(score={brief(score)}): a number, the lower the better; NaN does not count.")
    return number if math.isfinite(number) else None


def write(directory: Path, content: Content | ValueError, keep: int | None) -> Path:
    """Write a checkpoint to the run's directory and remove those that are too many; where it lies. Collective.

    Args:
        directory: the run's.
        content: what this process writes; or why it has nothing, which all processes raise.
        keep: as for `Saver`.
    """
    temporary = Path(together("save", _begin, directory, content)[0])
    assert isinstance(content, Content)
    try:
        told = together("save", _write_own, temporary, content)
        path = Path(on_first("save", _finish, directory, temporary, told))
    except BaseException:
        if collectives.everyone().rank == 0:
            with contextlib.suppress(OSError):
                files.remove(temporary)
        raise
    together("save", _see, path)  # all of them do, before an older one goes
    on_first("save", _prune, directory, keep)
    return path


def plain(what: str, value: Any) -> Any:
    """The value as JSON gives it back.

    Raises:
        ValueError: JSON does not hold it.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{what}: JSON holds finite numbers, strings, lists and dicts, and this is {brief(value)}; for NaN and infinity give "
            "None or a string."
        ) from error


def _begin(directory: Path, content: Content | ValueError) -> str | None:
    if isinstance(content, ValueError):
        raise content
    if collectives.everyone().rank:
        return None
    step = content.about["step"]
    path = directory / f"{manifest.UNFINISHED}{step}-{uuid4().hex[:8]}"
    private_directory(path)
    return str(path)


def _write_own(path: Path, content: Content) -> dict[str, Any]:
    name, about = f"process-{collectives.everyone().rank:05}.safetensors", content.about
    size, digest = files.write(path / name, encoded(content.tensors, content.places))
    its = {"file": name, "bytes": size, "sha256": digest, "workers": content.workers, "buckets": about["buckets"]}
    return {"process": its | content.own["process"], "score": content.own["score"], "about": about}


def _finish(directory: Path, path: Path, told: list[dict[str, Any]]) -> str:
    """Write the manifest of what all processes have written, and give the checkpoint its name."""
    about = told[0]["about"]
    size = about["processes_per_worker"]
    for rank, its in enumerate(told):
        about = told[0]["about"] | {"buckets": told[rank % size]["about"]["buckets"]}  # shards of their own
        if its["about"] != about:
            name = next(name for name in about if its["about"][name] != about[name])
            raise ValueError(
                f"save(state, step): {name} is {its['about'][name]!r} on rank {rank} and {about[name]!r} on rank 0; all ranks save the "
                "same step of the same run, and what is a process's own goes into extra."
            )
        file = path / its["process"]["file"]
        if not file.exists():
            raise OSError(
                f"{file}: written by rank {rank}, and not to be seen by rank 0; choose a directory that all share."
            )
    scores = [its["score"] for its in told if its["score"] is not None]
    versions = {"decentfn": decentfn.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    content = {
        "format": manifest.FORMAT if size > 1 else 1,
        **told[0]["about"],
        "score": sum(scores) / len(scores) if scores else None,
        "versions": versions,
        "processes": [its["process"] for its in told],
    }
    files.write(path / manifest.MANIFEST, [manifest.encode(content)])
    files.sync_directory(path)
    name = directory / manifest.next_name(directory, told[0]["about"]["step"])
    files.publish(path, name)
    return str(name)


def _see(path: Path) -> None:
    if not (path / manifest.MANIFEST).exists():
        raise OSError(f"{path}: written, and not to be seen by this process; choose a directory that all share.")


def _prune(directory: Path, keep: int | None) -> None:
    found = manifest.saved(directory)
    if keep is None or len(found) <= keep:
        return
    kept = {*found[-keep:], manifest.best(directory)}
    for path in found:
        if path not in kept:
            files.remove(path)


def _phase(topology: Topology | None, step: int) -> dict[str, Any] | None:
    if topology is None:
        return None
    phase = None if topology.period is None else step % topology.period
    return {"name": topology.name, "period": topology.period, "phase": phase}
