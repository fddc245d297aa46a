"""The contract: every algorithm keeps every promise, or declines it as the page says."""

import pytest

import decentfn as df
from decentfn.testing import PROMISES, try_promise
from tests import contract


def test_every_algorithm_has_a_row_and_every_promise_a_column():
    functions = set(df.algorithms.__all__)
    assert {row.partition(",")[0] for row in contract.ROWS} == functions
    assert list(contract.HEADS) == list(PROMISES)


def cells():
    """One row of each family by default; Inductor, which takes half a minute, for others only if slow tests are asked for."""
    for row in contract.ROWS:
        for promise in PROMISES:
            marks = [pytest.mark.xdist_group(row)]
            if row not in contract.FAMILIES:
                marks.append(pytest.mark.slow if promise == "compiled_ranks_agree" else pytest.mark.thorough)
            yield pytest.param(row, promise, marks=marks)


@pytest.mark.parametrize(("row", "promise"), list(cells()))
def test_the_contract(row, promise):
    declined = try_promise(PROMISES[promise], contract.ROWS[row])
    said = contract.committed_cells()[row, contract.HEADS[promise]]
    assert contract.cell(row, promise, declined) == said, (
        declined or "run `python -m tests.contract`, commit docs/contract.md"
    )
