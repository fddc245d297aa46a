"""Cases that break Decent-DP 0.2.3, in the order in which users meet them, and train here."""

import copy

import pytest
import torch
from torch import nn

import decentfn as df

pytestmark = pytest.mark.thorough


def linear(params, x):
    return x @ params["weight"] + params["bias"]


def start():
    return {"weight": torch.full((3, 2), 0.5), "bias": torch.zeros(2)}


def data(t, n=2):
    draw = torch.Generator().manual_seed(t)
    return torch.randn(n, 4, 3, generator=draw), torch.randn(n, 4, 2, generator=draw)


def squared(params, batch):
    return ((linear(params, batch[0]) - batch[1]) ** 2).mean()


def simulated(loss_fn, params, topology, optimizer=None, **options):
    """A stacked state and a step for all workers of `topology`."""
    algorithm = df.adapt_while_communicate(loss_fn, optimizer or df.sgd(0.1), topology, **options)
    n = topology.num_workers
    return df.stack(algorithm.init(params), n), df.simulate(algorithm.step, n)


# 1. Two training forwards before the first backward: zero buckets, nothing ever trains.


def test_1_a_siamese_loss_that_calls_the_model_twice_trains():
    def siamese(params, batch):
        one, other = (linear(params, x) for x in batch[0].chunk(2))
        return ((one - other - 1) ** 2).mean()

    linear(start(), data(0)[0])  # a warm-up forward touches nothing
    state, step = simulated(siamese, start(), df.topology("ring", 2))
    losses = []
    for t in range(40):
        state, metrics = step(state, data(0), t)
        losses.append(float(metrics.loss.mean()))
    assert losses[-1] < 0.5 * losses[0]


# 2. Accumulation as documented, repeated, never updates.


def test_2_every_step_of_repeated_accumulation_updates_as_one_large_batch_would():
    params, topology = start(), df.topology("ring", 2)
    state, step = simulated(df.accumulate(squared), params, topology)
    whole, whole_step = simulated(squared, params, topology)
    for t in range(4):
        before = df.params(state)["weight"]
        micro = tuple(x.unflatten(1, (2, 2)) for x in data(t))
        state, _ = step(state, micro, t)
        whole, _ = whole_step(whole, data(t), t)
        assert (df.params(state)["weight"] - before).abs().max() > 1e-3
        torch.testing.assert_close(df.params(state), df.params(whole))


# 3. load_state_dict in mid-training is discarded at the next mix.


@pytest.mark.parametrize("compiled", [False, True])
def test_3_parameters_loaded_in_mid_training_are_those_that_the_next_step_starts_from(compiled):
    topology = df.topology("one-peer-exp", 4)
    state, step = simulated(squared, start(), topology)
    step = df.compile(step, backend="aot_eager") if compiled else step
    for t in range(3):
        state, _ = step(state, data(t, 4), t)
    loaded = {"weight": torch.full((3, 2), -2.0), "bias": torch.ones(2)}
    state = df.with_params(state, df.stack(loaded, 4))
    state, _ = step(state, data(3, 4), 3)

    algorithm = df.adapt_while_communicate(squared, df.sgd(0.1), topology)
    fresh, _ = df.simulate(algorithm.step, 4)(df.stack(algorithm.init(loaded), 4), data(3, 4), 3)
    torch.testing.assert_close(df.params(state), df.params(fresh))


def test_3_other_parameters_than_the_states_are_refused():
    state, _ = simulated(squared, start(), df.topology("ring", 2))
    with pytest.raises(ValueError, match=r"with_params.*found \('bias', .*pass a tree like df.params"):
        df.with_params(state, start())
    with pytest.raises(ValueError, match="where the state has"):
        df.with_params(state, df.stack({"weight": torch.zeros(3, 2)}, 2))


# 4. Custom edges with weights that differ by step: the first mix multiplied all parameters by 1.4.


def test_4_edges_whose_weights_differ_by_step_scale_nothing():
    pairs = [(0, 1), (2, 3)]
    crossed = [(0, 2), (1, 3)]
    phases = [
        [df.topologies.Edge(pair, 0.9) for pair in pairs],
        [df.topologies.Edge(pair, 0.6) for pair in crossed],
        [df.topologies.Edge(range(4), 0.3)],
    ]
    state, step = simulated(squared, start(), df.topologies.from_groups("custom", phases, 4), df.sgd(0.0))
    for t in range(7):
        state, _ = step(state, data(t, 4), t)
        torch.testing.assert_close(df.params(state), df.stack(start(), 4))


# 5. World size 1: ZeroDivisionError. alternating-exp-ring on one node: a bare ValueError.


@pytest.mark.parametrize("name", ["complete", "ring", "one-peer-exp", "alternating-exp-ring"])
def test_5_one_worker_alone_trains_as_its_optimizer_does(name):
    options = {"local_world_size": 1} if name == "alternating-exp-ring" else {}
    init, step = df.adapt_while_communicate(squared, df.sgd(0.1), df.topology(name, 1, **options))
    state, own = init(start()), {k: v.clone().requires_grad_() for k, v in start().items()}
    optimizer = torch.optim.SGD(own.values(), lr=0.1)
    for t in range(5):
        batch = tuple(x[0] for x in data(t))
        state, _ = step(state, batch, t)
        optimizer.zero_grad()
        squared(own, batch).backward()
        optimizer.step()
    torch.testing.assert_close(df.params(state), {k: v.detach() for k, v in own.items()})


def test_5_an_exponential_ring_of_nodes_on_one_node_averages_with_everyone():
    one_node = df.topology("alternating-exp-ring", 4, local_world_size=4)
    assert torch.equal(df.mixing_matrix(one_node, 0), torch.full((4, 4), 0.25, dtype=torch.float64))


