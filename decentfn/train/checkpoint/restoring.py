"""Restoring: check every file, then every leaf, and only then return a state."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import brief, log, trees
from decentfn.core.buckets import Buckets, Place
from decentfn.core.draws import set_generator_states
from decentfn.errors import CheckpointCorrupt
from decentfn.optim.transforms.basic import rates
from decentfn.train.changes import resized, stacked, with_memory
from decentfn.train.checkpoint import files, layout
from decentfn.train.collective_calls import on_all, on_first, one_path
from decentfn.train.consensus import is_stacked
from decentfn.train.own_steps import memory_of, with_room_of

_MEMORY_OF = {"sparse_loco": "diloco"}
"""Algorithms that had a memory of their own, and whose it is now."""


class Restored(NamedTuple):
    """Content of a checkpoint."""

    state: Any
    step: int  # the t of the next step
    extra: Any
    """This process's own; with other processes, that of its first worker; with other workers, that of process 0."""
    config: Any


@collectives.calling("df.checkpoint.restore(source, state)")
def restore(source: str | Path, state: Any) -> Restored:
    """Read a checkpoint and restore the generators of torch, NumPy and Python. Collective.

    Every file is checked against its digest, every leaf against the template. The bucket size (`bucket_mb`) and the
    number of processes for the same workers may change. With another number of workers, every worker starts from the
    result of `df.resize`; each process then reads the values of its own leaves on all workers, one bucket of one worker
    at a time, and verifies its share of the files.

    Buffers that the `Saver` left out (`frozen`) come from the template, if they are those of the run.

    Args:
        source: a run's directory, for its newest intact checkpoint (the log names newer ones that are damaged), or a
            checkpoint's directory.
        state: the template, `init(params)` of the same algorithm on the current topology, stacked if this process holds
            several workers; it is not changed.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointCorrupt: on all processes, with the file and the defect.
        ValueError: on all processes, with the first rank and leaf that does not fit.
        NonFinite: on all processes, if another number of workers would start from infinite or NaN parameters.
    """
    source, skipped = one_path("restore(source, state)", source), dict[str, CheckpointCorrupt]()
    while (found := on_first("restore", _newest, source, list(skipped))) is not None:
        read: list[tuple[Restored, dict[str, Tensor], int]] = []
        try:
            on_all("restore", _verify_share, Path(found), state)
            on_all("restore", lambda path=Path(found), read=read: read.append(_read(path, state)))
        except CheckpointCorrupt as error:
            if found == str(source):
                raise
            skipped[found] = error  # damaged, or removed by the run that writes here
            continue
        restored, drawing, saved_workers = read[0]
        for directory in (Path(found).parent.resolve(), Path(found).resolve().parent):  # they differ if one is a link
            files.own[directory] = restored.step
        if memory_of(restored.state) is not None:  # workers on their own clocks have their own t
            if (box := collectives.world().mailbox) is not None and box.record.is_over:
                box.owners.add(restored.state.params)
        elif restored.step:
            restored.state.params.taken_at = restored.step - 1
        if collectives.all_processes().rank == 0:
            _tell(found, state, restored.state, saved_workers, skipped)
        set_generator_states(drawing, state.params[0].device)
        return restored
    if not skipped:
        raise FileNotFoundError(f"restore({str(source)!r}, state): there is no checkpoint; start with init(params).")
    error = next(iter(skipped.values()))
    raise CheckpointCorrupt(f"restore({str(source)!r}, state): no checkpoint is intact. The newest: {error}") from error


def _newest(source: Path, skipped: list[str]) -> str | None:
    if files.is_checkpoint(source):
        return str(source)
    for _ in range(2):  # a list of files that change meanwhile may have neither an old one nor the new one
        for path in reversed(files.checkpoints(source)):
            if str(path) not in skipped:
                return str(path)
    return None


