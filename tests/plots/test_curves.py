"""Curves show the numbers they are given; the library itself does not load matplotlib."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import decentfn as df

pytestmark = pytest.mark.thorough

LOSSES = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("values", [LOSSES, LOSSES.tolist(), list(LOSSES), LOSSES.clone().requires_grad_()])
def test_there_is_a_line_for_every_worker_and_a_thick_one_for_their_mean(values):
    *workers, mean = df.plots.training_curves(values, steps=range(0, 40, 2)).axes[0].lines
    for line, losses in zip(workers, LOSSES.T.double(), strict=True):
        assert np.array_equal(line.get_ydata(), losses) and line.get_xdata().tolist() == list(range(0, 40, 2))
    assert np.allclose(mean.get_ydata(), LOSSES.double().mean(1), rtol=1e-12)
    assert all(mean.get_linewidth() > 2 * line.get_linewidth() for line in workers)


def test_one_worker_is_one_line():
    [line] = df.plots.training_curves([3.0, 2.0]).axes[0].lines
    assert line.get_ydata().tolist() == [3.0, 2.0]


def test_consensus_curves_are_named_and_end_where_all_are_equal():
    [axes] = df.plots.consensus({"ring": [4.0, 2.0, 1.0], "one-peer-exp": [4.0, 0.0, 0.0]}).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ring", "one-peer-exp"]
    assert axes.get_yscale() == "log" and axes.lines[0].get_ydata().tolist() == [4.0, 2.0, 1.0]
    assert np.isnan(axes.lines[1].get_ydata()[1:]).all()
    assert df.plots.consensus(torch.ones(3), axes=axes) is axes.figure and len(axes.lines) == 3


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: p.training_curves([]), r"values=\[\]\): expected numbers \[T\] or \[T, N\]"),
        (lambda p: p.training_curves("loss"), r"values='loss'\): expected numbers"),
        (lambda p: p.training_curves([[1.0], [1.0, 2.0]]), "expected numbers"),
        (lambda p: p.training_curves(torch.ones(2, 3, 4)), "expected numbers"),
        (lambda p: p.training_curves([1.0, 2.0], steps=[0]), "2 rows need 2 steps, there are 1"),
        (lambda p: p.training_curves([1.0], axes=3), "axes are one matplotlib Axes"),
        (lambda p: p.consensus({}), "no curve to draw"),
        (lambda p: p.consensus({"ring": [[1.0]]}), r"expected numbers \[T\]"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(df.plots)


def test_without_matplotlib_the_library_works_and_a_picture_names_the_extra():
    code = """
import sys
import decentfn as df
assert not [name for name in sys.modules if name.startswith("matplotlib")]
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None  # as if it were not installed
try:
    df.plots.consensus([1.0])
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "pip install matplotlib" in done.stdout, done.stderr
