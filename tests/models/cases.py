"""All cases, by name: tiny networks with random weights, and a loss and batches for each."""

from tests.models import language_cases, other_cases, recurrent_cases, self_cases, torch_cases, vision_cases
from tests.models.registry import CASES, Case, Made, batch_of

__all__ = [
    "CASES",
    "Case",
    "Made",
    "batch_of",
    "language_cases",
    "other_cases",
    "recurrent_cases",
    "self_cases",
    "torch_cases",
    "vision_cases",
]