def _tell(found: str, template: Any, restored: Any, saved_workers: int, skipped: dict[str, CheckpointCorrupt]) -> None:
    """Log what differs from the newest checkpoint for the same workers, and a rate that the optimizer was not built with."""
    for path, error in skipped.items():
        log.warning("restore skipped %s, and read %s: %s", path, found, error)
    num_workers = collectives.world().num_workers * layout.local_workers(template)
    if num_workers != saved_workers:
        log.warning(
            f"restore: {found} was saved by {saved_workers} workers, and there are {num_workers}: each starts from their mean, and with "
            "process 0's extra and generators; redivide the data (docs/resizing.md)"
        )
    rates_of_both = (
        [float(node.learning_rate.flatten()[0]) for node in rates(state.local.opt) if not node.is_scheduled]
        for state in (template, restored)
    )
    differing = [both for both in zip(*rates_of_both, strict=True) if not math.isclose(*both, rel_tol=1e-12)]
    for built, saved in differing[:1]:
        log.warning(
            f"restore: the run continues with the checkpoint's learning rate {saved:g}; this optimizer was built with {built:g}: "
            f"df.set_learning_rate(state, {built:g}) sets it"
        )


def _on_topology(state: Any, about: dict[str, Any], path: Path) -> Any:
    """Compare the topology that a state of as many workers was saved on; restart memory that belongs to another one."""
    mine, theirs = state.params.plan.topology, about.get("topology")
    if None in (mine, theirs) or mine == theirs:
        return state
    restarts = getattr(layout.own_memory(state), "of_topology", False)
    if collectives.all_processes().rank == 0:
        what = "the memory belongs to that one and starts again" if restarts else "parameters and memory continue"
        log.warning("restore: %s was saved on topology %s, and the state is on %s: %s", path, theirs, mine, what)
    if not restarts:
        return state

    def restart(memory: Any, x: Buckets) -> Any:
        return memory._replace(inner=restart(memory.inner, x)) if hasattr(memory, "inner") else memory.restart(x)

    return with_memory(restart, state, state.params)


def _verify_share(path: Path, template: Any) -> None:
    """Where all processes read all files, for another number of workers, verify this one's share of them."""
    about, here = files.read_manifest(path), collectives.all_processes()
    if about["num_workers"] != here.num_workers * layout.local_workers(template):
        for entry in about["processes"][here.rank :: here.size]:
            _verify(path, entry)


def _verify(path: Path, process: dict[str, Any], into: Iterable[tuple[int, memoryview]] = ()) -> None:
    """Raise CheckpointCorrupt unless the file of a process is what the manifest says; `into` as for `files.digest_of`."""
    file = path / process["file"]
    try:
        size, digest = files.digest_of(file, into)
    except OSError as error:
        raise files.corrupt(file, f"cannot be read ({error})") from error
    if size != process["bytes"]:
        raise files.corrupt(file, f"it has {size} bytes where the manifest says {process['bytes']}")
    if digest != process["sha256"]:
        raise files.corrupt(file, "its content does not have the digest that the manifest names")


