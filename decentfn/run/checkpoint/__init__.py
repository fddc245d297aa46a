"""Checkpoints of a run: every worker's state, whole or not at all, and weights for others."""

from decentfn.run.checkpoint.exchange import export, import_
from decentfn.run.checkpoint.manifest import best, latest
from decentfn.run.checkpoint.restoring import Restored, restore
from decentfn.run.checkpoint.saving import Saver, save

__all__ = ["Restored", "Saver", "best", "export", "import_", "latest", "restore", "save"]
