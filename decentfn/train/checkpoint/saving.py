"""Saving: every process writes its workers to one directory, which gets its name when all files are on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from filelock import FileLock, Timeout
from torch import Tensor

import decentfn
from decentfn.comm import collectives
from decentfn.core import at_least, brief, brief_error, log, require, trees, warn
from decentfn.core.buckets import Place
from decentfn.core.draws import generator_states
from decentfn.elastic.generation import awaited_run
from decentfn.errors import RunError
from decentfn.kit.state import is_state
from decentfn.train.checkpoint import files, layout
from decentfn.train.collective_calls import make_directory, on_all, on_first, one_path
from decentfn.train.own_steps import memory_of

_warned: set[Path] = set()
"""Directories of the runs that were warned of steps taken twice."""


class _Content(NamedTuple):
    """Content that this process writes."""

    tensors: dict[str, Tensor]
    loose: dict[str, Tensor]  # states of generators, and tensors of `extra`
    places: dict[str, Place]
    frozen: dict[str, Tensor]  # only their digests are written
    about: dict[str, Any]  # equal on all processes
    process: dict[str, Any]  # this process's own
    score: float | None


@collectives.calling("df.checkpoint.save(directory, state, step)", of_state=True)
def save(
    directory: str | Path,
    state: Any,
    step: int,
    *,
    config: Any = None,
    extra: Any = None,
    score: float | None = None,
    frozen: Collection[str] = (),
) -> Path:
    """Save one checkpoint and return when it is on disk; earlier ones stay. Collective.

    Arguments and errors are those of `Saver` and its `save`. During a run, a `Saver` delays the step less.

    Returns:
        The checkpoint's directory, inside the run's.
    """
    with Saver(directory, config=config, keep=None, frozen=frozen) as saver:
        return _write(saver.directory, saver._content(state, step, extra, score), None)


class Saver(contextlib.AbstractContextManager["Saver", None]):
    """Background writer of a run's checkpoints. A context manager; collective.

    `save` copies the state and returns; a thread writes the copy. All processes share the directory, which this run
    locks until `close`, or the end of the `with`, which waits for the last checkpoint.

    Args:
        directory: the run's directory; created for its owner only.
        config: JSON content of each checkpoint, such as the run's settings.
        keep: number of newest checkpoints to keep, >= 1, beside the one with the lowest score; None keeps all.
        frozen: names of buffers that training leaves as they are, the same on all workers, such as `loss_fn.frozen` of
            `df.functional`. A checkpoint has their digests only; `restore` takes them from its template.

    Raises:
        RuntimeError: on all processes, if another run has locked the directory.
    """

    @collectives.calling("df.checkpoint.Saver(directory)")
    def __init__(
        self,
        directory: str | Path,
        *,
        config: Any = None,
        keep: int | None = 3,
        frozen: Collection[str] = (),
    ) -> None:
        self._config = on_all("Saver", _arguments, keep, config)[collectives.all_processes().rank]
        self.directory = one_path("Saver(directory)", directory)
        self._keep, self._frozen = keep, frozen
        self._lock = FileLock(self.directory / "lock")  # the system releases it when the process ends
        self._found: list[int] = []
        """Steps of the checkpoints that were in the directory."""
        self._connect()
        self._thread = ThreadPoolExecutor(1, "decentfn checkpoint")
        self._writing: Future[Path] | None = None
        self._is_closed = False

    def _connect(self) -> None:
        """Connect the thread with the other processes' and lock the directory. Collective, but not before a process has joined."""
        here = collectives.all_processes()
        self._changes, self._world = here.hooks.changes, here.apart()
        if awaited_run(here) is None:
            with collectives.use(self._world):  # connects it, so that `hang_up` ends what waits
                self._found = on_first("Saver", self._claim)
            if not self._found:  # also if what this process has saved there was removed
                files.own.pop(self.directory.resolve(), None)

    def _follow(self) -> None:
        """Reconnect after a loss or a join (`df.survive`); a checkpoint of earlier workers is done by then, or will not be."""
        if self._changes != collectives.all_processes().hooks.changes:
            with contextlib.suppress(Exception):  # the log has it
                self.wait()
            on_all("Saver.save", lambda: None)
            self._world.let_go()
            self._connect()

    def save(self, state: Any, step: int, *, extra: Any = None, score: float | None = None) -> None:
        """Save the current state after the previous checkpoint is written. Collective, in the same step.

        Args:
            state: the state of one worker, or stacked.
            step: the `t` of the next step, which is the number of steps taken.
            extra: content of this process, such as the state of its data loader: numbers, strings, None, tensors, arrays and
                bytes, in lists, tuples and dicts.
            score: for `keep` and `best`, lower is better; the mean over the processes counts, NaN does not.

        Raises:
            ValueError: on all processes, a leaf or an argument that cannot be saved; a step before the one last saved or
                restored; in the first call, the directory holds checkpoints, and no process has restored one of them.
            OSError, RuntimeError: on all processes, the previous checkpoint was not written; earlier ones are complete.
        """
        rule = "it is closed and has released the directory; open another."
        require(not self._is_closed, f"Saver({str(self.directory)!r}).save", rule)
        self._follow()
        self.wait()
        content = self._content(state, step, extra, score, copy=True)
        self._writing = self._thread.submit(self._write_apart, content)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk, or raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait, and release the directory."""
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._world.let_go()
            self._lock.release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # otherwise the error that ended the run is raised, and this one is logged

    def _claim(self) -> list[int]:
        if self._lock.is_locked:
            return self._found
        make_directory(self.directory, 0o700)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise RuntimeError(
                f"{self.directory}: another run or Saver holds the lock of this directory, and the two would mix their "
                "checkpoints; end the other first, or choose another directory."
            ) from error
        try:
            files.sweep(self.directory)
            return [step for _, step, _ in files.listed(self.directory)]
        except BaseException:
            self._lock.release()
            raise

    def _content(self, state: Any, step: int, extra: Any, score: float | None, *, copy: bool = False) -> _Content:
        made: list[_Content] = []

        def make() -> bool:
            made.append(self._content_here(state, step, extra, score, copy))
            now, last = made[0].about["step"], files.own.get(self.directory.resolve())
            rule = f"the last checkpoint is of step {last}, and steps count on over all epochs; pass t + 1 (df.data.epochs)."
            require(last is None or now >= last, "save", rule, step=now)
            taken = state.params.taken_at
            if taken is not None and now <= taken and memory_of(state) is None and self.directory not in _warned:
                _warned.add(self.directory)
                warn(
                    f"save(step={now}): the state is the result of step t={taken}, and a run that restores it begins at "
                    f"step={now}, so it takes steps twice; pass t + 1."
                )
            box = collectives.world().mailbox
            rule = "mail is in flight, which a checkpoint of ranks does not hold; save what df.settle(state) returned."
            require(box is None or box.record.is_over or state.params not in box.owners, "save(state, step)", rule)
            return last is not None

        if not any(on_all("save", make)) and self._found:
            raise ValueError(
                f"save(state, step={made[0].about['step']}): {self.directory} holds checkpoints of steps {min(self._found)} to "
                f"{max(self._found)}, and this process neither restored nor saved one of them, so they are another run's; "
                "restore(directory, state) resumes that run; for a new one take another directory."
            )
        files.own[self.directory.resolve()] = made[0].about["step"]
        return made[0]

    def _content_here(self, state: Any, step: int, extra: Any, score: float | None, copy: bool) -> _Content:
        """Collect what this process writes; with `copy`, the state may change at once. Raises ValueError if it cannot."""
        if not is_state(state):
            raise ValueError(
                f"save(state, step): the state is {brief(state)}; expected a training state, from init(params)."
            )
        step = at_least("save", "step", step, 0)
        here, local = collectives.world(), layout.local_workers(state)
        first, num_workers = here.worker * local, here.num_workers * local
        left_out = {f"{layout.BUFFERS}{name}" for name in self._frozen}
        uncopied = {id(x) for name, x in trees.named_leaves(state) if name in left_out}
        leaves = layout.leaves_of(
            trees.map(lambda x: x.detach().to("cpu", copy=copy and id(x) not in uncopied).contiguous(), state)
        )
        held = {leaf.name: leaf.values for leaf in leaves if leaf.name in left_out}
        if unknown := left_out - held.keys():
            raise ValueError(
                f"Saver(frozen={brief(sorted(name.removeprefix(layout.BUFFERS) for name in unknown))}): no buffer of the state has such a "
                "name; loss_fn.frozen has those of df.functional's frozen parameters."
            )
        leaves = [leaf for leaf in leaves if leaf.name not in left_out]
        tensors = {leaf.name: leaf.values for leaf in leaves}
        places = {leaf.name: layout.place(leaf, first, num_workers) for leaf in leaves}
        loose = {f"{layout.GENERATOR}{name}": x for name, x in generator_states(state.params[0].device).items()}
        about = {
            "step": step,
            "num_workers": num_workers,
            "processes_per_worker": here.processes_per_worker,
            "algorithm": layout.algorithm_of(state),
            "topology": state.params.plan.topology,
            "starts_equal": state.params.plan.starts_equal,
            "buckets": layout.digest_of_plan(state.params.plan),
            "config": self._config,
        }
        process = {
            "step": step,
            "extra": layout.packed(extra, loose),
            "workers": (first, first + local),
            "buckets": about["buckets"],
        }
        return _Content(tensors, loose, places, held, about, process, _number(score))

    def _write_apart(self, content: _Content) -> Path:
        try:
            with collectives.use(self._world):
                return _write(self.directory, content, self._keep)
        except BaseException as error:
            step = content.about["step"]
            if isinstance(error, RunError):
                error.step = step - 1
            log.error("the checkpoint of step %d may be missing from %s: %s", step, self.directory, error)
            raise


def _arguments(keep: Any, config: Any) -> Any:
    """Return the config after a JSON round trip."""
    if keep is not None:
        at_least("Saver", "keep", keep, 1)
    try:
        return json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Saver(config=...): JSON holds finite numbers, strings, lists and dicts, and this is {brief(config)} "
            f"({brief_error(error)}); for NaN and infinity give None or a string."
        ) from error


def _number(score: Any) -> float | None:
    try:
        number = math.nan if score is None else float(score)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"save(score={brief(score)}): a number, the lower the better; NaN does not count.") from error
    return number if math.isfinite(number) else None


def _write(directory: Path, content: _Content, keep: int | None) -> Path:
    temporary = Path(on_first("save", _begin, directory, content.about["step"]))
    try:
        told = on_all("save", _write_own, temporary, content)
        return Path(on_first("save", _finish, directory, temporary, told, keep))
    except BaseException:
        if collectives.all_processes().rank == 0:
            with contextlib.suppress(OSError):
                files.remove(temporary)
        raise


def _begin(directory: Path, step: int) -> str:
    path = directory / f"{files.UNFINISHED}{step}-{uuid4().hex[:8]}"
    path.mkdir(mode=0o700, parents=True)
    return str(path)


def _write_own(path: Path, content: _Content) -> dict[str, Any]:
    if not path.exists():
        raise OSError(f"{path}: created by rank 0, but not visible to this process; choose a directory that all share.")
    name = f"process-{collectives.all_processes().rank:05}.safetensors"
    encoded, sha = layout.encoded(content.tensors | content.loose, content.places), hashlib.sha256()
    its = {"file": name, "bytes": files.write(path / name, encoded, sha.update), "sha256": sha.hexdigest()}
    its |= {"frozen": layout.digests_of(content.frozen)} | content.process
    return {"process": its, "score": content.score, "about": content.about}


def _finish(directory: Path, path: Path, told: list[dict[str, Any]], keep: int | None) -> str:
    about = told[0]["about"]
    size = about["processes_per_worker"]
    for rank, its in enumerate(told):
        first = told[rank % size]  # processes of a worker have their own shards
        expected = about | {"buckets": first["about"]["buckets"]}
        if its["about"] != expected:
            name = next(name for name in expected if its["about"][name] != expected[name])
            raise ValueError(
                f"save(state, step): {name} is {its['about'][name]!r} on rank {rank} and {expected[name]!r} on rank 0; "
                "all ranks save the same step of the same run, and values of a single process belong in extra."
            )
        if its["process"]["frozen"] != first["process"]["frozen"]:
            raise ValueError(f"Saver(frozen=...): the names or the values differ between worker 0 and {rank // size}.")
    scores = [its["score"] for its in told if its["score"] is not None]
    versions = {"decentfn": decentfn.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    content = {
        "format": files.FORMAT if told[0]["process"]["frozen"] else 2 if size > 1 else 1,
        **about,
        "score": sum(scores) / len(scores) if scores else None,
        "versions": versions,
        "processes": [its["process"] for its in told],
    }
    files.write(path / files.MANIFEST, [files.encode_manifest(content)])
    files.sync_directory(path)
    name = directory / files.next_name(directory, about["step"])
    files.publish(path, name)
    if keep is not None:
        for old in set(files.checkpoints(directory)[:-keep]) - {files.best(directory)}:
            files.remove(old)
    return str(name)
