"""What surrounds a training run."""

from decentfn.run import data
from decentfn.run.process_group import init

__all__ = ["data", "init"]
