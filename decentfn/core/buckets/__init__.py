"""Flat buckets: the layout of a tree of tensors in vectors, and arithmetic on all of them at once."""

from decentfn.core.buckets.arithmetic import (
    add,
    all_finite,
    cast_like,
    copy_wide,
    counted_once,
    divide,
    each,
    everywhere_within_worker,
    global_norm,
    is_finite,
    known_finite,
    mean_within_worker,
    multiply,
    rows_of,
    scale,
    sum_within_worker,
    where,
    wide,
    widen,
    write_over,
    zeros_like,
)
from decentfn.core.buckets.parts import mean_of_processes, part_of, part_shape, unsharded, without_values
from decentfn.core.buckets.plan import (
    BucketPlan,
    Buckets,
    Mask,
    Place,
    Places,
    Plan,
    Segment,
    elements,
    flatten,
    loose,
    require_bucket_mb,
)
