"""Save: at once, or by a thread that writes while the run goes on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from decentfn import collectives, trees
from decentfn.errors import RunError
from decentfn.run.checkpoint import files, manifest
from decentfn.run.checkpoint.together import on_first, one_path, together
from decentfn.run.checkpoint.writing import Content, attempted, content_of, plain, write
from decentfn.topologies import Topology
from decentfn.words import brief

_log = logging.getLogger("decentfn")

_RESCUED = "rescued"
"""The folder of what `Saver.rescue` saves."""


@collectives.calling("df.checkpoint.save(directory, state, step)", of_state=True)
def save(
    directory: str | Path,
    state: Any,
    step: int,
    *,
    topology: Topology | None = None,
    config: Any = None,
    extra: Any = None,
    score: float | None = None,
) -> Path:
    """Save one checkpoint, and return when it is on the disk; earlier ones stay. Collective.

    Arguments and errors are those of `Saver` and its `save`; during a run, a `Saver` costs a step less.

    Returns:
        The checkpoint's own directory, in the run's.
    """
    content = attempted(
        lambda: content_of(state, _on_cpu, step, step, topology, plain("save(config=...)", config), extra, score)
    )
    directory = one_path("save(directory, ...)", directory)
    locks: list[files.Lock] = []
    on_first("save", _claim, directory, locks)
    try:
        return write(directory, content, None)
    finally:
        for lock in locks:
            lock.release()


class Saver:
    """Saves checkpoints of a run to its directory while the run goes on. A context manager; collective.

    `save` copies the state and returns; a thread writes the copy. Threads of one process take turns. All processes see the directory, which is this run's
    alone until `close`, or the end of the `with`, has waited for the last checkpoint.

    Args:
        directory: the run's; made, for its owner only, where it does not exist.
        topology: of all workers; each checkpoint tells its name, period and phase.
        config: what else each checkpoint tells, anything that JSON holds.
        keep: so many of the newest checkpoints stay, >= 1, and the one with the lowest score; None: all.

    Raises:
        ValueError: `keep` is no positive number; JSON does not hold `config`.
        RuntimeError: on all processes, where another run has the directory.
    """

    @collectives.calling("df.checkpoint.Saver(directory)")
    def __init__(
        self, directory: str | Path, *, topology: Topology | None = None, config: Any = None, keep: int | None = 3
    ) -> None:
        self._config = together("Saver", _arguments, keep, config)[collectives.everyone().rank]
        self.directory = one_path("Saver(directory)", directory)
        self._topology, self._keep = topology, keep
        self._one_at_a_time = threading.RLock()
        self._copies: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._locks: list[files.Lock] = []
        on_first("Saver", _claim, self.directory, self._locks)
        self._world = collectives.everyone().apart()
        self._is_closed = False

    def save(self, state: Any, step: int, *, extra: Any = None, score: float | None = None) -> None:
        """Save the state as it is now, as soon as the checkpoint before is written. Collective, in the same step.

        Args:
            state: of one worker, or stacked.
            step: the `t` of the next step, which is the number of steps taken.
            extra: this process's own, anything that JSON holds: where it is in its data, for example.
            score: the lower the better, for `keep` and `best`; the mean over the processes counts, NaN does not.

        Raises:
            ValueError: a leaf or an argument that cannot be saved.
            OSError, RuntimeError: on all processes, the checkpoint before was not written; those before it are whole.
        """
        if self._is_closed:
            raise ValueError(
                f"Saver({str(self.directory)!r}).save: it is closed, and the directory given back; open another."
            )
        with self._one_at_a_time:
            self.wait()
            content = attempted(
                lambda: content_of(state, self._copy, step, step, self._topology, self._config, extra, score)
            )
            self._thread = threading.Thread(target=self._write, args=(content,), name="decentfn checkpoint")
            self._thread.start()
            # Of several processes all raise it where they wait for this checkpoint.
            if self._world.size == 1 and isinstance(content, ValueError):
                self.wait()

    def rescue(self, state: Any, error: RunError, *, extra: Any = None) -> Path | None:
        """Save what a step that failed has left, and return when it is on the disk. Collective, each with its own error.

        Each worker's state is whole, but some may be steps further than others, and what they know of one another is off by
        the messages that were lost. So it lies apart, in the folder `rescued` of the run's directory, where `latest` does not
        find it; `export` makes one network of it.

        Args:
            state: that was passed to the step.
            error: what it raised.
            extra: as for `save`.

        Returns:
            The checkpoint, whose step is the largest of the processes' next steps, which the manifest has too; None where there is none, because a process
            is gone or does not know whether its state is whole. The log says why.
        """
        collectives.world().hang_up()  # or whoever raised for another reason would let its neighbours wait
        with self._one_at_a_time:
            try:
                self.wait()
            except Exception as earlier:
                _log.error("the checkpoint before was not written: %s", earlier)
            try:
                own: Any = getattr(error, "next_step", None)
                if self._is_closed:
                    self._world = collectives.everyone().apart()
                with collectives.use(self._world):
                    steps = together("Saver.rescue", lambda: own)
                _require_whole(steps)
                content = attempted(
                    lambda: content_of(state, self._copy, max(steps), own, self._topology, self._config, extra, None)
                )
                with collectives.use(self._world):
                    return write(self.directory / _RESCUED, content, None)
            except (OSError, RuntimeError) as reason:
                _log.error("nothing was rescued: %s", reason)
                return None
            finally:
                if self._is_closed:
                    self._let_go()

    def wait(self) -> None:
        """Return when what was saved is on the disk, or raise what went wrong."""
        with self._one_at_a_time:
            if self._thread is not None:
                self._thread.join()
            error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give the directory back."""
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._let_go()
            while self._locks:
                self._locks.pop().release()

    def _let_go(self) -> None:
        if self._world.size > 1:  # else it is not this Saver's alone
            self._world.let_go()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # else what ended the run is raised, and the log has this

    def _copy(self, state: Any) -> Any:
        """The state on the CPU, in the memory of the copy before."""
        leaves: list[Tensor] = trees.leaves(state)
        if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in self._copies]:
            self._copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for x in leaves]
        for copy, x in zip(self._copies, leaves, strict=True):
            copy.copy_(x.detach(), non_blocking=True)
        if any(x.is_cuda for x in leaves):
            torch.cuda.synchronize()
        return trees.fill(trees.enumerate_leaves(state), self._copies)

    def _write(self, content: Content | ValueError) -> None:
        try:
            with collectives.use(self._world):
                write(self.directory, content, self._keep)
        except BaseException as error:
            _log.error("a checkpoint was not written to %s: %s", self.directory, error)
            self._error = error


def _require_whole(steps: list[int | None]) -> None:
    """Every process's state is whole, and so are the workers that they are parts of."""
    if None in steps:
        raise RuntimeError(f"process {steps.index(None)} does not know whether its state is whole")
    size = collectives.processes_per_worker()
    for first in range(0, len(steps), size):
        if len(set(steps[first : first + size])) > 1:
            raise RuntimeError(f"the processes of worker {first // size} are at steps {steps[first : first + size]}")


def _arguments(keep: Any, config: Any) -> Any:
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"Saver(keep={brief(keep)}): so many checkpoints stay, an integer >= 1; None keeps all.")
    return plain("Saver(config=...)", config)


def _on_cpu(state: Any) -> Any:
    return trees.map(lambda x: x.detach().cpu(), state)


def _claim(directory: Path, locks: list[files.Lock]) -> None:
    """Lock the run's directory, and remove what a run that was killed has left in it."""
    lock = files.Lock(directory)
    try:
        for place in (directory, directory / _RESCUED):
            files.sweep(place, manifest.UNFINISHED)
    except BaseException:
        lock.release()
        raise
    locks.append(lock)
