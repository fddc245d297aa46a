"""Bytes and bits of messages."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from decentfn.core import draws, once, operator
from decentfn.core.buckets import BucketPlan, wide


def join(*fields: Tensor) -> Tensor:
    """Concatenate the bytes of all fields."""
    return torch.cat([field.reshape(-1).contiguous().view(torch.uint8) for field in fields])


def split(message: Tensor, fields: list[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Split a message into flat fields of `(count, dtype)`; the inverse of `join`."""
    pieces = message.split([count * dtype.itemsize for count, dtype in fields])
    pairs = zip(pieces, fields, strict=True)
    # Copy, because a view in another dtype must be aligned to its size; empty tensors cannot be viewed.
    fresh = ((once(piece.clone(memory_format=torch.contiguous_format)), *field) for piece, field in pairs)
    return [piece.view(dtype) if count else piece.to(dtype) for piece, count, dtype in fresh]


def _placed_kernel(values: Tensor, places: Tensor, numel: int) -> Tensor:
    # Add, because a message of zeros (an idle slot) may name one place many times.
    return values.new_zeros((*values.shape[:-1], numel)).scatter_add_(-1, places.long(), values)


placed = operator(
    "placed(Tensor values, Tensor places, int numel) -> Tensor",
    _placed_kernel,
    lambda values, places, numel: values.new_empty((*values.shape[:-1], numel)),
    ("values", "places"),
)
"""Operator `(values [..., k], places [..., k], numel)` -> zeros `[..., numel]` with the values added at these places.

It is one because Inductor (PyTorch 2.13) miscompiles `zeros.scatter`: it fuses the reader of several decoded messages
into the loop that fills their zeros, before the scatter. The messages then decode to zeros.
"""


def _largest_kernel(x: Tensor, k: int) -> Tensor:
    every = x.shape[-1] // _SAMPLE
    if x.device.type != "cpu" or every < 8 or x.dtype.itemsize < 4:
        return x.abs().topk(k, sorted=False).indices
    if x.dim() > 1:
        return torch.stack([_largest_kernel(row, k) for row in x])
    size = x.abs()
    sample = size[::every]
    expected = k * len(sample) / len(size)
    rank = min(len(sample), int(expected + 4 * math.sqrt(expected)) + 4)
    found = (size < sample.topk(rank).values[-1]).logical_not_().nonzero()[:, 0]  # a NaN is the largest, as in topk
    if len(found) >= k:
        return found.index_select(0, size.index_select(0, found).topk(k, sorted=False).indices)
    return size.topk(k, sorted=False).indices


_SAMPLE = 4096

largest = operator(
    "largest(Tensor x, int k) -> Tensor",
    _largest_kernel,
    lambda x, k: x.new_empty((*x.shape[:-1], k), dtype=torch.int64),
    ("x",),
)
"""Operator `(x [D], k)` -> places `[k]` of the values of largest magnitude, in any order.

PyTorch's `topk` on a CPU moves all values with their places, four times longer than this for 10^6 values: a sample bounds
the k-th magnitude from below, and only values above the bound are sorted. Which of equal magnitudes are taken may differ.
"""


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack `[D]` uint8 below 2^bits into `[ceil(D bits / 8)]` uint8, the first value in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=values.device)
    rows = pad(values, (0, -values.shape[0] % len(shifts))).reshape(-1, len(shifts))
    return (rows << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """Unpack the first `count` values, uint8; the inverse of `pack`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & (2**bits - 1)).reshape(-1)[:count]


def grid(plan: BucketPlan, chunk: int | None) -> tuple[int, int]:
    """Return the number of chunks and the values per chunk (the last one may hold fewer)."""
    width = min(chunk or plan.numel, plan.numel)
    return -(-plan.numel // max(1, width)), width


def chunked(plan: BucketPlan, chunk: int | None, bits: int) -> list[tuple[int, torch.dtype]]:
    """Return the fields of a message of one scale per chunk and `bits` per value."""
    return [(grid(plan, chunk)[0], wide(plan.dtype)), (-(-plan.numel * bits // 8), torch.uint8)]


def rows(x: Tensor, chunk: int | None) -> Tensor:
    """Reshape `[D]` to `[chunks, width]`, padded with zeros; 16-bit values become float32."""
    width = max(1, min(chunk or x.shape[0], x.shape[0]))
    return pad(x.to(wide(x.dtype)), (0, -x.shape[0] % width)).reshape(-1, width)


def scaled(values: Tensor, scales: Tensor, chunk: int | None, plan: BucketPlan) -> Tensor:
    """Return a bucket from integers `[D]` and one scale per chunk."""
    return (rows(values, chunk) * scales[:, None]).reshape(-1)[: plan.numel].to(plan.dtype)


def leaves(x: Tensor, plan: BucketPlan) -> tuple[Tensor, ...]:
    """Split a bucket into flat leaves."""
    return x.split([segment.numel for segment in plan.segments])


def place_dtype(size: int) -> torch.dtype:
    """Return the narrowest integer dtype for places 0 to size - 1."""
    dtypes = (torch.uint8, torch.int16, torch.int32, torch.int64)
    return next(dtype for dtype in dtypes if size <= torch.iinfo(dtype).max + 1)


def uniform(seed: int, t: Tensor | int, stream: int, shape: tuple[int, ...], worker: Tensor) -> Tensor:
    """Draw `shape` float64 in [0, 1) with 32 random bits on the worker's device, stored before use (see `once`)."""
    return once(draws.bits(seed, t, stream, shape, worker=worker).to(torch.float64) * 2.0**-32)
