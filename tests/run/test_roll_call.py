"""Every order of messages, deaths, wake-ups and joins of 3 and 4 workers: no two parts of a run continue."""

from typing import NamedTuple

import pytest

from decentfn.elastic.roll_call import Decision, Leave, Note, act, places_of


class Worker(NamedTuple):
    """A worker may rest before each of its moves for any time, as if stopped; others then give up waiting for it."""

    seat: int
    seats: tuple[int, ...]
    generation: int = 0
    step: int = 0
    """Step that it has not ended."""
    mode: str = "before the step"
    proposal: Decision | None = None
    """What it is about to propose, from the notes that it has read."""


class Run(NamedTuple):
    workers: tuple[Worker, ...]
    begun: tuple[tuple[int, ...], ...]
    """Number of steps that each worker has begun, by generation."""
    ended: tuple[int, ...]
    """Number of steps that a worker has ended, by generation."""
    notes: tuple[frozenset[Note], ...]
    decided: tuple[Decision | None, ...]
    deaths: int
    """Number of workers that may still die."""
    timeouts: int
    """Number of times that a worker may still take the others for lost although they are not."""


def put(items, i, value):
    return (*items[:i], value, *items[i + 1 :])


def moved(run, worker, **changes):
    return run._replace(workers=put(run.workers, worker.seat, worker._replace(**changes)))


def has_left(run, seat, generation):
    other = run.workers[seat]
    return other.mode in ("lost", "left", "dead") or other.generation > generation


def successors(run, reaches, steps, *, waits_for_all, store_compares):
    """All runs that are one move further."""
    dead = {other.seat for other in run.workers if other.mode == "dead"}
    for w in run.workers:
        g = w.generation
        if w.mode in ("left", "dead"):
            continue
        if w.mode == "waits":
            for new, decision in enumerate(run.decided):
                if decision is not None and w.seat in decision.seats:
                    mode = {
                        "seats": decision.seats,
                        "generation": new,
                        "step": decision.step,
                        "mode": "before the step",
                    }
                    yield moved(run, w, **mode)
            continue
        if run.deaths:
            yield moved(run, w, mode="dead", proposal=None)._replace(deaths=run.deaths - 1)
        if w.mode == "before the step" and w.step < steps:
            begun = put(run.begun, g, put(run.begun[g], w.seat, max(run.begun[g][w.seat], w.step + 1)))
            yield moved(run, w, mode="in the step")._replace(begun=begun)
        if w.mode == "in the step" and (not waits_for_all or all(run.begun[g][seat] > w.step for seat in w.seats)):
            ended = put(run.ended, g, max(run.ended[g], w.step + 1))
            yield moved(run, w, mode="before the step", step=w.step + 1)._replace(ended=ended)
        if w.mode in ("before the step", "in the step") and g + 1 < len(run.decided):
            if any(has_left(run, seat, g) for seat in w.seats):
                yield moved(run, w, mode="lost")
            elif run.timeouts:
                yield moved(run, w, mode="lost")._replace(timeouts=run.timeouts - 1)
            # More than can be: after each step any worker may have heard that somebody waits, and hold a roll call.
            if w.mode == "before the step" and w.step and any(other.mode == "waits" for other in run.workers):
                yield moved(run, w, mode="lost")
        if w.mode == "lost" and w.proposal is None:
            mine = Note(w.seat, w.step, tuple(seat for seat in w.seats if seat in reaches[w.seat]))
            gone = dead & set(w.seats) & reaches[w.seat]
            waiting = {other.seat for other in run.workers if other.mode == "waits"}
            wills = {
                act(mine, w.seats, run.notes[g + 1], run.decided[g + 1], gone, seen, is_over=is_over)
                for is_over in (False, True)
                for seen in ((), waiting)
            }
            for will in wills - {None}:
                # Only between reading notes and proposing can another worker's move matter.
                is_proposal = isinstance(will, Decision) and run.decided[g + 1] is None
                yield moved(run, w, proposal=will) if is_proposal else obeyed(run, w, will)
        if w.proposal is not None:
            is_first = run.decided[g + 1] is None or not store_compares
            decided = put(run.decided, g + 1, w.proposal) if is_first else run.decided
            yield moved(run, w, proposal=None)._replace(decided=decided)


def obeyed(run, w, will):
    new = w.generation + 1
    if isinstance(will, Note):
        return run._replace(notes=put(run.notes, new, run.notes[new] | {will}))
    if isinstance(will, Leave):
        return moved(run, w, mode="left")
    assert will.step in (w.step, w.step - 1), "at most one step is repeated"
    return moved(run, w, seats=will.seats, generation=new, step=will.step, mode="before the step")


def check(run):
    for new in range(1, len(run.decided)):
        members = [w for w in run.workers if w.generation == new and w.mode not in ("dead", "waits")]
        assert len({w.seats for w in members}) <= 1, "one generation, one set of workers"
        assert all(w.seat in w.seats for w in members)
        if (decision := run.decided[new]) is not None:
            assert run.ended[new - 1] <= decision.step + 1, "the others' run continues as well"


