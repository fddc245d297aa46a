"""The page "Write your own" is run as it stands; what it makes passes `df.testing` there, and is used here."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import decentfn as df

PAGE = Path(__file__).parents[2] / "docs" / "write_your_own.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


pytestmark = [pytest.mark.xdist_group("write your own"), pytest.mark.thorough]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page as a module of the user's."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "write_your_own.py").write_text("\n".join(BLOCKS), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        yield importlib.import_module("write_your_own")


def test_every_recipe_passes_its_checks(made):
    algorithm = next(block for block in BLOCKS if "@kit.algorithm" in block)
    assert len(algorithm.splitlines()) <= 30 and "decentfn." not in algorithm


def test_they_work_together(made):
    def loss_fn(params, batch):
        return ((params - batch) ** 2).mean()

    topology, n = df.topology("skip-ring", 8), 8
    targets = torch.linspace(-1, 1, n)[:, None].expand(n, 3)
    optimizer = made.signum(df.schedules.linear(0.05, 0.0, 100)(torch.tensor(0)).item())
    for init, step in (
        made.shift_register(loss_fn, optimizer, df.topology("static-ring", n)),
        df.deep_squeeze(loss_fn, df.sgd(0.1), topology, compressor=made.powers_of_two(), gamma=0.5),
    ):
        state, step = df.stack(init(torch.ones(3)), n), df.simulate(step, n)
        for t in range(60):
            state, metrics = step(state, targets, t)
        assert df.params(state).mean().abs() < 0.2
