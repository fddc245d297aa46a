"""What surrounds a training run."""

from decentfn.runtime.data import Shards, dirichlet_shards, fixed_shards, shards
from decentfn.runtime.process_group import init

__all__ = ["Shards", "dirichlet_shards", "fixed_shards", "init", "shards"]
