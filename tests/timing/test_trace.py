"""A trace says what arrived when, or is refused."""

import json

import pytest

import decentfn as df
from decentfn.timing import Trace, schedule_name
from decentfn.timing.trace import Replay

RING = df.topologies.from_shifts("directed-ring", [{1: 0.5}], 3)


def trace(**changes):
    """Worker 2 takes one step while the others take two."""
    parts = {
        "topology": schedule_name(RING),
        "num_workers": 3,
        "taken": [[[], []], [[(0, 0)], [(0, 1)]], [[(1, 0), (1, 1)], []]],
        "sent": [[[True], [True]], [[True], [True]], [[False]]],
        "ended": [[0.1, 0.2], [0.15, 0.25], [0.3]],
    }
    return Trace(**(parts | changes))


def test_levels_follow_what_steps_depend_on():
    assert trace().levels == (((0, 0),), ((0, 1), (1, 0)), ((1, 1),), ((2, 0),))


def test_a_ring_has_a_place_for_each_message_that_is_not_taken_yet():
    made = trace()
    assert made.room == 2  # both of worker 1's wait for worker 2
    assert made.places[0, 0] == made.places[0, 1] == 0  # the first was taken in the level of the second


def test_a_saved_trace_is_the_same(tmp_path):
    made = trace()
    made.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == made
    assert list(made.settled) == [(2, ())]


def test_a_file_without_late_messages_is_a_trace_in_which_none_was_late(tmp_path):
    made = trace()
    made.save(path := tmp_path / "trace.json")
    told = json.loads(path.read_text())
    del told["late"]  # as written before mail was taken after a gradient, too
    path.write_text(json.dumps(told))
    assert Trace.load(path) == made and made.late == ((0, 0), (0, 0), (0,))
    assert trace(late=[[0, 0], [1, 1], [2]]).levels == made.levels  # a step needs what it takes late, too


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"late": [[0, 0], [2, 0], [0]]}, r"messages, of which late=\[2, 0\]"),
        ({"late": [[0, 0], [0, 0], [0, 0]]}, r"worker 2 has 1 steps.*late=\[0, 0\]"),
        ({"late": [[0, 0], [0, -1], [0]]}, r"late=\[0, -1\]"),
        ({"late": [[0, 0]]}, "late has an entry for each of the 3 workers"),
        ({"taken": [[[], []], [[(0, 0)], [(0, 0)]], [[]]]}, "twice"),
        ({"taken": [[[], []], [[(2, 0)], []], [[]]]}, "no such message"),
        ({"taken": [[[], []], [[(0, 7)], []], [[]]]}, "no such message"),
        ({"taken": [[[(1, 1)], []], [[(0, 1)], []], [[]]]}, "later steps"),
        ({"ended": [[0.1], [0.1, 0.2], [0.3]]}, "2 steps in sent, 1 in ended"),
        ({"num_workers": 4}, "each of the 4 workers"),
    ],
)
def test_what_cannot_have_happened_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        trace(**changes)


def test_a_trace_of_another_schedule_is_refused():
    Replay("here", trace(), RING)
    with pytest.raises(ValueError, match="3 workers on the schedule .* of 4 "):
        Replay("here", trace(), df.topologies.static_ring(4))
    with pytest.raises(ValueError, match="digest"):
        Replay("here", trace(), df.topologies.static_ring(3))


def test_a_clocks_trace_is_replayed_if_its_exchange_has_the_algorithms_topology():
    ring, clock = df.topologies.static_ring(3), df.clock(0.1, df.planning.Cluster(3, df.planning.Link(1)))
    algorithm = df.asynchronous_diloco(lambda x, batch: (x * batch).sum(), df.sgd(0.1), ring, inner_steps=3)
    of = {its: df.timing.Exchange(its, 8.0, is_awaited=False) for its in (ring, algorithm.topology)}
    Replay("here", clock.timeline(of[algorithm.topology], 4).trace, algorithm.topology)
    with pytest.raises(ValueError, match=r"is of Exchange\(algorithm\.topology, "):
        Replay("here", clock.timeline(of[ring], 4).trace, algorithm.topology)
