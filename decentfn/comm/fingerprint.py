"""Check that all ranks run the same: gloo checks nothing, so they compare before anything is exchanged."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.core import Numbers, PyTree, first_difference, trees
from decentfn.core.buckets import Mask, Plan
from decentfn.errors import PlanMismatch
from decentfn.topologies import Topology

_STEPS_COMPARED = 4
_TRIED = (0, 1, 10, 100, 1000, 10_000, 100_000)  # steps at which functions of t are compared


def fingerprint(plan: Plan, topology: Topology, device: torch.device, masks: Sequence[Mask] = ()) -> list[str]:
    """Return lines that are equal on two ranks iff version, schedule, device type and the masks' leaves agree."""
    return [
        f"torch {torch.__version__}",
        *_lines_of(topology),
        f"parameters on {device.type}",
        *sorted(
            f"mask {index} takes {segment.name}"
            for index, mask in enumerate(masks)
            for bucket in plan.buckets
            for segment in bucket.segments
            if mask(segment.name, segment.shape)
        ),
    ]


def _lines_of(topology: Topology) -> list[str]:
    tables = [topology.sources, topology.weights, topology.groups, topology.mean_weights]
    if topology.draw is not None:
        tables = [table for t in topology.steps(_STEPS_COMPARED) for table in topology.round(t)[:-1]]
    return [
        f"topology={topology.name!r}",
        f"num_workers={topology.num_workers}",
        *(_with_digest(f"the topology's tables {i}", x) for i, x in enumerate(tables) if x is not None),
    ]


def label(topology: Topology) -> str:
    """Return the name of a schedule with a digest of its tables: equal iff the lines of `fingerprint` are."""
    return f"{topology.name} {hashlib.sha256(str(_lines_of(topology)).encode()).hexdigest()[:8]}"


def describe(name: str, value: Any) -> str:
    """Describe a hyperparameter in a line that is equal iff the value is; a function by its values at some steps."""
    if callable(value):
        return f"{name}(t)=" + ", ".join(f"{_value(value, t)} at {t}" for t in _TRIED)
    return re.sub(r" at 0x[0-9a-f]+", "", f"{name}={value}")


def structure(name: str, value: Any, enclosing: tuple[Any, ...] = ()) -> Iterator[str]:
    """Describe a transform: its types and functions' names, and the numbers in closures of this library's."""
    if isinstance(value, (tuple, list)):
        yield f"{name} is a {type(value).__name__} of {len(value)}"
        for key, item in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from structure(f"{name}.{key}", item, enclosing)
    elif isinstance(value, MethodType):
        yield from structure(name, value.__func__, enclosing)
    elif isinstance(value, FunctionType):
        yield f"{name} is {value.__module__}.{value.__qualname__}"
        # A function may close over itself.
        if (value.__module__ or "").split(".")[0] == "decentfn" and value not in enclosing:
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield from structure(f"{name}.{key}", cell.cell_contents, (*enclosing, value))
    elif isinstance(value, (bool, int, float, str, torch.dtype, type(None), Numbers)):
        yield f"{name}={value}"
    else:
        yield f"{name} is {type(value).__module__}.{type(value).__qualname__}"


def _value(function: Callable[[Tensor], Any], t: int) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            return f"{float(function(torch.tensor(t))):.4g}"  # processors may differ in the last bits of a cosine
    except Exception as error:
        return type(error).__name__  # a table that ends before


def agree(lines: list[str], of_part: Sequence[str] = ()) -> None:
    """Compare the runs that the ranks are about to start; collective. Arguments and errors as for `compare`."""
    compare("init(params)", lines, "every rank must build the same algorithm, model and topology", of_part)
    collectives.world().agreed.update(lines, of_part)