def explore(n, *, steps, deaths, timeouts, losses=1, parts=None, joins=0, waits_for_all=True, store_compares=True):
    """Check every run of n workers that can be; return their number, and who continued in a later generation."""
    everyone, total = tuple(range(n)), n + joins
    reaches = {seat: set(part) for part in parts or [tuple(range(total))] for seat in part}
    first = Run(
        tuple(Worker(i, everyone if i < n else (), mode="before the step" if i < n else "waits") for i in range(total)),
        begun=((0,) * total,) * (losses + 1),
        ended=(0,) * (losses + 1),
        notes=(frozenset(),) * (losses + 1),
        decided=(None,) * (losses + 1),
        deaths=deaths,
        timeouts=timeouts,
    )
    seen, todo, continued = {first}, [first], set()
    while todo:
        run = todo.pop()
        check(run)
        continued |= {w.seats for w in run.workers if w.generation}
        for one in successors(run, reaches, steps, waits_for_all=waits_for_all, store_compares=store_compares):
            if one not in seen:
                seen.add(one)
                todo.append(one)
    return len(seen), continued


CASES = [
    (3, {"steps": 1, "deaths": 1, "timeouts": 0}),
    (3, {"steps": 1, "deaths": 0, "timeouts": 1}),
    (2, {"steps": 2, "deaths": 1, "timeouts": 0, "joins": 1}),
    pytest.param(2, {"steps": 2, "deaths": 1, "timeouts": 1, "joins": 1, "losses": 2}, marks=pytest.mark.slow),
    pytest.param(3, {"steps": 2, "deaths": 1, "timeouts": 0, "joins": 1}, marks=pytest.mark.slow),
    pytest.param(3, {"steps": 2, "deaths": 1, "timeouts": 1}, marks=pytest.mark.slow),
    pytest.param(3, {"steps": 1, "deaths": 2, "timeouts": 0, "losses": 2}, marks=pytest.mark.thorough),
    pytest.param(3, {"steps": 1, "deaths": 1, "timeouts": 1, "losses": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"steps": 1, "deaths": 1, "timeouts": 0}, marks=pytest.mark.slow),
    pytest.param(4, {"steps": 1, "deaths": 0, "timeouts": 1}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("n", "case"), CASES)
def test_no_order_of_moves_lets_two_parts_of_a_run_continue(n, case):
    count, continued = explore(n, **case)
    print(n, case, count)
    assert count > 1000 and continued >= {tuple(i for i in range(n) if i != lost) for lost in range(n)}
    if "joins" in case:
        assert tuple(range(n + case["joins"])) in continued


def test_a_newcomer_takes_the_lowest_free_place():
    before = {0: 0, 2: 2, 3: 3, 4: 1}
    assert places_of((0, 2, 3, 4, 5), before) == (0, 2, 3, 1, 4)
    assert places_of((2, 4, 6, 7), before) == (2, 1, 0, 3)


@pytest.mark.parametrize("parts", [[(0, 1), (2,)], pytest.param([(0, 2), (1,)], marks=pytest.mark.slow)])
def test_of_a_partition_the_larger_part_continues_where_all_answer(parts):
    everyone = tuple(range(3))
    notes = [Note(seat, 0, next(part for part in parts if seat in part)) for seat in everyone]
    for note in notes:
        assert act(note, everyone, notes, None, (), is_over=False) == Decision(parts[0], 0)
    explore(3, steps=1, deaths=0, timeouts=1, parts=parts)


def test_of_equal_parts_the_one_with_the_lowest_worker_continues():
    for parts in ([(0, 3), (1, 2)], [(1, 2), (0, 3)], [(0, 1), (2, 3)]):
        notes = [Note(seat, seat, part) for part in parts for seat in part]
        expected = next(part for part in parts if 0 in part)
        assert act(notes[0], range(4), notes, None, (), is_over=False) == Decision(expected, 0, repeats=True)
    # One link is broken: as many as all reach one another.
    notes = [Note(seat, 5, tuple(i for i in range(4) if {i, seat} != {1, 2})) for seat in range(4)]
    assert act(notes[0], range(4), notes, None, (), is_over=False) == Decision((0, 1, 3), 5)


def test_a_decision_says_whether_one_of_its_workers_has_ended_the_step_before():
    for its, repeats in (((3, False), False), ((4, False), True), ((3, True), True)):
        notes = [Note(0, 3, (0, 1)), Note(1, its[0], (0, 1), its[1])]
        assert act(notes[0], (0, 1), notes, None, (), is_over=False) == Decision((0, 1), 3, repeats)


@pytest.mark.parametrize("step", [2, 4])
def test_who_is_left_out_has_no_say_in_the_step_of_the_others(step):
    notes = [Note(0, 3, (0, 1)), Note(1, 3, (0, 1)), Note(2, step, (2,), repeats=True)]
    assert act(notes[0], range(3), notes, None, (), is_over=False) == Decision((0, 1), 3)


def test_the_exploration_finds_what_a_weaker_protocol_allows():
    case = {"steps": 2, "deaths": 0, "timeouts": 1}
    with pytest.raises(AssertionError, match="the others' run continues as well|at most one step"):
        explore(3, **case, waits_for_all=False)
    with pytest.raises(AssertionError, match="one generation, one set of workers"):
        explore(3, **case, store_compares=False)
