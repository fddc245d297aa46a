"""Ctrl-C in a compiled step of one process: the state is the old one or the new one, never a part of each."""

import copy
import signal
import sys

import pytest
import torch

import decentfn as df
from decentfn.core import trees

pytestmark = pytest.mark.slow  # real interrupts: `test_donation.py` runs them in a process of their own


@pytest.fixture(autouse=True)
def heard():
    """A job in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


N, X = 4, torch.linspace(-1, 1, 60).view(4, 5, 3)


def made(backend):
    params = {"w": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.ones(4)}

    def loss(p, x):
        return (x @ p["w"] + p["b"]).square().mean()

    init, step = df.adapt_while_communicate(loss, df.adamw(0.1), df.topology("one-peer-exp", N))
    step, state = df.compile(df.simulate(step, N), backend=backend), df.stack(init(params), N)
    return step, step(state, X, 0)[0]


def values(state):
    return [x.clone() for x in trees.leaves(state)]


def equal(mine, theirs):
    return all(map(torch.equal, mine, theirs))


class Interrupting:
    """A backend that runs a graph node by node and sends Ctrl-C `after` so many of them, `times` in a row."""

    def __init__(self):
        self.after, self.times, self.nodes = -1, 1, 0

    def __call__(self, graph, inputs):
        mine = self

        class Run(torch.fx.Interpreter):
            def run_node(self, node):
                result = super().run_node(node)
                mine.nodes += 1
                for _ in range(mine.times if mine.nodes == mine.after else 0):
                    signal.raise_signal(signal.SIGINT)
                return result

        return lambda *args: Run(graph).run(*args)


@pytest.fixture(scope="module")
def interruptible():
    """`interruptible()`: the backend of a compiled step, the step and a state of its own."""
    backend = Interrupting()
    step, start = made(backend)

    def of_a_test():
        vars(backend).update(vars(Interrupting()))
        return backend, step, copy.deepcopy(start)

    return of_a_test


def test_an_interrupt_between_any_two_kernels_leaves_the_new_state(interruptible):
    backend, step, start = interruptible()
    expected, total = copy.deepcopy(start), 0
    step(expected, X, 1)
    total += backend.nodes
    new, (then, _) = values(expected), step(expected, X, 2)
    assert total > 20
    for after in range(1, total + 1):
        state = copy.deepcopy(start)
        backend.nodes, backend.after = 0, after
        with pytest.raises(KeyboardInterrupt):
            step(state, X, 1)
        assert equal(values(state), new), after
        backend.after = -1
        assert equal(values(step(state, X, 2)[0]), values(then))


def test_an_interrupt_at_any_line_between_graph_and_exchange_leaves_the_old_or_the_new_state():
    """Of this package's engine; torch's own lines after the last kernel are covered by the test above."""
    step, start = made("eager")
    expected = copy.deepcopy(start)
    step(expected, X, 1)
    old, new, found = values(start), values(expected), []
    for place in range(2000):
        state, lines = copy.deepcopy(start), [0]

        def trace(frame, event, _, lines=lines, place=place):
            if "decentfn/engine" not in frame.f_code.co_filename:
                return None
            if event == "line":
                lines[0] += 1
                if lines[0] == place:
                    signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            step(state, X, 1)
        except KeyboardInterrupt:
            found.append(equal(values(state), new))
            assert found[-1] or equal(values(state), old), place
        else:
            assert lines[0] < place or not place
            if place:
                break
        finally:
            sys.settrace(before)
    assert sorted(found) == found and any(found) and not all(found)


def test_a_second_interrupt_is_not_held_back(interruptible):
    backend, step, state = interruptible()
    step(state, X, 1)
    nodes, backend.nodes, backend.after, backend.times = backend.nodes, 0, 2, 2
    with pytest.raises(KeyboardInterrupt):
        step(state, X, 2)
    assert backend.nodes == 2 < nodes


def test_an_interrupt_while_a_step_compiles_is_not_held_back():
    def backend(graph, inputs):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("held back")

    with pytest.raises(KeyboardInterrupt):
        made(backend)


def test_the_users_own_handler_is_called_once_and_stays(interruptible):
    (backend, step, state), calls = interruptible(), []
    before = signal.signal(signal.SIGINT, lambda *args: calls.append(args[0]))
    try:
        mine = signal.getsignal(signal.SIGINT)
        backend.nodes, backend.after = 0, 3
        step(state, X, 1)
        assert calls == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
