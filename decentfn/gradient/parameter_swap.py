"""Parameter swap: one worker at a time has a module's tensors and plain attributes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from decentfn.torch_private import functorch

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def lock_of_module(module: nn.Module) -> threading.RLock:
    """Return the module's lock. Whoever swaps its tensors holds it; other threads' steps and evaluations wait."""
    return _locks.setdefault(module, threading.RLock())


class Entry(NamedTuple):
    """Entry of a parameter or a buffer in a module."""

    name: str
    holder: dict[str, Any]
    key: str
    own: Tensor
    other: dict[str, Any]  # the module's other table; a parametrization in a call leaves a tensor there (peft)


class ParameterSwap:
    """Context in which a module's own tensors have these values, through the backward pass; restored at the end.

    Parameters keep their identity for hooks, lists, tied layers and recomputation.
    """

    leaves: list[Tensor]  # tensors whose gradients are computed; `gradient(leaf)` returns a leaf's
    gradient: Callable[[Tensor], Any] = attrgetter("grad")
    constant: dict[str, Tensor]  # tensors that the loss must not change, by name

    def __init__(
        self, loss_fn: Any, entries: list[Entry], values: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> None:
        self.own = own_by_name(entries)
        self.leaves, self.constant = [], {}
        self._loss_fn, self._entries, self._values, self._buffers = loss_fn, entries, values, buffers
        self._before: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._with_gradient: list[Tensor] = []

    @classmethod
    def beside_weights(cls, entries: list[Entry], values: dict[str, Tensor]) -> ParameterSwap:
        """Swap in the values that a module's own tensors can hold, for lists and closures that have them."""
        swap = cls(None, entries, {}, {})
        fitting = [n for n, x in values.items() if x.device == swap.own[n].device and not functorch.is_batched(x)]
        swap._values = {name: values[name] for name in fitting}
        return swap

    def __enter__(self) -> ParameterSwap:
        try:
            for name, value in self._values.items():
                x = self.own[name]
                self._before.append((x, x.data, x.grad if x.is_leaf else None))
                if x.is_leaf:
                    x.grad = None
                    if name in self._buffers and x.requires_grad:
                        x.requires_grad_(False)  # a state's buffers are not trained
                        self._with_gradient.append(x)
                x.data = value
        except RuntimeError as error:
            self.__exit__()
            raise ValueError(
                f"df.autograd(loss_fn): the module's tensors are on {x.device}, and cannot hold values that are on {value.device}; leave "
                "the module where it was, and free its memory with p.data = p.new_empty(0) for each parameter."
            ) from error
        torch.clear_autocast_cache()
        return self

    def __exit__(self, *error: object) -> None:
        for entry in self._replaced():
            entry.holder[entry.key] = entry.own
            if entry.key in entry.other:
                del entry.other[entry.key]
        for x, data, grad in self._before:
            if x.is_leaf:
                x.grad = None
            x.data = data
            if grad is not None:
                x.grad = grad
        for x in self._with_gradient:
            x.requires_grad_()

    def _replaced(self) -> list[Entry]:
        return [p for p in self._entries if p.key not in p.holder or p.holder[p.key] is not p.own]

    def of(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss of a batch and its aux; raise ValueError if a parameter is no longer in its place."""
        loss, aux = self._loss_fn.of(batch)
        if replaced := self._replaced():
            constant = set(map(id, self.constant.values()))
            self._loss_fn.require_in_place([p.name for p in replaced if id(p.own) in constant])
        return loss, aux

    def require_dropped(self) -> None:
        """Raise ValueError if the module keeps views of the parameters; those of a sharded one are its own."""
        self._loss_fn.require_dropped(self._loss_fn.network.modules(), self.leaves if self.constant else [])

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers after the loss."""
        new = {name: self.own[name].data if name in self.own else b for name, b in self._buffers.items()}
        now = {p.name: p.holder[p.key] for p in self._replaced() if p.key in p.holder}
        return new | {name: x for name, x in now.items() if name in new and x is not None}


def entries_of(module: nn.Module, prefix: str = "") -> list[Entry]:
    """Return every place of a parameter or buffer of a module, repeated ones included; names omit the prefix."""
    return [
        Entry((f"{path}.{key}" if path else key).removeprefix(prefix), holder, key, x, other)
        for path, m in module.named_modules()
        for holder, other in ((m._parameters, m._buffers), (m._buffers, m._parameters))
        for key, x in holder.items()
        if x is not None
    ]


@contextmanager
def in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which a module, the first, and those within it are in eval mode; their modes are restored at exit.

    A class with a `train` of its own is told, as in a plain loop: some drop there what they cached in eval mode.
    """
    were = [(inner, inner.training) for inner in modules]
    is_told = any([type(inner).train is not nn.Module.train for inner in modules])
    if is_told:  # one by one: some return nothing
        modules[0].train()
        modules[0].eval()
    else:  # also an exported module, which refuses to be told
        for inner, _ in were:
            inner.training = False
    try:
        yield
    finally:
        if is_told:
            modules[0].train()
            modules[0].train(were[0][1])
        for inner, was in were:
            inner.training = was


@contextmanager
def to_evaluate(
    loss_fn: Any,
    entries: list[Entry],
    modules: Sequence[nn.Module],
    params: dict[str, Tensor],
    buffers: dict[str, Tensor],
) -> Iterator[Callable[[Any], Any]]:
    """Context in which a module, the first of `modules`, has these weights and is in eval mode, with the loss as a function
    of batches; each finds these buffers.
    """
    own = own_by_name(entries)
    moving = {name: b.clone() for name, b in buffers.items() if name not in loss_fn.frozen}
    given = loss_fn.require_same(own, {**params, **buffers, **moving})
    shapes = {name: given[name].shape for name in loss_fn.frozen if name in given}
    beside = ParameterSwap.beside_weights(entries, given)
    with beside, weights(entries, given), in_eval_mode(modules):
        own_now = {id(b) for b in moving.values()}
        places = [(e, x) for e in entries if id(x := e.holder[e.key]) in own_now]

        def loss_of(batch: Any) -> Any:
            for entry, value in places:  # a call may assign a buffer
                entry.holder[entry.key] = value
                if entry.key in entry.other:
                    del entry.other[entry.key]
            for name, b in moving.items():
                b.copy_(buffers[name])
            return loss_fn.of_current(batch)

        yield loss_of
    if not loss_fn.is_evaluated:
        loss_fn.require_dropped(modules, params.values())
        loss_fn.is_evaluated = True
    loss_fn.require_in_place(name for name in params if name in given and given[name] is not params[name])
    packed = []
    for name, shape in shapes.items():
        if given[name] is not None and given[name].shape != shape:
            packed.append(name)
    if packed:
        loss_fn.refuse_packed(packed)


@contextmanager
def weights(entries: list[Entry], tensors: dict[str, Tensor]) -> Iterator[None]:
    """Context in which a module with these entries has `tensors` as its parameters and buffers, by name, in all places of each.

    At the end its own are restored; `tensors` then has the module's replacements. If a block is used twice, the public
    `torch.func.functional_call` restores in the wrong order.
    """
    names = {id(entry.own): entry.name for entry in reversed(entries) if entry.name in tensors}  # of each the first
    entries = [entry for entry in entries if id(entry.own) in names]
    try:
        for entry in entries:
            entry.holder[entry.key] = tensors[names[id(entry.own)]]
        yield
    finally:
        for entry in entries:
            if entry.name in tensors:
                # A ScriptModule's holder has no `get`.
                tensors[entry.name] = entry.holder[entry.key] if entry.key in entry.holder else None  # noqa: SIM401  # pyright: ignore
            entry.holder[entry.key] = entry.own
            if entry.key in entry.other:
                del entry.other[entry.key]


def own_by_name(entries: list[Entry]) -> dict[str, Tensor]:
    """Return each tensor by its first name."""
    first = {id(entry.own): entry.name for entry in reversed(entries)}
    return {entry.name: entry.own for entry in entries if first[id(entry.own)] == entry.name}


def attributes_of(loss_fn: Any) -> list[dict[str, Any]]:
    """Return the tables of attributes of a loss's modules, and the plain dicts among their values."""
    nodes = [vars(m) for m in loss_fn.network.modules()] if hasattr(loss_fn, "network") else []
    return [table for node in nodes for table in (node, *(x for x in node.values() if type(x) is dict))]


@contextmanager
def put_back(loss_fn: Any, changed: list[str]) -> Iterator[None]:
    """Context in which a loss's modules may be called; if it replaces or adds tensors among their attributes, all of these
    are put back, and `changed` gets the names.
    """
    before = _noted(attributes_of(loss_fn), {}).values()
    try:
        yield
    finally:
        changed += sorted({k for t, old in before for k, x in t.items() if x is not old.get(k) and _holds_tensors(x)})
        for table, old in before if changed else ():
            table.clear()
            table.update(old)


def turns(loss_fn: Any, kept: list[dict[int, Any]], workers: int) -> Iterator[int]:
    """Yield each simulated worker's number while the modules have the attributes that its own calls left there.

    `kept` holds them between steps, by table. What is changed between steps is changed for all workers.
    """
    tables = attributes_of(loss_fn)
    here = now = _noted(tables, kept[-1] if kept else {})
    before = kept[:] if len(kept) == workers else [now] * workers
    kept.clear()  # after an error, all continue from what the modules have then
    for worker in range(workers):
        are_its_own = before[-1] is now and before[worker] is here  # the modules hold this worker's attributes already
        for table in () if are_its_own else tables:
            (_, new), (_, left), (_, its) = (
                d.get(id(table), now[id(table)]) for d in (now, before[-1], before[worker])
            )
            outside = {key for key in new | left if new.get(key, kept) is not left.get(key, kept)}
            table.clear()
            table.update({key: x for key, x in its.items() if key not in outside})
            table.update({key: new[key] for key in outside & new.keys()})
        yield worker
        here = _noted(tables, before[worker])
        kept.append(here)


def _noted(tables: list[dict[str, Any]], last: dict[int, Any]) -> dict[int, Any]:
    """Return tables and copies of them, by the tables' ids; `last` itself if nothing has changed.

    While a table is kept, no other has its id.
    """
    copies = [own for _, own in last.values()]
    is_same = ([*map(id, tables)], [*map(len, tables)]) == ([*last], [*map(len, copies)])
    if is_same and all(map(is_, _contained(tables), _contained(copies))):
        return last
    return {id(table): (table, dict(table)) for table in tables}


def _contained(tables: list[dict[str, Any]]) -> Iterator[Any]:
    return chain(*tables, *map(dict.values, tables))


def _holds_tensors(x: Any) -> bool:
    """Return True if `x` holds a tensor, or a weak reference to one, at any depth."""
    return any(isinstance(one() if type(one) is ref else one, Tensor) for one in contents(x))


def contents(x: Any) -> Iterator[Any]:
    """Yield what a mapping (TensorDict), list or another plain container holds at any depth; anything else itself."""
    found, seen = [x], set()
    while found:
        x = found.pop()
        if not isinstance(x, (Mapping, list, tuple, set, deque)):
            yield x
        elif id(x) not in seen:
            seen.add(id(x))
            found += [*(x.values() if isinstance(x, Mapping) else iter(x))]  # a tuple's class may have no length (e3nn)
