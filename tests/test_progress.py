"""A step that compiles says so through the logger "decentfn", once for every shape of batch, and is silent afterwards."""

import logging
import re
import time

import pytest
import torch

import decentfn as df
from decentfn.engine import compilation

pytestmark = pytest.mark.thorough

COMPILING = r"compiling adapt_then_combine\.step{} \.\.\."
COMPILED = r"compiled adapt_then_combine\.step in \d+\.\d s"


def a_step(**options):
    init, step = df.adapt_then_combine(lambda p, x: ((x - p) ** 2).mean(), df.sgd(0.1), df.topology("complete", 1))
    return init(torch.zeros(2)), df.compile(step, **options)


def said(caplog):
    of_compiling = ("decentfn", logging.DEBUG)  # what `init` says is at level INFO
    return [record.getMessage() for record in caplog.records if (record.name, record.levelno) == of_compiling]


def wait_for(caplog, lines):
    """Until another thread has logged so many lines."""
    until = time.monotonic() + 60
    while sum(record.name == "decentfn" for record in caplog.records) < lines and time.monotonic() < until:
        time.sleep(0.02)


def match_all(patterns, lines):
    assert len(patterns) == len(lines), lines
    for pattern, line in zip(patterns, lines, strict=True):
        assert re.fullmatch(pattern, line), line


def test_compiling_is_announced_and_timed_for_each_shape_of_batch(caplog):
    caplog.set_level(logging.DEBUG, "decentfn")
    state, step = a_step()
    for t, size in enumerate((3, 3, 5, 5, 3)):
        state, _ = step(state, torch.ones(size, 2), t)
    again = COMPILING.format(" again, for another batch or loss")
    match_all([COMPILING.format(""), COMPILED, again, COMPILED], said(caplog))


def test_other_backends_and_simulations_are_announced_too(caplog):
    caplog.set_level(logging.DEBUG, "decentfn")
    init, step = df.adapt_then_combine(lambda p, x: ((x - p) ** 2).mean(), df.sgd(0.1), df.topology("ring", 2))
    state, step = df.stack(init(torch.zeros(2)), 2), df.compile(df.simulate(step, 2), backend="aot_eager")
    for t in range(2):
        state, _ = step(state, torch.ones(2, 3, 2), t)
    match_all([COMPILING.format(""), COMPILED], said(caplog))


@pytest.mark.parametrize(("make", "said"), [(lambda loss: loss, "; with df.autograd"), (df.autograd, ")")])
def test_a_script_that_does_not_ask_is_told_of_a_long_compilation_once(caplog, monkeypatch, make, said):
    monkeypatch.setattr(compilation, "_SILENT_S", 0.05)

    def slow(graph, inputs):
        wait_for(caplog, 1)
        return graph.forward

    init, step = df.adapt_then_combine(
        make(lambda p, x: ((x - p) ** 2).mean()), df.sgd(0.1), df.topology("complete", 1)
    )
    state, step = init(torch.zeros(2)), df.compile(step, backend=slow)
    for t in range(3):
        state, _ = step(state, torch.ones(3, 2), t)
    time.sleep(0.2)
    [line] = [record.getMessage() for record in caplog.records if record.name == "decentfn"]
    assert line.startswith(f"compiling adapt_then_combine.step (minutes for a large network{said}")


def test_the_announcement_of_a_later_compilation_says_again(caplog, monkeypatch):
    monkeypatch.setattr(compilation, "_SILENT_S", 0.05)
    quick, seen = compilation.compile_cache.inductor, []

    def slow(graph, inputs, **kwargs):
        seen.append(graph)
        wait_for(caplog, len(seen))
        return quick(graph, inputs, **kwargs)

    monkeypatch.setattr(compilation.compile_cache, "inductor", slow)
    state, step = a_step()
    for t, size in enumerate((3, 5)):
        state, _ = step(state, torch.ones(size, 2), t)
    first, second = [record.getMessage() for record in caplog.records if record.name == "decentfn"]
    assert first.startswith("compiling adapt_then_combine.step (minutes")
    assert second.startswith("compiling adapt_then_combine.step again, for another batch or loss (minutes")


def test_a_backend_that_compiles_nothing_promises_no_minutes(caplog, monkeypatch):
    monkeypatch.setattr(compilation, "_SILENT_S", 0.0)
    state, step = a_step(backend="eager")
    step(state, torch.ones(3, 2), 0)
    assert [record.getMessage() for record in caplog.records if record.name == "decentfn"] == [
        "tracing adapt_then_combine.step"
    ]


def test_a_script_that_does_not_ask_is_told_nothing_of_a_quick_one(caplog):
    state, step = a_step(backend="aot_eager")
    step(state, torch.ones(3, 2), 0)
    assert said(caplog) == []
