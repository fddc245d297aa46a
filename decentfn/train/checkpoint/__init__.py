"""Checkpoints of a run, complete or absent, and exchange of weights with other programs."""

from decentfn.train.checkpoint.exchange import export, import_
from decentfn.train.checkpoint.files import best, checkpoints, latest
from decentfn.train.checkpoint.restoring import Restored, restore
from decentfn.train.checkpoint.saving import Saver, save

__all__ = ["Restored", "Saver", "best", "checkpoints", "export", "import_", "latest", "restore", "save"]
