"""`df.testing` finds what is wrong with a user's own algorithm, topology, transform or compressor."""

from typing import NamedTuple

import pytest
import torch

import decentfn as df
from decentfn import kit, testing
from decentfn.comm import collectives
from decentfn.core import trees
from decentfn.kit import Metrics, State, Worker, add, collect
from decentfn.optim.transforms import Transform
from decentfn.testing import PROMISES
from decentfn.testing.subjects import Run, ranks

pytestmark = pytest.mark.thorough


class Memory(NamedTuple):
    x: kit.Buckets


def my_algorithm(fault):
    """Adapt then combine, with a fault."""

    @kit.algorithm
    def algorithm(loss_fn, optimizer, topology, **options):
        worker = Worker(loss_fn, optimizer, topology, **options)

        def step(state, batch, t):
            g, local = worker.gradient(state.params, state.local, batch, t)
            u, local = worker.update(g.grads, g, local, state.params)
            x = worker.mix(add(state.params, u), t)
            if fault == "loses a hundredth":
                x = trees.map(lambda b: 0.99 * b, x)
            if fault == "learns nothing":
                x = state.params
            if fault == "widens":
                x = trees.map(lambda b: b.to(torch.promote_types(b.dtype, torch.float32)), x)
            if fault == "writes over its input":
                state.params[0].add_(1.0)
            if fault == "no collective order" and df.init().rank:
                x = trees.map(torch.clone, state.params)
            memory = state.memory
            if fault == "writes over a memory of zeros":
                memory = Memory(trees.map(lambda m, b: m.mul_(0.9) + b, memory.x, x))
            return State(x, local, memory), Metrics(g.loss, g.aux, g.loss)

        memories = {
            "remembers the parameters themselves": Memory,
            "writes over a memory of zeros": lambda x: Memory(trees.map(torch.zeros_like, x)),
        }
        return worker.algorithm(step, memories.get(fault))

    return algorithm


def ring(n):
    return df.topology("ring" if n > 1 else "complete", n)


@pytest.mark.parametrize(
    ("fault", "promise", "message"),
    [
        ("loses a hundredth", "laws_hold", "^laws_hold: mean preserved: off by"),
        ("learns nothing", "works_alone", "^works_alone: .*the loss of one batch went from (.*) to \\1 "),
        ("widens", "dtypes_stay", "returned a state with params.2 torch.float32"),
        ("writes over its input", "dtypes_stay", "wrote over 'params"),
        ("writes over a memory of zeros", "dtypes_stay", "^dtypes_stay: memory.x.0: Tensor-likes are not equal"),
        (
            "remembers the parameters themselves",
            "traced_ranks_agree",
            r"'memory.*x.(\d)' and 'params.\1'.*copy_wide\(x\)",
        ),
        ("no collective order", "interpreters_agree", "^interpreters_agree: params.0"),
    ],
)
def test_a_fault_of_an_algorithm_breaks_its_promise(fault, promise, message):
    with pytest.raises((AssertionError, RuntimeError, ValueError), match=message):
        testing.try_promise(PROMISES[promise], testing.Subject(my_algorithm(fault), ring))


def one_way(n):
    """Columns that sum to 1; of rows, none does."""
    kept = torch.linspace(0.3, 0.7, n, dtype=torch.float64) if n > 1 else torch.ones(1, dtype=torch.float64)
    W = torch.diag(kept) + torch.diag(1 - kept).roll(1, 0)
    return df.topologies.from_matrices("one way", [W.tolist()], needs_push_sum=True)


def test_an_algorithm_that_does_not_push_sums_is_refused_on_a_column_stochastic_graph():
    words = r"algorithm: '.*one way.*' is column-stochastic only.*kit\.pack.*worker\.algorithm\(\.\.\., push_sum=True\)"
    for topology in (one_way(4), df.topologies.every(3, one_way(4))):
        with pytest.raises(ValueError, match=words):
            my_algorithm(None)(lambda p, batch: p.sum(), df.sgd(0.1), topology)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["stochastic_gradient_push", "push_diging"])
def test_push_sum_passes_all_checks_on_a_column_stochastic_graph(name):
    assert testing.check_algorithm(getattr(df, name), one_way, backend="aot_eager")["laws_hold"] is None


