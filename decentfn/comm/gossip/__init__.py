"""Gossip with the neighbors: `post` starts the messages, `collect` waits and mixes. Plain, compressed, and push-sum."""

from decentfn.comm.gossip.guarding import are_finite, beside, guarded, unless_bad
from decentfn.comm.gossip.plain import (
    Posted,
    arrived,
    collect,
    collect_mean,
    difference,
    is_active,
    mean,
    mix_context,
    narrow,
    neighbors_sum,
    post,
    repaired,
)
from decentfn.comm.gossip.push_sum import moved
