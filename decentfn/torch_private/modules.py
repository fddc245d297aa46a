"""Where a module keeps its submodules and weights, and other weights in their places."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_, methodcaller
from threading import get_ident
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from decentfn.torch_private.autograd import is_backward
from decentfn.words import brief

_keys = methodcaller("keys")
"""Of a module's parameters or buffers; those of a scripted module cannot be iterated over."""

_values = methodcaller("values")

_LIST, _REFS = "_flat_weights", "_flat_weight_refs"
"""Where nn.RNNBase keeps its weights once more; where they are others than in the list, each call makes the list anew."""


def are_same(x: list[Any], y: list[Any]) -> bool:
    """Whether these very objects stand in both."""
    return len(x) == len(y) and all(map(is_, x, y))


@contextmanager
def weights(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within, the module has `tensors` for its parameters and buffers, by name, also where one stands in several places.

    Afterwards it has its own again, and where it put another tensor in a place, that one is in `tensors`.
    """
    with _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True):
        yield


class Submodules:
    """The module and all that stand in it, each once; searched for again only where some have changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._found: list[nn.Module] = [module]
        self._children: list[nn.Module | None] = []

    def look(self) -> list[nn.Module]:
        """Those of now: the same list where they are the same."""
        if not are_same(self._among(self._found), self._children):
            found, seen = [self.module], {self.module}
            for m in found:
                for child in m._modules.values():
                    if child is not None and child not in seen:
                        seen.add(child)
                        found.append(child)
            self._found, self._children = found, self._among(found)
        return self._found

    @staticmethod
    def _among(modules: list[nn.Module]) -> list[nn.Module | None]:
        return [*chain.from_iterable([m._modules.values() for m in modules])]


class _Hold(NamedTuple):
    thread: int
    modules: frozenset[int]
    """Their ids."""
    lends: bool


_condition = threading.Condition()
_holds: list[_Hold] = []


_HOOK = -1
"""Key of a hook before a module's forward that no handle has: those of PyTorch count from 0."""


class Alone:
    """Within, no other thread lends weights to these modules: it waits. Threads that do not lend themselves may go on together."""

    __slots__ = ("_hold",)

    def __init__(self, modules: list[nn.Module], lends: bool = True) -> None:
        self._hold = _Hold(get_ident(), frozenset(map(id, modules)), lends)

    def __enter__(self) -> None:
        with _condition:
            _condition.wait_for(lambda: all(map(self._goes_with, _holds)))
            _holds.append(self._hold)

    def _goes_with(self, other: _Hold) -> bool:
        own = self._hold
        is_apart = own.thread == other.thread or own.modules.isdisjoint(other.modules)
        return is_apart or not (own.lends or other.lends)

    def __exit__(self, *error: object) -> None:
        with _condition:
            _holds.remove(self._hold)
            _condition.notify_all()


class Refusing:
    """Within, a call of one of these modules by another thread raises: it would see, and change, what they are lent.

    PyTorch's own threads, which compute a forward pass again in a backward pass, may call them.
    """

    __slots__ = ("_hook", "_modules", "_outer")

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        thread = get_ident()

        def refuse(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() and get_ident() != thread and not is_backward():
                raise RuntimeError(
                    f"{type(module).__name__}(...): the module was called while another thread takes a training step with it, and has that "
                    "step's weights meanwhile. Evaluate with df.evaluate, or with the loss_fn of df.functional, which wait for one another; "
                    "or call a copy, copy.deepcopy(module), with df.load_state_dict."
                )

        self._hook = refuse

    def __enter__(self) -> None:
        self._outer = [m._forward_pre_hooks.get(_HOOK) for m in self._modules]
        for m in self._modules:
            m._forward_pre_hooks[_HOOK] = self._hook

    def __exit__(self, *error: object) -> None:
        for m, outer in zip(self._modules, self._outer, strict=True):
            if outer is None:
                m._forward_pre_hooks.pop(_HOOK, None)
            else:
                m._forward_pre_hooks[_HOOK] = outer


class _Places(NamedTuple):
    """Where tensors go that are given by name."""

    dicts: list[tuple[dict[str, Any], str]]
    """A dict of a submodule's, and the key; in the order of the names, and then those that are tied to others."""
    tied: list[str]
    """Whose tensors stand in the last of these."""
    lists: list[tuple[dict[str, Any], dict[str, Any], list[str]]]
    """Of recurrent networks, which also keep a list of their weights: attributes, parameters, and names in the list's order."""


class _Lent:
    """Within, these places hold these tensors; afterwards their own, and what was put there meanwhile is in `tensors`."""

    __slots__ = ("_given", "_own", "_own_lists", "_places", "_tensors")

    def __init__(self, places: _Places, tensors: dict[str, Any]) -> None:
        self._places, self._tensors = places, tensors
        self._given = [*tensors.values(), *[tensors[name] for name in places.tied]]
        self._own = [place[key] for place, key in places.dicts]
        self._own_lists = [(attributes[_LIST], attributes[_REFS]) for attributes, _, _ in places.lists]

    def __enter__(self) -> None:
        try:
            for (place, key), x in zip(self._places.dicts, self._given, strict=True):
                place[key] = x
            for attributes, parameters, names in self._places.lists:
                attributes[_LIST] = listed = [parameters[name] for name in names]
                attributes[_REFS] = list(map(ref, listed))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        places, lists, tensors = self._places.dicts, self._places.lists, self._tensors
        # A scripted module's places have no `get`.
        new = [place[key] if key in place else None for place, key in places]  # noqa: SIM401
        for (place, key), x in zip(places, self._own, strict=True):
            place[key] = x
        for (attributes, _, _), (listed, refs) in zip(lists, self._own_lists, strict=True):
            attributes[_LIST], attributes[_REFS] = listed, refs
        if not are_same(new, self._given):
            tensors.update(zip(tensors, new, strict=False))  # None for what was deleted


class Weights:
    """Where a module keeps its parameters and buffers: found by name once, and again where the module has changed."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._dicts: list[dict[str, Any]] = []  # of parameters and of buffers of all submodules
        self._names: tuple[list[str], list[str]] = [], []  # the keys of all places, and whose tensors are given
        self._ids: list[int] = []  # of what stands in all places
        self._places = _Places([], [], [])

    def are(self, tensors: dict[str, Tensor], modules: list[nn.Module]) -> _Lent:
        """As `weights`, which looks every name up in every step: 10 µs for each. `modules`: what `Submodules.look` found."""
        return _Lent(self._look(tensors, modules), tensors)

    def _look(self, tensors: dict[str, Tensor], modules: list[nn.Module]) -> _Places:
        dicts: list[dict[str, Any]] = [place for m in modules for place in (m._parameters, m._buffers)]
        names = [*chain.from_iterable(map(_keys, dicts))], [*tensors]
        ids = list(map(id, chain.from_iterable(map(_values, dicts))))
        if ids != self._ids or names != self._names or not are_same(dicts, self._dicts):
            first: dict[int, int] = {}
            same = [first.setdefault(x, n) for n, x in enumerate(ids)]
            self._places = self._found(modules, dicts, same, tensors)
            self._dicts, self._names, self._ids = dicts, names, ids
        return self._places

    def _found(
        self, modules: list[nn.Module], dicts: list[dict[str, Any]], same: list[int], tensors: dict[str, Tensor]
    ) -> _Places:
        whole = self._module
        prefixes = {m: f"{name}." if name else "" for name, m in whole.named_modules()}
        places = [(i, key) for i, keys in enumerate(map(_keys, dicts)) for key in keys]
        names = [prefixes[modules[i // 2]] + key for i, key in places]
        number = {name: n for n, name in enumerate(names) if dicts[places[n][0]][places[n][1]] is not None}
        missing = [name for name in tensors if name not in number]
        given = {same[number[name]]: name for name in tensors if name in number}
        parameters = [n for n in number.values() if places[n][0] % 2 == 0]
        is_whole = any(names[n] in tensors for n in parameters)  # of a sharded module its buffers alone are given
        untied = [names[n] for n in parameters if is_whole and same[n] not in given]
        if missing or untied or len(given) < len(tensors):
            raise ValueError(
                f"df.functional({self._name}): the module has changed since, in "
                f"{brief(sorted(missing or untied or tensors.keys() - set(given.values())))}; call df.functional again."
            )
        tied = [n for n in range(len(places)) if same[n] in given and names[n] not in tensors]
        found = [places[n] for n in (*(number[name] for name in tensors), *tied)]
        lists = [
            (vars(m), m._parameters, m._flat_weights_names)
            for m in modules
            if is_whole and isinstance(m, nn.RNNBase) and _REFS in vars(m)
            # Not where some are computed, by a parametrization or a hook: PyTorch then makes the list in the call.
            if all([m._parameters.get(name) is not None for name in m._flat_weights_names])
        ]
        return _Places([(dicts[i], key) for i, key in found], [given[same[n]] for n in tied], lists)
