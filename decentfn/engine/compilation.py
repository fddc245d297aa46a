"""`compile`: one graph for a whole run, overlapped and donated."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import PyTree, checks_numbers, context, log, require, trees
from decentfn.engine import cache as compile_cache
from decentfn.engine.advice import explain
from decentfn.engine.cuda_graphs import MODE, cuda_recorder, on_device, replayed, require_replayable
from decentfn.engine.donation import Fields, require_distinct, require_layout, uninterrupted
from decentfn.engine.layout import Layout
from decentfn.engine.memory import give_back_freed_memory, keep_freed_memory
from decentfn.gradient import lock_of
from decentfn.kit.state import is_state
from decentfn.kit.step import Step
from decentfn.torch_private import inductor
from decentfn.torch_private.dynamo import are_needed, guard_everything, prepare, with_constant_numbers

_GRAPHS = 32  # largest number of graphs of a step, for batches of different structures, dtypes and kinds of shapes

_SILENT_S = 5.0  # time after which a compilation is announced, also where logging is not configured


_numbers = itertools.count()


@checks_numbers
def compile(
    step: Step | Callable[..., Any],
    *,
    donate: bool = True,
    dynamic: bool | None = None,
    backend: Any = "inductor",
    mode: Literal["reduce-overhead"] | None = None,
    **options: Any,
) -> Step:
    """Compile `step(state, batch, t)` into one graph that serves every `t`, or two.

    An algorithm with outer steps, or a schedule that rests (`df.topologies.every`), has a second graph, of the steps in
    which nothing is due: they cost what a step of the optimizer costs. Each is compiled in its first step.

    Communication is posted first and waited for last. Dynamo guards the values that the loss, the optimizer or the
    topology reads from outside (numbers, flags, modules, tensors; `docs/gotchas.md` lists the gaps): every call checks
    them, and a change compiles the step again. A number that changes in every step should therefore be a tensor that is
    filled in place. The logger "decentfn" reports compilations and their times at level DEBUG. With `donate`, the
    kernel that computes the new state writes it over the old one: the state that was passed in *is* the new state, and
    no second one is allocated, but for the parameters of a simulation: new ones change places with the old ones, and a
    view of them (`state.params.tree()`) is of one step. Ctrl-C waits for the end of a donated step of one process.

    Args:
        step: a step of this library, a simulated step, or any pure function of the same form. `t` may be an int or a
            0-d tensor.
        donate: overwrite the state that is passed in (as an in-place optimizer would); False keeps the step pure.
        dynamic: as for torch.compile: None compiles once more for the second shape of a batch, which then serves any
            shape; True compiles for any shape from the start, False for each shape. A loss by `df.autograd` needs one
            graph for all.
        backend: as for torch.compile. A function that calls Inductor by itself lacks the passes that keep messages in order; write
            "inductor", and its `options`.
        mode: "reduce-overhead" records the step as a CUDA graph, which later steps replay for their own t and batch,
            without Python between kernels; for small models on a GPU. Of one process and a traced loss, and batches of
            tensors. The graph keeps the numbers and flags that the loss reads from outside.
        options: further `options=` of torch.compile (Inductor's), such as `layout_optimization=False` on the CPU for
            convolutions with batch, group or instance norm.

    Returns:
        Another step. A batch of another structure compiles once more.

    Raises:
        ValueError: `step` is not a function, or is compiled already; no CUDA graph can be made (`mode`); at the first
            call, a state from another algorithm or optimizer, a state with one tensor in two places (donated, it would
            be updated twice), or a step whose new state has another layout than the old one.

    >>> step = compile(lambda state, batch, t: (state + batch * t, state.sum()), backend="eager")
    >>> step(torch.ones(2), torch.ones(2), 3)
    (tensor([4., 4.]), tensor(2.))
    """
    step = Step.of(step, "compile", refuse=("compile", "donate"))
    if options.get("triton.cudagraphs"):
        raise ValueError(
            "compile(step, **{'triton.cudagraphs': True}): a step looks up its round on the host, which Inductor's CUDA graphs would "
            f'not do again; write mode="{MODE}".'
        )
    require(mode in (None, MODE), "compile", f'None or "{MODE}"; pass Inductor\'s options by name.', mode=mode)
    if mode is not None:
        require_replayable(step, donate, backend)
    keep_freed_memory()
    prepare()
    progress = _Progress(step, backend)
    kwargs: dict[str, Any] = {"fullgraph": True, "dynamic": dynamic, "backend": backend, "recompile_limit": _GRAPHS}
    settings: dict[str, Any] = {"guard_filter_fn": are_needed}
    if backend == "inductor":
        own = inductor.compile_options()
        theirs = {name: options[name] for name in own if name in options}
        rule = "the library's own keeps messages in order, and values from being lost; leave it out."
        require(not theirs, "compile(step)", rule, **theirs)
        kwargs["backend"] = progress.inductor
        settings |= own | options
    given: dict[str, Any] = kwargs if mode is None else kwargs | {"backend": on_device(progress.inductor)}
    lock = lock_of(step.loss_fn)
    graphs: list[tuple[Any, list[Callable[..., Any]], Layout | None]] = []
    has_failed: list[bool] = []

    def run(state: Any, batch: PyTree, t: Tensor) -> tuple[Any, Any]:
        leaves, structure = trees.flatten(state)
        here = context.step_world or collectives.world()
        # A graph depends on these, and Dynamo does not see them.
        form = here.identity.size_at_start, here.identity.processes_per_worker, structure
        pair = layout = None
        for known, its_graphs, its_layout in graphs:
            if known == form:
                pair, layout = its_graphs, its_layout
        if is_new := pair is None:
            if donate:
                require_distinct("compile", state)
                is_here = step.had("simulate") is not None and collectives.world().size == 1 and is_state(state)
                if mode is None and is_here and all(x.device.type == "cpu" for x in state.params):
                    layout = Layout(state, step.by_leaf and not step.is_by_autograd)
            functions = _on_leaves(step, state if layout is None else layout.template, donate)
            pair = [torch.compile(function, options=settings.copy(), **given) for function in functions]  # it pops
            if dynamic:
                pair = [with_constant_numbers(function) for function in pair]
            progress.begin()
        places, spare = (leaves, {}) if layout is None else layout.take(leaves)
        # torch.compile drops writes to a 0-d float64 input, so such a leaf is passed as [its view of shape [1]].
        for i, x in enumerate(places):
            if isinstance(x, Tensor) and x.dim() == 0 and x.dtype == torch.float64:
                places[i] = [x.view(1)]
        if not (step.is_by_autograd or type(batch) is Tensor or trees.is_flat(batch)):
            batch = trees.map(trees.unclassed, trees.plain(batch))
        guard_everything()
        # Of several processes a step may wait for a message, and must be interrupted.
        is_held = donate and here.identity.size == 1 and progress.since is None
        try:
            with lock, uninterrupted() if is_held else nullcontext():
                result = pair[bool(context.resting)](places, batch, t)
                if layout is not None:
                    layout.put(leaves, spare, result[1])
        except Exception as error:
            progress.end(done=False)
            if not explain(step, error, state, batch, _GRAPHS, is_first=not has_failed):
                raise
            has_failed.append(True)
            return run(state, batch, t)
        if is_new:
            give_back_freed_memory()
            graphs.append((form, pair, layout))
        if progress.since is not None:
            progress.end()
        return (state, result[0]) if donate else result

    run_or_replay = run if mode is None else replayed(run, cuda_recorder)
    made = step.transformed("donate") if donate else step
    return made.transformed("compile", run=run_or_replay)


class _Progress:
    """Log of compilations and their times; rank 0 warns of one that takes a few seconds."""

    def __init__(self, step: Step, backend: Any) -> None:
        self.since: float | None = None
        self._timer: threading.Timer | None = None
        self._name, self._verb, self._patience = step.name, "tracing", ""
        if backend != "eager":
            way_out = "; with df.autograd(loss_fn) the loss is not compiled, and seconds suffice"
            self._verb = "compiling"
            self._patience = f" (minutes for a large network{'' if step.is_by_autograd else way_out})"

    def begin(self, why: str = "") -> None:
        what = f"{self._verb} {self._name}{why}"
        log.debug("%s ...", what)
        self.since = time.perf_counter()
        if collectives.all_processes().rank == 0:
            self._timer = threading.Timer(_SILENT_S, log.warning, (f"{what}{self._patience}",))
            self._timer.daemon = True
            self._timer.start()

    def end(self, done: bool = True) -> None:
        if done and self.since is not None:
            log.debug("compiled %s in %.1f s", self._name, time.perf_counter() - self.since)
        self.since = None
        if self._timer is not None:
            self._timer.cancel()

    def inductor(self, graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        """Compile with the backend; a later graph is for steps in which schedules rest, or another batch or loss."""
        if self.since is None:
            self.begin(f" again, for {'steps without a round' if context.resting else 'another batch or loss'}")
        return compile_cache.inductor(graph, inputs, **kwargs)


def _on_leaves(step: Step, state: Any, donate: bool) -> list[FunctionType]:
    """Return the step as a function of the state's leaves, so that each call guards a plain list of tensors.

    Twice: for steps with a round, and for steps without one (`kit.rests`). A leaf with a spare, a tuple, is not written
    over: donated, the function returns the metrics, and True if all such leaves are new, in their spares.
    """
    one, template, fields = step.run, trees.enumerate_leaves(state), Fields.of(state)

    def taken(leaves: list[Tensor], batch: PyTree, t: Tensor) -> tuple[Any, Any]:
        result = one(trees.fill(template, leaves), batch, t)
        if step.loss_fn is not None and not any(x.requires_grad for x in leaves):
            new = trees.leaves((result[0], getattr(result[1], "loss", ())))  # here, as a loss in `vmap` does not tell
            if any(x.requires_grad for x in new):
                raise RuntimeError("the loss has a gradient of others than the state")  # run eagerly, it names them
        return result

    def pure(given: list[Any], batch: PyTree, t: Tensor) -> tuple[Any, Any]:
        return taken([_as_it_was(leaf) for leaf in given], batch, t)

    def donated(given: list[Any], batch: PyTree, t: Tensor) -> Any:
        leaves = [_as_it_was(leaf) for leaf in given]
        new, metrics = taken(leaves, batch, t)
        new_leaves = trees.leaves(new)
        require_layout("compile", fields, leaves, trees.nodes(new), new_leaves)
        # Metrics must not be views of the next state.
        metrics = trees.map(torch.clone, metrics)
        # A new leaf may be another old one, or a view of it; all are read before the first is written.
        new_leaves = [new if new is old else torch.clone(new) for old, new in zip(leaves, new_leaves, strict=True)]
        are_new = [leaf is not before for before, leaf in zip(leaves, new_leaves, strict=True)]
        moves = any(is_new and isinstance(place, tuple) for is_new, place in zip(are_new, given, strict=True))
        for is_new, leaf, place in zip(are_new, new_leaves, given, strict=True):
            if moves if isinstance(place, tuple) else is_new:
                (place if isinstance(place, Tensor) else place[-1]).copy_(leaf)
        return metrics, moves

    run = donated if donate else pure
    # Dynamo counts recompilations and remembers changing sizes by code and name; they must differ between steps.
    name = f"{run.__name__}_{step.name.replace('.', '_')}_{next(_numbers)}"
    codes = [run.__code__.replace(co_name=name) for _ in range(2)]  # of one name, so they share what sizes change
    return [FunctionType(code, run.__globals__, name, None, run.__closure__) for code in codes]


def _as_it_was(place: Any) -> Tensor:
    if isinstance(place, tuple):
        return place[0]
    return place[0].view(()) if isinstance(place, list) else place
