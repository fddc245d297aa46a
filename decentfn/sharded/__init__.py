"""Workers of several processes: their groups, the operators between them, and modules that PyTorch has sharded over them."""

from decentfn.sharded.modules import (
    as_placed,
    is_sharded,
    leave,
    local,
    own_shards,
    placed_like,
    places,
    require_parts,
    require_unwrapped,
    sharded,
    unsharded,
)
from decentfn.sharded.sums import make_tp_groups
from decentfn.sharded.workers import split_workers
