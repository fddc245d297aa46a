"""Learning rates, weight decay, γ and schedules are inputs of the compiled step: their values compile nothing."""

import logging
import math

import pytest
import torch

import decentfn as df
from decentfn.optim import schedules as s

TARGET = torch.tensor([1.0, -2.0, 3.0])


def loss_fn(params, batch):
    return ((params["w"] - batch) ** 2).sum()


def built(optimizer, gamma=0.5, n=1):
    return df.adapt_while_communicate(loss_fn, optimizer, df.topology("complete", n), gamma=gamma)


def start():
    return {"w": torch.zeros(3)}


def run(step, state, batch=TARGET, steps=4):
    for t in range(steps):
        state, metrics = step(state, batch, t)
    return state, metrics


class Graphs:
    """Backend that runs graphs eagerly and remembers their code, which is the key of compiled code in the cache."""

    def __init__(self):
        self.codes = []

    def __call__(self, graph, inputs):
        tensors = [(x.dtype, x.shape, x.device) for x in inputs]
        constants = [value for node in graph.graph.nodes for value in (*node.args, *node.kwargs.values())]
        self.codes.append((graph.code, tensors, str(constants)))
        return graph.forward


def test_twelve_learning_rates_are_one_graph_and_train_as_if_built_with_each():
    graphs = Graphs()
    init, step = built(df.adamw(1.0))
    compiled = df.compile(step, backend=graphs)
    for k in range(12):
        rate = 0.3 / (k + 1)
        state, metrics = run(compiled, df.set_learning_rate(init(start()), rate))
        expected, _ = run(step, built(df.adamw(rate))[0](start()))
        assert torch.equal(df.params(state)["w"], df.params(expected)["w"])
        assert float(metrics.learning_rate) == float(df.learning_rate(state)) == rate
    assert len(graphs.codes) == 1


def test_a_tensor_that_lowers_a_schedule_compiles_nothing():
    """As the error of `set_learning_rate` says; the factor is no part of the state."""
    graphs, factor, schedule = Graphs(), torch.tensor(1.0), s.cosine(0.1, 8)
    init, step = built(df.sgd(lambda count: factor * schedule(count)))
    compiled, state = df.compile(step, backend=graphs), init(start())
    with pytest.raises(ValueError, match=r"factor = torch\.tensor\(1\.0\), .*factor\.fill_\(0\.1\)"):
        df.set_learning_rate(state, 0.1)
    rates = []
    for t in range(6):
        factor.fill_(1.0 if t < 3 else 0.1)
        state, metrics = compiled(state, TARGET, t)
        rates.append(float(metrics.learning_rate))
    expected = [0.05 * (1 + math.cos(math.pi * t / 8)) * (1.0 if t < 3 else 0.1) for t in range(6)]
    assert rates == pytest.approx(expected, rel=1e-6)
    assert len(graphs.codes) == 1


