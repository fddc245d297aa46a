"""Foundations of the package: trees, buckets, scalars, numbers, random draws, formatting."""
