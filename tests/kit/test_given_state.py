"""A step trains states like those that its own init has made; any other is refused at the first call, in one sentence."""

import pickle

import pytest
import torch

import decentfn as df
from tests import cases

N = 4
ONE_OF_EACH = list({case.algorithm: case for case in reversed(cases.CASES)}.values())
HOW = {
    "simulated": lambda step: df.simulate(step, N),
    "compiled": lambda step: df.compile(df.simulate(step, N), backend="aot_eager"),
}


def algorithm(case, optimizer, loss=None):
    return cases.build(case, N, optimizer, loss)


def first_step(step, state, how):
    return HOW[how](step)(df.stack(state, N), cases.batches(N, 0), 0)


def test_every_algorithm_is_tried():
    named = set(df.algorithms.__all__)
    assert {case.algorithm for case in ONE_OF_EACH} == named


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_state_of_another_optimizer_is_refused_with_the_way_out(case, how):
    old = algorithm(case, df.adam(0.1)).init(cases.params())
    init, step = algorithm(case, df.sgd(0.1, momentum=0.9))
    init(cases.params())
    with pytest.raises(
        ValueError, match=r"^step\(state, batch, t\): .*local\.opt\.0\.count.*local\.opt\.0\.momentum.*init"
    ):
        first_step(step, old, how)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_state_of_another_algorithm_is_refused(case):
    other = next(other for other in ONE_OF_EACH if type(state_of(other).memory) is not type(state_of(case).memory))
    init, step = algorithm(case, df.sgd(0.1))
    init(cases.params())
    with pytest.raises(
        ValueError, match=r"^step\(state, batch, t\): the state is a State with.*, .* takes a State with"
    ):
        first_step(step, state_of(other), "simulated")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_without_init_a_state_that_the_step_cannot_read_is_refused(case, how):
    """There is nothing to compare it with; so what fails, or changes its form, names the state."""
    other = next(other for other in ONE_OF_EACH if type(state_of(other).memory) is not type(state_of(case).memory))
    for state, said in (
        (state_of(other), "State with|another algorithm|Dimension out of range"),
        (algorithm(case, df.adam(0.1)).init(cases.params()), "AdamState|count"),
    ):
        _, step = algorithm(case, df.sgd(0.1, momentum=0.9))
        with pytest.raises((ValueError, RuntimeError, IndexError), match=said):
            first_step(step, state, how)


def state_of(case):
    return algorithm(case, df.sgd(0.1)).init(cases.params())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_state_of_another_width_is_refused_once_init_has_said_which_is_right(case, how):
    """A plain loss takes any width; what init was called with is what the ranks agreed on."""
    init, step = algorithm(case, df.sgd(0.1), narrow_loss)
    old = init_of_width(case, 5)
    init({"w": torch.ones(7, 3)})
    with pytest.raises(ValueError, match=r"w \[5, 3\].*init.*w \[7, 3\]"):
        first_step(step, old, how)


def narrow_loss(params, batch):
    return (params["w"] ** 2).sum()


def init_of_width(case, width):
    return algorithm(case, df.sgd(0.1), narrow_loss).init({"w": torch.ones(width, 3)})


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_state_of_an_equal_algorithm_is_taken_from_memory_and_from_disk(case):
    """Built twice, in this process or an earlier one, with init called here or not."""
    made = state_of(case)
    for state in (made, pickle.loads(pickle.dumps(made))):
        for calls_init in (False, True):
            init, step = algorithm(case, df.sgd(0.1))
            if calls_init:
                init(cases.params())
            first_step(step, state, "simulated")


@pytest.mark.parametrize("how", HOW)
def test_a_modules_loss_knows_its_width_without_init(how):
    case = cases.Case("adapt_while_communicate", "ring")
    old, new = (df.functional(torch.nn.Linear(3, width), torch.nn.functional.mse_loss) for width in (2, 5))
    state = algorithm(case, df.sgd(0.1), old[2]).init(*old[:2])
    _, step = algorithm(case, df.sgd(0.1), df.accumulate(new[2]))
    batch = torch.ones(N, 2, 6, 3), torch.ones(N, 2, 6, 5)
    with pytest.raises(ValueError, match=r"'bias' .*\[2\].*\[5\].*init"):
        HOW[how](step)(df.stack(state, N), batch, 0)


@pytest.mark.parametrize("how", HOW)
def test_ema_takes_its_own_states_only(how):
    case = cases.Case("gradient_tracking", "static-exp")
    plain, averaged = algorithm(case, df.sgd(0.1)), df.ema(algorithm(case, df.sgd(0.1)))
    of_adam = df.ema(algorithm(case, df.adam(0.1)))
    first_step(averaged.step, averaged.init(cases.params()), how)
    with pytest.raises(ValueError, match=r"memory of gradient_tracking.*with an average.*df\.ema"):
        first_step(averaged.step, plain.init(cases.params()), how)
    with pytest.raises(ValueError, match=r"memory of decentfn\.wrappers.*memory of gradient_tracking"):
        first_step(plain.step, averaged.init(cases.params()), how)
    with pytest.raises(ValueError, match=r"local\.opt\.0\.count"):
        first_step(averaged.step, of_adam.init(cases.params()), how)


def test_an_optimizer_whose_start_depends_on_values_is_taken():
    def from_values(params):
        return [torch.full((), float(bucket.sum())) for bucket in params]

    optimizer = df.Transform(from_values, lambda grads, state, params: (grads, state))
    case = cases.Case("adapt_then_combine", "ring")
    init, step = algorithm(case, optimizer)
    first_step(step, init(cases.params()), "simulated")


def test_a_known_state_is_not_looked_at_again():
    """The plan caches the check, so a step pays for it once."""
    laid_out = []

    def init_state(params):
        laid_out.append(params)
        return ()

    optimizer = df.Transform(init_state, lambda grads, state, params: (grads, state))
    init, step = algorithm(cases.Case("adapt_then_combine", "ring"), optimizer)
    state, step = df.stack(init(cases.params()), N), df.simulate(step, N)
    state, _ = step(state, cases.batches(N, 0), 0)
    before = len(laid_out)
    for t in range(1, 4):
        state, _ = step(state, cases.batches(N, t), t)
    assert len(laid_out) == before


def test_a_stacked_state_in_a_step_of_one_worker_is_told_about_simulate():
    init, step = algorithm(cases.Case("adapt_then_combine", "ring"), df.sgd(0.1))
    with pytest.raises(ValueError, match=r"4 workers.*df\.simulate\(step, 4\).*df\.worker"):
        step(df.stack(init(cases.params()), N), cases.batches(N, 0), 0)
