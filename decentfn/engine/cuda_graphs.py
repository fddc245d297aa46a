"""CUDA graphs: a step of one process, recorded once and then replayed without Python between its kernels.

A recorded kernel reads and writes fixed memory. The state's own memory is fixed, as the step is donated; batches are
copied into buffers, and operators read what depends on t from memory, filled before each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import PyTree, brief_error, context, require, trees
from decentfn.kit.step import Step

MODE = "reduce-overhead"
_CALL = f'compile(step, mode="{MODE}")'
_FORMS = 32  # number of forms of batches whose recordings are kept


Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Function that records the kernels of a function without running them: returns what replays them, and its result."""


def require_replayable(step: Step, donate: bool, backend: Any) -> None:
    """Raise ValueError unless the step can become a CUDA graph."""
    require(backend == "inductor", _CALL, "CUDA graphs are Inductor's here; leave backend out.", backend=backend)
    require(donate, _CALL, "a graph writes the state in its place; leave donate=False out.")
    rule = "df.autograd(loss_fn) runs Python in every step, which a graph would not replay; pass loss_fn itself, or leave mode out."
    require(not step.is_by_autograd, _CALL, rule)
    rule = "there is no GPU for a CUDA graph; leave mode out on the CPU."
    require(torch.cuda.is_available(), _CALL, rule)
    _require_one_process()


def _require_one_process() -> None:
    here = collectives.all_processes()
    rule = f"{here.size} processes exchange messages, which a graph would not replay; leave mode out."
    require(here.size == 1, _CALL, rule)


def on_device(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend that refuses an input on the CPU, frozen in a graph, that others' operators compute with."""

    def compile_with(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            if not isinstance(value, Tensor) or value.device.type != "cpu":
                continue
            for user in node.users:
                rule = (
                    f"the step computes {user.target} of a tensor on the CPU ({node.name}: t, or one that it reads from outside), "
                    "whose value is frozen into the graph; move the tensor to the GPU, and in place of arithmetic with t use a "
                    "topology made of topologies (df.topologies.every) or df.kit, or leave mode out."
                )
                require(getattr(user.target, "namespace", "") == "decentfn" or user.op == "output", _CALL, rule)
        return backend(graph, inputs, **options)

    return compile_with


def cuda_recorder() -> Recorder:
    """Return a recorder of CUDA graphs that share memory: use a result before another graph is replayed."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a DataLoader's that pins memory, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result

    return record


def replayed(
    run: Callable[..., tuple[Any, Any]], make_recorder: Callable[[], Recorder]
) -> Callable[..., tuple[Any, Any]]:
    """Return `run`, run once for each form of batches, then recorded, then replayed; a state elsewhere starts over."""
    place: list[Any] = []
    known: list[tuple[Any, _Recording]] = []
    recorders: list[Recorder] = []

    def step(state: Any, batch: PyTree, t: Tensor) -> tuple[Any, Any]:
        _require_one_process()
        leaves, structure = trees.flatten(state)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        where = [structure, *((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors)]
        if where != place:
            known.clear()
            place[:], recorders[:] = where, [make_recorder()]
        batch = trees.plain(batch)
        given, structure = trees.flatten(batch)
        other = next((x for x in given if not isinstance(x, Tensor)), None)
        rule = "a batch of a graph holds tensors only, as another value is frozen into the graph."
        require(other is None, _CALL, rule, batch=other)
        form = [structure, bool(context.resting), *((x.shape, x.dtype) for x in given)]
        recording = next((recording for its_form, recording in known if its_form == form), None)
        if recording is None:
            device = tensors[0].device if tensors else None
            if device is not None and device.type == "cuda":
                here = torch.cuda.current_device()
                rule = f"kernels are recorded on the current GPU, cuda:{here}; call torch.cuda.set_device({device.index}) first."
                require(device.index == here, _CALL, rule, state=device)
            recording = _Recording(batch, device)
            known.append((form, recording))
            del known[:-_FORMS]
        for memory, x in zip(trees.leaves(recording.batch), given, strict=True):
            memory.copy_(x)
        return state, recording.metrics_of(run, recorders[0], state, t)

    return step


class _Recording:
    """Recording of a step for batches of one form, with memory of what the step number determines: rounds, and t itself."""

    def __init__(self, batch: PyTree, device: torch.device | None) -> None:
        self.batch = trees.map(lambda x: torch.empty_like(x, device=device), batch)
        self._of_step: dict[tuple[Callable[..., Tensor], torch.device], Tensor] = {}
        self._has_run = False
        self._replay: Callable[[], None] | None = None
        self._metrics: PyTree = None

    def read(self, function: Callable[..., Tensor], t: Tensor, device: torch.device) -> Tensor:
        """Return the memory's content for this function and device; the first call computes it for step t."""
        if (function, device) not in self._of_step:
            self._of_step[function, device] = function(t, device).clone()
        return self._of_step[function, device].clone()

    def metrics_of(self, run: Callable[..., tuple[Any, Any]], record: Recorder, state: Any, t: Tensor) -> PyTree:
        """Take a step with the batch in the buffers, and return its metrics."""
        if not self._has_run:  # compiles, loads kernels and makes the inputs, none of which can be recorded
            with context.having(inputs=self):
                metrics = run(state, self.batch, t)[1]
            self._has_run = True
            return metrics
        for (function, device), memory in self._of_step.items():
            memory.copy_(function(t, device))
        if self._replay is None:
            try:
                with context.having(inputs=self):
                    self._replay, (_, self._metrics) = record(lambda: run(state, self.batch, t))
            except RuntimeError as error:
                raise RuntimeError(
                    f"{_CALL}: the step cannot be recorded: {brief_error(error)}; leave mode out."
                ) from error
        self._replay()
        return trees.map(torch.clone, self._metrics)
