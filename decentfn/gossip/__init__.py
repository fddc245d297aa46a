"""Meeting the neighbours: `post` starts what travels, `collect` waits for it and mixes. Plain, compressed, and push-sum's."""

from decentfn.gossip.plain import (
    Posted,
    Row,
    collect,
    difference,
    mean,
    mix_context,
    mixed,
    narrow,
    neighbours_sum,
    post,
    row,
)

__all__ = [
    "Posted",
    "Row",
    "collect",
    "difference",
    "mean",
    "mix_context",
    "mixed",
    "narrow",
    "neighbours_sum",
    "post",
    "row",
]
