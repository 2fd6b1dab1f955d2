"""Barriers that are only counted: a table of (state, event) pairs, then every interleaving."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import combinations_with_replacement

import pytest

from headgate.errors import InternalError
from headgate.operators.elements import CheckpointBarrier
from headgate.runtime.protocol.barriers.at_least_once import PENDING_MAX, AtLeastOnceTracker
from headgate.runtime.protocol.barriers.handler import (
    AbortCheckpoint,
    ForwardCancel,
    TriggerSnapshot,
)
from headgate.runtime.protocol.failures import CheckpointFailure

SUBSUMED = CheckpointFailure.SUBSUMED
CANCEL = CheckpointFailure.CANCEL_MARKER


def snapshot(checkpoint_id: int, alignment_ms: int = 0, start_delay_ms: int = 0) -> TriggerSnapshot:
    barrier = CheckpointBarrier(checkpoint_id, trigger_ms=100)
    return TriggerSnapshot(barrier, alignment_ms, start_delay_ms)


def given_up(checkpoint_id: int, reason: CheckpointFailure) -> list:
    return [AbortCheckpoint(checkpoint_id, reason), ForwardCancel(checkpoint_id)]


def feed(tracker: AtLeastOnceTracker, position: int, element: str, now_ms: int = 100):
    """Deliver `b3` (barrier 3), `c3` (cancel marker 3) or `end` from a channel."""
    if element == "end":
        decisions = tracker.on_end_of_partition(position, now_ms)
    elif element[0] == "b":
        barrier = CheckpointBarrier(int(element[1:]), trigger_ms=100)
        decisions = tracker.on_barrier(position, barrier, now_ms)
    else:
        decisions = tracker.on_cancel(position, int(element[1:]))
    tracker.validate()
    return decisions


TABLE = {
    "barrier: an entry": (2, "0b1", []),
    "barrier: counted": (3, "0b1 2b1", []),
    "barrier: of an older one, never seen": (2, "0b2 1b1", []),
    "barrier: of one that is over": (2, "0b1 1b1 0b1", []),
    "barrier: twice on a channel counts once": (2, "0b1 0b1", []),
    "last barrier": (2, "0b1 1b1", [snapshot(1)]),
    "last barrier: the only open channel": (1, "0b1", [snapshot(1)]),
    "last barrier: the only channel left": (2, "0end 1b1", [snapshot(1)]),
    "last barrier: of the older of two": (2, "0b1 0b2 1b1", [snapshot(1)]),
    "last barrier: of the newer of two": (2, "0b1 0b2 1b1 1b2", [snapshot(2)]),
    "last barrier: drops all older ones": (
        2,
        "0b1 0b2 1b2",
        [*given_up(1, SUBSUMED), snapshot(2)],
    ),
    "last barrier: of a cancelled one": (2, "0c1 1b1", []),
    "last barrier: what was cancelled is dropped in silence": (3, "0c1 0b2 1b2 2b2", [snapshot(2)]),
    "cancel marker: of a newer one": (2, "0c1", given_up(1, CANCEL)),
    "cancel marker: of the only channel": (1, "0c1", given_up(1, CANCEL)),
    "cancel marker: of an entry": (2, "0b1 1c1", given_up(1, CANCEL)),
    "cancel marker: the second one": (3, "0c1 1c1", []),
    "cancel marker: of one that is over": (2, "0b1 1b1 0c1", []),
    "cancel marker: of an older one, never seen": (2, "0b2 1c1", []),
    "cancel marker: drops all older ones": (
        2,
        "0b1 1c2",
        [*given_up(1, SUBSUMED), *given_up(2, CANCEL)],
    ),
    "cancel marker: of an entry, drops all older ones": (
        2,
        "0b1 0b2 1c2",
        [*given_up(1, SUBSUMED), *given_up(2, CANCEL)],
    ),
    "cancel marker: newer entries stay": (2, "0b1 0b2 1c1 1b2", [snapshot(2)]),
    "end of a partition: nothing is waited for": (2, "0end", []),
    "end of a partition: still one owes its barrier": (3, "0b1 1end", []),
    "end of a partition: the last barrier": (2, "0b1 1end", [snapshot(1)]),
    "end of a partition: of several checkpoints": (2, "0b1 0b2 1end", [snapshot(1), snapshot(2)]),
    "end of a partition: of a channel whose barrier is here": (3, "0b1 0end 1b1", []),
    "end of a partition: of a cancelled one": (2, "0c1 1end", []),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    channels, events, expected = TABLE[case]
    tracker = AtLeastOnceTracker(channels)
    decisions = []
    for event in events.split():
        decisions = feed(tracker, int(event[0]), event[1:])
    assert decisions == expected


def test_times_are_those_of_the_first_and_the_last_barrier() -> None:
    tracker = AtLeastOnceTracker(2)
    feed(tracker, 0, "b1", 130)
    assert feed(tracker, 1, "b1", 175) == [snapshot(1, alignment_ms=45, start_delay_ms=30)]


def test_the_oldest_is_dropped_when_there_are_too_many() -> None:
    tracker = AtLeastOnceTracker(2)
    for id_ in range(1, PENDING_MAX + 1):
        assert feed(tracker, 0, f"b{id_}") == []
    assert feed(tracker, 0, f"b{PENDING_MAX + 1}") == given_up(1, SUBSUMED)
    assert feed(tracker, 1, "b1") == []
    assert feed(tracker, 1, "b2") == [snapshot(2)]


def test_pending_until_all_barriers_are_here() -> None:
    tracker = AtLeastOnceTracker(2)
    seen = [tracker.pending]
    for position, element in [(0, "b1"), (1, "b1"), (0, "c2"), (1, "b2")]:
        feed(tracker, position, element)
        seen.append(tracker.pending)
    assert seen == [False, True, False, False, False]


@pytest.mark.parametrize("element", ["b1", "c1", "end"])
def test_reading_a_closed_channel_is_our_bug(element: str) -> None:
    tracker = AtLeastOnceTracker(2)
    feed(tracker, 0, "end")
    with pytest.raises(InternalError, match=r"closed channel position=`0`"):
        feed(tracker, 0, element)


# -- every interleaving ---------------------------------------------------------------------------

SCRIPTS = [
    tuple(text.split())
    for text in (
        "b1 b2",
        "c1 b2",
        "b1 c2",
        "c1 c2",
        "end",
        "b1 end",
        "c1 end",
        "b1 b1 b2",
        "b1 b2 b1",
        "c1 b1 b2",
        "b1 c1 b2",
        "b2 b1",
        "c2 b1",
    )
]
SCRIPTS_OF_THREE = [SCRIPTS[i] for i in (0, 1, 2, 4, 5, 11)]


def explore(
    tracker: AtLeastOnceTracker, queues: list[tuple[str, ...]], read: list[str], taken: list[tuple]
) -> int:
    """Follow every order of delivery, without a channel ever being blocked; the number of leaves."""
    if not any(queues):
        check_end(tracker, read, taken)
        return 1
    leaves = 0
    for position, queue in enumerate(queues):
        if queue:
            branch = copy.deepcopy(tracker)
            decisions = feed(branch, position, queue[0])
            rest = [q[1:] if p == position else q for p, q in enumerate(queues)]
            leaves += explore(
                branch,
                rest,
                [*read, f"{position}{queue[0]}"],
                [*taken, *((decision, len(read) + 1) for decision in decisions)],
            )
    return leaves


def check_end(tracker: AtLeastOnceTracker, read: list[str], taken: list[tuple]) -> None:
    channels = range(max(int(event[0]) for event in read) + 1)
    outcomes: Counter[int] = Counter()
    for decision, at in taken:
        if isinstance(decision, TriggerSnapshot):
            id_ = decision.barrier.checkpoint_id
            outcomes[id_] += 1
            for channel in channels:
                seen = read[:at]
                assert f"{channel}b{id_}" in seen or f"{channel}end" in seen, "too early"
        elif isinstance(decision, ForwardCancel):
            outcomes[decision.checkpoint_id] += 1
    assert all(count == 1 for count in outcomes.values()), "passed on twice"
    cancelled = {event[2:] for event in read if event[1] == "c"}
    aborted = {d.checkpoint_id for d, _ in taken if isinstance(d, AbortCheckpoint)}
    assert aborted == {d.checkpoint_id for d, _ in taken if isinstance(d, ForwardCancel)}
    for id_ in ("1", "2"):
        first = [event[2:] for event in read if event[2:] in ("1", "2")]
        if id_ in first and not (id_ == "1" and first[0] == "2"):
            waits = int(id_) in tracker._entries and tracker._entries[int(id_)].barrier is not None
            assert outcomes[int(id_)] == (0 if waits else 1), "downstream waits for ever"
            assert not waits or id_ not in cancelled


@pytest.mark.parametrize(("channels", "scripts"), [(2, SCRIPTS), (3, SCRIPTS_OF_THREE)])
def test_every_interleaving(channels: int, scripts: list[tuple[str, ...]]) -> None:
    """Goal: no order of delivery breaks a promise. Method: depth-first over all of them."""
    leaves = sum(
        explore(AtLeastOnceTracker(channels), list(chosen), [], [])
        for chosen in combinations_with_replacement(scripts, channels)
    )
    assert leaves > 600