def compare(
    call: str,
    lines: list[str],
    rule: str,
    of_part: Sequence[str] = (),
    of_tp_group: Sequence[str] = (),
    tp_size: int = 1,
) -> None:
    """Compare `lines` over all ranks, `of_part` over those of one index in their worker, `of_tp_group` in those groups.

    Collective. Raises PlanMismatch on every rank, naming the first rank and line that differ from most, and the `rule`.
    """
    world = collectives.all_processes()
    size, here = world.identity.processes_per_worker, world.identity.rank
    with collectives.calling(call):
        told = collectives.gather_objects([lines, list(of_part), list(of_tp_group)], world)
    groups = [[(rank, told[rank][0]) for rank in range(len(told))]]
    groups += [[(rank, told[rank][1]) for rank in range(part, len(told), size)] for part in range(size)]
    groups += [[(rank, told[rank][2]) for rank in range(i, i + tp_size)] for i in range(0, len(told), tp_size)]
    for group in groups:
        found = [theirs for _, theirs in group]
        usual = max(found, key=found.count)
        first = group[found.index(usual)][0]
        for rank, theirs in group:
            if theirs != usual:
                one, other = first_difference(usual, theirs)
                raise PlanMismatch(
                    f"{call}: ranks disagree. {_name(first, size)} has {one!r}, {_name(rank, size).lower()} has {other!r}; {rule}.",
                    process=here,
                    peer=first if here == rank else rank,
                )


def _name(rank: int, size: int) -> str:
    return f"Rank {rank}" + f" (process {rank % size} of worker {rank // size})" * (size > 1)


# -- equal replicas: made by `broadcast`, and checked before a method relies on them; not for use inside a step --------


@collectives.calling("df.broadcast(tree)")
def broadcast(tree: PyTree) -> PyTree:
    """Copy worker 0's tree (process 0's) to every rank, bit for bit. Collective.

    `params, buffers = df.broadcast((params, buffers))` before `init` gives all workers the same start. If a worker is
    several processes, each receives the tree of the process with the same number in worker 0.

    Raises:
        ValueError: on every rank, if the trees differ in more than their values.
    """
    kinds = [_kind(name, leaf) for name, leaf in trees.named_leaves(tree)]
    compare("broadcast(tree)", [], "pass the same tree", kinds)
    return trees.map(collectives.process_broadcast, tree)


_RULE = "replicas must start equal: `params, buffers = df.broadcast((params, buffers))` before init"


def require_equal(call: str, tree: PyTree, rule: str = _RULE) -> None:
    """Raise ValueError on every rank unless all hold the same tree, bit for bit. Collective."""
    if collectives.world().identity.size > 1:
        lines = [_with_digest(name, leaf) for name, leaf in trees.named_leaves(tree)]
        compare(call, [], rule, lines)


def require_equal_rows(call: str, tree: PyTree) -> None:
    """Raise ValueError unless all workers of this process hold equal values, bit for bit; each leaf is `[N, ...]`."""
    for name, leaf in trees.named_leaves(tree):
        digests = [digest(row) for row in leaf]
        for worker, one in enumerate(digests):
            if one != digests[0]:
                raise ValueError(f"{call}: workers 0 and {worker} of this process differ in {name!r}; {_RULE}.")


def _kind(name: str, leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(f"leaf {name!r} is {type(leaf).__name__}, not a tensor; state and data are trees of tensors.")
    if kind := trees.not_plain(leaf):
        raise ValueError(
            f"leaf {name!r} is {kind}; what ranks send or compare is dense, such as x.to_dense() or x.dequantize()."
        )
    return f"{name or 'leaf'} {list(leaf.shape)} {leaf.dtype}"


def _with_digest(name: str, leaf: Tensor) -> str:
    return f"{_kind(name, leaf)} with digest {digest(leaf)}"


def digest(leaf: Tensor) -> str:
    """Return a digest that is equal for two tensors iff their bytes are."""
    return hashlib.sha256(as_bytes(leaf).cpu().numpy().data).hexdigest()[:16]


def as_bytes(leaf: Tensor) -> Tensor:
    """Return the bytes of a tensor, `[bytes]` uint8: a view, if it is contiguous."""
    dense = leaf.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
