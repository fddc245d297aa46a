"""What a module keeps among its plain attributes from one call to the next: a hidden state, a counter, a cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from decentfn.torch_private.autograd import submodules
from decentfn.words import brief

At = tuple[int, tuple[int, int]]
"""A worker, and the step and micro-batch in which it calls the module."""

Changes = list[tuple[dict[str, Any], str, Any]]
"""The attributes of a submodule, the name of one that is not the module's own now, and its value."""

_OF_PYTORCH = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, OrderedDict, set, deque)
_NODES = (tuple, *_CONTAINERS)
_MISSING = object()
_others: set[type] = set()
"""Types that are no tensors': to ask each attribute what it is takes ten times as long."""


class Attributes:
    """The plain attributes of a module as each worker's calls leave them; the module itself keeps its own.

    They are tensors, numbers, and containers of them. All else (flags, text, objects) stays in the module as a call leaves it, but what
    refers to the worker's weights (the list of them that an LSTM makes) ends with the call.
    The call of a later step goes on with what the worker's last one left. One of the same step and micro-batch begins with
    what that one began with, and one of an earlier step, in another run, with the module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._last: dict[
            int, tuple[tuple[int, int], Changes, Changes]
        ] = {}  # a call, what it began with and what it left
        self._written: set[tuple[int, str]] | None = None  # tensors that are changed in place, learnt in the first call

    @contextmanager
    def of(self, at: At, weights: Iterable[Tensor]) -> Iterator[None]:
        """Within, the module's attributes are this worker's, and its parameters and buffers are these."""
        worker, call = at
        last = self._last.get(worker)
        began = [] if last is None or call < last[0] else last[1] if call == last[0] else last[2]
        before = _look(self._module)
        clones: Changes = []
        if self._written != set():
            clones = [
                (m.own, name, x.clone())
                for m in before
                for name, x, _ in m.tensors
                if self._written is None or (id(m.own), name) in self._written
            ]
        for own, name, x in (*clones, *began):
            own[name] = x.clone() if (id(own), name) in (self._written or ()) else _copied(x)
        left: Changes | None = None
        try:
            yield
            if self._written is None:
                self._written = {(id(own), name) for own, name, x in clones if x._version}
            untouched = {id(x) for _, _, x in clones if not x._version}
            left = []
        finally:
            given = set(map(id, weights))
            changes = _put_back(before, lambda x: _is_kept(x) or _refers_to(x, given))
            if left is not None:
                left = [
                    (own, name, _without_graph(x))
                    for own, name, x in changes
                    if id(x) not in untouched and not _refers_to(x, given)
                ]
                self._last[worker] = (call, began, left)
        _require_untouched(self._module, before, ())


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """No tensor that is made within is left among the module's attributes; one that lives on is refused."""
    before = _look(module)
    changes: Changes = []
    try:
        yield
    finally:
        changes = _put_back(before, _holds_tensors)
    made = {id(m.own["_buffers"]) for m in before if "_buffers" in m.own}
    new = [name for own, name, _ in changes if id(own) in made]
    if new:
        raise ValueError(
            f"df.functional({type(module).__name__}): a call made the buffers {brief(sorted(new))}, which the state does not have; "
            "run the module once on a batch before df.functional, or write df.autograd(loss_fn)."
        )
    values = {id(m.own): m.values for m in before}
    lives_on = [
        name
        for own, name, x in changes
        if isinstance(x, torch.Tensor)
        and not x.requires_grad
        and isinstance(values[id(own)].get(name), (torch.Tensor, int, float))
    ]
    _require_untouched(module, before, lives_on)


class _Submodule(NamedTuple):
    """Its attributes before a call."""

    own: dict[str, Any]
    values: dict[str, Any]
    containers: list[tuple[str, Any, Any]]  # with a copy of each
    tensors: list[tuple[str, Tensor, int]]  # with the version of each


