"""`examples/transformers_model.py` trains a model of that package."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")


def test_the_transformers_example_learns(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    first, last = importlib.import_module("transformers_model").main(steps=20, seq_len=32)
    assert last < 0.7 * first
