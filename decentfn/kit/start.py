"""Start of a run: the parameters in buckets, and the check that all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from decentfn import sharded
from decentfn.comm import collectives
from decentfn.comm.fingerprint import agree, compare, digest, fingerprint, label
from decentfn.core import PyTree, log, require, trees
from decentfn.core.buckets import Buckets, flatten
from decentfn.kit.options import left_out
from decentfn.optim.transforms.transform import masks_of, require_descent
from decentfn.sharded import Partition
from decentfn.topologies import Topology


def lay_out(
    params: PyTree,
    optimizers: Sequence[Any],
    topologies: Sequence[Topology],
    options: Mapping[str, Any],
    partition: Partition,
) -> Buckets:
    """Copy `params` into buckets, make the groups of all `topologies`, its own first, and compare ranks. Collective."""
    masks, wire_dtype = masks_of(*optimizers), options["wire_dtype"]
    try:
        size = collectives.processes_per_worker()
        rule = f"the algorithm was built for workers of {partition.processes} processes, and now they have {size}; call"
        require(
            size == partition.processes, "init(params)", f"{rule} df.init(processes_per_worker=...) once, before it."
        )
        own = left_out(options["shared"], [name for name, _ in trees.named_leaves(params)])
        x = flatten(params, bucket_mb=options["bucket_mb"], masks=masks, left_out=own, **partition._asdict())
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
    run = collectives.compare_steps()
    if collectives.all_processes().rank == 0:
        values, mib = sum(bucket.numel for bucket in x.plan.buckets), x.plan.nbytes / 2**20
        log.info("run: %d values (%.4g MiB) in %d buckets, %r", values, mib, len(x), topologies[0])
    return Buckets(x, replace(x.plan, topology=label(topologies[0]), run=run))
