"""The page "Write your own" is run; what it makes passes `df.testing` there, and is used here."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import decentfn as df
from decentfn.testing import PROMISES, Subject, try_promise

PAGE = Path(__file__).parents[2] / "docs" / "write_your_own.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


QUICK = ("traced_ranks_agree", "one_graph", "accumulates", "laws_hold", "equal_workers_stay_equal")
pytestmark = [pytest.mark.xdist_group("write your own"), pytest.mark.thorough]


def module(folder, text):
    """The page as a module of the user's."""
    (folder / "write_your_own.py").write_text(text, encoding="utf-8")
    sys.modules.pop("write_your_own", None)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        return importlib.import_module("write_your_own")


def check_quickly(algorithm, topology, **how):
    """As `check_algorithm`, traced, with a few of its promises."""
    subject = Subject(algorithm, topology, **how | {"backend": "aot_eager"})
    for name in QUICK if subject.laws else QUICK[:-1]:
        assert try_promise(PROMISES[name], subject) is None


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """With a few promises tried; the contract tries all of them with this library's own algorithms."""
    text = "\n".join(BLOCKS)
    assert text.count("df.testing.check_algorithm(") == 3
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(df.testing, "check_algorithm", check_quickly)
        return module(tmp_path_factory.mktemp("own"), text)


@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path):
    module(tmp_path, "\n".join(BLOCKS))


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


@pytest.mark.parametrize("recipe", ["shift_register", "push", "median", "local_norms"])
def test_what_a_recipe_does_not_share_is_a_lone_workers(made, recipe):
    own = getattr(made, recipe)
    own = made.mixing(own) if recipe in ("median", "local_norms") else own
    n, targets = 3, torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))

    def head(topology, batches, **options):
        workers = batches.shape[1]
        init, step = own(lambda p, b: ((p["head"] - b) ** 2 + p["body"] ** 2).sum(), df.sgd(0.1), topology, **options)
        state = df.stack(init({"head": torch.ones(2), "body": torch.ones(2)}), workers)
        step = df.simulate(step, workers)
        for t, batch in enumerate(batches):
            state, _ = step(state, batch, t)
        return df.params(state)["head"]

    topology = (made.one_way if recipe == "push" else made.ring)(n)
    alone = [head(df.topology("complete", 1), targets[:, i : i + 1])[0] for i in range(n)]
    assert torch.equal(head(topology, targets, shared="!head"), torch.stack(alone))
