"""No algorithm grows on a schedule that it accepts; a part of `python -m tests.promises`."""

import re

import pytest

import decentfn as df
from decentfn.topologies import alternate, every, later, lossy, until
from tests import promises

VARYING = ("random-matching", "one-peer-exp", "shift-one", "equitopo-d-static")
OF_MOMENTUM = ("decentlam", "gasloc", "noloco", "quasi_global_momentum")


def assert_promised(name, topology, **options):
    """Refused, or right."""
    try:
        cell = promises.run(name, topology, **options)
    except ValueError as error:
        return str(error)
    assert not cell.wrong(name), f"{name} on {topology.name} of {topology.num_workers}: {cell}"
    return None


@pytest.mark.parametrize("schedule", ["random-matching", "one-peer-exp"])
def test_gasloc_agrees_where_its_page_sends_it(schedule):
    assert assert_promised("gasloc", df.topology(schedule, 8)) is None


def test_what_sparse_loco_moves_without_a_gradient_its_error_has_held():
    assert promises.run("sparse_loco", df.topology("complete", 8)).mean < 1e-14


def refusal(name, topology, num_workers=8, **options):
    """Build an algorithm on a topology, with a compressor where it needs one; return why it is refused, or None."""
    if name in ("beer", "choco_sgd", "deep_squeeze"):
        options |= {"compressor": df.compressors.top_k(0.1), "gamma": 0.3}
    try:
        getattr(df, name)(lambda x, b: ((x - b) ** 2).sum(), df.sgd(0.1), df.topology(topology, num_workers), **options)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("topology", ["complete", "random-matching", "ring", "static-exp"])
@pytest.mark.parametrize(
    "name", ["asynchronous_diloco", "beer", "exact_diffusion", "extra", "led", "nids", "power_gossip"]
)
def test_what_a_refusal_names_is_accepted(name, topology):
    """Six workers, which no exponential graph of pairs has."""
    if (why := refusal(name, topology, 6)) is not None:
        advice = why.rpartition("; use ")[2]
        for offered in re.findall("'([a-z-]+)'", advice):
            assert refusal(name, offered, 6) is None, why
        for other in {*re.findall("[a-z_0-9]+", advice)} & {*df.algorithms.__all__}:
            assert refusal(other, topology, 6) is None, why


def test_fast_gossip_is_sent_to_no_method_that_needs_it_too():
    why = refusal("gradient_tracking", "base", gossip_rounds=2)
    assert why is not None and "leave it out" in why and "gradient_tracking" not in why
    assert refusal("gradient_tracking", "base") is None


def test_a_static_topology_is_not_said_to_have_other_links():
    why = refusal("d2", "static-exp")
    assert why is not None and "other links" not in why and "'static-exp'" in why
    assert "other links" in (refusal("d2", "base") or "")


@pytest.mark.parametrize("name", ["noloco", "quasi_global_momentum", "gasloc"])
def test_momentum_that_grows_on_a_long_cycle_is_refused(name):
    assert "disagreement grows" in (assert_promised(name, df.topology("shift-one", 16)) or "")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in df.algorithms.__all__ if name not in promises.EVERYONE])
def test_what_is_accepted_converges(name):
    topologies = [df.topology(s, n) for s, n in zip(VARYING, (13, 8, 16, 16), strict=True)]
    topologies = topologies if name in OF_MOMENTUM else topologies[:2]
    if all([assert_promised(name, topology, rounds=200) for topology in topologies]):  # it refuses what varies
        assert_promised(name, df.topology("static-ring", 8), rounds=200)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in OF_MOMENTUM if name != "decentlam"])
def test_combinations_in_time_converge(name):
    pairs, ring, directed = (df.topology(s, 8) for s in ("random-matching", "static-ring", "static-exp"))
    combined = [every(3, ring), later(5, ring), alternate(pairs, ring), until(20, directed, ring), lossy(pairs, 0.2)]
    for topology in combined + [until(600, directed, ring)]:
        assert_promised(name, topology, rounds=200)
