"""What surrounds a training run."""

from decentfn.run import checkpoint, data
from decentfn.run.process_group import init

__all__ = ["checkpoint", "data", "init"]
