"""A run never deletes or mixes in checkpoints that it neither wrote nor restored."""

import shutil

import pytest
import torch

import decentfn as df
from decentfn.train.checkpoint import files


@pytest.fixture
def another_runs(tmp_path):
    """A directory with checkpoints of steps 10, 20 and 30, as another process left it."""
    _train(tmp_path / "run", (10, 20, 30))
    files.own.clear()
    return tmp_path / "run"


def _state():
    init, _ = df.adapt_while_communicate(lambda x, b: (x - b).square().sum(), df.sgd(0.1), df.topology("complete", 1))
    return init(torch.zeros(3))


def _train(directory, steps, keep=3):
    with df.checkpoint.Saver(directory, keep=keep) as saver:
        for step in steps:
            saver.save(_state(), step)


def _names(directory):
    return [path.name for path in df.checkpoint.checkpoints(directory)]


@pytest.mark.parametrize("steps", [(100, 200, 300), (30, 40), (15, 25), (5, 6)])
def test_a_run_from_scratch_in_another_runs_directory_is_refused(another_runs, steps):
    before = _names(another_runs)
    with pytest.raises(ValueError, match="steps 10 to 30.*neither restored nor saved"):
        _train(another_runs, steps)
    with pytest.raises(ValueError, match="another run's"):
        df.checkpoint.save(another_runs, _state(), steps[0])
    assert _names(another_runs) == before


@pytest.mark.parametrize("newest", [True, False])
def test_a_run_that_restored_goes_on(another_runs, newest):
    source = another_runs if newest else df.checkpoint.checkpoints(another_runs)[0]
    _, start, _, _ = df.checkpoint.restore(source, _state())
    _train(another_runs, (start + 10, start + 20))
    assert df.checkpoint.restore(another_runs, _state()).step == start + 20


def test_the_advice_works(another_runs):
    with df.checkpoint.Saver(another_runs) as saver:
        with pytest.raises(ValueError, match="restore"):
            saver.save(_state(), 100)
        _, start, _, _ = df.checkpoint.restore(another_runs, _state())
        saver.save(_state(), start + 1)
    _train(another_runs.parent / "another", (100,))


def test_a_run_whose_checkpoints_were_removed_begins_again(tmp_path):
    _train(tmp_path / "run", (10,))
    shutil.rmtree(tmp_path / "run")
    _train(tmp_path / "run", (1,))


def test_a_second_saver_of_the_same_process_goes_on(tmp_path):
    _train(tmp_path / "run", (10,))
    _train(tmp_path / "run", (20,))
    assert len(_names(tmp_path / "run")) == 2
