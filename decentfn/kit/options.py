"""What all algorithms take beside their own hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from decentfn.core.buckets import Buckets, require_bucket_mb
from decentfn.core.formatting import brief
from decentfn.gradient import LossFn, require_loss
from decentfn.optim.transforms.transform import require_descent, require_pair, wants_mix
from decentfn.topologies import Topology


class Options(TypedDict, total=False):
    """What all algorithms take beside their own hyperparameters."""

    bucket_mb: float
    """Largest bucket in MiB (25); one message travels per bucket and neighbour."""
    wire_dtype: torch.dtype | None
    """Dtype of what is exchanged, if narrower than the parameters' (None: as they are). Trackers, corrections and other
    memory are kept in float32 or wider, but travel no wider than the parameters."""


DEFAULTS = {"bucket_mb": 25.0, "wire_dtype": None}


def require_arguments(
    loss_fn: LossFn, optimizer: Any, topology: Topology, shows_mix: bool, options: Mapping[str, Any]
) -> None:
    """A loss, an optimizer that suits, a topology and known options, or an error says which is not."""
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
            "optimizer=MixAware(...): this algorithm has no neighbours' parameters at hand when it updates, for what it "
            "sends comes after the update or is compressed; use adapt_while_communicate."
        )


def require_options(options: Mapping[str, Any]) -> None:
    """Known names and possible values, or an error says which is not."""
    if "average_buffers" in options:
        raise TypeError("average_buffers is a wrapper: df.average_buffers(df.adapt_while_communicate(...)).")
    if "ema" in options or "loss_scale" in options:
        raise TypeError("an average and a scaled loss stand around: df.ema(algorithm), df.dynamic_loss_scale(loss_fn).")
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"unknown options {unknown}; known: {sorted(Options.__annotations__)}.")
    require_bucket_mb(options.get("bucket_mb", DEFAULTS["bucket_mb"]))
    wire_dtype = options.get("wire_dtype")
    if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
        raise ValueError(
            f"wire_dtype={brief(wire_dtype)}: expected a floating-point torch.dtype narrower than the parameters', such as "
            "torch.bfloat16, or None to send them as they are."
        )


def require_narrower(wire_dtype: torch.dtype | None, x: Buckets) -> None:
    """Some bucket is wider than the wire's dtype."""
    if wire_dtype is not None and all(bucket.dtype.itemsize < wire_dtype.itemsize for bucket in x):
        raise ValueError(
            f"wire_dtype={wire_dtype} is wider than every parameter ({x[0].dtype}), so all travel as they are; leave it out."
        )
