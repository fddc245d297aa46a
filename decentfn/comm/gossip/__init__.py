"""Meeting the neighbours: `post` starts what travels, `collect` waits for it and mixes. Plain, compressed, and push-sum's."""

from decentfn.comm.gossip.guarding import Noted, are_finite, guarded, is_guarded, note_skipped, unless_bad
from decentfn.comm.gossip.plain import (
    Posted,
    arrived,
    collect,
    difference,
    is_active,
    mean,
    mix_context,
    narrow,
    neighbours_sum,
    post,
    repaired,
)
