"""The small examples do what they say: each shows a law or a figure."""

import contextlib
import importlib
import io
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decentfn as df
from decentfn import kit
from decentfn.core.buckets import flatten
from decentfn.testing import PROMISES, Subject, check_algorithm, check_topology, check_transform, try_promise

F64 = torch.float64
EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = [pytest.mark.xdist_group("small examples"), pytest.mark.thorough]


@pytest.fixture(scope="module")
def example():
    """`example(name)` is the example as a module."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(EXAMPLES)
        yield importlib.import_module


def distances(topology, steps):
    """The consensus distance of x <- W x from x_i = i, in float64."""
    x = torch.arange(topology.num_workers, dtype=torch.float64)
    found = {}
    for t in range(max(steps) + 1):
        found[t] = float((x - x.mean()).square().mean().sqrt())
        x = df.mixing_matrix(topology, t) @ x
    return {t: found[t] for t in steps}


def test_gossip_is_the_product_of_mixing_matrices_and_exact_after_log_n_phases(example):
    average_consensus = example("average_consensus")
    table = average_consensus.main(num_workers=16)
    for name, errors in table.items():
        assert errors == pytest.approx(distances(df.topology(name, 16), errors), abs=1e-12)
    assert table["one-peer-exp"][3] > 1 and table["one-peer-exp"][4] == 0
    assert table["static-ring"][32] > 0.5


def said_on_this_rank(num_workers):
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as said:
        patched.syspath_prepend(EXAMPLES)
        importlib.import_module("average_consensus").main(num_workers)
    return said.getvalue()


def test_gossip_says_the_same_in_two_processes(ranks):
    said, nothing = ranks(2).run(said_on_this_rank, 8)
    assert not nothing
    heads, *rows = said.splitlines()
    for column, name in enumerate(heads.split()[1:], start=1):
        shown = {int(row.split()[0]): float(row.split()[column]) for row in rows}
        assert shown == pytest.approx(distances(df.topology(name, 8), shown), rel=0.1, abs=1e-12)


@given(half=st.integers(2, 7), share=st.floats(0, 1))
def test_two_racks_keep_the_mean_agree_and_spare_the_cable(example, half, share):
    custom_topology, pairs = example("custom_topology"), 1 + round(share * (half - 1))
    topology = df.topology("two-racks", 2 * half, pairs=pairs)
    check_topology(topology)
    certificate = df.topologies.certificate(topology)
    assert certificate.is_doubly_stochastic and certificate.is_connected and certificate.spectral_gap > 0
    assert topology.degree == 1
    assert custom_topology.over_the_cable(topology) == 2 * pairs / topology.period


@pytest.mark.parametrize(("num_workers", "pairs"), [(2, 1), (7, 1), (8, 0), (8, 5)])
def test_two_racks_of_another_size_are_refused(example, num_workers, pairs):
    example("custom_topology")
    with pytest.raises(ValueError, match=rf"two_racks\(num_workers={num_workers}, pairs={pairs}\): two racks"):
        df.topology("two-racks", num_workers, pairs=pairs)


def test_a_pair_of_racks_sends_a_fifth_of_the_ring_over_the_cable(example):
    table = example("custom_topology").main()
    assert table["two-racks pairs=1"][0] == table["ring"][0] / 5


def test_momentum_mixing_is_its_equation(example):
    """In float64: m' = beta m + g, x+ = W (x - eta m'), m+ = W m', with gradients x - target."""
    momentum_mixing, n, beta, eta = example("custom_algorithm").momentum_mixing, 4, 0.8, 0.1
    topology = df.topology("ring", n)
    target = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    init, step = momentum_mixing(lambda x, b: (x - b).square().sum() / 2, df.sgd(eta), topology, beta=beta)
    state, step = df.stack(init(torch.zeros(3, dtype=torch.float64)), n), df.simulate(step, n)
    x, m = torch.zeros_like(target), torch.zeros_like(target)
    for t in range(9):
        state, _ = step(state, target, t)
        w, m = df.mixing_matrix(topology, t), beta * m + (x - target)
        x, m = w @ (x - eta * m), w @ m
        torch.testing.assert_close(df.params(state), x, rtol=1e-12, atol=1e-12)


