"""Optimizers with PyTorch's interface as pairs `(init, update)`: their state is data, and their step one operator."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from decentfn.core import trees
from decentfn.core.buckets import Buckets, Plan, elements, plan_of, wide
from decentfn.core.formatting import brief, brief_error
from decentfn.core.numbers import require
from decentfn.core.scalars import operator
from decentfn.core.trees import PyTree
from decentfn.optim.transforms.basic import RateState, new_count
from decentfn.optim.transforms.transform import Transform, require_one_process
from decentfn.torch_private.dynamo import constant_while_traced

Named = list[tuple[str, Tensor]]

_CALL = "from_torch(make)"


class TorchState(NamedTuple):
    """State of an optimizer with PyTorch's interface: what it keeps of each parameter and of each group."""

    count: Tensor  # 0-d int64, updates so far
    rates: tuple[RateState, ...]  # of each group, if it has a key "lr"
    groups: tuple[dict[str, Tensor], ...]  # numbers of a group that the optimizer changes
    of_elements: dict[str, Buckets]  # tensors that every parameter has, in its shape
    of_leaves: dict[str, Tensor]  # numbers that every parameter has, [P]
    others: dict[str, dict[str, Tensor]]  # the rest, by the parameter's name


def from_torch(make: Callable[[Named], Any], lr_scheduler: Callable[[Any], Any] | None = None) -> Transform:
    """Turn an optimizer of `torch.optim`, or another with its interface, into a pair `(init, update)`.

    In every step `make` builds the optimizer anew, and one operator, eager also in a compiled step, gives it its state
    and takes a step. Each leaf is a parameter of its own, in its shape. On a GPU the operator waits for the numbers of
    the state. `df.set_learning_rate` sets the rates, unless they follow a scheduler. Optimizers of this library compile
    to one kernel per bucket and are faster.

    Args:
        make: `make(params) -> optimizer`, where `params` is a list of (dotted name, parameter), as
            `module.named_parameters()` yields them, which torch's optimizers accept; groups may be made by name.
        lr_scheduler: `lr_scheduler(optimizer) -> scheduler`, whose `step()` is called once after every update. A
            scheduler of a metric is refused: set the rate between steps.

    Raises:
        ValueError: `make` is not a function; from `init`, it does not return an optimizer, the optimizer needs a
            closure, sparse gradients or a metric, or a worker is several processes.

    >>> import decentfn as df
    >>> optimizer = df.from_torch(lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9))
    """
    rule = "expected a function of the parameters: df.from_torch(lambda params: torch.optim.AdamW(params, lr=1e-3))."
    require(callable(make), _CALL, rule, make=make)
    require(
        lr_scheduler is None or callable(lr_scheduler), _CALL, "a function of the optimizer.", scheduler=lr_scheduler
    )
    _adapters.append(_Adapter(make, lr_scheduler))
    number = len(_adapters) - 1
    handle = torch.tensor(number)

    def init(params: Buckets) -> TorchState | tuple[()]:
        require_one_process("from_torch", params, "it needs whole leaves")
        return _first(_layout_of(number, params.plan.number(), str(params[0].device)), params) if len(params) else ()

    def update(grads: Buckets, state: TorchState, params: Buckets) -> tuple[Buckets, PyTree]:
        if not len(grads):  # of a mask that takes no leaf
            return grads, state
        leaves, template = trees.leaves(state), trees.enumerate_leaves(state)
        out = _step(list(grads), list(params), leaves, handle, params.plan.number(), 0)
        return Buckets(out[: len(grads)], grads.plan), trees.fill(template, out[len(grads) :])

    return Transform(init, update)


class _Kind(NamedTuple):
    """Kind of a value in an optimizer's state: a tensor's, or a Python number's `type`."""

    type: type
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def restored(self, x: Tensor) -> Any:
        """Return a value of this kind."""
        return x.to(self.device).clone() if self.type is Tensor else self.type(x.item())


def _kind(value: Any) -> _Kind | str | None:
    if isinstance(value, Tensor):
        return _Kind(Tensor, tuple(value.shape), value.dtype, value.device)
    for kind, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64)):
        if isinstance(value, kind):
            return _Kind(kind, (), dtype, torch.device("cpu"))
    return None if value is None else type(value).__name__


def _changed(value: Any, before: Any) -> _Kind | None:
    kind = _kind(value)
    if not isinstance(kind, _Kind) or not isinstance(_kind(before), _Kind):
        return None
    return None if bool((torch.as_tensor(value) == torch.as_tensor(before)).all()) else kind


