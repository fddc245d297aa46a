"""The contract: every algorithm keeps every promise, or declines it as the page says."""

from dataclasses import replace

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
    "stochastic_gradient_push, delayed",
    "choco_sgd",
    "streaming_diloco",
)
"""The rows of the first tier."""
LATER = {("compiled_ranks_agree", "streaming_diloco")}
"""Its cells that CI alone tries: they compile for 20 s each."""

INDUCTOR = ("compiled_ranks_agree", "sixteen_bits_compile")
"""Promises that say nothing of a step which is only traced."""
COMPILED = (*INDUCTOR, "laws_hold", "laws_hold_on_a_narrow_wire", "nothing_in_flight_is_written_over", "keeps_an_ema")
FAMILIES_ONLY = (*INDUCTOR, "works_by_autograd")
"""Promises that CI tries for a row of each family: an algorithm does not see where its gradient comes from."""
OF_A_TRACE = (
    *("traced_ranks_agree", "donated_is_pure", "one_graph", "laws_hold", "nothing_in_flight_is_written_over"),
    *("scales_the_loss", "keeps_an_ema", "averages_buffers"),
)
"""Promises about the step that is traced once for all of them; the invariants are tried on a narrow wire, too, eagerly."""


def further_forms():
    """Rows of functions that CI traces in another row: that of a family, or the first."""
    traced = {row.partition(",")[0] for row in contract.FAMILIES}
    for row in contract.ROWS:
        function = row.partition(",")[0]
        if row not in contract.FAMILIES and function in traced:
            yield row
        traced.add(function)


FURTHER_FORMS = set(further_forms())

TRACED = {row: replace(subject, backend="aot_eager") for row, subject in contract.ROWS.items()}
"""Rows that are traced instead of compiled."""


def mark_of(row, promise):
    """The mark of a row of a family: CI compiles it on ranks, or alone in 16 bits; `-m slow` does both."""
    is_even = contract.FAMILIES.index(row) % 2 == 0
    compiles_on_ranks = row in FIRST or not is_even
    wanted = {
        "compiled_ranks_agree": compiles_on_ranks,
        "traced_ranks_agree": not compiles_on_ranks,
        "sixteen_bits_compile": is_even,
    }
    if not wanted.get(promise, True):
        return [pytest.mark.slow]
    is_first = row in FIRST and promise != "sixteen_bits_compile" and (promise, row) not in LATER
    return [] if is_first else [pytest.mark.thorough]


def cells():
    """CI compiles one row of each family with Inductor and traces one of each other function; `-m slow` compiles all."""
    for row in contract.ROWS:
        for promise in PROMISES:
            marks = [pytest.mark.xdist_group(row)]
            if row in contract.FAMILIES:
                marks += mark_of(row, promise)
                yield pytest.param(row, promise, contract.ROWS, marks=marks, id=f"{row}-{promise}")
                continue
            if promise not in INDUCTOR:
                is_slow = promise in FAMILIES_ONLY or row in FURTHER_FORMS and promise in OF_A_TRACE
                traced = [*marks, pytest.mark.slow if is_slow else pytest.mark.thorough]
                yield pytest.param(row, promise, TRACED, marks=traced, id=f"{row}-{promise}")
            if promise in COMPILED:
                compiled = [*marks, pytest.mark.slow]
                yield pytest.param(row, promise, contract.ROWS, marks=compiled, id=f"{row}-{promise}-inductor")


@pytest.mark.parametrize(("row", "promise", "subjects"), list(cells()))
def test_the_contract(row, promise, subjects):
    declined = try_promise(PROMISES[promise], subjects[row])
    said = contract.committed_cells()[row, contract.HEADS[promise]]
    assert contract.cell(row, promise, declined) == said, (
        declined or "run `python -m tests.contract`, commit docs/contract.md"
    )
