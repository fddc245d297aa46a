"""One step, two interpreters: what gloo ranks compute, vmap computes."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import decentfn as df
from decentfn.comm.collectives import World, use
from decentfn.core import trees
from decentfn.testing import on_ranks
from tests import cases
from tests.cases import CASES, Case

STEPS = 5


def assert_same(case, ranks_results, simulated, local=1):
    leaves, losses = simulated
    # Sums of bfloat16 numbers depend on their order; nothing else does by more than float32's rounding.
    sums_are_rounded = case.algorithm == "all_reduce" and "wire_dtype" in case.hyperparameters
    close = {"atol": 5e-3, "rtol": 0.02} if sums_are_rounded else {"atol": 1e-6, "rtol": 1e-5}
    for rank, (mine, my_losses) in enumerate(ranks_results):
        rows = slice(rank * local, (rank + 1) * local) if local > 1 else rank
        assert len(mine) == len(leaves)
        for got, expected in zip(mine, leaves, strict=True):
            torch.testing.assert_close(got, expected[rows], **close)
        torch.testing.assert_close(torch.stack(my_losses), torch.stack(losses)[:, rows], **close)


def possible(case, n):
    if case.topology == "alternating-exp-ring" and n % 2:
        return False
    return not (case.topology in ("static-ring", "chain", "binary-tree") and n < 4)


def test_every_algorithm_has_a_case():
    functions = set(df.algorithms.__all__)
    assert functions == {case.algorithm for case in CASES} | set(cases.OTHERS) & functions


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_gloo_ranks_agree_with_vmap(ranks, case, n):
    if not possible(case, n) or (n == 8 and case.algorithm not in cases.CORE):
        pytest.skip("the topology has another size, or smaller sizes cover the algorithm")
    if n == 8:  # threads: to start so many processes takes longer than all else here
        results = on_ranks(8, lambda rank: cases.on_this_rank(case, STEPS, 1, None))
    else:
        results = ranks(n).run(cases.on_this_rank, case, STEPS, 1, None)
    assert_same(case, results, cases.simulated(case, n, STEPS))


BY_INDUCTOR = [
    Case("adapt_while_communicate", "ring"),
    Case("adapt_then_combine", "alternating-exp-ring"),
]


def one_case_each(algorithms):
    return [next(case for case in CASES if case.algorithm == algorithm) for algorithm in algorithms]


def assert_compiled_ranks_agree(ranks, case, backend):
    n = 2 if case.algorithm in cases.CORE and case.topology != "alternating-exp-ring" else 4
    assert_same(case, ranks(n).run(cases.on_this_rank, case, STEPS, 1, backend), cases.simulated(case, n, STEPS))


@pytest.mark.parametrize("case", BY_INDUCTOR, ids=str)
def test_compiled_gloo_ranks_agree_with_vmap(ranks, case):
    assert_compiled_ranks_agree(ranks, case, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_compiled_on_gloo_ranks_agrees_with_vmap(ranks, case):
    assert_compiled_ranks_agree(ranks, case, "inductor")


@pytest.mark.parametrize(
    "case", [Case("adapt_while_communicate", "ring"), Case("adapt_then_combine", "complete")], ids=str
)
def test_workers_packed_in_processes_agree_with_vmap(ranks, case):
    results = ranks(2).run(cases.on_this_rank, case, STEPS, 2, None)
    assert_same(case, results, cases.simulated(case, 4, STEPS), local=2)


@pytest.mark.parametrize(
    "case", [Case("adapt_while_communicate", "ring"), Case("adapt_then_combine", "one-peer-exp")], ids=str
)
def test_pairwise_mixing_is_bitwise_the_same(ranks, case):
    simulated, _ = cases.simulated(case, 4, STEPS)
    for rank, (mine, _) in enumerate(ranks(4).run(cases.on_this_rank, case, STEPS, 1, None)):
        assert all(torch.equal(got, expected[rank]) for got, expected in zip(mine, simulated, strict=True))


def traced(built, rank):
    """Return the traced code and constants of a step on one of two processes with two workers each."""
    init, step = built
    state, batch, step = df.stack(init(cases.params()), 2), cases.batches(2, 0), df.simulate(step, 2)
    leaves, template = trees.leaves(state), trees.enumerate_leaves(state)

    def run(leaves, batch, t):
        return trees.leaves(step(trees.fill(template, leaves), batch, t))

    with use(World(None, rank, 2)):
        graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(leaves, batch, torch.tensor(3))
    return graph.code, [constant.tolist() for _, constant in sorted(graph.named_buffers())]


@pytest.mark.parametrize("case", one_case_each(dict.fromkeys(case.algorithm for case in CASES)), ids=str)
def test_what_is_traced_does_not_know_the_rank(case):
    """Ranks share compiled code, found by the graph that Dynamo sees; a rank in it would be that of who compiled first."""
    built = cases.build(case, 4)
    assert traced(built, rank=0) == traced(built, rank=1)
