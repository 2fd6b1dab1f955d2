"""Two processes that take turns: whatever happens, one leads in the end, and none waits for ever."""

from __future__ import annotations

import itertools

import pytest

from headgate.runtime.protocol.standby import (
    Step,
    Turn,
    Watched,
    first_step,
    step_behind,
    step_by_turn,
    step_fenced,
)

TURN_OF = {Step.LEAD: Turn.LEADS, Step.LEAVE: Turn.OVER}


def step(other: Turn, *, first: bool, silent_ms: int = 0) -> Step:
    return step_by_turn(other, first=first, silent_ms=silent_ms, silent_max_ms=100)


@pytest.mark.parametrize("restarted", itertools.product([False, True], repeat=2))
@pytest.mark.parametrize("order", itertools.product([0, 1], repeat=4))
def test_exactly_one_leads_whoever_is_asked_first(
    restarted: tuple[bool, bool], order: tuple[int, ...]
) -> None:
    """Both begin, in any order, and answer each other truly."""
    steps = [first_step(first=number == 0, restarted=restarted[number]) for number in (0, 1)]
    for number in (*order, 0, 1, 0, 1):
        if steps[number] is Step.ASK:
            other = TURN_OF.get(steps[1 - number], Turn.STANDS_BY)
            steps[number] = step(other, first=number == 0)
    assert sorted(each.name for each in steps) == ["LEAD", "WATCH"]


def test_a_job_begins_with_the_first() -> None:
    assert first_step(first=True, restarted=False) is Step.LEAD
    assert first_step(first=False, restarted=False) is Step.ASK
    assert first_step(first=True, restarted=True) is Step.ASK


@pytest.mark.parametrize("first", [True, False])
def test_one_that_is_alone_leads_and_one_whose_job_is_over_leaves(first: bool) -> None:
    assert step(Turn.GONE, first=first) is Step.LEAD
    assert step(Turn.OVER, first=first) is Step.LEAVE
    assert step(Turn.LEADS, first=first) is Step.WATCH


@pytest.mark.parametrize("first", [True, False])
def test_one_that_does_not_answer_is_given_time(first: bool) -> None:
    assert step(Turn.SILENT, first=first, silent_ms=99) is Step.ASK
    assert step(Turn.SILENT, first=first, silent_ms=100) is Step.LEAD


def test_behind_a_leader() -> None:
    assert step_behind(Watched.LOST) is Step.LEAD
    assert step_behind(Watched.JOB_ENDED) is Step.LEAVE
    assert step_behind(Watched.DEPOSED) is Step.ASK


def test_a_fenced_leader_fights_no_other_run() -> None:
    assert [turn for turn in Turn if step_fenced(turn) is Step.WATCH] == [Turn.LEADS]
    assert step_fenced(Turn.SILENT) is Step.ASK  # whose run it was is not known yet
