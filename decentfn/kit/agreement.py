"""What makes a function an algorithm: what its users give is looked at, and all ranks have called it alike."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from decentfn import collectives, draws
from decentfn.fingerprint import agree, describe, structure
from decentfn.gradient import is_by_autograd
from decentfn.kit.expected import checked, marked, require_order
from decentfn.kit.options import DEFAULTS
from decentfn.kit.state import Algorithm, Metrics
from decentfn.numbers import bind, plain
from decentfn.scalars import as_step
from decentfn.torch_private import functorch
from decentfn.trees import PyTree
from decentfn.words import brief

P = ParamSpec("P")


def algorithm(function: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Decorate a function that builds an algorithm.

    The `init` of what it builds compares over all ranks, first of all, which algorithm this is, its hyperparameters and
    its optimizer. Hyperparameters are all keyword-only arguments and the `Options`, as the call gives them or by default.
    Numbers are compared as they are, functions by their values at some steps. The optimizer is compared by what it is made
    of; the loss is not. The `step` refuses a state, a batch or a `t` that are not its own, takes `t` as an int or a tensor,
    and what it draws from PyTorch's generators follows from torch's seed, `t` and the worker.

    Args:
        function: `(loss_fn, optimizer, topology, *, hyperparameters, **options) -> Algorithm`; what it annotates as `int`,
            `float` or `bool` is one, finite, or the call is refused.
    """
    signature = inspect.signature(function)
    if list(signature.parameters)[:3] != ["loss_fn", "optimizer", "topology"]:
        raise ValueError(
            f"@kit.algorithm on {function.__name__}{signature}: its first arguments are loss_fn, optimizer, topology, and its "
            "hyperparameters stand after a *."
        )

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        call = bind(function, signature, args, kwargs)
        call.arguments.update(plain(function.__name__, signature.parameters, call.arguments))
        built = function(*call.args, **call.kwargs)
        if not isinstance(built, Algorithm):
            raise ValueError(
                f"{function.__name__}(...) returned {brief(built)}; a function under @kit.algorithm returns an Algorithm: "
                "`return worker.algorithm(step)`."
            )
        call.apply_defaults()
        loss_fn, optimizer, topology = (call.arguments[name] for name in ("loss_fn", "optimizer", "topology"))
        by_autograd = is_by_autograd(loss_fn)
        own = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        values = {name: call.arguments[name] for name in own} | DEFAULTS | call.arguments.get("options", {})

        def start(params: PyTree, buffers: PyTree = None) -> Any:
            lines = [describe(name, value) for name, value in values.items()]
            agree([f"algorithm {function.__name__}", *lines, *structure("optimizer", optimizer)])
            return built.init(params, buffers)

        @functools.wraps(built.step)
        def run(state: Any, batch: PyTree, t: int | Tensor) -> tuple[Any, Metrics]:
            if not torch.compiler.is_dynamo_compiling():
                require_order(state, batch, t)
            t = as_step(t)
            if torch.compiler.is_dynamo_compiling() or functorch.has_no_value(t):
                return built.step(state, batch, t)
            with collectives.whole_step(t) as here, draws.torch_draws(t, here.place):
                return built.step(state, batch, t)

        init, step = checked(built.init, start, run, loss_fn)
        topology = built.topology or topology
        step = marked(step, by_autograd=by_autograd, num_workers=topology.num_workers)
        return Algorithm(init, step, loss_fn=loss_fn, topology=topology)

    return build