def ring(num_workers):
    return df.topology("static-ring" if num_workers > 1 else "complete", num_workers)


QUICK = ("traced_ranks_agree", "donated_is_pure", "one_graph", "dtypes_stay")


def test_momentum_mixing_promises_what_every_algorithm_does(example):
    subject = Subject(example("custom_algorithm").momentum_mixing, ring, backend="aot_eager")
    for name in QUICK:
        assert try_promise(PROMISES[name], subject) is None, name


@pytest.mark.slow
def test_momentum_mixing_passes_all_checks(example):
    check_algorithm(example("custom_algorithm").momentum_mixing, ring)


def test_workers_that_mix_their_momentum_stay_closer_together(example):
    results = example("custom_algorithm").main(steps=100)
    assert results["momentum mixed"].distance < 0.9 * results["momentum kept"].distance
    assert min(result.mean for result in results.values()) > 0.9


def lion_in_float64(params, gradients, rate, b1, b2, decay):
    """Algorithm 2 of Chen et al., leaf by leaf, from the paper."""
    m = {name: torch.zeros_like(x) for name, x in params.items()}
    for count, grads in enumerate(gradients):
        for name, g in grads.items():
            c = b1 * m[name] + (1 - b1) * g
            params[name] = params[name] - rate(count) * (c.sign() + decay[name] * params[name])
            m[name] = b2 * m[name] + (1 - b2) * g
    return params


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_lion_is_its_equation_eager_and_compiled(example, backend):
    lion, b1, b2 = example("custom_optimizer").lion, 0.8, 0.95
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = {"w": draw(3, 4), "b": draw(4)}
    gradients = [{"w": draw(3, 4), "b": draw(4)} for _ in range(12)]
    optimizer = lion(df.schedules.cosine(0.1, 10), b1, b2, weight_decay=0.3, mask=df.transforms.not_bias_or_norm)

    def loss_fn(params, batch):  # the batch is its gradient
        return sum((params[name] * g).sum() for name, g in batch.items())

    init, step = df.adapt_while_communicate(loss_fn, optimizer, df.topology("complete", 1))
    state, step = init(params), step if backend is None else df.compile(step, backend=backend)
    for t, batch in enumerate(gradients):
        state, _ = step(state, batch, t)

    def rate(count):  # in the float32 of the schedule
        return df.schedules.cosine(0.1, 10)(torch.tensor(count)).double()

    expected = lion_in_float64(dict(params), gradients, rate, b1, b2, {"w": 0.3, "b": 0.0})
    torch.testing.assert_close(df.params(state), expected, rtol=1e-12, atol=1e-12)


def test_lion_promises_what_every_transform_does(example):
    check_transform(lambda: example("custom_optimizer").lion(1e-3, weight_decay=0.1))


def stepped(pair, deltas, y):
    """φ after each outer step of these outer gradients."""
    init, update = pair
    y = flatten({"w": y})
    state, found = init(y), []
    for delta in deltas:
        u, state = update(flatten({"w": delta}), state, y)
        y = kit.add(y, u)
        found.append(y[0])
    return torch.stack(found)


def nesterov_of_torch(deltas, y, rate, momentum):
    y = y.clone().requires_grad_()
    optimizer, found = torch.optim.SGD([y], lr=1.0, momentum=0.5, nesterov=True), []
    for k, delta in enumerate(deltas):
        optimizer.param_groups[0] |= {"lr": rate(k), "momentum": momentum(k)}
        y.grad = delta.clone()
        optimizer.step()
        found.append(y.detach().clone())
    return torch.stack(found)