def _read(path: Path, template: Any) -> tuple[Restored, dict[str, Tensor], int]:
    """Return what the checkpoint holds for this process, the generators' states and the number of workers that saved it."""
    about = files.read_manifest(path)
    theirs, mine = about["algorithm"], layout.algorithm_of(template)
    if None not in (theirs, mine) and _MEMORY_OF.get(theirs, theirs) != mine:
        raise ValueError(
            f"restore: {path} has the memory of {theirs}, and the state is {mine}'s; build the algorithm that it "
            "was saved with, or start another one from its parameters: init(df.params(state))."
        )
    here, local = collectives.world(), layout.local_workers(template)
    first, num_workers = here.worker * local, here.num_workers * local
    as_many = about["num_workers"] == num_workers
    if as_many and template.params.plan.starts_equal and not about.get("starts_equal", True):
        raise ValueError(
            f"restore: the workers of {path} may differ, and the state's algorithm never makes them equal; restore it with "
            "the algorithm that it was saved with, and start this one from init(df.consensus_mean(state))."
        )
    buckets = layout.digest_of_plan(template.params.plan)
    entries, others = _of_process(about, range(first, first + local) if as_many else None)
    are_mine = all(entry["buckets"] == buckets for entry in entries)
    if not are_mine or about["processes_per_worker"] != here.processes_per_worker:
        entries += others  # which have shards of these leaves
    try:
        parts = [_Part(path, entry) for entry in entries]
        places = next((its.shape[1] for name, its in parts[0].places.items() if name.endswith("ring.to")), 0)
        rooms = template  # ranks have none, the simulator one by its trace
        template = collectives.with_room(template, places)
        one = trees.map(lambda x: x[0], template) if is_stacked(template, of_runs=True) else template
        state = trees.map(torch.empty_like, template if as_many else one)
        leaves = layout.leaves_of(state)
        by_bucket = [leaf.name for leaf in leaves if leaf.is_by_bucket]
        if by_bucket and not are_mine:
            raise ValueError(
                f"restore: leaf {by_bucket[0]!r} is in no kit.Buckets, so it may be of a bucket's layout, and {path} has other "
                "buckets; build the algorithm with the bucket_mb that it was saved with."
            )
        given = {leaf.name: leaf.values for leaf in layout.leaves_of(template if as_many else one)}
        frozen = {name: given[name] for name in parts[0].frozen if name in given}
        if (size := about["processes_per_worker"]) != here.processes_per_worker and frozen:
            raise ValueError(
                f"restore: {path} was saved without its frozen buffers by {size} processes per worker; restore it with as many."
            )
        for name, digest in layout.digests_of(frozen).items():
            if digest != parts[0].frozen[name]:
                raise ValueError(
                    f"restore: the template's {name.removeprefix(layout.BUFFERS)!r} is not the frozen buffer with which {path} was saved; "
                    "load the same weights before df.functional."
                )
        _compare_names(leaves, parts, path)
        saved = _Saved(path, parts, about["num_workers"], frozen)
        if as_many:
            saved.fill(leaves, first, verify=True)
            state = _on_topology(state, about, path)
        elif is_stacked(template, of_runs=True):
            row = state
            state = stacked(one, lambda: saved.rows(row, leaves), range(first, first + local))
        else:
            state = resized(one, saved.rows(state, leaves), first)
        state = with_room_of(f"restore({path})", state, rooms)
        drawing = parts[0].generators(template.params[0].device)
        extra = layout.unpacked(parts[0].process["extra"], parts[0].open.get_tensor)
        return Restored(state, about["step"], extra, about["config"]), drawing, about["num_workers"]
    except Exception:
        for entry in entries if as_many else ():
            _verify(path, entry)  # a damaged file is the cause of any error
        raise


