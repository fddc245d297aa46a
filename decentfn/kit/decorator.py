"""Decorator of algorithms: it checks the user's arguments and that all ranks have made the same call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, cast

import torch

from decentfn.comm.fingerprint import agree, describe, require_equal, structure
from decentfn.core import PyTree, bind, brief, require, require_numbers_on_cpu, trees
from decentfn.gradient import constants, require_inputs
from decentfn.kit.options import DEFAULTS, require_names
from decentfn.kit.preconditions import require_doubly_stochastic
from decentfn.kit.state import StateCheck, require_params
from decentfn.kit.step import Algorithm
from decentfn.topologies.rounds import Topology, demanding

P = ParamSpec("P")

_RULE = (
    "nothing mixes frozen parameters and constant buffers, so replicas must start with equal ones: "
    "`params, buffers = df.broadcast((params, buffers))` before init. A worker's own numbers belong in its batches"
)


def algorithm(function: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Decorate a function that builds an algorithm.

    The algorithm's `init` first compares over all ranks the algorithm's name, its hyperparameters and its optimizer.
    Hyperparameters are all keyword-only arguments and the `Options`, passed or default. Numbers are compared by value,
    functions by their values at some steps, the optimizer by its structure; the loss is not compared. The `step`
    refuses a state, a batch or a `t` that does not belong to it, and takes `t` as an int or a tensor. Its draws from
    PyTorch's generators follow from torch's seed, `t` and the worker.

    Args:
        function: `(loss_fn, optimizer, topology, *, hyperparameters, **options) -> Algorithm`; arguments annotated as
            `int`, `float` or `bool` must have that type and be finite, or the call is refused; so is a column-stochastic
            graph, unless it returns `worker.algorithm(..., push_sum=True)`.
    """
    signature = inspect.signature(function)
    if list(signature.parameters)[:3] != ["loss_fn", "optimizer", "topology"]:
        raise ValueError(
            f"@kit.algorithm on {function.__name__}{signature}: its first arguments are loss_fn, optimizer, topology, and its "
            "hyperparameters follow a *."
        )

    own = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        require_numbers_on_cpu(function.__name__)
        call = bind(function, signature, args, kwargs)
        require_names(function.__name__, call.arguments.get("options", {}), own)
        if isinstance(given := call.arguments["topology"], Topology):
            # Another takes its place only if the same call accepts it.
            again = cast(Any, build)
            call.arguments["topology"] = demanding(given, lambda other: again(*call.args[:2], other, **call.kwargs))
        built = function(*call.args, **call.kwargs)
        if not isinstance(built, Algorithm):
            raise ValueError(
                f"{function.__name__}(...) returned {brief(built)}; a function under @kit.algorithm returns an Algorithm: "
                "`return worker.algorithm(step)`."
            )
        call.apply_defaults()
        mixes_on = built.topology or call.arguments["topology"]
        if not built.step.pushes_sum:
            require_doubly_stochastic(function.__name__, mixes_on)
        loss_fn, optimizer = call.arguments["loss_fn"], call.arguments["optimizer"]
        values = {name: call.arguments[name] for name in own} | DEFAULTS | call.arguments.get("options", {})

        expected = StateCheck(loss_fn, built.step.start, mixes_on, starts_equal=built.step.starts_equal)

        def start(params: PyTree, buffers: PyTree = None) -> Any:
            rule = "torch.inference_mode is on, and what is made in it cannot be trained; call init outside of it."
            try:
                require(not torch.is_inference_mode_enabled(), "init(params)", rule)
                require_numbers_on_cpu("init(params)")
                require_params(params)
                buffers = require_inputs("init(params, buffers)", loss_fn, params, trees.plain(buffers))
            except Exception as error:
                agree([f"{type(error).__name__}: {error}"])  # otherwise ranks without an error would wait for this one
                raise
            lines = [f"algorithm {function.__name__}"]
            for name, value in (*values.items(), ("optimizer", optimizer)):
                is_optimizer = hasattr(value, "init") and hasattr(value, "update")
                lines += structure(name, value) if is_optimizer else [describe(name, value)]
            agree(lines)
            state = built.init(params, buffers)
            require_equal("init(params, buffers)", constants(loss_fn, buffers), _RULE)
            return expected.record(state)

        start.__name__ = start.__qualname__ = f"{function.__name__}.init"
        return Algorithm(start, replace(built.step, check=expected.check, loss_fn=loss_fn, topology=mixes_on))

    return build
