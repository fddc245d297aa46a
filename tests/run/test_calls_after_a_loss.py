"""Calls outside steps in a run of `df.survive`: a loss ends them with a named error, soon, and none mixes two sets of workers."""

import json
import time
from datetime import timedelta

import pytest
import torch

import decentfn as df
from decentfn.comm.collectives import world
from decentfn.elastic.generation import generation_of
from decentfn.testing import on_ranks
from tests.run import survivors
from tests.run.survivors import ALGORITHMS, gradient, loss_fn, start_params
from tests.run.test_survival import leave

AT, STEPS = 3, 7


def outcome(call, *arguments):
    """The value of a call outside steps, or the name of its error."""
    try:
        return call(*arguments)
    except df.errors.RunError as error:
        return type(error).__name__


def train(rank, dies_inside, through):
    init, step = ALGORITHMS["gossip"](loss_fn, 4)
    step = df.survive(step, patience=timedelta(seconds=60))
    state, seen = init(start_params(rank, "gossip")), []
    for t in range(STEPS):
        if rank == 3 and t == AT:
            if dies_inside:  # its partner lacks its message, and the two others end the step
                world().channels.group.allreduce([torch.zeros(1)]).wait()
                while len(through) < 2:
                    time.sleep(0.01)
            leave(step)
            break
        state, _ = step(state, gradient(rank, t), t)
        if t == AT:
            through.append(rank)
        mean = outcome(df.consensus_mean, state)
        seen.append(
            (
                state.params.tensors[0].clone(),
                mean,
                outcome(df.consensus_distance, state),
                generation_of(world()).members.seats,
            )
        )
    return seen


@pytest.mark.parametrize("dies_inside", [False, True])
def test_a_call_between_steps_is_of_one_set_of_workers_or_fails_on_all(dies_inside):
    seen = on_ranks(4, train, dies_inside, [])
    for t in range(STEPS):
        those = [its[t] for its in seen if len(its) > t]
        assert len({seats for *_, seats in those}) == 1 or t == AT
        x = torch.stack([its[0] for its in those]).mean(0)
        for _, mean, distance, _ in those:
            if t == AT and dies_inside:
                assert mean == distance == "PeerLost"  # nobody waited for workers that have made theirs
            else:
                torch.testing.assert_close(mean["x"], x, rtol=0, atol=1e-14)
    assert [len(its) for its in seen] == [STEPS] * 3 + [AT]


# -- processes that are killed in such a call -----------------------------------------------------------------------------

TIMEOUT = 60


def check(lines, directory):
    """Each call is one of a step's whole generation, or has failed with a name, soon."""
    by_step = {}
    for its in lines:
        for line in (line for line in its if "x" in line):
            by_step.setdefault((line["t"], line["generation"]), []).append(line)
    ended = [its[-1]["end"] for its in lines if "end" in its[-1]]
    assert ended == ["done"] * len(ended) and len(ended) >= 2
    failed = 0
    for (t, _), those in by_step.items():
        x = torch.tensor([line["x"] for line in those], dtype=torch.float64)
        is_whole = len(those) == len(those[0]["seats"])
        for call in (call for line in those for call in line["calls"]):
            assert call["seconds"] < TIMEOUT, (t, call)  # nothing waits for the dead
            failed += call["error"] is not None
            if call["error"]:
                assert call["error"] in ("PeerLost", "ExchangeTimeout"), (t, call)
                continue
            expected = {
                "gather": [float(seat) for seat in those[0]["seats"]],
                "evaluate": sum(those[0]["places"]) / len(those[0]["places"]),
                "stop": False,
                "save": None,
            }
            if is_whole:  # else somebody died before it could tell its parameters
                distance = ((x - x.mean(0)) ** 2).sum(1).mean().sqrt().item()
                expected |= {"mean": x.mean(0).tolist(), "distance": distance}
            if call["call"] in expected:
                assert call["value"] == pytest.approx(expected[call["call"]], rel=1e-12), (t, call)
    found = json.loads((df.checkpoint.checkpoints(directory)[-1] / "manifest.json").read_text())
    assert (found["step"], found["num_workers"]) == (max(t for t, _ in by_step) + 1, len(ended))
    return failed


@pytest.mark.thorough
def test_a_process_killed_in_any_call_is_survived_at_the_next_step(tmp_path):
    names = ["mean", "evaluate", "save", "stop"]
    job = {"algorithm": "gossip", "calls": True, "timeout": TIMEOUT, "patience": 30, "steps": 12}
    jobs = [job | {"dies_in": [i % 4, 4, name]} for i, name in enumerate(names)]
    # Before the first call of a generation, for which nothing is connected yet; and with a newcomer.
    jobs += [
        job | {"dies_in": [1, 4, "mean"], "dies": {3: 4}},
        job | {"algorithm": "push-sum", "n": 3, "joins": 5, "steps": 30},
    ]
    for i, lines in enumerate(survivors.results(tmp_path, jobs)):
        failed = check(lines, tmp_path / str(i) / "saved")
        assert failed or "joins" in jobs[i] or jobs[i]["dies_in"][2] == "stop", jobs[i]
        assert "joins" not in jobs[i] or not failed
