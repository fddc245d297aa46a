"""Autograd inside an operator, and a module's weights while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from decentfn.words import brief


def surroundings() -> tuple[Any, Any]:
    """What PyTorch's dispatcher does here: autograd, autocast, torch.func. Compiled code switches most of it off inside."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def enabled(around: tuple[Any, Any]) -> Iterator[None]:
    """Within an operator's kernel, autograd and all else is as it was `around`."""
    with torch._C._ForceDispatchKeyGuard(*around), torch.enable_grad():
        yield


@contextmanager
def unseen() -> Iterator[None]:
    """Within, a view is a tensor of its own to autograd, as after `detach`."""
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS), torch._C._AutoDispatchBelowAutograd():
        yield


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

_keys = methodcaller("keys")
"""Of a module's parameters or buffers; those of a scripted module cannot be iterated over."""


def allow_saved_tensors_hooks() -> None:
    """Activation checkpointing works again on this thread: a compiler that fails while it traces torch.func.grad leaves it refused."""
    torch._C._autograd._saved_tensors_hooks_enable()  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def weights(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within, the module has `tensors` for its parameters and buffers, by name, also where one stands in several places.

    Afterwards it has its own again, and where it put another tensor in a place, that one is in `tensors`.
    """
    with _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True):
        yield


class Weights:
    """Where a module keeps its parameters and buffers: found by name once, and again where the module has changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._form: tuple[list[nn.Module], list[str], list[int], list[str]] | None = None
        self._places: list[tuple[int, str, str]] = []  # which of the dicts, its key, whose tensor

    @contextmanager
    def are(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """As `weights`, which looks every name up in every step: 10 µs for each."""
        dicts = self._look(tensors)
        places = [(dicts[i], key, name) for i, key, name in self._places]
        own = [places_of[key] for places_of, key, _ in places]
        try:
            for places_of, key, name in places:
                places_of[key] = tensors[name]
            yield
        finally:
            new = {name: places_of[key] for places_of, key, name in places[: len(tensors)] if key in places_of}
            for (places_of, key, _), x in zip(places, own, strict=True):
                places_of[key] = x
            tensors.update({name: x for name, x in new.items() if x is not None})

    def _look(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        """The dicts of parameters and buffers of all submodules, among which `_places` says where these tensors go."""
        modules = submodules(self.module)
        dicts: list[dict[str, Any]] = [places for m in modules for places in (m._parameters, m._buffers)]
        first: dict[int, int] = {}
        same = [first.setdefault(id(x), n) for n, x in enumerate([x for d in dicts for x in d.values()])]
        form = modules, [*chain.from_iterable(map(_keys, dicts))], same, [*tensors]
        if form != self._form:
            self._form, self._places = form, self._found(modules, dicts, same, tensors)
        return dicts

    def _found(
        self, modules: list[nn.Module], dicts: list[dict[str, Any]], same: list[int], tensors: dict[str, Tensor]
    ) -> list[tuple[int, str, str]]:
        prefixes = {m: f"{name}." if name else "" for name, m in self.module.named_modules()}
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
                f"df.functional({type(self.module).__name__}): the module has changed since, in "
                f"{brief(sorted(missing or untied or tensors.keys() - set(given.values())))}; call df.functional again."
            )
        tied = [n for n in range(len(places)) if same[n] in given and names[n] not in tensors]
        return [
            *((*places[number[name]], name) for name in tensors),
            *((*places[n], given[same[n]]) for n in tied),
        ]


def submodules(module: nn.Module) -> list[nn.Module]:
    """All of them and the module itself, each once."""
    found, seen = [module], {module}
    for m in found:
        for child in m._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found
