"""RelaySGD's published step counts, exact to the step; `python tests/relaysgd_records.py` replays all 858."""

import pytest
import torch

from tests.relaysgd_records import METHODS, Record, by_run, quadratic, records, replay

pytestmark = pytest.mark.thorough

LONGEST = 1000  # steps that CI may take


def in_ci() -> list[list[Record]]:
    """For each method and topology the largest number of workers with short enough records: at most two records."""
    chosen = {}
    for run in by_run([record for record in records() if record.steps <= LONGEST and record.num_workers <= 24]):
        chosen[run[0].algorithm, run[0].topology] = run
    return [sorted(run, key=lambda record: -record.steps)[:2] for run in chosen.values()]


def test_all_858_records_are_there():
    assert len(records()) == 858
    assert {record.algorithm for record in records()} == set(METHODS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("run", in_ci(), ids=lambda run: f"{run[0].algorithm} {run[0].topology} {run[0].num_workers}")
def test_published_step_counts_are_met_to_the_step(run):
    assert replay(run) == [record.steps for record in run]


def test_the_problem_has_the_heterogeneity_and_the_distance_that_it_should():
    record = Record("D2", "ring", 6, 0.1, 10.0, seed=2, recorded_lr=0.1, steps=0)
    A, B, optimum = quadratic(record)
    gradients = A.transpose(1, 2) @ (A @ optimum - B)
    assert float((gradients**2).sum((1, 2)).mean()) == pytest.approx(0.1, abs=1e-5)
    assert float(optimum.norm()) == pytest.approx(10.0, abs=1e-9)
    assert float(gradients.sum(0).norm()) == pytest.approx(0.0, abs=1e-12)
    singular = torch.linalg.svdvals(A)
    assert singular.min() == pytest.approx(0.5) and singular.max() == pytest.approx(1.0)
