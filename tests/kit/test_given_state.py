"""A step trains states like those that its own init has made; any other is refused at the first call, in one sentence."""

import copy
import pickle
from functools import cache

import pytest
import torch

import decentfn as df
from tests import contract, network

pytestmark = pytest.mark.thorough

N = 4
ONE_OF_EACH = list({row.partition(",")[0]: row for row in reversed(contract.ROWS)}.values())
HOW = {
    "simulated": lambda step: df.simulate(step, N),
    "compiled": lambda step: df.compile(df.simulate(step, N), backend="aot_eager"),
}


def algorithm(row, optimizer, loss=None):
    return network.build(row, N, optimizer, loss)


def first_step(step, state, how):
    return HOW[how](step)(df.stack(state, N), network.batches(N, 0), 0)


def test_every_algorithm_is_tried():
    named = set(df.algorithms.__all__)
    assert {row.partition(",")[0] for row in ONE_OF_EACH} == named


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("row", ONE_OF_EACH)
def test_a_state_of_another_optimizer_is_refused_with_the_way_out(row, how):
    old = algorithm(row, df.adam(0.1)).init(network.params())
    init, step = algorithm(row, df.sgd(0.1, momentum=0.9))
    init(network.params())
    with pytest.raises(
        ValueError, match=r"^step\(state, batch, t\): .*local\.opt\.0\.count.*local\.opt\.0\.momentum.*init"
    ):
        first_step(step, old, how)


@pytest.mark.parametrize("row", ONE_OF_EACH)
def test_a_state_of_another_algorithm_is_refused(row):
    other = next(other for other in ONE_OF_EACH if type(state_of(other).memory) is not type(state_of(row).memory))
    init, step = algorithm(row, df.sgd(0.1))
    init(network.params())
    with pytest.raises(
        ValueError, match=r"^step\(state, batch, t\): the state has 'State with.* where init laid out 'State with"
    ):
        first_step(step, state_of(other), "simulated")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("row", ONE_OF_EACH)
def test_without_init_a_state_that_the_step_cannot_read_is_refused(row, how):
    """It is compared with the layout of a start from its own parameters."""
    other = next(other for other in ONE_OF_EACH if type(state_of(other).memory) is not type(state_of(row).memory))
    averaged = df.ema_state(df.ema(algorithm(row, df.sgd(0.1, momentum=0.9))).init(network.params()))
    for state in (state_of(other), algorithm(row, df.adam(0.1)).init(network.params()), averaged):
        _, step = algorithm(row, df.sgd(0.1, momentum=0.9))
        with pytest.raises(ValueError, match=r"step\(state, batch, t\): the state has '.*' where init laid out '.*'"):
            first_step(step, state, how)


@cache
def state_of(row):
    return algorithm(row, df.sgd(0.1)).init(network.params())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("row", ONE_OF_EACH)
def test_a_state_of_another_width_is_refused_once_init_has_said_which_is_right(row, how):
    """A plain loss takes any width; what init was called with is what the ranks agreed on."""
    init, step = algorithm(row, df.sgd(0.1), narrow_loss)
    old = init_of_width(row, 5)
    init({"w": torch.ones(7, 3)})
    with pytest.raises(ValueError, match=r"w \[5, 3\].*init.*w \[7, 3\]"):
        first_step(step, old, how)


def narrow_loss(params, batch):
    return (params["w"] ** 2).sum()


def init_of_width(row, width):
    return algorithm(row, df.sgd(0.1), narrow_loss).init({"w": torch.ones(width, 3)})


@pytest.mark.parametrize("row", ONE_OF_EACH)
def test_a_state_of_an_equal_algorithm_is_taken_from_memory_and_from_disk(row):
    """Built twice, in this process or an earlier one, with init called here or not."""
    made = state_of(row)
    for state in (made, pickle.loads(pickle.dumps(made))):
        for calls_init in (False, True):
            init, step = algorithm(row, df.sgd(0.1))
            if calls_init:
                init(network.params())
            first_step(step, state, "simulated")


def test_memory_of_another_topology_is_refused_until_it_starts_again():
    def built(topology):
        options = {"compressor": df.compressors.top_k(0.5), "gamma": 0.3}
        init, step = df.choco_sgd(lambda x, b: ((x - b) ** 2).sum(), df.sgd(0.05), topology, **options)
        return init, df.simulate(step, 4)

    topologies = df.topology("static-ring", 4), df.topology("star", 4)
    batch = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (init, ring), (_, star) = map(built, topologies)
    state = df.stack(init(batch[0]), 4)
    for t in range(5):
        state, _ = ring(state, batch, t)
    state = df.set_learning_rate(state, 0.0)
    with pytest.raises(ValueError, match=r"sums on topology static-ring .* step is of star .*df.with_params"):
        star(state, batch, 5)
    state = df.with_params(state, df.params(state))
    for t in range(5, 200):
        state, _ = star(state, batch, t)
    assert df.consensus_distance(state) < 1e-4  # it stays large with the ring's sums
    df.donate(star)(state, batch, 200)  # looks at the state again


@pytest.mark.parametrize("how", HOW)
def test_a_modules_loss_knows_its_width_without_init(how):
    row = "adapt_while_communicate on ring"
    old, new = (df.functional(torch.nn.Linear(3, width), torch.nn.functional.mse_loss) for width in (2, 5))
    state = algorithm(row, df.sgd(0.1), old[2]).init(*old[:2])
    _, step = algorithm(row, df.sgd(0.1), df.accumulate(new[2]))
    batch = torch.ones(N, 2, 6, 3), torch.ones(N, 2, 6, 5)
    with pytest.raises(ValueError, match=r"'bias' .*\[2\].*\[5\].*init"):
        HOW[how](step)(df.stack(state, N), batch, 0)


