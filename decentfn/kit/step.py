"""Step object: its function, its checks before and after, and the transforms applied to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import PyTree, as_step, brief, context, draws, require, trees, warn
from decentfn.core.buckets import Buckets, Plan
from decentfn.gradient import LossFn, is_by_autograd, tell_of_batch
from decentfn.gradient.side_channel import SideChannel, with_side_channel
from decentfn.kit.state import left_alone, require_like
from decentfn.timing.trace import Replay
from decentfn.topologies import Topology
from decentfn.torch_private import functorch


class Applied(NamedTuple):
    """Transform or wrapper that made a step."""

    name: str
    """Name of its function: compile, donate, simulate, sweep; guard, average_buffers."""
    size: int | None = None
    """Number of workers simulated, or of runs swept."""


_OF_STEPS = ("compile", "donate", "sweep", "simulate")


@dataclass(frozen=True, eq=False)
class Step:
    """Function `(state, batch, t) -> (state, metrics)`, pure unless it is donated.

    What a call runs, in this order:

    1. `check`, in the first call with a layout of the state: `StateCheck.check` (`kit/state.py`), within
       `df.simulate`'s and `df.guard`'s.
    2. `run`, between the hooks of `collectives.whole_step`: the function under `@kit.algorithm`, as `Worker.algorithm` got
       it; `df.simulate` batches it (`engine/simulation.py`), `df.compile` compiles it (`engine/compilation.py`, `run`);
       `df.donate`'s writes the new state over the old one.
    3. `watch`: `df.guard`'s, which stops a run of bad steps.

    Transforms return another step (`transformed`): `df.simulate`, `df.donate`, `df.compile` and the wrappers.
    """

    run: Callable[[Any, PyTree, Tensor], tuple[Any, Any]] = field(repr=False)
    """Function that is traced and batched over workers; `t` is 0-d int64 on the CPU."""
    name: str = "step"
    check: Callable[[Any, PyTree, Tensor], None] | None = field(default=None, repr=False)
    """Check at the first call with each new plan of a state, which may raise; `kit.algorithm` sets it. None for a plain
    function, which accepts anything."""
    start: Callable[[Buckets, PyTree], Any] | None = field(default=None, repr=False)
    """Function `(params, buffers) -> state` like `init`, without its comparisons of ranks."""
    watch: Callable[..., None] | None = field(default=None, repr=False)
    """Callback `(new state, t, overwrites)` after every step, which has written over its state or not; may raise."""
    loss_fn: LossFn | None = field(default=None, repr=False)
    topology: Topology | None = field(default=None, repr=False)
    """The algorithm's; None for a plain function."""
    schedules: tuple[Topology, ...] = field(default=(), repr=False)
    """Schedules of `kit.rests`: what serves their rounds is left out of a step in which all of them rest."""
    transforms: tuple[Applied, ...] = ()
    """Transforms and wrappers that made the step, the last one last."""
    starts_equal: bool = False
    """True if all workers must start with the same parameters."""
    pushes_sum: bool = False
    """True if it corrects column-stochastic mixing by push-sum's weight."""
    by_leaf: bool = False
    """True if the leaves of a bucket can be computed apart from each other."""
    own_steps: bool = False
    """True if each worker takes its own steps, and `t` is not the same on all."""
    arrivals: Replay | None = field(default=None, repr=False)
    """What each simulated worker takes and sends in each step, if not all step at once."""
    _known: weakref.WeakValueDictionary[Any, Plan] = field(
        default_factory=weakref.WeakValueDictionary, init=False, repr=False
    )
    """Plans of the checked states, by plan id, number of bucket dimensions and structure."""
    _has_warned: list[bool] = field(default_factory=list, init=False, repr=False)
    """Not empty after a warning of steps that were left out."""

    @classmethod
    def of(cls, function: Callable[..., Any], call: str = "Algorithm", *, refuse: Sequence[str] = ()) -> Step:
        """Return a step itself, or a plain function as one; raise ValueError if one of these transforms was applied."""
        if isinstance(function, Step):
            if done := [name for name in _OF_STEPS if name in refuse and function.had(name)]:
                raise ValueError(
                    f"{call}({done[0]}(step)): the order is df.compile(df.sweep(df.simulate(step, N), R)), each at most once; "
                    "df.compile donates by itself, and df.donate is for a step that is not compiled."
                )
            return function
        rule = "expected a step; init, step = df.adapt_while_communicate(...)."
        require(callable(function), f"{call}({brief(function)})", rule)
        name = getattr(function, "__qualname__", type(function).__name__)
        return cls(function, name.replace(".<locals>", ""))

    def __call__(self, state: Any, batch: PyTree, t: int | Tensor) -> tuple[Any, Any]:
        """Take step `t`, 0 <= t, the same on all workers (but for `own_steps`)."""
        if torch.compiler.is_dynamo_compiling():
            if collectives.sends_outside_step():
                refuse: Any = torch.compiler.disable(_refuse_torch_compile)  # raised in a graph, it would not be seen
                refuse()
            return self.run(state, batch, as_step(t))
        step_number = as_step(t)
        if type(t) is int and type(step_number) is Tensor:
            number = t
        else:
            number = None if functorch.has_no_value(step_number) else int(step_number)
        x = getattr(state, "params", None)
        key = None
        if isinstance(x, Buckets):
            key = id(x.plan), x.tensors[0].dim(), hash(trees.flatten(state)[1])
            if x.plan.processes > 1:
                collectives.require_workers_of(x.plan.processes)
        is_known = self.check is None or key in self._known
        result = (self._run if is_known else self._check_and_run)(state, batch, step_number, number)
        if not is_known:
            self._known[key] = state.params.plan
        return result

    def _check_and_run(self, state: Any, batch: PyTree, t: Tensor, number: int | None) -> tuple[Any, Any]:
        """Run the step with a state that has not been checked yet."""
        assert self.check is not None
        self.check(state, batch, t)
        if self.schedules and not self.had("simulate") and not functorch.has_no_value(state.params.tensors[0]):
            collectives.look_up(state.params.tensors[0], self.schedules[0], t)  # raises if workers are missing
        with nullcontext() if self._donates else left_alone(state):
            try:
                result = self._run(state, batch, t, number)
            except Exception as error:
                tell_of_batch(error, self.loss_fn, batch)
                raise
        require_like(state, result[0])
        return result

    def _run(self, state: Any, batch: PyTree, t: Tensor, number: int | None) -> tuple[Any, Any]:
        """Run the step with all of its messages; its draws follow from torch's seed, `t` and the worker."""
        if number is None:
            return self.run(state, batch, t)
        x = getattr(state, "params", None)
        run = x.plan.run if isinstance(x, Buckets) else 0
        last = getattr(x, "taken_at", None)
        if last is not None and number != last + 1:
            self._require_next(number, last)
        with (
            collectives.whole_step(number, donated=self._donates, run=run) as here,
            draws.torch_draws(number, here.identity.place),
        ):
            mail = self.arrivals or (here.mailbox if self.own_steps else None)
            if mail is not None and x not in mail.owners:
                if self.arrivals is None:
                    collectives.require_mail(f"step(state, batch, t={number})", False)
                else:
                    mail.require_begun(number, trees.nodes_of(collectives.Ring, state)[0].to)
            # In a replay t is a level, in which workers take steps of other numbers.
            known = self.schedules if self.arrivals is None else ()
            outer, context.resting = context.resting, collectives.find_rounds(known, t, number)
            context.arrivals = self.arrivals
            try:
                is_hidden = isinstance(batch, SideChannel)  # by the step of which this one is a part
                if self.is_by_autograd and not is_hidden and not functorch.has_no_value(state.params.tensors[0]):
                    result = with_side_channel(self.run, state, batch, t)
                else:
                    result = self.run(state, batch, t)
            finally:
                context.resting, context.arrivals = outer, None
            if self._donates and isinstance(x, Buckets):
                x.taken_at = number  # even if an error follows
        if isinstance(x, Buckets):
            new = x if self._donates or not isinstance(result, tuple) else getattr(result[0], "params", x)
            if isinstance(new, Buckets) and (self._donates or new is not x):
                new.taken_at, new.plan = number, x.plan  # not of the state for which it was compiled
                if mail is not None:
                    mail.owners = weakref.WeakSet([new])
        if self.watch is not None:
            self.watch(result[0], t, self._donates)
        return result

    def _require_next(self, t: int, last: int) -> None:
        """Raise ValueError if step `t` does not follow the step whose result the state is; warn of a gap, once."""
        if t <= last:
            raise ValueError(
                f"step(state, batch, t={t}): the state is the result of step t={last}, so the next step is t={last + 1}. Schedules, "
                "outer steps and random draws follow t, which counts on over all epochs: `for t, batch in "
                "df.data.epochs(loader, num_epochs): ...`, after a restart with start=, the step that df.checkpoint.restore "
                "returned. To repeat a step, pass the state from before it, or a copy; init starts a new run."
            )
        if self.arrivals is not None:
            i, s = self.arrivals.trace.levels[last + 1][0]
            raise ValueError(
                f"step(state, batch, t={t}) after step t={last}: a replay takes all levels of the trace in order, and worker {i}'s own "
                f"step {s} is in level {last + 1}; go on with t={last + 1}."
            )
        if not self._has_warned:
            self._has_warned.append(True)
            warn(
                f"step(state, batch, t={t}) after step t={last}: {t - last - 1} rounds of the schedule are left out. t counts the "
                "calls of the step (with accumulation, not the micro-batches); this is said once."
            )

    def transformed(self, by: str, size: int | None = None, **changes: Any) -> Step:
        """Return the step that a transform of this name has made."""
        return replace(self, transforms=(*self.transforms, Applied(by, size)), **changes)

    def had(self, name: str) -> Applied | None:
        """Return the transform of this name that made the step, or None."""
        return next((one for one in self.transforms if one.name == name), None)

    def require_common_steps(self, call: str) -> None:
        """Raise ValueError, naming the call, if each worker takes its own steps."""
        if self.own_steps:
            raise ValueError(
                f"{call}: all workers would exchange in the same step, and those of {self.name} take their own steps and wait for nobody, "
                "also if others are lost; leave it out, or use an algorithm whose workers step together, such as stochastic_gradient_push."
            )

    @property
    def num_workers(self) -> int | None:
        """Number of workers in the topology."""
        return None if self.topology is None else self.topology.num_workers

    @cached_property
    def is_by_autograd(self) -> bool:
        """True if the gradient is one operator (`df.autograd`), so that the batch uses the side channel."""
        return self.loss_fn is not None and is_by_autograd(self.loss_fn)

    @cached_property
    def _donates(self) -> bool:
        return self.had("donate") is not None


