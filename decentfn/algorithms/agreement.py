"""What makes a function an algorithm: all ranks have called it alike, or its `init` says who has not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from decentfn.algorithms.worker import DEFAULTS, Algorithm
from decentfn.fingerprint import agree, describe, structure
from decentfn.trees import PyTree

P = ParamSpec("P")


def algorithm(function: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Let `init` compare over all ranks, first of all, which algorithm this is, its hyperparameters and its optimizer.

    Hyperparameters are all keyword-only arguments and the `Options`, as the call gives them or by default. Numbers are
    compared as they are, functions by their values at some steps. The optimizer is compared by what it is made of, see
    `structure`; the loss is not.

    Args:
        function: `(loss_fn, optimizer, topology, *, hyperparameters, **options) -> Algorithm`.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        init, step = function(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        own = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        values = {name: call.arguments[name] for name in own} | DEFAULTS | call.arguments.get("options", {})

        def start(params: PyTree, buffers: PyTree = None) -> object:
            lines = [describe(name, value) for name, value in values.items()]
            optimizer = structure("optimizer", call.arguments["optimizer"])
            agree([f"algorithm {function.__name__}", *lines, *optimizer])
            return init(params, buffers)

        return Algorithm(start, step)

    return build
