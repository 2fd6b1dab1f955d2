"""Alignment groups: cases by hand, then with real steps: no source waits for ever, and none runs ahead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import InternalError
from headgate.operators.elements import WATERMARK_MAX, WATERMARK_MIN
from headgate.operators.splits import WHOLE
from headgate.runtime.protocol.ids import SubtaskId
from headgate.runtime.protocol.watermark_alignment import (
    NO_LIMIT,
    AlignmentGroup,
    Announcement,
    Member,
    WatermarkAlignment,
)

DRIFT_MS, EVERY_MS, TICK_MS, IDLE_MS = 100, 1_000, 200, 5_000


def member(number: int) -> Member:
    return Member(SubtaskId(0, number), "times")


def group() -> AlignmentGroup:
    return AlignmentGroup(DRIFT_MS, EVERY_MS)


def test_the_slowest_and_the_drift_make_the_limit() -> None:
    one = group()
    assert one.report(member(0), 500, 0) == 600
    assert one.report(member(1), 50, 1_000) == 150
    assert one.report(member(0), 700, 2_000) is None
    assert one.report(member(1), 90, 3_000) == 190


def test_who_is_idle_is_not_waited_for() -> None:
    one = group()
    one.report(member(0), 500, 0)
    one.report(member(1), 50, 1_000)
    assert one.report(member(1), None, 2_000) == 600
    assert one.report(member(0), None, 3_000) == NO_LIMIT
    assert one.report(member(0), None, 4_000) is None


def test_who_has_finished_is_not_waited_for() -> None:
    one = group()
    one.report(member(0), 500, 0)
    one.report(member(1), 50, 1_000)
    assert one.leave(SubtaskId(0, 1), 2_000) == 600
    assert one.leave(SubtaskId(0, 1), 3_000) is None


def test_limits_do_not_follow_each_report_but_none_is_forgotten() -> None:
    one = group()
    assert one.report(member(0), 1, 0) == 101
    assert one.report(member(0), 2, 499) is None
    assert one.report(member(0), 2, 500) == 102


def test_the_end_of_time_is_not_passed() -> None:
    assert group().report(member(0), WATERMARK_MAX - 1, 0) is None  # no limit, as before
    assert group().report(member(0), WATERMARK_MIN, 0) == WATERMARK_MIN + DRIFT_MS


def test_groups_do_not_know_each_other() -> None:
    both = WatermarkAlignment({"a": (10, EVERY_MS), "b": (20, EVERY_MS)})
    assert both.report("a", member(0), 5, 0) == [Announcement("a", 15)]
    assert both.report("b", member(0), 7, 0) == [Announcement("b", 27)]
    assert both.leave(SubtaskId(0, 0), 1_000) == [
        Announcement("a", NO_LIMIT),
        Announcement("b", NO_LIMIT),
    ]
    with pytest.raises(InternalError, match="unknown alignment group"):
        both.report("c", member(0), 1, 0)


def test_a_step_pauses_what_is_above_the_limit(aligned):
    run = aligned()
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 1_000).read("b", 2_000).wait(TICK_MS)
    run.splits.announce("other", 0)
    assert run.splits.paused == frozenset()
    run.splits.announce("g", 1_500)
    assert run.splits.paused == {"b"}
    assert run.splits.can_pause is False
    assert not run.splits.stands_still
    run.splits.announce("g", 998)
    assert run.splits.stands_still
    run.splits.announce("g", NO_LIMIT)
    assert run.splits.paused == frozenset()


def test_a_step_pauses_as_soon_as_it_is_ahead(aligned):
    run = aligned()
    run.splits.announce("g", 1_500)
    run.read(WHOLE, 1_501).wait(TICK_MS)
    assert not run.splits.stands_still
    run.read(WHOLE, 1_502).wait(TICK_MS)
    assert run.splits.stands_still


def test_splits_in_the_queue_of_one_that_waits_wait_too(aligned):
    run = aligned()
    run.splits.opened("a", queued=True)
    run.splits.opened("b", queued=True)
    run.read("a", 2_000).wait(TICK_MS)
    run.splits.announce("g", 1_500)
    assert run.splits.stands_still
    run.splits.can_pause = True  # then it could read the other one
    assert not run.splits.stands_still


def test_reports_say_how_far_the_splits_being_read_are(aligned):
    run = aligned()
    run.wait(1_000)
    assert run.reports == []  # who has no time yet is not waited for
    run.splits.opened("a")
    run.splits.opened("b", queued=True)
    run.read("a", 5_000).wait(1_000)
    assert run.reports == [4_999]
    run.wait(6_000)
    assert run.reports[-1] is None
    run.read("a", 6_000).wait(1_000)
    assert run.reports[-1] == 5_999


@pytest.mark.parametrize("wait_for_queued", [False, True])
def test_between_two_splits_of_a_queue_the_others_still_wait(aligned, wait_for_queued):
    run = aligned(wait_for_queued=wait_for_queued)
    run.splits.opened("a", queued=True)
    run.splits.opened("b", queued=True)
    run.read("a", 5_000).wait(1_000)
    run.read("a", 5_100, last=True).wait(1_000)
    assert run.reports[0] == 4_999
    assert None not in run.reports
    run.read("b", 6_000).wait(1_000)
    assert run.reports[-1] == 5_999
    run.read("b", 7_000, last=True).wait(1_000)
    assert run.reports[-1] is None


def test_who_waits_is_neither_idle_nor_driven_by_the_clock(aligned):
    run = aligned(close_after_ms=1_000)
    run.read(WHOLE, 2_000).wait(TICK_MS)
    run.splits.announce("g", 0)
    run.wait(60_000)
    assert run.signals == [("watermark", 1_999)]
    assert run.reports == [1_999] * 60
    run.splits.announce("g", NO_LIMIT)
    run.wait(10_000)
    assert ("idle", True) in run.signals


def test_the_clock_takes_a_quiet_member_along(aligned):
    run = aligned(close_after_ms=1_000)
    run.read(WHOLE, 2_000).wait(4_000)
    assert run.reports == [1_999, 1_999 + 1_800, 1_999 + 2_800, 1_999 + 3_800]


SUBTASKS = st.lists(  # per subtask: its splits, each with times in order; some are quiet for ever
    st.lists(st.lists(st.integers(0, 5_000), max_size=6).map(sorted), min_size=1, max_size=3),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SUBTASKS, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_everything_is_read_and_nobody_far_ahead(aligned, subtasks, can_pause, ends, random):
    """With splits that end or fall silent, read at random speeds; any watermark above the limit stops."""
    runs = [aligned(DRIFT_MS) for _ in subtasks]
    alignment, limit = WatermarkAlignment({"g": (DRIFT_MS, EVERY_MS)}), NO_LIMIT
    left = {
        (i, f"s{j}"): list(s) for i, splits in enumerate(subtasks) for j, s in enumerate(splits)
    }
    reached = dict.fromkeys(left, WATERMARK_MIN)
    for (number, split), _ in left.items():
        runs[number].splits.can_pause = can_pause
        runs[number].splits.opened(split)

    def tick(now_ms: int) -> None:
        nonlocal limit
        for number, run in enumerate(runs):
            run.wait(TICK_MS)
            for watermark in run.reports:
                for _, limit in alignment.report("g", member(number), watermark, now_ms):
                    for other in runs:
                        other.splits.announce("g", limit)
            run.reports.clear()
        for (number, split), time in last.items():
            reached[number, split] = time - 1

    last: dict[tuple[int, str], int] = {}
    rounds = 0
    while any(left.values()):
        rounds += 1
        assert rounds < 2_000, "somebody waits for ever"
        readable = [
            (number, split)
            for (number, split), times in left.items()
            if times
            and not runs[number].splits.stands_still
            and not (can_pause and split in runs[number].splits.paused)
        ]
        if readable and random.random() < 0.7:
            number, split = random.choice(readable)
            assert not can_pause or reached[number, split] <= limit
            time = left[number, split].pop(0)
            over = ends and not left[number, split]
            runs[number].read(split, time, last=over)
            last[number, split] = time
        else:
            tick(rounds * TICK_MS)
