"""Workers of several processes: their groups, the operators between them, and modules that PyTorch has sharded over them."""

from decentfn.sharded.modules import (
    Partition,
    as_placed,
    is_sharded,
    leave,
    local,
    own_shards,
    partition_of,
    placed_like,
    require_unwrapped,
    sharded,
    unsharded,
)
from decentfn.sharded.workers import make_tp_groups, split_workers