# 6. A parameter unused on one rank leaves the others waiting for ever; those never used are never averaged.


def uneven(worker):
    def loss_fn(params, batch):
        used = linear(params["shared"], batch[0])
        if worker == 0:
            used = used + params["first"]
        return ((used - batch[1]) ** 2).mean()

    return loss_fn


def train_unevenly():
    here = df.init()
    params = {"shared": start(), "first": torch.zeros(2), "unused": torch.full((5,), float(here.rank))}
    init, step = df.adapt_while_communicate(uneven(here.rank), df.sgd(0.1), df.topology("ring", here.size))
    state = init(params)
    for t in range(3):
        state, _ = step(state, tuple(x[here.rank] for x in data(t)), t)
    return df.params(state)


def test_6_parameters_unused_on_one_rank_or_on_all_are_mixed_and_nobody_waits(ranks):
    one, other = ranks(2).run(train_unevenly)
    for mine in (one, other):
        assert torch.equal(mine["unused"], torch.full((5,), 0.5))
        assert mine["first"].abs().min() > 1e-3
    assert not torch.equal(one["shared"]["weight"], other["shared"]["weight"])


# 7. Mixed dtypes, non-contiguous parameters, copy.deepcopy: crash.


def test_7_mixed_dtypes_and_strides_train_and_a_copied_state_goes_its_own_way():
    def loss_fn(params, batch):
        hidden = (batch[0] @ params["wide"].float()).bfloat16() * params["narrow"]
        return ((hidden.float() + params["bias"] - batch[1]) ** 2).mean()

    params = {
        "wide": torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3).mT,
        "narrow": torch.ones(2, dtype=torch.bfloat16),
        "bias": torch.zeros(2, 4)[:, 1],
    }
    assert not params["wide"].is_contiguous() and not params["bias"].is_contiguous()
    state, step = simulated(loss_fn, params, df.topology("ring", 2))
    state, _ = step(state, data(0), 0)
    twin, before = copy.deepcopy(state), df.params(state)
    twin, _ = step(twin, data(1), 1)
    assert all(torch.equal(a, b) for a, b in zip(df.params(state).values(), before.values(), strict=True))
    state, _ = step(state, data(1), 1)
    for key, leaf in df.params(state).items():
        assert torch.equal(leaf, df.params(twin)[key])
        assert leaf.dtype == params[key].dtype and leaf.shape == (2, *params[key].shape)
        assert (leaf[0] - params[key]).abs().max() > 0


def test_7_a_module_with_channels_last_weights_trains():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    module = module.to(memory_format=torch.channels_last)
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    algorithm = df.adapt_while_communicate(loss_fn, df.sgd(0.05), df.topology("ring", 2))
    state, step = df.stack(algorithm.init(params, buffers), 2), df.simulate(algorithm.step, 2)
    batch = torch.randn(2, 8, 3, 4, 4), torch.randn(2, 8, 1)
    losses = []
    for t in range(20):
        state, metrics = step(state, batch, t)
        losses.append(float(metrics.loss.mean()))
    assert losses[-1] < losses[0]


# 8. torch.compile of the whole step: internal error in Dynamo.


def test_8_the_whole_step_compiles_as_one_graph():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    state, step = simulated(squared, start(), df.topology("ring", 2), df.adamw(1e-2))
    eager, eager_step = state, step
    compiled = df.compile(step, backend=count, donate=False)
    for t in range(4):
        state, _ = compiled(state, data(t), t)
        eager, _ = eager_step(eager, data(t), t)
    assert len(graphs) == 1
    torch.testing.assert_close(df.params(state), df.params(eager))


# 9. Errors are a bare ValueError with the text in a log.

ERRORS = [
    (lambda: df.topology("ring", 5), r"ring\(num_workers=5\).*even.*use 'static-ring' or 'base'"),
    (lambda: df.topology("one-peer-exp", 6), r"one_peer_exp\(num_workers=6\).*power of two; use 'base'"),
    (
        lambda: df.topology("alternating-exp-ring", 6, local_world_size=4),
        r"alternating_exp_ring\(num_workers=6, local_world_size=4\): N must be a multiple",
    ),
    (lambda: df.topology("one-peer-epx", 4), r"topology\('one-peer-epx'\): no such topology; nearest: one-peer-exp"),
    (
        lambda: df.topologies.from_groups("mine", [[df.topologies.Edge([0, 1]), df.topologies.Edge([1, 2])]], 3),
        r"mine: phase 0 .* must be in exactly one",
    ),
    (
        lambda: df.topologies.from_groups("mine", [[df.topologies.Edge([0, 1])]], 3),
        r"mine: phase 0 .* \(an idle worker has its own edge",
    ),
    (
        lambda: df.topologies.from_groups("mine", [[df.topologies.Edge([0, 1], 1.5)]], 2),
        r"mine: Edge\(\[0, 1\], weight=1.5\).*lies in \[0, 1\]",
    ),
    (lambda: df.register_topology("ring")(lambda num_workers: None), r"register_topology\('ring'\).*choose another"),
    (
        lambda: df.adapt_while_communicate(squared, df.sgd(0.1), df.topology("ring", 2), gamma=1.5),
        r"adapt_while_communicate\(gamma=1.5\): γ is in \[0, 1\]",
    ),
]


@pytest.mark.parametrize(("call", "text"), ERRORS)
def test_9_errors_say_the_call_the_value_the_rule_and_the_way_out(call, text):
    with pytest.raises(ValueError, match=text):
        call()
