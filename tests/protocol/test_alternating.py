"""Barriers that may overtake: a test for every (state, event) pair of the module's table."""

from __future__ import annotations

import pytest

from headgate.errors import InternalError
from headgate.operators.elements import CheckpointBarrier, CheckpointOptions
from headgate.runtime.protocol.barriers.alternating import AlternatingBarrierHandler
from headgate.runtime.protocol.barriers.at_least_once import AtLeastOnceTracker
from headgate.runtime.protocol.barriers.handler import (
    ABORTED_IDS_MAX,
    AbortCheckpoint,
    AlignedBarrierHandler,
    BarrierHandler,
    BlockChannel,
    DropCapture,
    FinishCapture,
    ForwardCancel,
    StartCapture,
    StartTimer,
    TriggerSnapshot,
    UnblockAll,
)
from headgate.runtime.protocol.failures import CheckpointFailure

SUBSUMED = CheckpointFailure.SUBSUMED
CANCEL = CheckpointFailure.CANCEL_MARKER
TIMEOUT_MS = 50
OPTIONS = {
    "b": CheckpointOptions(aligned_timeout_ms=TIMEOUT_MS),
    "u": CheckpointOptions(unaligned=True),
    "o": CheckpointOptions(aligned_timeout_ms=TIMEOUT_MS, unaligned=True),
    "p": CheckpointOptions(savepoint="s"),
}
DUE_MS = {1: 150, 2: 1050}


def barrier(element: str) -> CheckpointBarrier:
    """`b1` may overtake after a while, `u1` does at once, `o1` does after a while, `p1` never may."""
    id_ = int(element[1:])
    return CheckpointBarrier(id_, DUE_MS[id_] - TIMEOUT_MS, OPTIONS[element[0]])


def snapshot(element: str, alignment_ms: int = 0, start_delay_ms: int = 0) -> TriggerSnapshot:
    return TriggerSnapshot(barrier(element), alignment_ms, start_delay_ms)


def given_up(id_: int, reason: CheckpointFailure) -> list:
    return [AbortCheckpoint(id_, reason), ForwardCancel(id_)]


def feed(handler: BarrierHandler, event: str, now_ms: int):
    """`0 b1`: barrier 1 is read from channel 0; `0 ?b1`: announced; `0 c1`, `0 end`; `timer`; `abort 1`."""
    source, _, element = event.partition(" ")
    if source == "timer":
        decisions = handler.on_timer(now_ms)
    elif source == "abort":
        decisions = handler.on_abort_notice(int(element))
    elif element == "end":
        decisions = handler.on_end_of_partition(int(source), now_ms)
    elif element[0] == "?":
        decisions = handler.on_announced(int(source), barrier(element[1:]), now_ms)
    elif element[0] == "c":
        decisions = handler.on_cancel(int(source), int(element[1:]))
    else:
        decisions = handler.on_barrier(int(source), barrier(element), now_ms)
    handler.validate()
    return decisions


def run(channels: int, *events: str, now_ms: int = 100):
    """Deliver all events, the last one at `now_ms`, those before at 100; its decisions."""
    handler = AlternatingBarrierHandler(channels)
    for event in events[:-1]:
        feed(handler, event, 100)
    return feed(handler, events[-1], now_ms)


