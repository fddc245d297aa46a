"""Options that all algorithms take in addition to their own hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from decentfn.core.buckets import Buckets, require_bucket_mb
from decentfn.core.formatting import brief
from decentfn.core.numbers import no_such_argument
from decentfn.gradient import LossFn, require_loss
from decentfn.optim.transforms.transform import require_descent, require_pair, wants_mix
from decentfn.topologies import Topology


class Options(TypedDict, total=False):
    """Options that all algorithms take in addition to their own hyperparameters.

    `bucket_mb`: largest bucket in MiB (25), > 0; one message is sent per bucket and neighbor. docs/performance.md helps
    to choose it.

    `wire_dtype`: floating-point dtype of the exchanged values, if narrower than the parameters' (None: unchanged).
    Trackers, corrections and other memory are kept in float32 or wider, but sent no wider than the parameters.
    """

    bucket_mb: float
    wire_dtype: torch.dtype | None


DEFAULTS = {"bucket_mb": 25.0, "wire_dtype": None}


def require_arguments(
    loss_fn: LossFn, optimizer: Any, topology: Topology, shows_mix: bool, options: Mapping[str, Any]
) -> None:
    """Raise an error that names the argument unless loss, optimizer, topology and options are valid."""
    require_loss("loss_fn", loss_fn)
    require_pair("optimizer", optimizer)
    require_descent(optimizer)
    if not isinstance(topology, Topology):
        raise ValueError(
            f"topology={brief(topology)}: expected a Topology, for example df.topology('ring', num_workers=4)."
        )
    require_options(options)
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
        raise TypeError(no_such_argument(call, name, [*own, *Options.__annotations__]))


def require_options(options: Mapping[str, Any]) -> None:
    """Raise an error that names the option unless all names are known and all values valid."""
    require_names("Worker", options)
    require_bucket_mb(options.get("bucket_mb", DEFAULTS["bucket_mb"]))
    wire_dtype = options.get("wire_dtype")
    is_float = isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point and wire_dtype.itemsize > 1
    if wire_dtype is not None and not is_float:
        raise ValueError(
            f"wire_dtype={brief(wire_dtype)}: expected a floating-point torch.dtype of 16 bits or more that is narrower than the "
            "parameters', such as torch.bfloat16, or None to send them as they are."
        )


def require_narrower(wire_dtype: torch.dtype | None, x: Buckets) -> None:
    """Raise ValueError unless some bucket is wider than `wire_dtype`."""
    if wire_dtype is not None and all(bucket.dtype.itemsize < wire_dtype.itemsize for bucket in x):
        raise ValueError(
            f"wire_dtype={wire_dtype} is wider than every parameter ({x[0].dtype}), so all are sent unchanged; leave it out."
        )