def test_outer_optimizers_are_nesterov_of_torch_with_these_numbers(example):
    """GPA with one μ: momentum μ at the rate (1 - μ) γ. Schedules: numbers of each step."""
    outer, draw = example("outer_optimizers"), torch.Generator().manual_seed(0)
    y, deltas = torch.randn(5, generator=draw, dtype=F64), torch.randn(12, 5, generator=draw, dtype=F64)
    gpa = outer.primal_averaging(0.5, mu_x=0.8, mu_y=0.8)
    expected = nesterov_of_torch(deltas, y, lambda k: 0.1, lambda k: 0.8)
    torch.testing.assert_close(stepped(gpa, deltas, y), expected, rtol=0, atol=1e-13)
    rate, momentum = lambda k: 0.1 + k / 20, lambda k: 0.9 - k / 40
    pier = outer.scheduled_nesterov(lambda k: rate(k.double()), lambda k: momentum(k.double()))
    torch.testing.assert_close(
        stepped(pier, deltas, y), nesterov_of_torch(deltas, y, rate, momentum), rtol=0, atol=1e-13
    )
    slow = stepped(outer.primal_averaging(0.5, mu_x=1.0, mu_y=0.7), deltas, y)
    z = y - 0.5 * deltas.cumsum(0)
    torch.testing.assert_close(slow, 0.7 * y + 0.3 * z, rtol=0, atol=1e-13)


def test_every_outer_optimizer_trains(example):
    assert min(example("outer_optimizers").main(steps=240).values()) > 0.85


def test_only_workers_that_wait_for_nobody_keep_their_pace_beside_a_slow_worker_or_link(example, tmp_path):
    seconds = example("seconds")
    found = seconds.main(seconds=3.0, seeds=(0,), path=tmp_path / "seconds.png")
    assert (tmp_path / "seconds.png").exists()
    taken = {}
    for cluster, clock in seconds.CLUSTERS.items():
        for name, method in seconds.methods(0.05).items():
            line = seconds.timeline(clock, method.sends, 3.0)
            taken[cluster, name] = len(line.end) if line.trace is None else max(line.trace.num_steps)
            assert found[cluster][name][0].seconds[-1] == 3.0
    for name in found["equal workers"]:
        waits = not name.startswith("asynchronous")
        for cluster in ("one is three times slower", "one has a tenth of the bandwidth"):
            slower = taken[cluster, name] / taken["equal workers", name]
            assert slower <= 0.7 if waits else slower == 1, (cluster, name)
    slow = {name: curves[0].accuracy[-1] for name, curves in found["one is three times slower"].items()}
    assert slow["asynchronous push"] > slow["all-reduce"] + 0.1 and slow["asynchronous DiLoCo"] > slow["DiLoCo"]


def test_lion_trains(example):
    assert min(example("custom_optimizer").main(steps=60).values()) > 0.85


def test_16_bit_numbers_halve_messages_and_shrink_steps(example):
    table = example("mixed_precision").main(steps=2)
    full, half = table["float32"], table["float32, bfloat16 wire"]
    assert half.wire == full.wire / 2 and half.state == full.state
    assert full.state == pytest.approx(3 * full.wire, rel=0.01)  # parameters and two moments
    assert table["bfloat16 autocast"].step < 0.8 * full.step
    assert table["bfloat16 parameters alone"].state == pytest.approx(full.state - full.wire / 2, rel=1e-3)
    assert all(row.loss == pytest.approx(full.loss, abs=0.05) for row in table.values())


def test_a_third_of_the_bytes_trains_as_well(example):
    table = example("compressed_gossip").main(steps=200)
    d, neighbors = 64 * 32 + 32 + 32 * 10 + 10, 2
    assert table["everything"][0] == pytest.approx(neighbors * 4 * d / 1e3)
    assert table["top_k(0.25)"][0] == pytest.approx(neighbors * (4 + 2) * round(0.25 * d) / 1e3, rel=1e-3)
    assert table["top_k(0.25)"][1] > table["everything"][1] - 0.03
    assert table["sign"][0] < table["everything"][0] / 30 and table["sign"][1] > 0.8


