"""What surrounds a training run."""

from decentfn.run import checkpoint, data, logs
from decentfn.run.process_group import init
from decentfn.run.signals import preemption

__all__ = ["checkpoint", "data", "init", "logs", "preemption"]