class _Layout(NamedTuple):
    """Layout of a state as plain data, which a traced step can read; pairs are of a key and a `_Kind`."""

    rates: tuple[float, ...]
    scheduled: bool
    groups: tuple[tuple[tuple[str, _Kind], ...], ...]
    of_elements: tuple[tuple[str, _Kind], ...]
    of_leaves: tuple[tuple[str, _Kind], ...]
    others: tuple[tuple[str, tuple[tuple[str, _Kind], ...]], ...]
    leaves: int


def _first(layout: _Layout, params: Buckets) -> TorchState:
    """Return a state before the first update; only its learning rates are read."""
    device = params[0].device

    def zeros(pairs: tuple[tuple[str, _Kind], ...]) -> dict[str, Tensor]:
        return {key: torch.zeros(kind.shape, dtype=kind.dtype, device=device) for key, kind in pairs}

    def rate(value: float) -> RateState:
        count = new_count(params) if layout.scheduled else ()
        return RateState(torch.full((), value, dtype=torch.float64, device=device), count)

    sizes = [bucket.numel for bucket in params.plan.buckets]
    of_elements = {
        key: Buckets([torch.zeros(n, dtype=kind.dtype.to_real(), device=device) for n in sizes], params.plan)
        for key, kind in layout.of_elements
    }
    of_leaves = {k: torch.zeros(layout.leaves, dtype=kind.dtype, device=device) for k, kind in layout.of_leaves}
    others = {name: zeros(pairs) for name, pairs in layout.others}
    rates, groups = tuple(map(rate, layout.rates)), tuple(map(zeros, layout.groups))
    return TorchState(new_count(params), rates, groups, of_elements, of_leaves, others)


class _Form:
    """Form of an optimizer's state for one plan, learned from two trial steps.

    Args:
        plan: the plan of the parameters.
        optimizer: built for parameters that the trial changes.
        named: these parameters.
        scheduled: True if the rates follow a scheduler.
    """

    def __init__(self, plan: Plan, optimizer: Any, named: Named, scheduled: bool) -> None:
        self.plan, self.device, self.scheduled = plan, named[0][1].device, scheduled
        before, name, trials = [dict(group) for group in optimizer.param_groups], type(optimizer).__name__, []
        for _ in range(2):
            for _, p in named:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            trials.append([{k: _kind(v) for k, v in optimizer.state.get(p, {}).items()} for _, p in named])
        rule = f"{name} keeps other things after its second step than after its first, so no state has room for them."
        require(trials[0] == trials[1], _CALL, rule)
        self.names, self.kinds = [leaf for leaf, _ in named], list[dict[str, _Kind]]()
        for leaf, own in zip(self.names, trials[0], strict=True):
            unknown = [f"a {kind} under {key!r}" for key, kind in own.items() if isinstance(kind, str)]
            rule = f"{name} keeps {' and '.join(unknown)} of {leaf!r}; a state holds tensors and numbers."
            require(not unknown, _CALL, rule)
            self.kinds.append({key: kind for key, kind in own.items() if isinstance(kind, _Kind)})
        shapes = [tuple(p.shape) for _, p in named]
        common = [key for key in self.kinds[0] if self._is_common(key)]
        self.of_elements = [k for k in common if [own[k].shape for own in self.kinds] == shapes and any(shapes)]
        self.of_leaves = [
            k for k in common if k not in self.of_elements and all(own[k].shape == () for own in self.kinds)
        ]
        shared = {*self.of_leaves, *self.of_elements}
        self.others = {n: [k for k in own if k not in shared] for n, own in zip(self.names, self.kinds, strict=True)}
        self.groups = [
            {k: kind for k, v in group.items() if k != "lr" and (kind := _changed(v, old.get(k))) is not None}
            for group, old in zip(optimizer.param_groups, before, strict=True)
        ]
        self.layout = _Layout(
            tuple(float(group["lr"]) for group in before if "lr" in group),
            scheduled,
            tuple(tuple(kinds.items()) for kinds in self.groups),
            tuple((key, self.kinds[0][key]) for key in self.of_elements),
            tuple((key, self.kinds[0][key]) for key in self.of_leaves),
            tuple(
                (name, tuple((key, kinds[key]) for key in self.others[name]))
                for name, kinds in zip(self.names, self.kinds, strict=True)
                if self.others[name]
            ),
            len(named),
        )

    def _is_common(self, key: str) -> bool:
        """Return True if every parameter has the key, in one dtype."""
        return all(key in own for own in self.kinds) and len({own[key].dtype.to_real() for own in self.kinds}) == 1

    def give(self, optimizer: Any, named: Named, state: TorchState) -> None:
        """Give the optimizer its state."""
        numbers = {key: state.of_leaves[key].to(self.kinds[0][key].device).unbind() for key in self.of_leaves}
        tensors = {key: state.of_elements[key].leaves() for key in self.of_elements}
        for i, ((name, p), kinds) in enumerate(zip(named, self.kinds, strict=True)):
            own = {key: values[i] for shared in (numbers, tensors) for key, values in shared.items()}
            own |= {key: state.others[name][key] for key in self.others[name]}
            if own:
                optimizer.state[p] = {key: kinds[key].restored(own[key]) for key in kinds}
        for group, kinds, own in zip(optimizer.param_groups, self.groups, state.groups, strict=True):
            group.update({key: kind.restored(own[key]) for key, kind in kinds.items()})

    def take(self, optimizer: Any, named: Named, rates: tuple[RateState, ...], count: Tensor) -> TorchState:
        """Return the optimizer's state."""
        states = [optimizer.state.get(p, {}) for _, p in named]

        def values(key: str) -> list[Tensor]:
            pairs = zip(states, self.kinds, strict=True)
            return [torch.as_tensor(own[key], dtype=kinds[key].dtype, device=self.device) for own, kinds in pairs]

        sizes, of_elements = [len(bucket.segments) for bucket in self.plan.buckets], {}
        for key in self.of_elements:
            rest = iter(values(key))
            vectors = [torch.cat([elements(x) for x in itertools.islice(rest, size)]) for size in sizes]
            of_elements[key] = Buckets(vectors, self.plan)
        others = {
            n: {k: torch.as_tensor(own[k], dtype=kinds[k].dtype, device=self.device).clone() for k in self.others[n]}
            for n, own, kinds in zip(self.names, states, self.kinds, strict=True)
            if self.others[n]
        }
        groups = tuple(
            {k: torch.as_tensor(g[k], dtype=kind.dtype, device=self.device).clone() for k, kind in kinds.items()}
            for g, kinds in zip(optimizer.param_groups, self.groups, strict=True)
        )
        of_leaves = {key: torch.stack(values(key)) for key in self.of_leaves}
        return TorchState(count, rates, groups, of_elements, of_leaves, others)


