"""Workers that start apart come together without a gradient, or the algorithm refuses to start."""

import pytest
import torch

import decentfn as df
from decentfn.testing import problem
from tests import contract

pytestmark = pytest.mark.thorough

N, STEPS = 4, 50
NARROW = [row for row in contract.ROWS if row in ("diloco", "streaming_diloco", "slowmo")]
CASES = [(row, {}) for row in contract.ROWS] + [(row, {"wire_dtype": torch.bfloat16}) for row in NARROW]
STAY_APART = {"all_reduce", "demo", "relay_sgd, gradients", "sparse_loco"} | {
    row
    for row in contract.ROWS
    if row.startswith("decoupled_diloco") or "bits" in row and row.startswith(("diloco,", "streaming_diloco,"))
}
REFUSED = r"replicas must start equal"

cases = pytest.mark.parametrize(("row", "options"), CASES, ids=lambda x: str(x))


def needs_equal(row, options):
    return row in STAY_APART or bool(options)


def built(row, options, num_workers=N):
    subject = contract.ROWS[row]
    return subject.algorithm(
        lambda params, batch: 0.0 * sum((x**2).sum() for x in params.values()),
        df.sgd(0.1),
        subject.topology(num_workers),
        **subject.hyperparameters,
        **options,
    )


def params(worker):
    return {"w": torch.arange(6.0) + worker, "v": torch.full((3, 3), float(worker), dtype=torch.float64)}


def disagreement_left(algorithm, state):
    step, before = df.donate(df.simulate(algorithm.step, N)), df.consensus_distance(state)
    for t in range(STEPS):
        state, _ = step(state, torch.zeros(N, 1), t)
    return float(df.consensus_distance(state) / before)


@pytest.mark.one_in(3)
@cases
def test_unequal_workers_come_together_or_do_not_start(row, options):
    algorithm = built(row, options)
    state = problem.stacked([algorithm.init(params(i)) for i in range(N)])
    if needs_equal(row, options):
        for step in (algorithm.step, df.ema(algorithm).step):
            with pytest.raises(ValueError, match=REFUSED):
                df.simulate(step, N)(state, torch.zeros(N, 1), 0)
        with pytest.raises(ValueError, match=REFUSED):
            df.compile(df.simulate(algorithm.step, N), backend="eager")(state, torch.zeros(N, 1), 0)
    else:
        assert disagreement_left(algorithm, state) < 0.9


@pytest.mark.one_in(3)
@cases
def test_unequal_parameters_that_are_set_come_together_or_are_refused(row, options):
    algorithm = built(row, options)
    equal = df.stack(algorithm.init(params(0)), N)
    apart = problem.stacked([params(i) for i in range(N)])
    df.with_params(equal, df.stack(params(1), N))
    if needs_equal(row, options):
        with pytest.raises(ValueError, match=rf"with_params.*{REFUSED}"):
            df.with_params(equal, apart)
    else:
        assert disagreement_left(algorithm, df.with_params(equal, apart)) < 0.9


@pytest.mark.parametrize(("row", "options"), [case for case in CASES if needs_equal(*case)], ids=lambda x: str(x))
def test_ranks_that_need_equal_parameters_refuse_others(row, options):
    algorithm = built(row, options, 2)

    def start(rank):
        with pytest.raises(ValueError, match=rf"init\(params, buffers\).*{REFUSED}"):
            algorithm.init(params(rank))
        state = algorithm.init(params(0))
        with pytest.raises(ValueError, match=rf"with_params.*{REFUSED}"):
            df.with_params(state, params(rank))
        df.with_params(state, params(1))

    df.testing.on_ranks(2, start)
