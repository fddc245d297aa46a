"""Where a step is not compiled, the error names the cause: the schedule, the optimizer, the compiler, or the loss."""

import math

import pytest
import torch

import decentfn as df
from decentfn.optim import schedules

TARGET = torch.tensor([1.0, 2.0])


def loss_fn(params, batch):
    return ((params["w"] - batch) ** 2).sum()


def compiled(optimizer=None, loss_fn=loss_fn, **options):
    init, step = df.adapt_while_communicate(loss_fn, optimizer or df.sgd(0.1), df.topology("complete", 1))
    return df.compile(step, **({"backend": "eager"} | options))(init({"w": torch.zeros(2)}), TARGET, 0)


USES = {
    "math": lambda count: math.cos(count),
    "if": lambda count: 0.1 if count < 10 else 0.01,
    "float": lambda count: 0.1 / (1 + float(count)),
    "item": lambda count: 0.1 / (1 + count.item()),
    "list": lambda count: [0.1, 0.2][count],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("named", "make"),
    [
        ("sgd(learning_rate", lambda rate: df.sgd(rate)),
        ("adamw(weight_decay", lambda rate: df.adamw(weight_decay=rate)),
        ("adapt_while_communicate(gamma", lambda rate: df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 1), gamma=rate)),
        ("slowmo(learning_rate", lambda rate: df.slowmo(loss_fn, df.sgd(0.1), df.topology("complete", 1), learning_rate=rate)),
        ("join(schedule", lambda rate: schedules.join([rate], [])),
    ],
)  # fmt: skip
def test_a_schedule_that_uses_the_count_as_a_number_is_refused_where_it_is_given(use, named, make):
    with pytest.raises(ValueError) as error:
        make(USES[use])
    argument = "t" if "gamma" in named or "slowmo" in named else "count"
    assert str(error.value).startswith(named) and f"uses {argument} as a number" in str(error.value)
    assert f"torch.where({argument} < 10" in str(error.value) and "df.schedules" in str(error.value)


def test_the_advice_works():
    rate = lambda count: torch.where(count < 10, 0.1, 0.01) * torch.cos(count.double())  # noqa: E731
    _, metrics = compiled(df.sgd(rate))
    assert float(metrics.learning_rate) == pytest.approx(0.1)


def test_a_schedule_that_fails_or_returns_a_vector_is_named():
    with pytest.raises(ValueError, match=r"sgd\(learning_rate=.*raised KeyError.*returns a number"):
        df.sgd(lambda count: {}["rate"])
    with pytest.raises(ValueError, match=r"sgd\(learning_rate=.*returned \[3\] values"):
        df.sgd(lambda count: torch.ones(3))


@pytest.mark.parametrize("first", [-0.1, math.nan, math.inf])
def test_a_schedule_whose_first_value_is_no_rate_is_refused(first):
    def rate(count):
        return first + 0.1 * count

    with pytest.raises(ValueError, match=rf"sgd\(learning_rate=.*for count 0 it returned {first:g}; .*>= 0"):
        df.sgd(rate)
    with pytest.raises(ValueError, match=r"adapt_while_communicate\(gamma=.*for t 0 it returned"):
        df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("complete", 1), gamma=rate)
    assert df.sgd(lambda count: 0.1 * count)  # a warm-up starts at 0


def test_an_optimizer_that_branches_on_values_is_not_blamed_on_the_loss():
    branching = df.Transform(lambda p: (), lambda g, s, p: (g if g[0].sum() > 0 else df.kit.each(torch.neg, g), s))
    with pytest.raises(RuntimeError, match=r"loss alone compiles.*optimizer.*torch\.where") as error:
        compiled(branching)
    assert "df.autograd" not in str(error.value)


def test_a_loss_that_branches_on_values_gets_autograd_and_that_works():
    def branching(params, batch):
        return loss_fn(params, batch) * (1 if batch.sum() > 0 else 2)

    with pytest.raises(RuntimeError, match=r"df\.autograd\(loss_fn\)"):
        compiled(loss_fn=branching)
    _, metrics = compiled(loss_fn=df.autograd(branching))
    assert float(metrics.loss) == 5.0


