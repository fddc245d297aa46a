"""Flat buckets: how a tree of tensors is laid out in vectors, and what is computed with all of them at once."""

from decentfn.buckets.arithmetic import (
    add,
    all_finite,
    cast_like,
    copy_wide,
    divide,
    each,
    global_norm,
    multiply,
    scale,
    where,
    wide,
    widen,
    zeros_like,
)
from decentfn.buckets.plan import BucketPlan, Buckets, Mask, Plan, Segment, elements, flatten, require_bucket_mb

__all__ = [
    "BucketPlan",
    "Buckets",
    "Mask",
    "Plan",
    "Segment",
    "add",
    "all_finite",
    "cast_like",
    "copy_wide",
    "divide",
    "each",
    "elements",
    "flatten",
    "global_norm",
    "multiply",
    "require_bucket_mb",
    "scale",
    "where",
    "wide",
    "widen",
    "zeros_like",
]