def test_sixty_four_workers_know_all_digits_compiled(example, monkeypatch):
    monkeypatch.setattr(df, "compile", partial(df.compile, backend="aot_eager"))
    compiled = example("sixty_four_workers").main(steps=100)
    assert compiled > 0.9
    assert compiled == pytest.approx(example("sixty_four_workers").main(steps=100, compile=False), abs=0.01)


def test_a_run_is_resumed_to_the_bit_and_goes_on_with_half_its_workers(example, tmp_path, monkeypatch):
    taken, simulate = [], df.simulate

    def counted(step, num_workers):
        taken.append((num_workers, []))
        step, mine = simulate(step, num_workers), taken[-1][1]
        return lambda state, batch, t: (mine.append(t), step(state, batch, t))[1]

    monkeypatch.setattr(df, "simulate", counted)
    seen = example("resume_and_resize").main(tmp_path / "run", steps=20)
    assert seen["same"] and min(seen["four"], seen["two"]) > 0.8
    expected = [(4, range(40)), (4, range(20)), (4, range(20, 40)), (2, range(40, 60))]
    assert [(workers, steps) for workers, steps in taken] == [(workers, list(steps)) for workers, steps in expected]


def test_what_cannot_work_is_answered_as_the_page_of_mistakes_says(tmp_path):
    written = tmp_path / "mistakes.md"
    command = [sys.executable, "-m", "tests.mistakes", str(written)]
    finished = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    page = written.read_text(encoding="utf-8")
    assert page == (EXAMPLES.parent / "docs" / "mistakes.md").read_text(encoding="utf-8"), (
        "run `python -m tests.mistakes`"
    )
    assert page.count("\n| `") >= 60


def test_the_sweep_is_at_the_published_errors(example):
    sweep = example("sweep")
    best = sweep.optimum()
    for name, published in (("diffusion", "8.2e-02"), ("exact diffusion", "2.2e-08")):
        errors = (sweep.train(name, [0.05, 0.1], 1000) - best).norm(dim=-1)
        assert f"{errors[1]:.1e}" == published and errors[0] != errors[1]


def test_a_cell_of_the_published_table_is_that_of_the_example_it_takes_its_methods_from(example, capsys):
    table, heterogeneity = example("published_table"), example("heterogeneity")
    ours = table.main(steps=20, seeds=2, rates=(0.4,), methods=("D²",))
    for seed in range(2):
        alone = heterogeneity.train(heterogeneity.METHODS["D²"], heterogeneity.Config(steps=20), 0.1, seed)
        assert ours["D²"][1][seed] == pytest.approx(100 * alone.local, abs=0.2)
    assert "38.2" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_language_models_are_compared_once_and_each_run_is_read_again(example, tmp_path, capsys):
    compare = example("compare_lm")
    options = {"steps": 2, "periods": (2,), "seeds": 1, "layers": 1, "dim": 16, "eval_bytes": 256}
    config = compare.Config(**options, out=tmp_path / "runs.jsonl")
    first = compare.main(config)
    written = config.out.read_text()
    assert compare.main(config) == first and config.out.read_text() == written
    assert {line["method"] for line in first} == set(compare.METHODS | compare.EVERY_STEP)
    bits = {line["method"]: line for line in first}
    # Whatever the peers, the mean of GASLoC and of Factored Gossip DiLoCo follows DiLoCo's.
    for name in ("GASLoC", "Factored Gossip DiLoCo"):
        assert bits[name]["bits_per_byte"] == pytest.approx(bits["DiLoCo"]["bits_per_byte"], abs=1e-4)
    assert bits["DiLoCo"]["megabytes"] == pytest.approx(1.75 * 4e-6 * bits["DiLoCo"]["parameters"])
    assert config.out.with_suffix(".png").exists() and "mean model" in capsys.readouterr().out