def _of_process(about: dict[str, Any], workers: range | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return processes that saved this process's part of these workers (None: any), and the workers' others."""
    size, here = about["processes_per_worker"], collectives.world()
    source = here.process * size // here.processes_per_worker
    sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for rank, entry in enumerate(about["processes"]):
        start, stop = entry["workers"]
        if workers is None or (start < workers.stop and workers.start < stop):
            sides[rank % size != source].append(entry)
    return sides


_OWNERS = {("params/", layout.BUFFERS): "network", ("local.opt",): "optimizer", ("",): "algorithm or wrapper"}
"""What has the leaves whose names begin so."""
Wanted = dict[str, tuple[Tensor, Place]]
"""Parts of leaves that are not filled yet, and their places."""


class _Part:
    """File of one process, whose digest is checked."""

    def __init__(self, path: Path, process: dict[str, Any]) -> None:
        self._file, self.process = path / process["file"], process
        self.open = safe_open(self._file, framework="pt")
        self.places, self.frozen = layout.places_in(self.open.metadata()), process["frozen"]

    def generators(self, device: torch.device) -> dict[str, Tensor]:
        """Return the states of this process's generators that are of use here."""
        known = {f"{layout.GENERATOR}{name}": name for name in ("cpu", "python", "numpy", device.type)}
        return {known[name]: self.open.get_tensor(name) for name in known.keys() & set(self.open.keys())}

    def copy(self, name: str, wanted: Wanted, filled: dict[str, Tensor], values: Any = None) -> None:
        """Copy this file's share of the wanted part, and mark it, or remove a leaf that is complete from what is wanted."""
        into, (_, offset) = wanted[name]
        source, target = [], []
        for mine, theirs, count, wide in zip(
            self.places[name].offset, offset, self.open.get_slice(name).get_shape(), into.shape, strict=True
        ):
            start, stop = max(mine, theirs), min(mine + count, theirs + wide)
            source.append(slice(start - mine, stop - mine))
            target.append(slice(start - theirs, stop - theirs))
        if not all(x.start < x.stop for x in target):
            return
        part = into[tuple(target)]
        if values is not into:
            part.copy_((self.open.get_slice(name) if values is None else values)[tuple(source)])
        if part.shape == into.shape:
            del wanted[name]
        else:
            filled.setdefault(name, torch.zeros(into.shape, dtype=torch.bool))[tuple(target)] = True

    def read(self, wanted: Wanted, filled: dict[str, Tensor]) -> Iterator[tuple[int, memoryview]]:
        """Yield memory for `files.digest_of`: of wanted leaves, or of one leaf of the file at a time, for `copy`."""
        with self._file.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        starts = {name: 8 + size + header[name]["data_offsets"][0] for name in wanted.keys() & self.places.keys()}
        for name in sorted(starts, key=starts.__getitem__):
            (into, there), mine, start = wanted[name], self.places[name], starts[name]
            shape = tuple(header[name]["shape"])
            is_direct = (into.is_cpu, shape, mine.offset) == (True, into.shape, tuple(there.offset))
            is_direct &= into[0].is_contiguous()  # else each of its elements would be read by itself
            values = into if is_direct else torch.empty(shape, dtype=into.dtype)
            for memory in layout.bytes_of(values):
                yield start, memory
                start += len(memory)
            self.copy(name, wanted, filled, values)


def _compare_names(leaves: Sequence[layout.Leaf], parts: Sequence[_Part], path: Path) -> None:
    own, theirs = {leaf.name for leaf in leaves}, {name for part in parts for name in (*part.places, *part.frozen)}
    for prefixes, what in _OWNERS.items():  # a renamed parameter also renames the optimizer's leaves and the memory's
        mine, saved = (sorted(x for x in names if x.startswith(prefixes)) for names in (own - theirs, theirs - own))
        found = [f"only {side} has {brief(names)}" for side, names in ((path, saved), ("the state", mine)) if names]
        rule = f"restore: another {what}: {', '.join(found)}; build the {what} as when it was saved."
        if found:
            raise ValueError(rule)


class _Saved(NamedTuple):
    path: Path
    parts: Sequence[_Part]
    num_workers: int
    given: dict[str, Tensor]
    """Leaves that are not in the files, of the template's workers."""

    def fill(self, leaves: Sequence[layout.Leaf], first: int, *, verify: bool = False) -> None:
        """Read the values of these leaves for the workers from `first` on, or raise unless all of them are there."""
        wanted: Wanted = {leaf.name: (leaf.values, layout.place(leaf, first, self.num_workers)) for leaf in leaves}
        for name in wanted.keys() & self.given.keys():
            wanted.pop(name)[0].copy_(self.given[name])
        for name, (values, there) in wanted.items():
            mine = layout.DTYPES[values.dtype], list(there.shape)
            for part in [part for part in self.parts if name in part.places]:
                theirs = part.open.get_slice(name).get_dtype(), list(part.places[name].shape)
                if theirs != mine:
                    raise ValueError(
                        f"restore: leaf {name!r} is {theirs[0]} {theirs[1]} in {self.path} (workers first) and "
                        f"{mine[0]} {mine[1]} in the state; build the same algorithm, optimizer, network and topology "
                        "as when it was saved."
                    )
        filled = dict[str, Tensor]()
        for part in self.parts:
            if verify:
                _verify(self.path, part.process, part.read(wanted, filled))
                continue
            for name in wanted.keys() & part.places.keys():
                part.copy(name, wanted, filled)
        for name, (values, _) in wanted.items():
            held = int(filled[name].sum()) if name in filled else 0
            if held < values.numel():
                raise files.corrupt(self.path, f"of leaf {name!r} it holds {held} of {values.numel()} values")

    def rows(self, one: Any, leaves: Sequence[layout.Leaf]) -> Any:
        """Replace each tensor of one worker's state by an iterable of all workers' values, read on demand."""
        counts = []
        for _, node in trees.named_leaves(one, Buckets):
            counts += [len(b.segments) for b in node.plan.buckets] if isinstance(node, Buckets) else [1]
        rest = iter(leaves)
        pieces = [list(islice(rest, count)) for count in counts]
        pairs = zip(trees.leaves(one), pieces, strict=True)
        return trees.fill(trees.enumerate_leaves(one), [self._row_by_row(*pair) for pair in pairs])

    def _row_by_row(self, tensor: Tensor, pieces: Sequence[layout.Leaf]) -> Iterator[Tensor]:
        for worker in range(self.num_workers):
            self.fill(pieces, worker)
            yield tensor.clone()
