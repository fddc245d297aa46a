"""Runs whose processes change: a step survives the loss of workers, and new workers join."""
