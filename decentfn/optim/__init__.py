"""Gradient transforms, and schedules of the update count."""
