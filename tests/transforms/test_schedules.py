"""Schedules: equal to their formulas in plain Python, and traceable."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from decentfn.optim import schedules

CASES = {
    "constant": (0.1,),
    "linear": (0.0, 1.0, 4),
    "per_run": ([0.1, 0.2],),
    "cosine": (1.0, 8, 0.1),
    "warmup_cosine": (0.1, 5, 20),
    "warmup_linear": (0.1, 5, 20, 0.01),
    "warmup_stable_decay": (0.1, 3, 4, 12, 0.01),
    "inverse_sqrt": (0.1, 4),
    "polynomial": (0.1, 0.01, 8, 2.0),
    "exponential_decay": (1.0, 0.5, 3),
    "piecewise_constant": (1.0, {2: 0.1, 4: 0.5}),
    "join": ([schedules.linear(0.0, 1.0, 3), schedules.cosine(1.0, 5)], [3]),
}


def at(schedule, count):
    return float(schedule(torch.tensor(count)))


def test_the_table_of_cases_is_complete():
    assert sorted([*CASES, "gamma_from_learning_rate"]) == schedules.__all__  # γ has its own test in test_model_state


@given(st.integers(0, 6), st.integers(1, 9), st.integers(0, 20))
def test_a_linear_warm_up_and_decay_is_that_of_transformers(warmup, rest, count):
    """`get_linear_schedule_with_warmup` of transformers 5, written out."""
    steps = warmup + rest
    expected = count / warmup if count < warmup else max(0.0, (steps - count) / rest)
    assert at(schedules.warmup_linear(0.3, warmup, steps), count) == pytest.approx(0.3 * expected, abs=1e-15)


def test_an_unknown_schedule_names_those_that_exist():
    with pytest.raises(AttributeError, match=r"no 'linear_warmup'; it has .*warmup_cosine, warmup_linear"):
        schedules.linear_warmup  # noqa: B018


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_returns_a_0d_float64_tensor(name):
    value = getattr(schedules, name)(*CASES[name])(torch.tensor(3))
    assert value.dtype == torch.float64 and value.shape == ()


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_one_graph_for_all_counts(name):
    schedule = getattr(schedules, name)(*CASES[name])
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda count: schedule(count), fullgraph=True, backend=counter)
    values = [float(compiled(torch.tensor(u))) for u in range(12)]
    assert counter.frame_count == 1
    assert values == [at(schedule, u) for u in range(12)]


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_batched_over_workers_gives_each_its_own_value(name):
    schedule = getattr(schedules, name)(*CASES[name])
    counts = torch.tensor([0, 2, 4, 30])
    values = torch.func.vmap(schedule)(counts)
    torch.testing.assert_close(values, torch.stack([schedule(u) for u in counts]), rtol=1e-14, atol=0)


def test_a_line_and_a_cosine_are_what_torchs_schedulers_give_together():
    """As Decent-DP's `lr_scheduler_fn_cosine_with_warmup` joins them."""
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
    main = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-6)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[5])
    schedule = schedules.join([schedules.linear(0.001, 0.1, 5), schedules.cosine(0.1, 20, 1e-6)], [5])
    for u in range(25):
        assert at(schedule, u) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