def test_plain_mixing_that_is_declared_as_push_sum_breaks_the_promise_that_equal_workers_stay():
    @kit.algorithm
    def declares(loss_fn, optimizer, topology, **options):
        worker = Worker(loss_fn, optimizer, topology, **options)

        def step(state, batch, t):
            g, local = worker.gradient(state.params, state.local, batch, t)
            u, local = worker.update(g.grads, g, local, state.params)
            return State(worker.mix(add(state.params, u), t), local), g.metrics

        return worker.algorithm(step, push_sum=True)

    with pytest.raises(AssertionError, match="^equal_workers_stay_equal: off by"):
        testing.try_promise(PROMISES["equal_workers_stay_equal"], testing.Subject(declares, one_way))


def test_an_algorithm_says_what_it_declines():
    """A sound one is on the page "Write your own", where all promises are tried."""
    subject = testing.Subject(my_algorithm(None), ring)
    assert "does not show its optimizer the neighbors' messages" in testing.try_promise(
        PROMISES["shows_the_mix"], subject
    )
    assert testing.try_promise(PROMISES["interpreters_agree"], subject) is None


def impatient(added):
    @kit.algorithm
    def adds(loss_fn, optimizer, topology, **options):
        worker = Worker(loss_fn, optimizer, topology, **options)

        def step(state, batch, t):
            payload = trees.map(torch.clone, state.params)
            posted = worker.post(payload, t)
            for bucket in payload:
                bucket.add_(added)
            x = collect(posted)
            return State(x, state.local), Metrics(x[0].sum(), None, x[0].sum())

        return worker.algorithm(step)

    return testing.Subject(adds, ring)


def test_late_messages_show_a_payload_that_is_written_over_while_it_travels():
    """The step adds one to what it has posted before it waits for the answers; if all are late, the mix has all of it."""
    right, late = ranks(impatient(0.0), Run(), steps=1), ranks(impatient(1.0), Run(), steps=1, delay=0.05)
    torch.testing.assert_close(late[-1].params[0], right[-1].params[0] + 1.0)


def test_ranks_are_real_and_their_errors_come_out():
    def mean_rank(rank):
        here = df.init()
        assert (here.rank, here.size) == (rank, 3)
        return collectives.process_mean(torch.tensor([float(rank)])).item()

    assert testing.on_ranks(3, mean_rank) == [1.0, 1.0, 1.0]
    with pytest.raises(ZeroDivisionError):
        testing.on_ranks(2, lambda rank: 1 / 0)
    with pytest.raises(ValueError, match=r"on_ranks\(num_ranks=.*an integer; found function"):
        testing.on_ranks(mean_rank, 2)


def test_ranks_leave_torchs_generator_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    testing.on_ranks(2, lambda rank: torch.manual_seed(rank))
    assert torch.initial_seed() == 3 and torch.equal(torch.get_rng_state(), before)


def test_a_transform_that_keeps_python_state_is_found():
    counts = []

    def update(grads, state, params):
        counts.append(0)
        return trees.map(lambda g: -g * len(counts), grads), state

    with pytest.raises(AssertionError, match="graphs for 3 updates|not close"):
        testing.check_transform(lambda: Transform(lambda params: (), update))


def test_a_transform_whose_state_is_the_parameters_is_found():
    with pytest.raises(AssertionError, match="share memory"):
        testing.check_transform(lambda: Transform(lambda params: params, lambda g, s, p: (g, s)))


def test_a_compressor_that_promises_too_much_is_found():
    top = df.compressors.top_k(0.1)
    with pytest.raises(AssertionError, match="more than 1 - δ"):
        testing.check_compressor(top._replace(delta=lambda plan: 0.9))
    with pytest.raises(AssertionError, match="planned are"):
        testing.check_compressor(top._replace(nbytes=lambda plan: 1))


def test_a_topology_whose_weights_do_not_sum_to_one_is_found():
    good = df.topology("static-exp", 4)
    object.__setattr__(good, "weights", good.weights * 0.99)
    with pytest.raises(AssertionError, match="sum to 1"):
        testing.check_topology(good)


def test_checks_in_a_process_of_several_are_of_one_alone():
    """At the head of a script under torchrun, by rank 0 or by all; the topology has another size than the run."""

    def check(rank):
        if rank == 0:
            testing.check_topology(df.topology("static-ring", 4))
            return testing.try_promise(PROMISES["works_alone"], testing.Subject(my_algorithm(None), ring))
        return None

    assert testing.on_ranks(2, check) == [None, None]