TABLE = {
    # -- idle
    "idle: barrier of one that is over": (2, ["0 b1", "1 b1", "0 b1"], []),
    "idle: announcement of one that is over": (2, ["0 b1", "1 b1", "0 ?b1"], []),
    "idle: barrier of an older one": (2, ["0 p2", "1 p2", "0 b1"], []),
    "idle: unaligned barrier of an older one": (2, ["0 p2", "1 p2", "0 u1"], []),
    "idle: timer": (2, ["timer"], []),
    "idle: timer of one that is over": (2, ["0 b1", "1 b1", "timer"], []),
    "idle: end of a partition": (2, ["0 end"], []),
    "idle: abort notice of one that is over": (2, ["0 b1", "1 b1", "abort 1"], []),
    "idle: abort notice of a newer one": (2, ["abort 1"], []),
    "idle: cancel marker of one that is over": (2, ["0 b1", "1 b1", "0 c1"], []),
    "idle: cancel marker of an older one": (2, ["0 p2", "1 p2", "0 c1"], []),
    "idle: newer cancel marker": (2, ["0 c1"], given_up(1, CANCEL)),
    "idle: barrier behind its cancel marker": (2, ["0 c1", "1 b1"], []),
    "idle: cancel marker is forwarded once": (2, ["0 c1", "1 c1"], []),
    # -- begin
    "begin: announcement": (2, ["0 ?b1"], [StartTimer(150)]),
    "begin: barrier": (2, ["0 b1"], [BlockChannel(0), StartTimer(150)]),
    "begin: barrier that never may overtake": (2, ["0 p1"], [BlockChannel(0)]),
    "begin: unaligned barrier": (
        2,
        ["0 u1"],
        [StartCapture(1), snapshot("u1")],
    ),
    "begin: one open channel, in line": (1, ["0 b1"], [snapshot("b1")]),
    "begin: one open channel, unaligned": (
        1,
        ["0 u1"],
        [StartCapture(1), snapshot("u1"), FinishCapture(1, 0)],
    ),
    "begin: one channel left": (2, ["0 end", "1 b1"], [snapshot("b1")]),
    "begin: one channel, announced, then in time": (1, ["0 ?b1", "0 b1"], [snapshot("b1")]),
    "begin: barrier of an aborted one": (2, ["abort 1", "0 b1"], [ForwardCancel(1)]),
    "begin: unaligned barrier of an aborted one": (2, ["abort 1", "0 u1"], [ForwardCancel(1)]),
    "begin: announcement of an aborted one": (2, ["abort 1", "0 ?b1"], [ForwardCancel(1)]),
    "begin: what is aborted is over": (2, ["abort 1", "0 b1", "1 b1"], []),
    # -- aligning
    "aligning: barrier of an older one": (2, ["0 p2", "1 b1"], []),
    "aligning: announcement": (2, ["0 b1", "1 ?b1"], []),
    "aligning: second announcement": (2, ["0 ?b1", "1 ?b1"], []),
    "aligning: first barrier behind its announcement": (2, ["0 ?b1", "0 b1"], [BlockChannel(0)]),
    "aligning: barrier, not the last": (3, ["0 b1", "1 b1"], [BlockChannel(1)]),
    "aligning: last barrier": (2, ["0 b1", "1 b1"], [snapshot("b1"), UnblockAll()]),
    "aligning: last barrier of one that never may overtake": (
        2,
        ["0 p1", "1 p1"],
        [snapshot("p1"), UnblockAll()],
    ),
    "aligning: unaligned barrier, not the last": (
        3,
        ["0 b1", "1 o1"],
        [StartCapture(1), snapshot("o1"), UnblockAll()],
    ),
    "aligning: last barrier, unaligned": (
        2,
        ["0 b1", "1 o1"],
        [StartCapture(1), snapshot("o1"), UnblockAll(), FinishCapture(1, 0)],
    ),
    "aligning: unaligned barrier while only announced": (
        2,
        ["0 ?b1", "1 o1"],
        [StartCapture(1), snapshot("o1")],
    ),
    "aligning: duplicate out of a blocked channel": (2, ["0 b1", "0 o1"], []),
    "aligning: timer, too early": (2, ["0 b1", "timer"], [StartTimer(150)]),
    "aligning: timer of one that never may overtake": (2, ["0 p1", "timer"], []),
    "aligning: cancel marker": (2, ["0 b1", "1 c1"], [UnblockAll(), *given_up(1, CANCEL)]),
    "aligning: cancel marker while only announced": (
        2,
        ["0 ?b1", "1 c1"],
        given_up(1, CANCEL),
    ),
    "aligning: cancel marker of an older one": (2, ["0 p2", "1 c1"], []),
    "aligning: end of a partition, not the last": (3, ["0 b1", "1 end"], []),
    "aligning: end of the last partition": (
        2,
        ["0 b1", "1 end"],
        [snapshot("b1"), UnblockAll()],
    ),
    "aligning: abort notice": (2, ["0 b1", "abort 1"], [UnblockAll(), ForwardCancel(1)]),
    "aligning: abort notice while only announced": (2, ["0 ?b1", "abort 1"], [ForwardCancel(1)]),
    "aligning: abort notice of an older one": (2, ["0 p2", "abort 1"], []),
    "aligning: abort notice of a newer one": (2, ["0 b1", "abort 2"], []),
    "aligning: newer announcement": (
        2,
        ["0 b1", "0 ?b2"],
        [UnblockAll(), *given_up(1, SUBSUMED), StartTimer(1050)],
    ),
    "aligning: newer barrier": (
        2,
        ["0 b1", "1 b2"],
        [UnblockAll(), *given_up(1, SUBSUMED), BlockChannel(1), StartTimer(1050)],
    ),
    "aligning: newer barrier that never may overtake": (
        2,
        ["0 b1", "1 p2"],
        [UnblockAll(), *given_up(1, SUBSUMED), BlockChannel(1)],
    ),
    "aligning: newer unaligned barrier": (
        2,
        ["0 b1", "1 u2"],
        [UnblockAll(), *given_up(1, SUBSUMED), StartCapture(2), snapshot("u2")],
    ),
    "aligning: newer unaligned barrier out of a blocked channel": (
        2,
        ["0 p1", "0 u2"],
        [UnblockAll(), *given_up(1, SUBSUMED), StartCapture(2), snapshot("u2")],
    ),
    "aligning: newer barrier of an aborted one": (
        2,
        ["abort 2", "0 b1", "1 b2"],
        [UnblockAll(), *given_up(1, SUBSUMED), ForwardCancel(2)],
    ),
    "aligning: newer cancel marker": (
        2,
        ["0 b1", "1 c2"],
        [UnblockAll(), *given_up(1, SUBSUMED), *given_up(2, CANCEL)],
    ),
    # -- collecting
    "collecting: barrier of an older one": (2, ["0 u2", "1 b1"], []),
    "collecting: announcement": (2, ["0 u1", "1 ?b1"], []),
    "collecting: barrier, not the last": (3, ["0 u1", "1 b1"], []),
    "collecting: duplicate": (2, ["0 u1", "0 u1"], []),
    "collecting: last barrier, in line": (2, ["0 u1", "1 b1"], [FinishCapture(1, 0)]),
    "collecting: last barrier, unaligned": (2, ["0 u1", "1 u1"], [FinishCapture(1, 0)]),
    "collecting: timer": (2, ["0 ?b1", "0 o1", "timer"], []),
    "collecting: cancel marker": (
        2,
        ["0 u1", "1 c1"],
        [DropCapture(1), AbortCheckpoint(1, CANCEL)],
    ),
    "collecting: cancel marker of an older one": (2, ["0 u2", "1 c1"], []),
    "collecting: end of a partition, not the last": (3, ["0 u1", "1 end"], []),
    "collecting: end of the last partition": (2, ["0 u1", "1 end"], [FinishCapture(1, 0)]),
    "collecting: end of a partition whose barrier is here": (2, ["0 u1", "0 end"], []),
    "collecting: abort notice": (2, ["0 u1", "abort 1"], [DropCapture(1)]),
    "collecting: barrier behind the abort notice": (2, ["0 u1", "abort 1", "1 u1"], []),
    "collecting: abort notice of an older one": (2, ["0 u2", "abort 1"], []),
    "collecting: abort notice of a newer one": (2, ["0 u1", "abort 2"], []),
    "collecting: newer announcement": (
        2,
        ["0 u1", "0 ?b2"],
        [DropCapture(1), AbortCheckpoint(1, SUBSUMED), StartTimer(1050)],
    ),
    "collecting: newer barrier": (
        2,
        ["0 u1", "0 p2"],
        [DropCapture(1), AbortCheckpoint(1, SUBSUMED), BlockChannel(0)],
    ),
    "collecting: newer unaligned barrier": (
        2,
        ["0 u1", "1 u2"],
        [DropCapture(1), AbortCheckpoint(1, SUBSUMED), StartCapture(2), snapshot("u2")],
    ),
    "collecting: newer cancel marker": (
        2,
        ["0 u1", "1 c2"],
        [DropCapture(1), AbortCheckpoint(1, SUBSUMED), *given_up(2, CANCEL)],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    channels, events, expected = TABLE[case]
    assert run(channels, *events) == expected


AT_150 = {
    "announcement, overdue": (2, ["0 ?b1"], [StartCapture(1), snapshot("o1", 0, 50)]),
    "second announcement, overdue": (
        2,
        ["0 ?b1", "1 ?b1"],
        [StartCapture(1), snapshot("o1", 0, 50)],
    ),
    "first barrier, overdue": (2, ["0 b1"], [StartCapture(1), snapshot("o1", 0, 50)]),
    "barrier, overdue": (
        3,
        ["0 b1", "1 b1"],
        [StartCapture(1), snapshot("o1", 50, 0), UnblockAll()],
    ),
    "last barrier in line, overdue: nothing is left to overtake": (
        2,
        ["0 b1", "1 b1"],
        [snapshot("b1", 50, 0), UnblockAll()],
    ),
    "only barrier in line, overdue": (1, ["0 b1"], [snapshot("b1", 0, 50)]),
    "timer": (2, ["0 b1", "timer"], [StartCapture(1), snapshot("o1", 50, 0), UnblockAll()]),
    "timer before the first barrier": (
        2,
        ["0 ?b1", "timer"],
        [StartCapture(1), snapshot("o1", 0, 50)],
    ),
    "timer, one channel": (1, ["0 ?b1", "timer"], [StartCapture(1), snapshot("o1", 0, 50)]),
    "timer of an older one": (2, ["0 ?b1", "0 ?b2", "timer"], [StartTimer(1050)]),
    "timer of one that never may overtake": (2, ["0 p1", "timer"], []),
    "newer announcement, not overdue": (
        2,
        ["0 u1", "1 ?b2"],
        [DropCapture(1), AbortCheckpoint(1, SUBSUMED), StartTimer(1050)],
    ),
}


@pytest.mark.parametrize("case", AT_150)
def test_what_is_different_when_the_checkpoint_is_old_enough(case: str) -> None:
    channels, events, expected = AT_150[case]
    assert run(channels, *events, now_ms=DUE_MS[1]) == expected


def test_alignment_lasts_from_the_first_barrier_to_the_last() -> None:
    handler = AlternatingBarrierHandler(3)
    feed(handler, "0 ?b1", 110)
    feed(handler, "0 b1", 120)
    assert feed(handler, "timer", 155)[1] == snapshot("o1", alignment_ms=35, start_delay_ms=20)
    assert feed(handler, "1 o1", 160) == []
    assert feed(handler, "2 o1", 190) == [FinishCapture(1, 70)]


def test_a_switch_before_the_first_barrier_stands_for_it() -> None:
    handler = AlternatingBarrierHandler(2)
    feed(handler, "0 ?b1", 110)
    assert feed(handler, "timer", 160)[1] == snapshot("o1", alignment_ms=0, start_delay_ms=60)
    feed(handler, "0 o1", 170)
    assert feed(handler, "1 o1", 190) == [FinishCapture(1, 30)]


def test_a_clock_behind_the_coordinators_gives_no_negative_times() -> None:
    handler = AlternatingBarrierHandler(2)
    assert feed(handler, "0 u1", 90)[1] == snapshot("u1")
    assert feed(handler, "1 u1", 80) == [FinishCapture(1, 0)]


def test_only_an_alignment_waits_for_records_to_be_read() -> None:
    handler = AlternatingBarrierHandler(2)
    seen = [handler.pending]
    for event in ("0 ?b1", "0 b1", "1 o1", "0 u2", "1 u2"):
        feed(handler, event, 100)
        seen.append(handler.pending)
    assert seen == [False, True, True, False, False, False]


@pytest.mark.parametrize("element", ["b1", "b2", "c1", "end"])
def test_reading_a_blocked_channel_in_line_is_our_bug(element: str) -> None:
    handler = AlternatingBarrierHandler(2)
    feed(handler, "0 b1", 100)
    with pytest.raises(InternalError, match=r"closed or blocked position=`0`"):
        feed(handler, f"0 {element}", 100)


@pytest.mark.parametrize("element", ["b1", "u1", "c1", "end"])
def test_reading_a_closed_channel_is_our_bug(element: str) -> None:
    handler = AlternatingBarrierHandler(2)
    feed(handler, "0 end", 100)
    with pytest.raises(InternalError, match="closed or blocked"):
        feed(handler, f"0 {element}", 100)


def test_notices_are_forgotten_with_their_checkpoint_and_bounded() -> None:
    handler = AlternatingBarrierHandler(1)
    for id_ in range(1, ABORTED_IDS_MAX + 2):
        feed(handler, f"abort {id_}", 100)
    assert feed(handler, "0 b1", 100) == [snapshot("b1")]  # the oldest was forgotten
    assert feed(handler, "0 b2", 100) == [ForwardCancel(2)]
    assert len(handler._notices._ids) == ABORTED_IDS_MAX - 1


def test_the_others_hear_of_announcements_timers_and_notices_and_do_nothing() -> None:
    handlers: list[BarrierHandler] = [AlignedBarrierHandler(2), AtLeastOnceTracker(2)]
    for handler in handlers:
        feed(handler, "0 b1", 100)
        for event in ("1 ?b1", "timer", "abort 1", "abort 2"):
            assert feed(handler, event, 5000) == []
        assert snapshot("b1", 4900, 0) in feed(handler, "1 b1", 5000)