class _Adapter:
    """Builder of optimizers, with the forms of their states and the options that a scheduler gives them."""

    def __init__(self, make: Callable[[Named], Any], lr_scheduler: Callable[[Any], Any] | None) -> None:
        self._make, self._lr_scheduler = make, lr_scheduler
        self._forms: dict[tuple[int, torch.device], _Form] = {}
        self._scheduled: tuple[int, Any, Any] | None = None  # the count, the optimizer and its scheduler
        self._lock = threading.RLock()

    def optimizer(self, named: Named) -> Any:
        """Return an optimizer of these parameters."""
        optimizer = self._make(list(named))
        has_all = all(hasattr(optimizer, name) for name in ("param_groups", "state", "step"))
        rule = f"make(params) returned {brief(optimizer)}; expected an optimizer, torch.optim.AdamW(params, lr=1e-3)."
        require(has_all, _CALL, rule)
        return optimizer

    def form(self, plan: Plan, device: torch.device) -> _Form:
        """Return the form of the state for parameters of this plan."""
        key = plan.number(), device
        with self._lock:
            if key not in self._forms:
                named = _named(plan, [torch.ones(b.numel, dtype=b.dtype, device=device) for b in plan.buckets])
                optimizer = self.optimizer(named)
                if self._lr_scheduler is not None:
                    scheduler = self._lr_scheduler(optimizer)
                    rule = "its scheduler follows a metric; leave it out, and use df.set_learning_rate between steps."
                    require(not isinstance(scheduler, ReduceLROnPlateau), _CALL, rule)
                    optimizer = self.optimizer(named)
                try:
                    self._forms[key] = _Form(plan, optimizer, named, self._lr_scheduler is not None)
                except (TypeError, RuntimeError) as error:
                    raise ValueError(
                        f"{_CALL}: a trial step of {type(optimizer).__name__} without arguments, on dense gradients, raised "
                        f"{brief_error(error)}; optimizers that need a closure or sparse gradients have no pair (init, update)."
                    ) from error
            return self._forms[key]

    def options(self, count: int, named: Named) -> list[dict[str, Any]]:
        """Return the options of each group after the scheduler's first `count` steps."""
        assert self._lr_scheduler is not None
        with self._lock:
            if self._scheduled is None or self._scheduled[0] > count:
                optimizer = self.optimizer(
                    [(name, torch.zeros((), dtype=p.dtype).expand(p.shape)) for name, p in named]
                )
                self._scheduled = 0, optimizer, self._lr_scheduler(optimizer)
                optimizer.step()  # without gradients; a scheduler warns if no step was before its own
            done, optimizer, scheduler = self._scheduled
            for _ in range(count - done):
                scheduler.step()
            self._scheduled = count, optimizer, scheduler
            return [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]

    def step(self, grads: Buckets, params: Buckets, state: TorchState) -> tuple[Buckets, TorchState]:
        """Take one step of one worker."""
        form, count, new = self.form(params.plan, params[0].device), int(state.count), [x.clone() for x in params]
        named = _named(params.plan, new)
        for (_, p), g in zip(named, grads.leaves(), strict=True):
            p.grad = g.clone()
        optimizer = self.optimizer(named)
        rates = state.rates
        with_rate = [group for group in optimizer.param_groups if "lr" in group]
        if form.scheduled:
            for group, options in zip(optimizer.param_groups, self.options(count, named), strict=True):
                group.update(options)
            used = [torch.as_tensor(float(g["lr"]), dtype=torch.float64, device=form.device) for g in with_rate]
            rates = tuple(RateState(lr, state.count + 1) for lr in used)
        else:
            for group, rate in zip(with_rate, rates, strict=True):
                lr = group["lr"]
                value = float(rate.learning_rate)
                group["lr"] = torch.full_like(lr, value) if isinstance(lr, Tensor) else value
        if count:
            form.give(optimizer, named, state)
        optimizer.step()
        pairs = zip(new, params, strict=True)
        updates = Buckets([(y.to(wide(y.dtype)) - x.to(wide(x.dtype))).to(x.dtype) for y, x in pairs], params.plan)
        return updates, form.take(optimizer, named, rates, state.count + 1)


