"""A trace says what arrived when, or is refused."""

import pytest

import decentfn as df
from decentfn.timing import Trace, schedule_name

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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
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
    trace().require_of("here", RING)
    with pytest.raises(ValueError, match="3 workers on the schedule .* of 4 "):
        trace().require_of("here", df.topologies.static_ring(4))
    with pytest.raises(ValueError, match="digest"):
        trace().require_of("here", df.topologies.static_ring(3))
