"""Gradient transforms and optimizers on flat buckets: pairs `(init, update)` as in optax."""

from decentfn.buckets import global_norm
from decentfn.transforms.basic import (
    ScheduleState,
    TraceState,
    add_decayed_weights,
    clip_by_bucket_norm,
    clip_by_global_norm,
    scale,
    scale_by_learning_rate,
    trace,
)
from decentfn.transforms.mix_aware import MixContext
from decentfn.transforms.optimizers import (
    AccumAdamState,
    AdamState,
    accum_adam,
    accum_adamw,
    adam,
    adamw,
    scale_by_accum_adam,
    scale_by_adam,
    sgd,
)
from decentfn.transforms.transform import (
    MaskedTransform,
    MixAware,
    Transform,
    by_leaf,
    chain,
    identity,
    masked,
    not_bias_or_norm,
    partition,
)

__all__ = [
    "AccumAdamState",
    "AdamState",
    "MaskedTransform",
    "MixAware",
    "MixContext",
    "ScheduleState",
    "TraceState",
    "Transform",
    "accum_adam",
    "accum_adamw",
    "adam",
    "adamw",
    "add_decayed_weights",
    "by_leaf",
    "chain",
    "clip_by_bucket_norm",
    "clip_by_global_norm",
    "global_norm",
    "identity",
    "masked",
    "not_bias_or_norm",
    "partition",
    "scale",
    "scale_by_accum_adam",
    "scale_by_adam",
    "scale_by_learning_rate",
    "sgd",
    "trace",
]
