"""The page for Decent-DP's users: its two programs print the same, and it speaks of everything that they know."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import decentfn as df
from decentfn.core import trees

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from_decent_dp.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def printed(name, folder, ranks):
    """Return the output of the block that begins with `# name` under torchrun."""
    [code] = [block for block in BLOCKS if block.startswith(f"# {name}\n")]
    (folder / name).write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run([*launcher, str(folder / name)], capture_output=True, text=True, timeout=300, env=env)
    assert finished.returncode == 0, finished.stderr
    return [float(number) for number in re.findall(r"held-out loss (\d\.\d{5})", finished.stdout)]


@pytest.mark.slow
def test_the_programs_before_and_after_print_the_same_loss(tmp_path):
    pytest.importorskip("decent_dp")
    [before], [after] = (printed(name, tmp_path, ranks=2) for name in ("before.py", "after.py"))
    assert after == pytest.approx(before, abs=2e-5)
    assert after < 0.3  # the targets' variance is 0.5


def test_every_public_name_of_decent_dp_is_on_the_page():
    pytest.importorskip("decent_dp")
    from decent_dp import ddp, optim, topo, utils

    names = {name for module in (ddp, optim, topo, utils) for name in module.__all__}
    names |= set(inspect.signature(ddp.DecentralizedDataParallel).parameters)
    names |= {name for name in vars(ddp.DecentralizedDataParallel) if not name.startswith("_")} - {"forward"}
    names |= set(inspect.signature(ddp.DecentralizedDataParallel.global_avg).parameters) - {"self"}
    names |= {"pre_average_hook", "one-peer-exp", "alternating-exp-ring", "complete", "ring", "load_state_dict"}
    missing = {name for name in names if not re.search(rf"\b{re.escape(name)}\b", PAGE)}
    assert not missing


def test_every_name_of_this_library_on_the_page_exists():
    for name in re.findall(r"\bdf\.(\w+(?:\.\w+)*)", PAGE):
        place = df
        for part in name.split("."):
            assert hasattr(place, part), f"df.{name}"
            place = getattr(place, part)
    from decentfn.compat import decent_dp

    for name in re.findall(r"\bdecent_dp\.(\w+)", PAGE.split("## What differs")[1]):
        assert name in ("py",) or hasattr(decent_dp, name)
    assert hasattr(decent_dp, "keep_average")


def test_state_and_t_of_each_worker_are_all_that_a_resumed_run_needs(tmp_path):
    topology = df.topology("one-peer-exp", 4)
    init, step = df.adapt_while_communicate(
        lambda params, batch: ((params["w"] - batch) ** 2).sum(), df.transforms.accum_adamw(0.1, accum_iter=3), topology
    )
    fresh = df.stack(init({"w": torch.ones(3)}), 4)
    step = df.simulate(step, 4)

    def train(state, steps):
        for t in steps:
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(t))
            state, _ = step(state, batch, t)
        return state

    straight, saved = train(fresh, range(8)), train(fresh, range(5))
    for i in range(4):
        torch.save({"leaves": trees.leaves(df.worker(saved, i)), "t": 5}, tmp_path / f"worker-{i}.pt")
    files = [torch.load(tmp_path / f"worker-{i}.pt") for i in range(4)]
    leaves = [torch.stack(column) for column in zip(*(file["leaves"] for file in files), strict=True)]
    resumed = train(trees.fill(trees.enumerate_leaves(fresh), leaves), range(files[0]["t"], 8))
    for got, expected in zip(trees.leaves(resumed), trees.leaves(straight), strict=True):
        assert torch.equal(got, expected)


def test_a_run_goes_on_from_the_kept_average(ranks):
    """`keep_average` on ranks is `keep_average` on the stacked state, and everyone holds the mean after it."""
    from decentfn.compat import decent_dp

    init, _ = df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.1), df.topology("ring", 2))
    stacked = df.with_params(df.stack(init(torch.zeros(3)), 2), torch.tensor([[0.0, 1.0, 2.0], [2.0, 3.0, 6.0]]))
    mean = torch.tensor([1.0, 2.0, 4.0])
    assert torch.equal(df.params(decent_dp.keep_average(stacked)), mean.expand(2, 3))
    for kept in ranks(2).run(_keep_average):
        assert torch.equal(kept, mean)


def _keep_average():
    from decentfn.compat import decent_dp

    here = df.init()
    init, _ = df.adapt_while_communicate(lambda p, b: (p * b).sum(), df.sgd(0.1), df.topology("ring", 2))
    state = init(torch.tensor([[0.0, 1.0, 2.0], [2.0, 3.0, 6.0]])[here.rank])
    return df.params(decent_dp.keep_average(state))
