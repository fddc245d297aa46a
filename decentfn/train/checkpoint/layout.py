"""Layout of checkpoints: a state as named leaves with their places, and one safetensors file per process.

Leaves of a bucket are stored by parameter name, so other bucket sizes can read them. Workers are the first axis of
every leaf: its shape is over all workers, its offset is where this file's part begins. If a worker is several
processes, each stores its shards, placed in the worker's unsharded tensors, and a copy of unsharded leaves.

What a process saves beside its state, `extra`, is a tree in JSON, with its tensors in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decentfn.comm.fingerprint import as_bytes, digest
from decentfn.core import brief, require, trees
from decentfn.core.buckets import Buckets, Place, Plan
from decentfn.train.consensus import is_stacked

DTYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes of safetensors files, by their names there."""

_LEAVES = "leaves"
BUFFERS = "local.buffers."
"""Prefix of the names of a module's buffers, frozen parameters among them."""
EXTRA, GENERATOR = "extra/", "generator/"
"""Prefixes of the names of tensors of `extra`, and of generators' states."""
_KIND = "decentfn kind"


class Leaf(NamedTuple):
    """This process's part of a leaf, `[L, ...]` for L workers: a view of the state."""

    name: str
    values: Tensor
    is_by_bucket: bool  # one value per bucket, not per parameter
    shard: Place | None  # place in the worker's tensor; None: unsharded, or the process's own


def without_compiled(name: str) -> str:
    """Return a name without the part that `torch.compile(module)` puts before those of the module."""
    return name.replace("_orig_mod.", "")


def local_workers(state: Any) -> int:
    """Return the number of workers in the state."""
    return state.params[0].shape[0] if is_stacked(state, of_runs=True) else 1


def own_memory(state: Any) -> Any:
    """Return the memory of the state's algorithm, within those of wrappers."""
    memory = state.memory
    while hasattr(memory, "inner"):
        memory = memory.inner
    return memory


def algorithm_of(state: Any) -> str | None:
    """Return the algorithm of this library that owns the state's memory; None if there is none."""
    package, _, name = type(own_memory(state)).__module__.rpartition(".")
    return name if package == "decentfn.algorithms" else None


def leaves_of(state: Any) -> list[Leaf]:
    """Return the state's leaves by name; complex ones as real and imaginary parts, `[..., 2]`.

    Raises ValueError for two leaves of one name, or one that is not a tensor of a supported dtype.
    """
    stacked, found, shards = is_stacked(state, of_runs=True), dict[str, Leaf](), dict(state.params.plan.places)
    for path, node in trees.named_leaves(state, Buckets):
        if isinstance(node, Buckets):
            owns = [segment.name for bucket in node.plan.buckets for segment in bucket.segments]
            rows = [(f"{path}/{own}", shards.get(own), x) for own, x in zip(owns, node.leaves(), strict=True)]
        else:
            own = path.removeprefix(BUFFERS)
            rows = [(path, shards.get(own) if own != path else None, node)]
        for name, shard, x in [(without_compiled(name), shard, x) for name, shard, x in rows]:
            if isinstance(x, torch.Tensor) and x.is_complex():
                x = torch.view_as_real(x)
                shard = shard and Place((*shard.shape, 2), (*shard.offset, 0))
            if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
                kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
                raise ValueError(
                    f"checkpoint: leaf {name!r} of the state is {kind}, which safetensors files do not hold."
                )
            rule = f"two leaves of the state are called {name!r}; rename a key of the parameters."
            require(name not in found, "checkpoint", rule)
            values = x if stacked else x[None]
            by_bucket = not isinstance(node, Buckets) and values.dim() > 1 and not path.startswith("local.buffers")
            found[name] = Leaf(name, values, by_bucket, shard)
    return list(found.values())


def place(leaf: Leaf, first: int, num_workers: int) -> Place:
    """Return the place of `[L, ...]`, of the workers from `first` on, among all workers."""
    shape = leaf.values.shape[1:]
    unsharded, offset = leaf.shard or (shape, [0] * len(shape))
    return Place((num_workers, *unsharded), (first, *offset))