def _refuse_torch_compile() -> None:
    raise ValueError(
        "torch.compile(step): over several processes, whose messages it would send in any order, and from memory that it has reused; "
        "use df.compile(step), also around a function that calls steps."
    )


class _Pair(NamedTuple):
    init: Callable[..., Any]
    step: Step


class Algorithm(_Pair):
    """Training algorithm: `init(params, buffers=None) -> state` and the pure `step(state, batch, t)`.

    The step's draws from PyTorch's generators follow from torch's seed, `t` and the worker.
    """

    def __new__(cls, init: Callable[..., Any], step: Callable[..., tuple[Any, Any]]) -> Algorithm:
        """Make the pair; a plain function becomes a `Step`."""
        return super().__new__(cls, init, Step.of(step))

    def _replace(self, **changes: Any) -> Algorithm:
        """Return a copy with another `init` or `step`; a plain function has the loss and the topology of this step."""
        init, step = super()._replace(**changes)
        if not isinstance(step, Step):
            step = replace(Step.of(step), loss_fn=self.loss_fn, topology=self.topology)
        return Algorithm(init, step)

    @property
    def loss_fn(self) -> LossFn | None:
        """Loss of the algorithm."""
        return self.step.loss_fn

    @property
    def topology(self) -> Topology | None:
        """Topology of the algorithm; the complete one if the algorithm averages over all workers."""
        return self.step.topology


def require_algorithm(call: str, algorithm: Any) -> None:
    """Raise ValueError, naming the argument of `call`, unless `algorithm` is an `Algorithm`."""
    rule = "expected an Algorithm(init, step), as from df.adapt_while_communicate(...)."
    require(isinstance(algorithm, Algorithm), f"{call}({brief(algorithm)})", rule)


def require_bare(call: str, algorithm: Any) -> None:
    """Raise ValueError, naming the argument of `call`, if the step is simulated, donated or compiled already."""
    require_algorithm(call, algorithm)
    if done := [name for name in _OF_STEPS if algorithm.step.had(name)]:
        raise ValueError(
            f"{call}(Algorithm(init, {done[0]}(step))): a wrapper changes the step of one worker; wrap the algorithm first, and "
            f"df.{done[0]} the result's step."
        )
