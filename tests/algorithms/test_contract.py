"""The contract: every algorithm keeps every promise, or declines it as the page says."""

import pytest

import decentfn as df
from decentfn.testing import PROMISES, try_promise
from tests import contract


def test_every_algorithm_has_a_row_and_every_promise_a_column():
    functions = set(df.algorithms.__all__)
    assert {row.partition(",")[0] for row in contract.ROWS} == functions
    assert list(contract.HEADS) == list(PROMISES)


FIRST = (
    "adapt_while_communicate, Decent-DP",
    "gradient_tracking, atc",
    "stochastic_gradient_push, delayed",
    "choco_sgd",
    "relay_sgd, models",
    "streaming_diloco",
)
"""The rows of the first tier."""
LATER = {("compiled_ranks_agree", "relay_sgd, models"), ("compiled_ranks_agree", "streaming_diloco")}
"""Its cells that CI alone tries: they compile for 20 s each."""


def cells():
    """CI compiles one row of each family with Inductor; `-m slow` compiles the others."""
    for row in contract.ROWS:
        for promise in PROMISES:
            marks = [pytest.mark.xdist_group(row)]
            if promise in ("compiled_ranks_agree", "sixteen_bits_compile") and row not in contract.FAMILIES:
                marks.append(pytest.mark.slow)
            elif promise == "sixteen_bits_compile" or row not in FIRST or (promise, row) in LATER:
                marks.append(pytest.mark.thorough)
            yield pytest.param(row, promise, marks=marks)


@pytest.mark.parametrize(("row", "promise"), list(cells()))
def test_the_contract(row, promise):
    declined = try_promise(PROMISES[promise], contract.ROWS[row])
    said = contract.committed_cells()[row, contract.HEADS[promise]]
    assert contract.cell(row, promise, declined) == said, (
        declined or "run `python -m tests.contract`, commit docs/contract.md"
    )
