"""What surrounds a training run."""

from decentfn.run.data import Shards, dirichlet_shards, fixed_shards, shards
from decentfn.run.process_group import init

__all__ = ["Shards", "dirichlet_shards", "fixed_shards", "init", "shards"]
