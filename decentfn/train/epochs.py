"""Epochs of a loader as numbered batches, and the state from which another process reads the rest of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from inspect import isgeneratorfunction
from itertools import chain
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from decentfn.comm import collectives
from decentfn.core import brief, log, require
from decentfn.core.draws import generator_states, set_generator_states

GENERATORS = (torch.Generator, np.random.Generator, random.Random)
"""Kinds of generators whose states are kept."""

_END = object()
_OPTIONS = (
    ("persistent_workers", False, "outlive an epoch keep their random numbers"),
    ("in_order", True, "hand batches over in any order do not tell which have been read"),
)
"""Of a DataLoader without a state: what its processes must be, and why."""


class Epochs(Iterator[tuple[int, Any]]):
    """Numbered batches `(t, batch)` of several epochs, which another process can continue. Made by `epochs`.

    Save with `saver.save(state, t + 1, extra=batches.state_dict())`, and after `df.checkpoint.restore` call
    `batches.load_state_dict(extra)`: the batches and random numbers that follow are those of a run that did not stop. A
    loader with `state_dict` sets its position itself. Any other is read again from the start of its epoch, with the
    generators as they were then.
    """

    def __init__(self, loader: Any, num_epochs: int, start: int, generators: Sequence[Any]) -> None:
        samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
        parts = [loader, getattr(loader, "dataset", None), *samplers, getattr(samplers[1], "sampler", None)]
        self._parts = list({id(part): part for part in parts}.values())
        hidden = getattr(loader, "synchronized_generator", None)  # of the sampler within accelerate's sampler
        own = [*generators, hidden, *(getattr(part, "generator", None) for part in self._parts)]
        self._generators = list({id(one): one for one in own if isinstance(one, GENERATORS)}.values())
        self._loader, self._num_epochs, self._t = loader, num_epochs, start
        # accelerate's loader has the method, and with False a state no more than the DataLoader within.
        self._has_state = hasattr(loader, "state_dict") and getattr(loader, "use_stateful_dataloader", True)
        self._has_processes = getattr(loader, "num_workers", 0) > 0
        # Each of a stream's processes may have a short last batch, which the length does not count.
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        is_estimate = is_stream and self._has_processes and not self._has_state
        self._loses_order = self._has_state and hasattr(loader, "use_stateful_dataloader") and not is_stream
        self._size = 0 if is_estimate else length_hint(loader)  # 0 of a stream
        self._epoch = start // self._size if self._size else 0
        division = f"batch_size={getattr(loader, 'batch_size', None)}, {self._size or 'unknown'} batches"
        division += f", num_workers={loader.num_workers}" if is_estimate else ""
        self._division = [] if self._has_state else [division]
        """How an epoch that is read again is divided into batches."""
        self._first = self._epoch * self._size
        """t of the epoch's first batch."""
        is_generator = isgeneratorfunction(getattr(type(loader), "__iter__", None))
        self._begins_late = is_generator and self._has_processes
        """True if the seeds of the loader's processes, of which each reads alone, are drawn with the first batch (litdata)."""
        self._at_first: Any = None
        """States of the generators before the epoch's first batch, once it has been read."""
        self._resumed: dict[str, Any] = {}
        self._batches = self._read()

    def __next__(self) -> tuple[int, Any]:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the loader's state and those of all generators, after the step of a batch.

        Raises:
            ValueError: a loader without a state of its own, whose processes outlive an epoch (`persistent_workers=True`) or
                hand over batches in any order (`in_order=False`); rows that accelerate shuffles with `use_stateful_dataloader=True`.
        """
        is_read_again = self._has_processes and not self._has_state
        for option, needed, why in _OPTIONS:
            if is_read_again and getattr(self._loader, option, needed) != needed:
                raise ValueError(
                    f"epochs(loader, ...).state_dict(): processes that {why}; make the DataLoader with {option}={needed}."
                )
        rule = "accelerate's use_stateful_dataloader=True keeps a position and not the order of the rows; leave it out."
        require(not self._loses_order, "epochs(loader, ...).state_dict()", rule)
        here, now = collectives.all_processes(), self._drawn()
        return self._resumed or {
            "t": self._t,
            "epoch": self._epoch,
            "first": self._first,
            "process": [here.rank, here.size, *self._division],
            "loader": self._loader.state_dict() if self._has_state and self._at_first else None,
            "at first": self._at_first or now,
            "now": now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called; before the first batch.

        With another number of processes, or batches of another size, the data are divided anew: the epoch starts again,
        `t` continues, and the log says so at WARNING.

        Raises:
            ValueError: not the state of such a loader and such generators; a batch has been read.
        """
        call, here = "epochs(loader, ...).load_state_dict(state)", collectives.all_processes()
        rule = f"{brief(state)} is not the result of state_dict(), which Saver.save(extra=) takes."
        require(isinstance(state, Mapping) and "at first" in state, call, rule)
        require(not self._at_first, call, "batches have been read; call it before the loop.")
        theirs, mine = len(state["now"]["own"]), len(self._generators)
        if theirs != mine or state["loader"] is not None and not hasattr(self._loader, "load_state_dict"):
            raise ValueError(
                f"{call}: it is of a loader {'with' if state['loader'] else 'without'} state_dict and of {theirs} generators "
                f"besides the global ones, and here are {mine}; pass the same kind of loader and the same generators=."
            )
        self._t, self._epoch, self._first = state["t"], state["epoch"], state["first"]
        its, own = state["process"], [here.rank, here.size, *self._division]
        if its == own[: len(its)]:
            self._resumed = dict(state)
            return
        self._first = self._t
        log.warning(
            "epochs: %s read these batches, and this is %s: epoch %d starts again, with t=%d",
            *(*map(_described, (its, own)), self._epoch, self._t),
        )

    def _read(self) -> Iterator[tuple[int, Any]]:
        state, self._resumed = self._resumed, {}
        t, start, then, begun = self._first, self._t, None, None
        if state:
            self._draw_from(state["at first"])  # the seeds of a loader's processes are drawn again
            then = state["now"] if start > t else None
            if state["loader"] is not None:
                self._loader.load_state_dict(state["loader"])
                # torchdata.nodes' has no length, and would begin the next epoch as the rest of this one.
                if hasattr(self._loader, "restart_on_stop_iteration"):
                    self._loader.restart_on_stop_iteration = False
                t = start
                if start - self._first == self._size > 0:
                    # All of an epoch is read: some loaders yield nothing now, and others (litdata) begin the next one.
                    self._epoch, self._first, then = self._epoch + 1, start, None
                    self._draw_from(state["now"])
                    if self._epoch < self._num_epochs:
                        self._set_epoch(self._epoch)
                        rest = iter(self._loader)
                        if (batch := next(rest, _END)) is not _END:
                            begun = chain([batch], rest)
                        else:
                            self._draw_from(state["now"])
        for epoch in range(self._epoch, self._num_epochs):
            if begun is None:
                self._set_epoch(epoch)
            self._epoch, self._at_first = epoch, self._drawn() if begun is None else state["now"]
            batches, begun = begun or iter(self._loader), None
            while True:
                now, then = (then, None) if t == start else (None, then)
                if now is not None:
                    self._draw_from(now)
                if (batch := next(batches, _END)) is _END:
                    break
                if now is not None and self._begins_late:
                    self._draw_from(now)
                t += 1
                if t > start:
                    self._t = t
                    yield t - 1, batch
            self._first = t
        self._epoch, self._at_first = self._num_epochs, self._drawn()

    def _set_epoch(self, epoch: int) -> None:
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if hasattr(self._loader, "_num_iter_calls"):  # by which Fabric's loader sets its sampler's epoch again
            self._loader._num_iter_calls = epoch

    def _drawn(self) -> dict[str, Any]:
        """Return the states of the global generators and of the loader's own."""
        own = [
            one.get_state() if isinstance(one, torch.Generator)
            else one.getstate() if isinstance(one, random.Random) else one.bit_generator.state
            for one in self._generators
        ]  # fmt: skip
        return {"global": generator_states(torch.device("cpu")), "own": own}

    def _draw_from(self, states: Mapping[str, Any]) -> None:
        set_generator_states(states["global"], torch.device("cpu"))
        for one, its in zip(self._generators, states["own"], strict=True):
            if isinstance(one, torch.Generator):
                one.set_state(its)
            elif isinstance(one, random.Random):
                one.setstate(its)
            else:
                one.bit_generator.state = its


def _described(process: Sequence[Any]) -> str:
    rank, size, *division = process
    return f"process {rank} of {size}" + "".join(f" ({how})" for how in division)