@given(u=st.integers(0, 50), steps=st.integers(1, 30))
def test_schedules_of_one_formula_are_that_formula(u, steps):
    share = min(u / steps, 1.0)
    close = {"rel": 1e-12, "abs": 1e-15}
    assert at(schedules.constant(0.3), u) == 0.3
    assert at(schedules.linear(0.5, 0.1, steps), u) == pytest.approx(0.5 - 0.4 * share, **close)
    cosine = 0.1 + 0.4 * (1 + math.cos(math.pi * share)) / 2
    assert at(schedules.cosine(0.5, steps, 0.1), u) == pytest.approx(cosine, **close)
    assert at(schedules.exponential_decay(0.5, 0.9, steps), u) == pytest.approx(0.5 * 0.9 ** (u / steps), **close)
    staircase = schedules.exponential_decay(0.5, 0.9, steps, staircase=True)
    assert at(staircase, u) == pytest.approx(0.5 * 0.9 ** (u // steps), **close)
    expected = 0.5 * (0.1 if u >= 3 else 1) * (2.0 if u >= 7 else 1)
    assert at(schedules.piecewise_constant(0.5, {7: 2.0, 3: 0.1}), u) == pytest.approx(expected, **close)


@given(u=st.integers(0, 60), warmup=st.integers(0, 20), rest=st.integers(1, 20), end=st.sampled_from([0.0, 0.1]))
def test_schedules_with_a_warmup_are_their_formulas(u, warmup, rest, end):
    """Linear to the peak, then down to `end` at the end of the run, where they stay."""
    steps, close = warmup + rest, {"rel": 1e-12, "abs": 1e-15}
    cosine = end + (0.5 - end) * (1 + math.cos(math.pi * min((u - warmup) / rest, 1.0))) / 2
    expected = 0.5 * u / warmup if u < warmup else cosine
    assert at(schedules.warmup_cosine(0.5, warmup, steps, end), u) == pytest.approx(expected, **close)
    decayed = 0.5 + (end - 0.5) * min(max((u - warmup) / rest, 0.0), 1.0)
    expected = 0.5 * u / warmup if u < warmup else 0.5 if u < warmup + 7 else decayed
    ours = schedules.warmup_stable_decay(0.5, warmup, rest, steps + 7, end)
    assert at(ours, u if u < warmup + 7 else u + 7) == pytest.approx(expected, **close)
    expected = 0.5 * (u / (warmup + 1) if u <= warmup else math.sqrt((warmup + 1) / u))
    assert at(schedules.inverse_sqrt(0.5, warmup + 1), u) == pytest.approx(expected, **close)
    expected = end + (0.5 - end) * (1 - min(u / rest, 1.0)) ** 1.5
    assert at(schedules.polynomial(0.5, end, rest, 1.5), u) == pytest.approx(expected, **close)


@given(k=st.integers(1, 1000), total=st.integers(1, 1000))
@example(k=7, total=100)  # 0.07 * 100 is more than 7
def test_gamma_follows_from_the_count_at_the_start(k, total):
    k = min(k, total)
    gamma = schedules.gamma_from_learning_rate(schedules.constant(0.05), 1.0, k / total, total, peak=0.1)
    assert [at(gamma, k - 1), at(gamma, k)] == [1.0, 0.5]


@given(u=st.integers(0, 30))
def test_joined_schedules_count_from_where_they_begin(u):
    parts = [schedules.linear(0.0, 1.0, 5), schedules.cosine(1.0, 10), schedules.constant(0.2)]
    joined = schedules.join(parts, [5, 12])
    index = (u >= 5) + (u >= 12)
    assert at(joined, u) == at(parts[index], u - [0, 5, 12][index])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: schedules.constant(-1.0), "constant(value=-1.0)"),
        (lambda: schedules.linear(0.0, math.inf, 3), "linear(end=inf)"),
        (lambda: schedules.linear(0.0, 1.0, 0), "linear(steps=0)"),
        (lambda: schedules.cosine(1.0, 2.5), "cosine(steps=2.5)"),
        (lambda: schedules.warmup_cosine(0.1, 10, 10), "warmup_cosine(warmup=10, steps=10)"),
        (lambda: schedules.warmup_stable_decay(0.1, 5, 6, 10), "warmup_stable_decay(warmup=5, decay=6, steps=10)"),
        (lambda: schedules.polynomial(0.1, 0.0, 10, 0.0), "polynomial(power=0.0)"),
        (lambda: schedules.exponential_decay(1.0, 0.0, 3), "exponential_decay(rate=0.0)"),
        (lambda: schedules.piecewise_constant(1.0, {0: 0.5}), "piecewise_constant(count in factors=0)"),
        (lambda: schedules.piecewise_constant(1.0, {1: -0.5}), "piecewise_constant(factor=-0.5)"),
        (lambda: schedules.join([], []), "join(0 schedules"),
        (lambda: schedules.join([schedules.constant(1.0)] * 3, [4, 4]), "boundaries=[4, 4]"),
    ],
)
def test_a_wrong_argument_is_named_at_construction(make, named):
    with pytest.raises(ValueError) as error:
        make()
    assert named in str(error.value)