_adapters: list[_Adapter] = []


@constant_while_traced
def _layout_of(number: int, plan: int, device: str) -> _Layout:
    return _adapters[number].form(plan_of(plan), torch.device(device)).layout


def _named(plan: Plan, vectors: Sequence[Tensor]) -> Named:
    """Return the leaves as named parameters that are views of these vectors."""
    names = [segment.name for bucket in plan.buckets for segment in bucket.segments]
    return [(n, nn.Parameter(x)) for n, x in zip(names, Buckets(vectors, plan).leaves(), strict=True)]


def _kernel(
    grads: list[Tensor], params: list[Tensor], state: list[Tensor], handle: Tensor, plan: int, workers: int
) -> list[Tensor]:
    adapter, layout = _adapters[int(handle)], plan_of(plan)

    def one(grads: Iterable[Tensor], params: Iterable[Tensor], state: Iterable[Tensor]) -> list[Tensor]:
        x = Buckets(params, layout)
        template = trees.enumerate_leaves(_first(adapter.form(layout, x[0].device).layout, x))
        updates, new = adapter.step(Buckets(grads, layout), x, trees.fill(template, list(state)))
        return [x.clone() for x in (*updates, *trees.leaves(new))]

    with torch.no_grad():
        if not workers:
            return one(grads, params, state)
        rows = [one(*([x[i] for x in part] for part in (grads, params, state))) for i in range(workers)]
        return [torch.stack(column) for column in zip(*rows, strict=True)]


def _over_workers(
    info: Any,
    in_dims: Any,
    grads: list[Tensor],
    params: list[Tensor],
    state: list[Tensor],
    handle: Tensor,
    plan: int,
    workers: int,
) -> tuple[list[Tensor], list[int]]:
    def first(tensors: list[Tensor], dims: list[int | None]) -> list[Tensor]:
        pairs = zip(tensors, dims, strict=True)
        return [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]

    if workers:
        raise ValueError(
            "sweep(step, R): df.from_torch updates one worker after the other, so nothing is gained; use df.sgd, df.adamw or "
            "another optimizer of df.transforms, or train one run after the other."
        )
    parts = [first(x, d) for x, d in zip((grads, params, state), in_dims[:3], strict=True)]
    out = _step(*parts, handle, plan, info.batch_size)
    return out, [0] * len(out)


_step = operator(
    # `workers`: 0 for one worker alone; N for N stacked ones.
    "torch_optimizer(Tensor[] grads, Tensor[] params, Tensor[] state, Tensor optimizer, int plan, int workers) -> Tensor[]",
    _kernel,
    lambda grads, params, state, handle, plan, workers: [torch.empty_like(x) for x in (*grads, *state)],
    _over_workers,
)
