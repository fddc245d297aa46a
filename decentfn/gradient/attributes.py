"""What a module keeps among its plain attributes from one call to the next: a hidden state, a counter, a cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from decentfn.torch_private.modules import are_same
from decentfn.words import brief

At = tuple[int, tuple[int, int]]
"""A worker, and the step and micro-batch in which it calls the module."""

Changes = list[tuple[dict[str, Any], str, Any]]
"""The attributes of a submodule, the name of one that is not the module's own now, and its value."""

_OF_PYTORCH = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, OrderedDict, set, deque)
_NODES = (tuple, *_CONTAINERS)
_MISSING = object()


class Attributes:
    """The plain attributes of a module as each worker's calls leave them; the module itself keeps its own.

    They are tensors, numbers, and containers of them. All else (flags, text, objects) stays in the module as a call leaves it, but what
    refers to the worker's weights (the list of them that an LSTM makes) ends with the call.
    The call of a later step goes on with what the worker's last one left. One of the same step and micro-batch begins with
    what that one began with, and one of an earlier step, in another run, with the module's own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: _Seen | None = None
        self.last: dict[
            int, tuple[tuple[int, int], Changes, Changes]
        ] = {}  # a call, what it began with and what it left
        self.written: set[tuple[int, str]] | None = None  # tensors that are changed in place, learnt in the first call

    def of(self, at: At, weights: Iterable[Tensor], modules: list[nn.Module]) -> _Call:
        """Within, the attributes of these, a module and its submodules, are this worker's, and their parameters and buffers these."""
        return _Call(self, at, weights, self._look(modules))

    @contextmanager
    def put_back(self, modules: list[nn.Module]) -> Iterator[None]:
        """No tensor that is made within is left among these modules' attributes; one that lives on is refused."""
        seen = self._look(modules)
        versions = seen.versions()
        changes: Changes = []
        try:
            yield
        finally:
            changes = seen.put_back(_holds_tensors)
        made = {id(own["_buffers"]) for own in seen.owners if "_buffers" in own}
        new = [name for own, name, _ in changes if id(own) in made]
        if new:
            raise ValueError(
                f"df.functional({self._name}): a call made the buffers {brief(sorted(new))}, which the state does not have; "
                "run the module once on a batch before df.functional, or write df.autograd(loss_fn)."
            )
        values = {id(own): before for own, before in zip(seen.owners, seen.before, strict=True)}
        lives_on = [
            name
            for own, name, x in changes
            if isinstance(x, torch.Tensor)
            and not x.requires_grad
            and isinstance(values[id(own)].get(name), (torch.Tensor, int, float))
        ]
        self.require_nothing_else([*lives_on, *seen.written(versions)])

    def _look(self, modules: list[nn.Module]) -> _Seen:
        """What the attributes are now."""
        seen = self._seen
        if seen is None or not seen.is_still(modules):
            self._seen = seen = _Seen(modules)
        return seen

    def require_nothing_else(self, lives_on: list[str]) -> None:
        """No tensor lives on in the module itself."""
        if lives_on:
            raise ValueError(
                f"df.functional({self._name}): the module keeps tensors from one call to the next as attributes, "
                f"{brief(sorted({*lives_on}))}; the state would not have them. Make buffers of them, "
                "self.register_buffer(name, tensor), or let them go on beside the state from the first call on, df.autograd(loss_fn)."
            )


class _Call:
    """Within, the module's attributes are those that a worker's last call left."""

    __slots__ = ("_at", "_attributes", "_began", "_clones", "_seen", "_versions", "_weights")

    def __init__(self, attributes: Attributes, at: At, weights: Iterable[Tensor], seen: _Seen) -> None:
        self._attributes, self._at, self._weights, self._seen = attributes, at, weights, seen

    def __enter__(self) -> None:
        (worker, call), seen, written = self._at, self._seen, self._attributes.written
        last = self._attributes.last.get(worker)
        began = [] if last is None or call < last[0] else last[1] if call == last[0] else last[2]
        self._began, self._versions, self._clones = began, seen.versions(), []
        if seen.tensors and written != set():
            self._clones = [
                (own, name, x.clone()) for own, name, x in seen.tensors if written is None or (id(own), name) in written
            ]
        for own, name, x in (*self._clones, *began):
            own[name] = x.clone() if (id(own), name) in (written or ()) else _copied(x)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        attributes, clones = self._attributes, self._clones
        if kind is None and attributes.written is None:
            attributes.written = {(id(own), name) for own, name, x in clones if x._version}
        given = set(map(id, self._weights))
        changes = self._seen.put_back(lambda x: _is_kept(x) or _refers_to(x, given))
        if kind is None:
            left: Changes = []
            if changes:
                untouched = {id(x) for _, _, x in clones if not x._version}
                left = [
                    (own, name, _without_graph(x))
                    for own, name, x in changes
                    if id(x) not in untouched and not _refers_to(x, given)
                ]
            worker, call = self._at
            attributes.last[worker] = call, self._began, left
            attributes.require_nothing_else(self._seen.written(self._versions))


