"""The thread that asks gloo for messages."""

import threading

import pytest

from decentfn.collectives.poster import Poster


def test_things_are_done_in_order_by_another_thread_and_errors_come_back():
    poster, by = Poster("poster"), []

    def note(number):
        by.append((number, threading.current_thread().name))
        if number == 1:
            raise ValueError("one")

    first, second, third = [poster.submit(note, number) for number in range(3)]
    third.result()
    first.result()
    with pytest.raises(ValueError, match="one"):
        second.result()
    assert by == [(number, "poster") for number in range(3)]


def test_when_it_has_ended_things_are_done_here():
    """As in a step of a handler that runs while the interpreter ends, after the thread was stopped."""
    poster, done = Poster("one that ends"), []
    poster.submit(done.append, 1).result()
    poster._end()
    poster.submit(done.append, 2).result()
    assert done == [1, 2] and "one that ends" not in [thread.name for thread in threading.enumerate()]
