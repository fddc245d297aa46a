"""The page "Coming from DistributedDataParallel" does what it says: its code is run, before against after."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import decentfn as df

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_ddp.md"


def run_page():
    code: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(block, code)
    here = df.init()

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    draw = torch.Generator().manual_seed(here.rank)
    inputs = torch.randn(20, 2, 8, 4, generator=draw)
    batches = list(zip(inputs, inputs.sum(-1, keepdim=True), strict=True))
    before = code["before"](model(), batches, here.rank)
    return (
        {k.removeprefix("module."): v.clone() for k, v in before.items()},
        code["after"](model(), batches),
        code["decentralized"](model(), batches),
    )


def test_before_and_after_are_the_same_and_one_name_makes_it_decentralized(ranks):
    results = ranks(4).run(run_page)
    for before, after, decentralized in results:
        assert before.keys() == after.keys() == decentralized.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-5)
    assert not torch.equal(results[0][2]["0.weight"], results[1][2]["0.weight"])


def test_every_name_on_the_page_exists():
    for name in re.findall(r"df\.(\w+)", PAGE.read_text()):
        assert hasattr(df, name), name
