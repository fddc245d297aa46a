"""Decent-DP's trajectories, recorded from the installed package while the tests run, and by this library's own step."""

import functools
import importlib

import pytest
import torch

import decentfn as df
from decentfn.compat import decent_dp
from tests.decent_dp import problem, replay
from tests.decent_dp.problem import cases

pytest.importorskip("decent_dp", reason="the peer to compare with: pip install decent-dp==0.2.3 loguru")

TOLERANCE = 2e-6
SIZES = (2, 4)
EVERY = [pytest.param(n, name, id=f"{n}-{name}") for n in SIZES for name in cases(n)]


pytestmark = [pytest.mark.xdist_group("decent_dp"), pytest.mark.thorough]  # one process makes the fixture


@pytest.fixture(scope="module")
def records(ranks):
    """`records(n)`: what decent-dp does on n gloo ranks, run now."""
    record = importlib.import_module("tests.decent_dp.record")

    @functools.cache
    def of_size(n):
        arrays = ranks(n).run(record.on_this_rank)[0]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    return of_size


def difference(replayed, recorded, name, rows=slice(None)):
    return float((replayed.x.double() - recorded[f"{name}/x"][:, rows].double()).abs().max())


def assert_same(replayed, recorded, name, rows=slice(None)):
    assert difference(replayed, recorded, name, rows) <= TOLERANCE
    torch.testing.assert_close(replayed.loss.double(), recorded[f"{name}/loss"][:, rows], atol=TOLERANCE, rtol=1e-5)
    if replayed.mean is not None:
        mean = recorded[f"{name}/mean"][rows]
        torch.testing.assert_close(replayed.mean.expand_as(mean), mean, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(replayed.distance, recorded[f"{name}/distance"][rows], atol=TOLERANCE, rtol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("n", "name"), EVERY)
def test_the_librarys_step_repeats_a_run_of_decent_dp(records, n, name):
    assert_same(replay.run(cases(n)[name], n), records(n), name)


@pytest.mark.parametrize("n", SIZES)
def test_every_recorded_run_trains_and_disagrees_with_the_mean(records, n):
    """The comparison would be empty if nothing moved, or if all workers did the same."""
    for name in cases(n):
        x = records(n)[f"{name}/x"]
        assert (x[-1] - x[0]).abs().max() > 0.05
        assert (x[-1] - x[-1].mean(0)).abs().max() > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_edges_are_asked_for_in_the_order_that_the_schedule_states(records, n):
    for name, case in cases(n).items():
        launched, mixed = (records(n)[f"{name}/{key}"].tolist() for key in ("launched", "mixed"))
        after = case.average.after if case.average and not case.average.will_revert else None
        assert launched == [1, *range(3, case.steps + 2)]
        assert mixed == [-1 if u == 1 or u - 1 == after else u for u in range(1, case.steps + 1)]


@pytest.mark.parametrize("n", SIZES)
def test_buckets_are_closed_where_decent_dp_closes_them(records, n):
    start = problem.initial_params()
    for name, case in cases(n).items():
        found = decent_dp.buckets([(key, start[key]) for key in replay.BACKWARD], case.bucket_mb)
        number = {key: k for k, names in enumerate(found) for key in names}
        assert [number[key] for key in problem.NAMES] == records(n)[f"{name}/buckets"].tolist()


MISTAKES = [
    ("edge skip", "one-peer-exp/sgdm"),
    ("edge skip", "ring/adamw"),
    ("edge skip", "alternating-exp-ring/adamw_ready"),
    ("decay groups", "one-peer-exp/adamw_ready"),
    ("decay groups", "complete/adam_ready"),
    ("decay groups", "ring/accum_adamw_ready"),
    ("global clip", "ring/sgdm_clip_2buckets"),
    ("global clip", "alternating-exp-ring/accum_adamw_accum2_clip_buckets"),
    ("bias correction", "one-peer-exp/adamw"),
    ("bias correction", "sched/adamw_cosine"),
    ("update at the local point", "one-peer-exp/sgdm"),
]


@pytest.mark.parametrize(("mistake", "name"), MISTAKES)
def test_a_mistake_is_noticed(records, mistake, name):
    mistaken = replay.run(cases(4)[name], 4, mistake)
    with pytest.raises(AssertionError):
        assert_same(mistaken, records(4), name)
    assert difference(mistaken, records(4), name) > 10 * TOLERANCE


ON_RANKS = [
    (2, "complete/adamw"),
    (2, "ring/sgdm_clip_2buckets"),
    (2, "one-peer-exp/accum_adamw_accum2_clip_buckets"),
    (4, "complete/adam_ready"),
    (4, "ring/accum_adam_ready"),
    (4, "one-peer-exp/sgdm"),
    (4, "alternating-exp-ring/sgdm"),
    (4, "alternating-exp-ring/adamw_accum3"),
    (4, "gamma/sgdm_0.3"),
    (4, "sched/adamw_cosine"),
    (4, "avg/sgdm_keep"),
    (4, "avg/sgdm_forgot_revert"),
    (4, "custom/weights_differ_by_step"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("n", "name"), ON_RANKS)
def test_gloo_ranks_repeat_a_run_of_decent_dp(ranks, records, n, name):
    for rank, mine in enumerate(ranks(n).run(replay.on_this_rank, cases(n)[name], n, {})):
        assert_same(mine, records(n), name, rank)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["one-peer-exp/adamw_ready", "alternating-exp-ring/sgdm_clip_2buckets"])
def test_the_compiled_step_repeats_a_run_of_decent_dp(records, name, backend):
    assert_same(replay.run(cases(4)[name], 4, backend=backend), records(4), name)


def test_compiled_gloo_ranks_repeat_a_run_of_decent_dp(ranks, records):
    how = {"backend": "aot_eager"}
    for rank, mine in enumerate(ranks(2).run(replay.on_this_rank, cases(2)["gamma/sgdm_0.3"], 2, how)):
        assert_same(mine, records(2), "gamma/sgdm_0.3", rank)


def test_a_schedule_of_random_rounds_is_refused():
    with pytest.raises(
        ValueError, match="pairs or groups in a fixed order; use a topology of df.topologies.from_groups"
    ):
        decent_dp.schedule(df.topology("random-matching", num_workers=4))