def without_gradients(params, batch):
    with torch.no_grad():
        return loss_fn(params, batch)


OUTSIDE = {
    "constant": (lambda params, batch: torch.tensor(1.0), "does not depend on the parameters"),
    "detached": (lambda params, batch: loss_fn(params, batch).detach(), "does not depend on the parameters"),
    "no_grad": (without_gradients, "does not depend on the parameters"),
    "NumPy": (lambda params, batch: torch.tensor((params["w"].numpy() ** 2).sum()), "leaves torch.*torch operations"),
    "NumPy, detached": (
        lambda params, batch: torch.tensor((params["w"].detach().numpy() ** 2).sum()),
        "does not depend on the parameters.*torch operations, without NumPy",
    ),
}
WAYS = {"traced": lambda loss: loss, "by autograd": df.autograd, "scaled": df.dynamic_loss_scale}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_loss_without_a_graph_is_refused_in_the_first_step(outside, way):
    loss, message = OUTSIDE[outside]
    init, step = df.adapt_while_communicate(WAYS[way](loss), df.sgd(0.1), df.topology("ring", 2))
    state = df.stack(init({"w": torch.zeros(2)}), 2)
    kind = ValueError
    if outside == "NumPy, detached" and way != "by autograd":  # torch.func refuses it first
        kind, message = RuntimeError, r"data pointer.*\n.*does not depend on the parameters.*without NumPy"
    with pytest.raises(kind, match=message) as error:
        df.simulate(step, 2)(state, torch.stack([TARGET, TARGET]), 0)
    assert "df.autograd" not in str(error.value)


def test_a_loss_without_a_graph_is_refused_compiled_and_accumulated():
    for loss in (OUTSIDE["constant"][0], OUTSIDE["no_grad"][0]):
        with pytest.raises(ValueError, match="does not depend on the parameters"):
            compiled(loss_fn=loss)
        init, step = df.adapt_while_communicate(df.accumulate(loss), df.sgd(0.1), df.topology("complete", 1))
        with pytest.raises(ValueError, match="does not depend on the parameters"):
            step(init({"w": torch.zeros(2)}), torch.ones(2, 1, 2), 0)


def test_a_gradient_of_zero_is_no_error():
    for zero in (lambda p, b: 0 * p["w"].sum(), lambda p, b: torch.sign(p["w"] - b).sum()):
        with torch.no_grad():  # around the step, not in the loss
            _, metrics = compiled(loss_fn=zero)
        assert float(metrics.grad_norm) == 0


@pytest.mark.parametrize("by_autograd", [False, True])
def test_a_failing_compiler_is_not_blamed_on_the_loss(by_autograd):
    def failing(graph, inputs):
        raise KeyError("no such device")

    for options in ({"backend": failing}, {"backend": "inductor", "no_such_option": 1}):
        with pytest.raises(RuntimeError, match=r"compiler fails for every function.*no.such.*Check `backend`") as error:
            compiled(loss_fn=df.autograd(loss_fn) if by_autograd else loss_fn, **options)
        assert "df.autograd" not in str(error.value)


def test_anomaly_mode_is_named():
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match="set_detect_anomaly is on.*Switch it off"),
    ):
        compiled(backend="aot_eager")


def test_keys_of_two_types_compile_as_they_run():
    params = {"w": torch.zeros(2), 3: torch.ones(2), "a": torch.zeros(1)}
    init, step = df.adapt_while_communicate(lambda p, b: ((p["w"] - b["x"]) ** 2).sum() + p[3].sum() * p["a"].sum(), df.sgd(0.1), df.topology("complete", 1))  # fmt: skip
    batch = {"x": TARGET, 7: TARGET}
    expected, _ = step(init(params), batch, 0)
    state, _ = df.compile(step, backend="eager")(init(params), batch, 0)
    for key, leaf in df.params(expected).items():
        assert torch.equal(df.params(state)[key], leaf)