def _look(module: nn.Module) -> list[_Submodule]:
    found = []
    for own in map(vars, submodules(module)):
        containers, tensors = [], []
        for name in own.keys() - _OF_PYTORCH:
            x = own[name]
            if type(x) in _CONTAINERS:
                containers.append((name, x, _copied(x)))
            elif type(x) in _others:
                continue
            elif not isinstance(x, torch.Tensor):
                _others.add(type(x))
            elif not x.requires_grad and not x.is_inference():
                tensors.append((name, x, x._version))
        found.append(_Submodule(own, dict(own), containers, tensors))
        made = own.get("_buffers")  # in a call, others than the state's
        if isinstance(made, dict):  # TorchScript's are fixed, and no dict
            found.append(_Submodule(made, dict(made), [], []))
    return found


def _put_back(before: list[_Submodule], which: Callable[[Any], bool]) -> Changes:
    """What has changed of those `which`; the module has its own again."""
    changes: Changes = []
    for m in before:
        for name, x, content in m.containers:
            if not _are_same(x, content) and which(x):
                if m.own.get(name) is x:
                    changes.append((m.own, name, _copied(x)))
                x.clear()
                (x.update if hasattr(x, "update") else x.extend)(content)
        for name in m.own.keys() - _OF_PYTORCH:
            x, old = m.own[name], m.values.get(name, _MISSING)
            if x is not old and which(x):
                changes.append((m.own, name, x))
                if old is _MISSING:
                    del m.own[name]
                else:
                    m.own[name] = old
    return changes


def _require_untouched(module: nn.Module, before: list[_Submodule], others: Iterable[str]) -> None:
    """No tensor of the module's own has been written to."""
    lives_on = {*others, *(name for m in before for name, x, version in m.tensors if x._version != version)}
    if lives_on:
        raise ValueError(
            f"df.functional({type(module).__name__}): the module keeps tensors from one call to the next as attributes, "
            f"{brief(sorted(lives_on))}; the state would not have them. Make buffers of them, "
            "self.register_buffer(name, tensor), or let them go on beside the state from the first call on, df.autograd(loss_fn)."
        )


def _copied(x: Any) -> Any:
    """Containers anew, with what stands in them."""
    if type(x) not in _CONTAINERS:
        return x
    copies = [_copied(v) if type(v) in _CONTAINERS else v for v in (x.values() if isinstance(x, dict) else x)]
    return _like(x, zip(x, copies, strict=True) if isinstance(x, dict) else copies)


def _like(x: Any, content: Iterable[Any]) -> Any:
    """A container as `x`, of this content."""
    return deque(content, x.maxlen) if type(x) is deque else type(x)(content)


def _are_same(x: Any, y: Any) -> bool:
    if type(x) not in _CONTAINERS or x is y:
        return x is y
    if len(x) != len(y) or type(x) is not type(y):
        return False
    if isinstance(x, set):
        return x == y
    if isinstance(x, dict):
        if x.keys() != y.keys():
            return False
        y = [y[k] for k in x]
        x = x.values()
    return all([v is w or _are_same(v, w) for v, w in zip(x, y, strict=True)])


def _without_graph(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach() if x.requires_grad else x
    if isinstance(x, tuple):
        values = [_without_graph(v) for v in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values) if type(x) is tuple else x
    if type(x) in _CONTAINERS and not isinstance(x, set):
        return _like(
            x, [(k, _without_graph(v)) for k, v in x.items()] if isinstance(x, dict) else map(_without_graph, x)
        )
    return x


def _values(x: Any) -> list[Any]:
    """What stands in a container, at any depth."""
    if not isinstance(x, _NODES):
        return [x]
    found = []
    for v in x.values() if isinstance(x, dict) else x:
        found += _values(v) if isinstance(v, _NODES) else [v]
    return found


def _refers_to(x: Any, tensors: set[int]) -> bool:
    """Whether one of these stands in it, or a weak reference to one."""
    return not tensors.isdisjoint([id(v() if type(v) is ReferenceType else v) for v in _values(x)])


def _holds_tensors(x: Any) -> bool:
    """Whether a tensor stands in it, or a weak reference to one."""
    return any(isinstance(v() if type(v) is ReferenceType else v, torch.Tensor) for v in _values(x))


def _is_kept(x: Any) -> bool:
    if isinstance(x, _NODES):
        return all([v is None or isinstance(v, (torch.Tensor, int, float, str)) for v in _values(x)])
    return isinstance(x, (torch.Tensor, int, float)) and not isinstance(x, bool)
