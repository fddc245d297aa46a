"""Iterates of decent-bench 0.3.0, recorded by `tests/decent_bench_records.py`, against this library's.

All nine are equal to 1e-12. Names differ: its ATC_Tracking (also `NEXT`) is `gradient_tracking(form="semi-atc")`, and its
Aug-DGM (also `ATC_DIGing`) is the default, `form="atc"`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import decentfn as df

RECORD = json.loads((Path(__file__).parents[1] / "data" / "decent_bench.json").read_text(encoding="utf-8"))
K = RECORD["local_steps"]
PAIRS = {
    "DGD": (df.adapt_while_communicate, {}),
    "ATC": (df.adapt_then_combine, {}),
    "ATC_Tracking": (df.gradient_tracking, {"form": "semi-atc"}),
    "AugDGM": (df.gradient_tracking, {"form": "atc"}),
    "EXTRA": (df.extra, {}),
    "ExactDiffusion": (df.exact_diffusion, {}),
    "NIDS": (df.nids, {}),
    "KGT": (df.k_gt, {"inner_steps": K, "outer_learning_rate": RECORD["options"]["KGT"]["aux_step_size"]}),
    "LED": (df.led, {"inner_steps": K, "beta": RECORD["options"]["LED"]["aux_step_size"]}),
}


def loss(x, batch):
    A, b = batch
    return x @ A @ x / 2 + b @ x


@pytest.mark.parametrize("name", PAIRS)
def test_iterates_are_those_of_decent_bench(name):
    algorithm, options = PAIRS[name]
    expected = np.array(RECORD["iterates"][name])
    topology = df.topologies.from_matrices("recorded", [RECORD["W"]])
    init, step = algorithm(loss, df.sgd(RECORD["rate"]), topology, **options)
    starts = [init(torch.tensor(x, dtype=torch.float64)) for x in expected[0]]
    state = df.core.trees.map(lambda *leaves: torch.stack(leaves), *starts)
    batch = (torch.tensor(RECORD["A"], dtype=torch.float64), torch.tensor(RECORD["b"], dtype=torch.float64))
    step, local = df.simulate(step, len(starts)), options.get("inner_steps", 1)
    for t in range(local * (len(expected) - 1)):
        state, _ = step(state, batch, t)
        if (t + 1) % local == 0:
            got = df.params(state).numpy()
            np.testing.assert_allclose(got, expected[(t + 1) // local], rtol=0, atol=1e-12)
    assert np.abs(expected[-1] - expected[0]).max() > 0.1
