"""Meeting the neighbours: `post` starts what travels, `collect` waits for it and mixes. Plain, compressed, and push-sum's."""

from decentfn.gossip.guarding import Noted, are_finite, guarded, is_guarded, note_skipped, unless_bad
from decentfn.gossip.per_slot import arrived, exchange
from decentfn.gossip.plain import (
    Posted,
    Row,
    collect,
    difference,
    given,
    mean,
    mix_context,
    mixed,
    narrow,
    neighbours_sum,
    post,
    repaired,
    row,
)

__all__ = [
    "Noted",
    "Posted",
    "Row",
    "are_finite",
    "arrived",
    "collect",
    "difference",
    "exchange",
    "given",
    "guarded",
    "is_guarded",
    "mean",
    "mix_context",
    "mixed",
    "narrow",
    "neighbours_sum",
    "note_skipped",
    "post",
    "repaired",
    "row",
    "unless_bad",
]