def digest_of_plan(plan: Plan) -> str:
    """Return a digest that is equal for two plans iff their buckets are."""
    return hashlib.sha256("\n".join(plan.describe()).encode()).hexdigest()[:16]


def digests_of(frozen: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each frozen buffer, `[L, ...]`; raise ValueError if one differs between the workers."""
    digests = {}
    for name, x in frozen.items():
        found = {digest(row) for row in x}
        if len(found) > 1:
            raise ValueError(f"Saver(frozen={brief([name.removeprefix(BUFFERS)])}): it differs between the workers.")
        digests[name] = found.pop()
    return digests


def encoded(
    tensors: Mapping[str, Tensor], places: Mapping[str, Place] | None = None, *, tied: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file without copying; tensors are on the CPU. `tied`: names of others in the file."""
    own = dict(tied or {}) if places is None else {_LEAVES: json.dumps({n: p._asdict() for n, p in places.items()})}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | own}
    start = 0
    for name, x in tensors.items():
        stop = start + x.nbytes
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for x in tensors.values():
        yield from bytes_of(x)


def places_in(metadata: Mapping[str, str]) -> dict[str, Place]:
    """Return the places of a file's leaves from its metadata."""
    told = json.loads(metadata[_LEAVES])
    return {name: Place(tuple(place["shape"]), tuple(place["offset"])) for name, place in told.items()}


def bytes_of(x: Tensor) -> Iterator[memoryview]:
    """Yield the memory of a tensor on the CPU, in the order of its elements; it may be written to."""
    if not x.numel():
        return
    if x.is_contiguous():
        yield as_bytes(x).numpy().data
    else:
        for row in x:
            yield from bytes_of(row)


def packed(value: Any, tensors: dict[str, Tensor], path: str = "extra") -> Any:
    """Return what JSON holds of the value, and add its tensors; raise ValueError, with the path, for anything else."""

    def beside(kind: str, x: Tensor) -> dict[str, str]:
        name = f"{EXTRA}{path}"
        tensors[name] = x.detach().to("cpu", copy=True)
        return {_KIND: kind, "name": name}

    def each(items: Any) -> list[Any]:
        return [packed(item, tensors, f"{path}[{i}]") for i, item in enumerate(items)]

    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value) in (bool, int, str) or (type(value) is float and value - value == 0):
        return value
    if type(value) is Tensor and value.dtype in DTYPES and value.layout == torch.strided:
        return beside("tensor", value)
    if isinstance(value, bytes):
        return beside("bytes", torch.tensor(list(value), dtype=torch.uint8))
    if type(value) is np.ndarray and value.dtype.isnative and value.dtype.kind in "biuf":
        x = torch.from_numpy(np.array(value, order="C"))
        if x.dtype in DTYPES:
            return beside("array", x)
    if type(value) is list:
        return each(value)
    if type(value) is tuple:
        return {_KIND: "tuple", "items": each(value)}
    if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        values = {key: packed(item, tensors, f"{path}[{key!r}]") for key, item in value.items()}
        if _KIND not in value and all(type(key) is str for key in value):
            return values
        return {_KIND: "dict", "items": [[key, item] for key, item in values.items()]}
    raise ValueError(
        f"save(extra=...): {path} is {brief(value)} ({type(value).__name__}); a checkpoint holds finite numbers, strings, None, tensors, "
        "arrays and bytes in lists, tuples and dicts whose keys are strings or integers; for NaN and infinity give None or a string."
    )


def unpacked(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the tree that was packed; `tensor(name)` reads one that is beside it."""
    if isinstance(value, list):
        return [unpacked(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: unpacked(item, tensor) for key, item in value.items()}
    if kind == "dict":
        return {key: unpacked(item, tensor) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(unpacked(item, tensor) for item in value["items"])
    x = tensor(value["name"])
    return x if kind == "tensor" else x.numpy() if kind == "array" else bytes(x.tolist())