class _Seen:
    """What a module's attributes are before a call."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._own = list(map(vars, modules))
        # In a call others than the state's buffers may be made. TorchScript's are fixed, and no dict.
        buffers = [b for own in self._own if isinstance(b := own.get("_buffers"), dict)]
        self.owners = self._own + buffers
        self.before = [dict(own) for own in self.owners]
        self.containers: list[tuple[dict[str, Any], str, Any, Any]] = []  # with a copy of each
        self.tensors: list[tuple[dict[str, Any], str, Tensor]] = []
        self._nested: list[Any] = []  # containers, those within others too
        for own in self._own:
            for name in own.keys() - _OF_PYTORCH:
                x = own[name]
                if type(x) in _CONTAINERS:
                    self.containers.append((own, name, x, _copied(x)))
                    self._nested += _nested(x)
                elif isinstance(x, torch.Tensor) and not x.requires_grad and not x.is_inference():
                    self.tensors.append((own, name, x))
        self._dicts = self.owners + [x for x in self._nested if isinstance(x, dict)]
        self._all, self._sizes = self._all_now(), list(map(len, self._nested))

    def is_still(self, modules: list[nn.Module]) -> bool:
        """Whether all is as it was, so that nothing has to be looked at anew."""
        return are_same(list(map(vars, modules)), self._own) and self._is_unchanged()

    def _is_unchanged(self) -> bool:
        """Whether the very same things stand in the same places, in containers at any depth too."""
        return are_same(self._all_now(), self._all) and list(map(len, self._nested)) == self._sizes

    def _all_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(self._nested)]

    def versions(self) -> list[int]:
        """Of the tensors: one that is written to has another."""
        return [x._version for _, _, x in self.tensors]

    def written(self, versions: list[int]) -> list[str]:
        """Names of the tensors that had these versions, and have others."""
        return [name for (_, name, x), v in zip(self.tensors, versions, strict=True) if x._version != v]

    def put_back(self, which: Callable[[Any], bool]) -> Changes:
        """What has changed of those `which`; the module has its own again."""
        changes: Changes = []
        if self._is_unchanged():
            return changes
        for own, name, x, content in self.containers:
            if not _are_same(x, content) and which(x):
                if own.get(name) is x:
                    changes.append((own, name, _copied(x)))
                x.clear()
                (x.update if hasattr(x, "update") else x.extend)(content)
        both = zip(self.owners, self.before, strict=True)
        others = [
            (own, name, x, old) for own, b in both for name, x in own.items() if x is not (old := b.get(name, _MISSING))
        ]
        for own, name, x, old in others:
            if name not in _OF_PYTORCH and which(x):
                changes.append((own, name, x))
                if old is _MISSING:
                    del own[name]
                else:
                    own[name] = old
        return changes


def _copied(x: Any) -> Any:
    """Containers anew, with what stands in them."""
    if type(x) not in _CONTAINERS:
        return x
    copies = [_copied(v) if type(v) in _CONTAINERS else v for v in (x.values() if isinstance(x, dict) else x)]
    return _like(x, zip(x, copies, strict=True) if isinstance(x, dict) else copies)


def _nested(x: Any) -> list[Any]:
    """A container, and those in it."""
    inside = [v for v in (x.values() if isinstance(x, dict) else x) if type(v) in _CONTAINERS]
    return [x, *chain.from_iterable(map(_nested, inside))]


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
    inside = [*x.values()] if isinstance(x, dict) else [*x]
    return [w for v in inside for w in _values(v)] if any([isinstance(v, _NODES) for v in inside]) else inside


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
