"""The contract: every algorithm keeps every promise, or declines it as the page says."""

from dataclasses import replace

import pytest
import torch

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
    "streaming_diloco",
)
"""The rows that CI compiles on ranks."""
IN_16_BITS = ("power_gossip",)
"""Of the other families, the one that CI compiles in 16 bits: its messages are matrices."""
LATER = ("stochastic_gradient_push, delayed", "streaming_diloco")
"""Rows of these that CI alone tries."""

INDUCTOR = ("compiled_ranks_agree", "sixteen_bits_compile")
"""Promises that say nothing of a step which is only traced."""
COMPILED = (*INDUCTOR, "laws_hold", "laws_hold_on_a_narrow_wire", "nothing_in_flight_is_written_over", "keeps_an_ema")
OF_A_TRACE = (
    *("traced_ranks_agree", "donated_is_pure", "one_graph", "laws_hold", "nothing_in_flight_is_written_over"),
    *("scales_the_loss", "keeps_an_ema", "averages_buffers"),
)
"""Promises about the step that is traced once for all of them; the invariants are tried on a narrow wire, too, eagerly."""
BUILT_BY_ANOTHER = ("exact_diffusion", "motef", "nids", "sparse_loco")
"""Functions whose step is that of d2, beer or diloco."""


def further_forms():
    """Rows of steps that CI traces in another row: that of a family, or the first."""
    traced = {row.partition(",")[0] for row in contract.FAMILIES} | {*BUILT_BY_ANOTHER}
    for row in contract.ROWS:
        function = row.partition(",")[0]
        if row not in contract.FAMILIES and function in traced:
            yield row
        traced.add(function)


FURTHER_FORMS = set(further_forms())

TRACED = {row: replace(subject, backend="aot_eager") for row, subject in contract.ROWS.items()}
"""Rows that are traced instead of compiled."""


def cells_of(row):
    """The promises of a row with their subjects and the tier that tries them: of a row that is no family's, every other one.

    A scaled loss keeps the laws of `laws_hold` where a worker overflows, too, and a traced step has the bits of an eager one.
    """
    scales = contract.committed_cells()[row, contract.HEADS["scales_the_loss"]] == "holds"
    place = list(contract.ROWS).index(row)
    for number, promise in enumerate(PROMISES):
        if row in FIRST:
            tier = "slow" if promise in ("traced_ranks_agree", "sixteen_bits_compile") else "first"
            yield promise, contract.ROWS, "thorough" if row in LATER and tier == "first" else tier
            continue
        is_family = row in contract.FAMILIES
        if promise not in INDUCTOR:
            # An algorithm does not see where its gradient comes from.
            repeats = promise == "works_by_autograd" and not is_family or promise == "laws_hold" and scales
            is_slow = repeats or row in FURTHER_FORMS and promise in OF_A_TRACE
            is_slow |= not is_family and (place + number) % 2 == 1
            yield promise, TRACED, "slow" if is_slow else "thorough"
        if promise in COMPILED:
            yield (
                promise,
                contract.ROWS,
                "thorough" if row in IN_16_BITS and promise == "sixteen_bits_compile" else "slow",
            )


def cells():
    """CI compiles four rows of different families with Inductor and traces one of each other function; `-m slow` compiles all.

    One worker's step is in one graph if that of a first row is, so CI runs the others without a compiler.
    """
    for row in contract.ROWS:
        for promise, subjects, tier in cells_of(row):
            marks = [pytest.mark.xdist_group(row), *([] if tier == "first" else [getattr(pytest.mark, tier)])]
            name = f"{row}-{promise}"
            is_both = promise in COMPILED and promise not in INDUCTOR and row not in FIRST
            name += "-inductor" if is_both and subjects is contract.ROWS else ""
            if promise == "works_alone" and row not in FIRST:
                yield pytest.param(row, promise, subjects, "force_eager", marks=marks, id=name)
                marks, name = [marks[0], pytest.mark.slow], f"{name}-traced"
            yield pytest.param(row, promise, subjects, "default", marks=marks, id=name)


@pytest.mark.parametrize(("row", "promise", "subjects", "stance"), list(cells()))
def test_the_contract(row, promise, subjects, stance):
    with torch.compiler.set_stance(stance):
        declined = try_promise(PROMISES[promise], subjects[row])
    said = contract.committed_cells()[row, contract.HEADS[promise]]
    assert contract.cell(row, promise, declined) == said, (
        declined or "run `python -m tests.contract`, commit docs/contract.md"
    )
