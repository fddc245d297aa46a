"""What surrounds a training run."""

from decentfn.runtime.process_group import init

__all__ = ["init"]
