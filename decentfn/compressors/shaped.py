"""Compressors that treat the leaves as matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decentfn.compressors import wire
from decentfn.compressors.compressor import RULES, Compressor, Fields, Key, packed
from decentfn.core.arguments import checks_arguments
from decentfn.core.buckets import BucketPlan, Segment, wide


@checks_arguments(RULES)
def low_rank(rank: int = 1, *, seed: int = 0) -> Compressor:
    """Project each matrix M `[m, n]` (first axis x all others) onto r columns: P = orth(M G), G Gaussian, C = P (Pᵀ M).

    One step of a power iteration from a random start. δ = min over the matrices of r/min(m, n). Sent: P and Pᵀ M,
    (m + n) r values per matrix. Leaves that this does not make smaller, and one-dimensional ones, are sent
    uncompressed.

    Args:
        rank: r >= 1.
        seed: seed of G.
    Source: PowerSGD, Vogels et al., NeurIPS 2019, without its warm start (messages do not depend on earlier ones).
    """

    def shapes(plan: BucketPlan) -> list[tuple[int, int] | None]:
        found = [matrix_shape(segment) for segment in plan.segments]
        return [s if s and rank * (s[0] + s[1]) < s[0] * s[1] else None for s in found]

    def fields(plan: BucketPlan) -> Fields:
        pairs = zip(plan.segments, shapes(plan), strict=True)
        return [(rank * sum(shape) if shape else segment.numel, plan.dtype) for segment, shape in pairs]

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> list[Tensor]:
        columns = sum(shape[1] for shape in shapes(plan) if shape)
        uniform = wire.uniform(seed, key.t, key.bucket, (2, columns, rank), key.worker)
        gaussian = ((-2 * torch.log1p(-uniform[0])).sqrt() * torch.cos(2 * math.pi * uniform[1])).to(wide(plan.dtype))
        pieces, first = [], 0
        for leaf, shape in zip(wire.leaves(x, plan), shapes(plan), strict=True):
            if shape:
                matrix = leaf.reshape(shape).to(wide(plan.dtype))
                p = orthonormal(matrix @ gaussian[first : first + shape[1]]).to(plan.dtype).to(matrix.dtype)
                leaf = torch.cat([p.reshape(-1), (p.T @ matrix).reshape(-1)]).to(plan.dtype)
                first += shape[1]
            pieces.append(leaf)
        return pieces

    def decode(plan: BucketPlan, *pieces: Tensor) -> Tensor:
        leaves = []
        for piece, shape in zip(pieces, shapes(plan), strict=True):
            if shape:
                p, q = piece.to(wide(plan.dtype)).split([shape[0] * rank, shape[1] * rank])
                piece = (p.reshape(shape[0], rank) @ q.reshape(rank, shape[1])).reshape(-1).to(plan.dtype)
            leaves.append(piece)
        return torch.cat(leaves)

    def delta(plan: BucketPlan) -> float:
        return min([1.0, *(rank / min(shape) for shape in shapes(plan) if shape)])

    return packed(f"low_rank({rank}, seed={seed})", fields, encode, decode, delta)


@checks_arguments(RULES)
def dct_top_k(k: int = 32, *, chunk: int = 64) -> Compressor:
    """Send the k largest DCT coefficients of each tile of a leaf. δ = min over tiles of k/size.

    A matrix (first axis x all others) or vector is divided into tiles whose sides are the largest divisors of its sides
    up to `chunk`. Sent per tile: k values and k places (1 or 2 bytes each), or all values of a tile of at most k.

    Args:
        k: coefficients per tile, >= 1.
        chunk: longest side of a tile, >= 1; 64 x 64 = 4,096 values for a matrix whose sides it divides.
    Source: DeMo, Peng et al., 2024.
    """

    def tiles(segment: Segment) -> tuple[int, int, int, int]:
        """Return the numbers of tiles down and across, and the sides of a tile."""
        m, n = matrix_shape(segment) or (1, segment.numel)
        h, w = _divisor(m, chunk), _divisor(n, chunk)
        return m // h, n // w, h, w

    def fields(plan: BucketPlan) -> Fields:
        found: Fields = []
        for segment in plan.segments:
            down, across, h, w = tiles(segment)
            count = down * across * min(k, h * w)
            found += [(count, plan.dtype), (count if k < h * w else 0, wire.place_dtype(h * w))]
        return found

    def encode(x: Tensor, plan: BucketPlan, key: Key) -> list[Tensor]:
        pieces = []
        for leaf, segment in zip(wire.leaves(x, plan), plan.segments, strict=True):
            down, across, h, w = tiles(segment)
            tile = leaf.reshape(down, h, across, w).movedim(1, 2).to(wide(plan.dtype))
            turned = (_cosines(h, tile) @ tile @ _cosines(w, tile).T).reshape(down * across, h * w).to(plan.dtype)
            if k < h * w:
                places = turned.abs().topk(k, dim=1, sorted=False).indices
                pieces += [turned.gather(1, places), places.to(wire.place_dtype(h * w))]
            else:
                pieces.append(turned)
        return pieces

    def decode(plan: BucketPlan, *parts: Tensor) -> Tensor:
        leaves = []
        for values, places, segment in zip(parts[::2], parts[1::2], plan.segments, strict=True):
            down, across, h, w = tiles(segment)
            turned = values.reshape(down * across, min(k, h * w))
            if k < h * w:
                turned = wire.placed(turned, places.reshape(down * across, k), h * w)
            turned = turned.reshape(down, across, h, w).to(wide(plan.dtype))
            tile = _cosines(h, turned).T @ turned @ _cosines(w, turned)
            leaves.append(tile.movedim(1, 2).reshape(-1).to(plan.dtype))
        return torch.cat(leaves)

    def delta(plan: BucketPlan) -> float:
        sizes = [tiles(segment)[2] * tiles(segment)[3] for segment in plan.segments if segment.numel]
        return min([1.0, *(k / size for size in sizes)])

    return packed(f"dct_top_k({k}, chunk={chunk})", fields, encode, decode, delta)


def matrix_shape(segment: Segment) -> tuple[int, int] | None:
    """Return a leaf's shape as a matrix, first axis x all others; None for a vector."""
    if len(segment.shape) < 2 or not segment.numel:
        return None
    m, n = segment.shape[0], segment.numel // segment.shape[0]
    return (m, n) if min(m, n) > 1 else None


def orthonormal(p: Tensor) -> Tensor:
    """Return r orthonormal columns whose span contains the columns of `p` `[..., m, r]`, r <= m."""
    # Householder: Gram-Schmidt's columns are not orthogonal if those of p are nearly dependent.
    return torch.linalg.qr(p).Q


def _cosines(size: int, like: Tensor) -> Tensor:
    """Return the orthonormal DCT-II as a matrix `[size, size]`; row f is frequency f."""
    f = torch.arange(size, dtype=torch.float64, device=like.device)
    table = torch.cos(math.pi / size * f[:, None] * (f[None, :] + 0.5)) * math.sqrt(2 / max(1, size))
    scaled = torch.where(f[:, None] == 0, table / math.sqrt(2), table)
    return scaled.to(like.dtype)


def _divisor(n: int, limit: int) -> int:
    return next((d for d in range(min(n, limit), 0, -1) if n % d == 0), 1)
