"""The contract: every algorithm keeps every promise, or declines it as the page says."""

import pytest

import decentfn as df
from decentfn.testing import PROMISES, try_promise
from tests import contract


def test_every_algorithm_has_a_row_and_every_promise_a_column():
    functions = {name for name in df.algorithms.__all__ if name[0].islower()}
    assert {row.partition(",")[0] for row in contract.ROWS} == functions
    assert list(contract.HEADS) == list(PROMISES)


BY_INDUCTOR = (
    "compiled_ranks_agree",
    "laws_hold",
    "laws_hold_on_a_narrow_wire",
    "nothing_in_flight_is_written_over",
    "keeps_an_ema",
)
ALWAYS = (
    "adapt_while_communicate",
    "adapt_then_combine",
    "all_reduce",
    "gradient_tracking, atc",
    "stochastic_gradient_push, delayed",
    "push_diging",
    "quasi_global_adam",
    "choco_sgd",
)
"""Rows that are compiled by Inductor in every run; the others' compilations are slow."""


def cells():
    for row in contract.ROWS:
        for promise in PROMISES:
            slow = [pytest.mark.slow] if promise in BY_INDUCTOR and row not in ALWAYS else []
            yield pytest.param(row, promise, marks=[pytest.mark.xdist_group(row), *slow])


@pytest.mark.parametrize(("row", "promise"), list(cells()))
def test_the_contract(row, promise):
    declined = try_promise(PROMISES[promise], contract.ROWS[row])
    said = contract.committed_cells()[row, contract.HEADS[promise]]
    assert contract.cell(row, promise, declined) == said, (
        declined or "run `python -m tests.contract`, commit docs/contract.md"
    )