@pytest.mark.parametrize(
    ("make", "gamma"),
    [
        (lambda k: df.sgd(s.warmup_cosine(0.1 * k, k, 10 * k), weight_decay=0.1 * k), lambda k: 0.1 * k),
        pytest.param(
            lambda k: df.adamw(s.join([s.exponential_decay(k, 0.1 * k, k), s.constant(0.1 * k)], [k])),
            lambda k: s.piecewise_constant(0.9, {k: 0.1 * k}),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            lambda k: df.adam(s.inverse_sqrt(0.1 * k, k), weight_decay=s.linear(k, 0.0, k)),
            lambda k: s.polynomial(0.9, 0.1, k, k),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_other_lengths_peaks_decays_and_gammas_have_the_same_graph(make, gamma):
    """So another `--epochs` finds its code in the cache."""
    graphs, ends = Graphs(), []
    for k in (1, 2):
        init, step = built(make(k), gamma(k))
        state, metrics = run(df.compile(step, backend=graphs), init(start()))
        expected, theirs = run(step, init(start()))
        torch.testing.assert_close(df.params(state), df.params(expected))
        torch.testing.assert_close(metrics.learning_rate, theirs.learning_rate)
        ends.append(df.params(state)["w"])
    assert len(graphs.codes) == 2 and graphs.codes[0] == graphs.codes[1]
    assert not torch.equal(ends[0], ends[1])


TOP_K = df.compressors.top_k(0.5)
NUMBERS = {
    "choco_sgd": lambda x: {"compressor": TOP_K, "gamma": x},
    "deep_squeeze": lambda x: {"compressor": TOP_K, "gamma": x},
    "motef": lambda x: {"compressor": TOP_K, "gamma": x, "momentum": x},
    "noloco": lambda x: {"gamma": x, "inner_steps": 2},
    "asynchronous_diloco": lambda x: {"outer_learning_rate": x, "outer_momentum": x, "inner_steps": 2},
    "diloco": lambda x: {"outer_learning_rate": x, "inner_steps": 2},
    "streaming_diloco": lambda x: {"outer_learning_rate": x, "inner_steps": 2, "num_fragments": 1},
    "decoupled_diloco": lambda x: {
        "outer_learning_rate": x,
        "outer_momentum": x,
        "inner_steps": 2,
        "num_fragments": 1,
    },
    "k_gt": lambda x: {"outer_learning_rate": x, "inner_steps": 2},
    "led": lambda x: {"beta": x / 2, "inner_steps": 2},
    "sparse_loco": lambda x: {"outer_learning_rate": x, "decay": x, "inner_steps": 2},
    "slowmo": lambda x: {"learning_rate": s.linear(x, 0.1, 4), "inner_steps": 2},
    "gasloc": lambda x: {"outer_learning_rate": x, "outer_momentum": x, "inner_steps": 2},
    "demuon": lambda x: {"momentum": x},
    "a2cid2": lambda x: {"eta": x},
    "clipped_gossip": lambda x: {"tau": x},
}
"""Hyperparameters that a search varies. `beer` is `motef`'s code; the outer optimizer of another one is a transform."""
RESTS = {
    "asynchronous_diloco",
    "decoupled_diloco",
    "diloco",
    "gasloc",
    "k_gt",
    "led",
    "noloco",
    "slowmo",
    "sparse_loco",
    "streaming_diloco",
}
"""Between outer steps they have a graph of their own."""


@pytest.mark.thorough
@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_algorithms_are_inputs(name):
    graphs, n, ends = Graphs(), 4, []
    topology = df.topology("ring" if name == "a2cid2" else "static-ring", n)
    batch = torch.outer(torch.arange(4.0), TARGET)
    for x in (0.3, 0.6):
        init, step = getattr(df, name)(loss_fn, df.sgd(0.1), topology, **NUMBERS[name](x))
        step, state = df.simulate(step, n), df.stack(init(start()), n)
        expected, _ = run(step, state, batch)
        compiled, _ = run(df.compile(step, backend=graphs), state, batch)
        torch.testing.assert_close(df.params(compiled), df.params(expected))
        ends.append(df.params(compiled)["w"])
    each = 2 if name in RESTS else 1
    assert len(graphs.codes) == 2 * each and graphs.codes[:each] == graphs.codes[each:]
    assert not torch.equal(ends[0], ends[1])


def test_each_simulated_worker_has_its_own_rate():
    n, rates = 4, torch.tensor([0.0, 0.1, 0.2, 0.4], dtype=torch.float64)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(1.0), df.topologies.idle(n))
    state = df.set_learning_rate(df.stack(init(start()), n), rates)
    state, metrics = run(df.simulate(step, n), state, df.stack(TARGET, n))
    assert torch.equal(metrics.learning_rate, rates)
    expected = TARGET * (1 - (1 - 2 * rates[:, None]) ** 4)
    torch.testing.assert_close(state.params.tree()["w"], expected.float())


def test_groups_have_rates_in_their_order():
    groups = {"a": df.sgd(0.1), "b": df.adamw(0.2)}
    optimizer = df.transforms.partition(groups, lambda name, shape: name[0])
    init, step = df.adapt_while_communicate(lambda p, batch: (p["a"] ** 2 + p["b"] ** 2).sum(), optimizer, df.topology("complete", 1))  # fmt: skip
    state = init({"a": torch.ones(2), "b": torch.ones(2)})
    assert df.learning_rate(state).tolist() == [0.1, 0.2]
    state = df.set_learning_rate(state, torch.tensor([0.5, 0.0]))
    state, metrics = step(state, TARGET, 0)
    assert df.params(state)["b"].tolist() == [1.0, 1.0] and df.params(state)["a"].tolist() == [0.0, 0.0]
    assert metrics.learning_rate.tolist() == [0.5, 0.0]
    assert df.learning_rate(df.set_learning_rate(state, 0.3)).tolist() == [0.3, 0.3]


def test_a_scheduled_rate_is_the_last_one_used_and_is_not_set():
    init, step = built(df.sgd(df.schedules.linear(0.0, 1.0, 10)))
    state, metrics = run(step, init(start()), steps=3)
    assert float(df.learning_rate(state)) == float(metrics.learning_rate) == 0.2
    with pytest.raises(ValueError, match=r"follows a schedule.*df\.adamw\(3e-4\)"):
        df.set_learning_rate(state, 0.1)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (-1.0, "finite number >= 0"),
        (float("nan"), "finite number"),
        ("fast", "is a number"),
        (torch.ones(3), r"shape \[3\]"),
        (torch.tensor(-0.1), "finite number >= 0"),
    ],
)
def test_a_wrong_rate_is_named(rate, said):
    state = built(df.sgd(0.1))[0](start())
    with pytest.raises(ValueError, match=rf"set_learning_rate\((state, rate\): |rate=).*{said}"):
        df.set_learning_rate(state, rate)
    plain = df.Transform(lambda params: (), lambda grads, state, params: (grads, state))
    with pytest.raises(ValueError, match="keeps no learning rate"):
        df.learning_rate(built(plain)[0](start()))
    with pytest.raises(ValueError, match="found a dict"):
        df.set_learning_rate(start(), 0.1)


def test_a_checkpoint_keeps_the_rate_and_a_resumed_run_says_so(tmp_path, caplog):
    init, step = built(df.sgd(0.1))
    state, _ = run(step, df.set_learning_rate(init(start()), 0.01))
    df.checkpoint.save(tmp_path, state, 4)
    with caplog.at_level(logging.WARNING, "decentfn"):
        again = df.checkpoint.restore(tmp_path, init(start())).state
    assert float(df.learning_rate(again)) == 0.01
    assert "checkpoint's learning rate 0.01; this optimizer was built with 0.1" in caplog.text
    caplog.clear()
    df.checkpoint.restore(tmp_path, built(df.sgd(0.01))[0](start()))
    assert not caplog.text


@pytest.mark.thorough
def test_other_lengths_and_rates_find_inductors_code_in_the_cache(monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    for k in (1, 2, 3):
        init, step = built(df.adamw(df.schedules.warmup_cosine(0.1 * k, k, 10 * k)), 0.1 * k)
        run(df.compile(step), init(start()))
    assert counters["inductor"]["fxgraph_cache_miss"] <= 1 < counters["inductor"]["fxgraph_cache_hit"]
