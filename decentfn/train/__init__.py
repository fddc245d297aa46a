"""Everything around the training step: setup, data, checkpoints, evaluation, logs."""

from decentfn.train import checkpoint, data, logs
from decentfn.train.process_group import init
from decentfn.train.signals import preemption

__all__ = ["checkpoint", "data", "init", "logs", "preemption"]
