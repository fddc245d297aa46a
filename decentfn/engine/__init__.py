"""Transforms of a step: `compile`, `simulate` and `donate` take a `Step` and return one."""
