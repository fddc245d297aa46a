"""Options that all algorithms take in addition to their own hyperparameters, and the start of a run by them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypedDict

import torch

from decentfn import sharded
from decentfn.comm import collectives
from decentfn.comm.fingerprint import agree, compare, digest, fingerprint, label
from decentfn.core import PyTree, brief, no_such_argument, require, trees
from decentfn.core.buckets import Buckets, flatten
from decentfn.gradient import LossFn, require_loss
from decentfn.optim.transforms.transform import masks_of, require_descent, require_pair, wants_mix
from decentfn.sharded import Partition
from decentfn.topologies import Topology

_log = logging.getLogger("decentfn")

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


DEFAULTS = {"bucket_mb": 25.0, "wire_dtype": None, "shared": None}


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
        patterns = [shared] if isinstance(shared, str) else shared
        for pattern in patterns:
            rule = f"no parameter has such a name; they are {brief(list(names))}."
            require(any(fnmatchcase(name, pattern.removeprefix("!")) for name in names), "init", rule, shared=pattern)
        chosen = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
        out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
        own = {name for name in names if not _matches(name, chosen) or _matches(name, out)}
    rule = "it leaves all parameters out, so nothing would be exchanged; train each worker alone, with num_workers=1."
    require(len(own) < len(set(names)), "init", rule, shared=shared)
    return frozenset(own)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def lay_out(
    params: PyTree,
    optimizers: Sequence[Any],
    topologies: Sequence[Topology],
    bucket_mb: float,
    wire_dtype: torch.dtype | None,
    shared: Shared,
    partition: Partition,
) -> Buckets:
    """Copy `params` into buckets, make the groups of all `topologies`, its own first, and compare ranks. Collective."""
    masks = masks_of(*optimizers)
    try:
        size = collectives.processes_per_worker()
        rule = f"the algorithm was built for workers of {partition.processes} processes, and now they have {size}; call"
        require(
            size == partition.processes, "init(params)", f"{rule} df.init(processes_per_worker=...) once, before it."
        )
        own = left_out(shared, [name for name, _ in trees.named_leaves(params)])
        x = flatten(params, bucket_mb=bucket_mb, masks=masks, left_out=own, **partition._asdict())
        for optimizer in optimizers:
            require_descent(optimizer, x.plan)
        if wire_dtype is not None and all(bucket.dtype.itemsize < wire_dtype.itemsize for bucket in x):
            raise ValueError(
                f"wire_dtype={wire_dtype} is wider than every parameter ({x[0].dtype}), so all are sent unchanged; leave it out."
            )
        if topologies[0].num_workers % (here := collectives.world()).size:
            collectives.refuse_size(here, 1, topologies[0].num_workers, "init(params)")
        devices = {tensor.device: plan.segments[0].name for tensor, plan in zip(x, x.plan.buckets, strict=True)}
        if len(devices) > 1:
            where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
            rule = "a worker's parameters are on one device: model.to(df.init().device) before."
            raise ValueError(f"init(params): {where}; {rule}")
        [device] = devices
        collectives.require_messages_from("init(params)", device)
    except Exception as error:
        agree([f"{type(error).__name__}: {error}"])  # otherwise ranks without an error would wait for this one
        raise
    agree(fingerprint(x.plan, topologies[0], device, masks), x.plan.describe())
    if partition.tp_size > 1:
        common = [(name, leaf) for name, leaf in trees.named_leaves(params) if name in partition.common]
        lines = [f"{name} with digest {digest(leaf)}" for name, leaf in common]
        rule = "the processes of a worker start equal: make them after torch.manual_seed(0) on each"
        compare("init(params)", [], rule, of_tp_group=lines, tp_size=partition.tp_size)
        sharded.make_tp_groups(partition.tp_size)
    for topology in topologies:
        if topology.groups is not None:
            collectives.make_groups(topology.groups)
    collectives.compare_steps()
    if collectives.all_processes().rank == 0:
        values, mib = sum(bucket.numel for bucket in x.plan.buckets), x.plan.nbytes / 2**20
        _log.info("run: %d values (%.4g MiB) in %d buckets, %r", values, mib, len(x), topologies[0])
    return Buckets(x, replace(x.plan, topology=label(topologies[0])))
