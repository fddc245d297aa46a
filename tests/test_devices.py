"""Nothing in a step waits for the device or copies more than a round's weights to it: every algorithm, counted on meta."""

import pytest
import torch

from decentfn import trees
from tests import contract, devices


@pytest.mark.parametrize("row", contract.ROWS)
def test_a_step_waits_for_nothing_and_copies_a_rounds_numbers(row):
    for simulated in (False, True):
        seen, new = devices.copies(contract.ROWS[row], simulated=simulated)
        assert {leaf.device.type for leaf in trees.leaves(new)} == {"meta"}
        assert not any(copy.waits for copy in seen), seen
        assert sum(copy.numbers for copy in seen) <= 200 and len(seen) <= 16, seen


def test_what_waits_and_what_copies_is_seen():
    with devices.Copies() as copies:
        torch.ones(3).to("meta")
        torch.empty(3, device="meta").copy_(torch.ones(3))
    assert copies.seen == [devices.Copy(3, True)] * 2
    with pytest.raises(RuntimeError):
        torch.ones(1, device="meta").item()


def test_the_page_is_what_is_counted():
    assert devices.PAGE.read_text() == devices.page()
