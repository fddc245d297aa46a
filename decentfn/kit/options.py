"""Options that all algorithms take in addition to their own hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypedDict

import torch

from decentfn.core import brief, no_such_argument, require
from decentfn.gradient import LossFn, require_loss
from decentfn.optim.transforms.transform import require_descent, require_pair, wants_mix
from decentfn.topologies import Topology

Shared = str | Sequence[str] | Callable[[str], bool] | None
"""A choice of parameters by their names, as in `Options.shared`."""


class Options(TypedDict, total=False):
    """Options that all algorithms take in addition to their own hyperparameters.

    `bucket_mb`: largest bucket in MiB (25), > 0; one message is sent per bucket and neighbor. docs/performance.md helps
    to choose it.

    `wire_dtype`: floating-point dtype of the exchanged values, if narrower than the parameters' (None: unchanged).
    Trackers, corrections and other memory are kept in float32 or wider, but sent no wider than the parameters.

    `shared`: parameters that workers exchange (None: all): a pattern of names, such as "backbone.*", several, or a
    function of the name. "!head.*" leaves its matches out: each worker has its own, which no message carries, and trains
    them as if it were alone. docs/heterogeneity.md says what is done with them.
    """

    bucket_mb: float
    wire_dtype: torch.dtype | None
    shared: Shared


DEFAULTS: dict[str, Any] = {"bucket_mb": 25.0, "wire_dtype": None, "shared": None}


def require_arguments(
    loss_fn: LossFn, optimizer: Any, topology: Topology, shows_mix: bool, options: Mapping[str, Any]
) -> None:
    """Raise an error that names the argument unless loss, optimizer, topology and options are valid."""
    require_loss("loss_fn", loss_fn)
    require_pair("optimizer", optimizer)
    require_descent(optimizer)
    rule = "expected a Topology, for example df.topology('ring', num_workers=4)."
    require(isinstance(topology, Topology), f"topology={brief(topology)}", rule)
    require_names("Worker", options)
    mb = options.get("bucket_mb", DEFAULTS["bucket_mb"])
    is_size = isinstance(mb, Real) and not isinstance(mb, bool) and 0 < float(mb) < float("inf")
    rule = "a bucket's size is a positive number of MiB; 25 is the default."
    require(is_size, f"bucket_mb={brief(mb)}", rule)
    wire_dtype = options.get("wire_dtype")
    is_float = isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point and wire_dtype.itemsize > 1
    if wire_dtype is not None and not is_float:
        raise ValueError(
            f"wire_dtype={brief(wire_dtype)}: expected a floating-point torch.dtype of 16 bits or more that is narrower than the "
            "parameters', such as torch.bfloat16, or None to send them as they are."
        )
    shared = options.get("shared")
    are_names = isinstance(shared, Sequence) and len(shared) > 0 and all(isinstance(one, str) for one in shared)
    rule = 'a pattern of names such as "!head.*", a list of them, or a function of the name.'
    require(shared is None or callable(shared) or are_names, "Worker", rule, shared=shared)
    if wants_mix(optimizer) and not shows_mix:
        raise ValueError(
            "optimizer=MixAware(...): this algorithm does not show its optimizer the neighbors' messages (most send after the "
            "update, or compress them); use adapt_while_communicate, or in one of your own that posts before it updates, "
            "kit.Worker(..., shows_mix=True) and worker.update(..., posted=posted)."
        )


def require_names(call: str, options: Mapping[str, Any], own: Sequence[str] = ()) -> None:
    """Raise TypeError unless all names of options are known; `own` are the other keyword arguments of `call`."""
    for name in sorted(set(options) - set(Options.__annotations__)):
        if name in ("lr", "learning_rate") and "learning_rate" not in own:
            raise TypeError(f"{call}({name}=...): a learning rate is the optimizer's, df.sgd(0.1).")
        if name == "compressor":
            rule = "its messages are not compressed, wire_dtype=torch.bfloat16 rounds them; choco_sgd and diloco compress theirs."
            raise TypeError(f"{call}(compressor=...): {rule}")
        raise TypeError(no_such_argument(call, name, [*own, *Options.__annotations__]))


def left_out(shared: Shared, names: Sequence[str]) -> frozenset[str]:
    """Return those of the parameters' names that are not shared; raise ValueError if none is, or a pattern matches none."""
    if shared is None:
        return frozenset()
    if callable(shared):
        own = {name for name in names if not shared(name)}
    else:
        chosen, out = set[str](), set[str]()
        patterns = [shared] if isinstance(shared, str) else shared
        for pattern in patterns:
            found = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
            rule = f"no parameter has such a name; they are {brief(list(names))}."
            require(len(found) > 0, "init", rule, shared=pattern)
            (out if pattern.startswith("!") else chosen).update(found)
        own = out | (set(names) - chosen if chosen else set())
    rule = "it leaves all parameters out, so nothing would be exchanged; train each worker alone, with num_workers=1."
    require(len(own) < len(set(names)), "init", rule, shared=shared)
    return frozenset(own)
