"""Streaming DiLoCo against trajectories of torchft's: recorded by its tests, and computed with its unchanged code.

Two workers, one layer per fragment. torchft sends a fragment τ steps before it is due; decentfn sends it when it is due
and applies it τ steps later, so its first step has the number τ.
"""

import json
from pathlib import Path

import pytest
import torch

import decentfn as df

DATA = json.loads((Path(__file__).parents[1] / "data" / "torchft_streaming_diloco.json").read_text(encoding="utf-8"))
SETUP = DATA["setup"]
N = SETUP["workers"]


def trajectory(start, loss, batch, case, steps, wrap=lambda step: step):
    """Return θ `[S+1, N, P, ...]` and φ of all steps; `start` is `[P, ...]`, a row per fragment."""
    init, step = df.streaming_diloco(
        lambda params, c: loss(torch.stack([params[f"{p}"] for p in range(len(start))]), c),
        df.sgd(case["gamma"]),
        df.topology("complete", N),
        inner_steps=case["H"],
        num_fragments=case["P"],
        delay=case["tau"],
        alpha=case["alpha"],
        outer_learning_rate=case["eta"],
        outer_momentum=case["beta"],
    )
    state = df.stack(init({f"{p}": row for p, row in enumerate(start)}), N)
    step, thetas, phis = wrap(df.simulate(step, N)), [], []
    for s in range(steps + 1):
        for tree, found in ((df.params(state), thetas), (state.memory.phi.tree(), phis)):
            found.append(torch.stack([tree[f"{p}"].clone() for p in range(len(start))], dim=1))
        state, _ = step(state, batch, case["tau"] + s)
    return torch.stack(thetas), torch.stack(phis)


def constant_gradients(case, steps):
    """A run of torchft's mocked updates: every gradient is 2."""
    start = torch.full((SETUP["P"], *SETUP["fragment_shape"]), SETUP["start"])
    return trajectory(start, lambda x, c: SETUP["gradient"] * x.sum(), torch.zeros(N), SETUP | case, steps)


@pytest.mark.parametrize("case", DATA["recorded"], ids=lambda case: f"tau={case['tau']},alpha={case['alpha']}")
def test_recorded_trajectories_are_reproduced_to_the_last_digit(case):
    expected = torch.tensor(case["theta"])
    theta, phi = constant_gradients(case, expected.shape[1] - 1)
    for p in range(SETUP["P"]):
        assert (theta[:, :, p].flatten(1) == expected[p, :, None]).all()
        assert (phi[case["phi_at"], :, p].flatten(1) == torch.tensor(case["phi"][p])[:, None]).all()


def test_a_worker_that_survives_and_its_lost_peers_successor_follow_the_same_recorded_trajectory():
    survivor, successor = DATA["recovery"]
    theta, phi = constant_gradients({"tau": 0, "alpha": 0.0}, len(survivor["theta"][0]) - 1)
    for p in range(SETUP["P"]):
        assert (theta[:, 0, p].flatten(1) == torch.tensor(survivor["theta"][p])[:, None]).all()
        assert (phi[survivor["phi_at"], 0, p].flatten(1) == torch.tensor(survivor["phi"][p])[:, None]).all()
        joined = torch.tensor(successor["theta"][p][3:])  # two steps alone, then the survivor's state after nine
        assert (theta[9 : 9 + len(joined), 1, p].flatten(1) == joined[:, None]).all()


@pytest.mark.parametrize("wrap", [lambda step: step, df.donate], ids=["pure", "donated"])
@pytest.mark.parametrize("case", DATA["computed"], ids=lambda case: f"H={case['H']},P={case['P']},tau={case['tau']}")
def test_computed_trajectories_of_unequal_workers_agree_in_float64(case, wrap):
    """Six operations per step and number, none larger than 8: within four spacings of float64."""
    start, optima = (torch.tensor(case[name], dtype=torch.float64) for name in ("start", "optima"))
    expected = torch.tensor(case["theta"], dtype=torch.float64).transpose(0, 1)
    theta, phi = trajectory(start, lambda x, c: 0.5 * ((x - c) ** 2).sum(), optima, case, len(expected) - 1, wrap)
    torch.testing.assert_close(theta, expected, atol=1e-15, rtol=0)
    of_all = torch.tensor(case["phi"], dtype=torch.float64)[:, None].expand_as(phi)
    torch.testing.assert_close(phi, of_all, atol=1e-15, rtol=0)