@pytest.mark.parametrize("how", HOW)
def test_ema_takes_its_own_states_only(how):
    row = "gradient_tracking, awc"
    plain, averaged = algorithm(row, df.sgd(0.1)), df.ema(algorithm(row, df.sgd(0.1)))
    of_adam = df.ema(algorithm(row, df.adam(0.1)))
    first_step(averaged.step, averaged.init(network.params()), how)
    with pytest.raises(ValueError, match=r"memory of gradient_tracking.*with an average.*df\.ema"):
        first_step(averaged.step, plain.init(network.params()), how)
    with pytest.raises(ValueError, match=r"memory of decentfn\.wrappers.*memory of gradient_tracking"):
        first_step(plain.step, averaged.init(network.params()), how)
    with pytest.raises(ValueError, match=r"local\.opt\.0\.count"):
        first_step(averaged.step, of_adam.init(network.params()), how)


@pytest.mark.parametrize("transform", [df.donate, lambda step: df.compile(step, backend="eager"), lambda step: step])
def test_after_its_first_step_a_step_still_refuses_another_state_of_the_same_run(transform):
    """The average of `df.ema`, or another optimizer's numbers, beside parameters that the step knows."""
    plain = algorithm("adapt_then_combine on ring", df.sgd(0.1))
    init, step = df.ema(plain)
    state, step = df.stack(init(network.params()), N), transform(df.simulate(step, N))
    state, _ = step(state, network.batches(N, 0), 0)
    other = algorithm("adapt_then_combine on ring", df.adam(0.1)).init(network.params())
    mixed = state._replace(local=state.local._replace(opt=df.stack(other, N).local.opt))
    for given, refusal in (
        (df.ema_state(state), "needs one with an average"),
        (mixed, "another algorithm, network or"),
    ):
        with pytest.raises(ValueError, match=refusal):
            step(given, network.batches(N, 1), 1)


def test_a_state_from_inference_mode_is_not_written_over_and_its_copy_is():
    init, step = algorithm("adapt_then_combine on ring", df.sgd(0.1))
    state = init(network.params())
    with torch.inference_mode():
        state = df.stack(state, N)
    step = df.donate(df.simulate(step, N))
    with pytest.raises(RuntimeError, match="inference tensor"):
        step(state, network.batches(N, 0), 0)
    step(copy.deepcopy(state), network.batches(N, 0), 0)


def test_a_state_that_is_changed_in_inference_mode_as_in_lightnings_validation_is_trained_on():
    module = torch.nn.Linear(3, 1)
    params, buffers, loss_fn = df.functional(module, torch.nn.functional.mse_loss)
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    step, batch = df.donate(step), (torch.ones(2, 3), torch.ones(2, 1))
    for change in (
        lambda state: df.set_learning_rate(state, 0.1),
        lambda state: df.with_params(state, df.params(state)),
        lambda state: df.load_state_dict(module, state, df.state_dict(module, state)),
    ):
        state, undisturbed = init(params, buffers), init(params, buffers)
        with torch.inference_mode():
            state = change(state)
        state, undisturbed = step(state, batch, 0)[0], step(undisturbed, batch, 0)[0]
        assert torch.equal(state.params[0], undisturbed.params[0])


def test_an_optimizer_whose_start_depends_on_values_is_taken():
    def from_values(params):
        return [torch.full((), float(bucket.sum())) for bucket in params]

    optimizer = df.Transform(from_values, lambda grads, state, params: (grads, state))
    row = "adapt_then_combine on ring"
    init, step = algorithm(row, optimizer)
    first_step(step, init(network.params()), "simulated")


def test_a_known_state_is_not_looked_at_again():
    """The plan caches the check, so a step pays for it once."""
    laid_out = []

    def init_state(params):
        laid_out.append(params)
        return ()

    optimizer = df.Transform(init_state, lambda grads, state, params: (grads, state))
    init, step = algorithm("adapt_then_combine on ring", optimizer)
    state, step = df.stack(init(network.params()), N), df.simulate(step, N)
    state, _ = step(state, network.batches(N, 0), 0)
    before = len(laid_out)
    for t in range(1, 4):
        state, _ = step(state, network.batches(N, t), t)
    assert len(laid_out) == before


def test_a_stacked_state_in_a_step_of_one_worker_is_told_about_simulate():
    init, step = algorithm("adapt_then_combine on ring", df.sgd(0.1))
    with pytest.raises(ValueError, match=r"4 workers.*df\.simulate\(step, 4\).*df\.worker"):
        step(df.stack(init(network.params()), N), network.batches(N, 0), 0)


def test_a_default_device_other_than_the_cpu_is_refused_before_a_schedule_or_a_step_number_is_made_there():
    """On a GPU each of them would be waited for; meta stands for it."""
    topology, x = df.topology("ring", 2), torch.zeros(3)

    def make():
        return df.all_reduce(lambda p, b: ((p - b) ** 2).sum(), df.sgd(0.1), topology)

    init, step = make()
    state, simulated = df.stack(init(x), 2), df.simulate(step, 2)
    calls = {
        "ring": lambda: df.topology("ring", 2),
        "all_reduce": make,
        r"init\(params\)": lambda: init(x),
        r"step\(state, batch, t=0\)": lambda: simulated(state, torch.ones(2, 3, device="cpu"), 0),
    }
    for name, call in calls.items():
        with torch.device("meta"), pytest.raises(ValueError, match=rf"{name}: torch's default device is meta, and"):
            call()
    torch.set_default_device("meta")
    try:
        with pytest.raises(ValueError, match=r"call torch\.set_default_device\(None\)"):
            calls["ring"]()
    finally:
        torch.set_default_device(None)
    simulated(state, torch.ones(2, 3), 0)
