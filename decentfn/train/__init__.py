"""What surrounds a training run."""

from decentfn.train import checkpoint, data, logs
from decentfn.train.process_group import init
from decentfn.train.signals import preemption

__all__ = ["checkpoint", "data", "init", "logs", "preemption"]
