"""Aligned barriers: a table of (state, event) pairs, then every interleaving of small inputs."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import combinations_with_replacement

import pytest

from headgate.errors import InternalError
from headgate.operators.elements import CheckpointBarrier, CheckpointOptions
from headgate.runtime.protocol.barriers.handler import (
    AbortCheckpoint,
    AlignedBarrierHandler,
    BlockChannel,
    ForwardCancel,
    TriggerSnapshot,
    UnblockAll,
)
from headgate.runtime.protocol.failures import CheckpointFailure

SUBSUMED = CheckpointFailure.SUBSUMED
CANCEL = CheckpointFailure.CANCEL_MARKER


def barrier(checkpoint_id: int) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, trigger_ms=100)


def snapshot(checkpoint_id: int, alignment_ms: int = 0, start_delay_ms: int = 0) -> TriggerSnapshot:
    return TriggerSnapshot(barrier(checkpoint_id), alignment_ms, start_delay_ms)


def feed(handler: AlignedBarrierHandler, position: int, element: str, now_ms: int = 100):
    """Deliver `b3` (barrier 3), `c3` (cancel marker 3) or `end` from a channel."""
    if element == "end":
        decisions = handler.on_end_of_partition(position, now_ms)
    elif element[0] == "b":
        decisions = handler.on_barrier(position, barrier(int(element[1:])), now_ms)
    else:
        decisions = handler.on_cancel(position, int(element[1:]))
    handler.validate()
    return decisions


def run(channels: int, *events: tuple[int, str]):
    """Deliver all events; return the decisions of the last one."""
    handler = AlignedBarrierHandler(channels)
    decisions = []
    for position, element in events:
        decisions = feed(handler, position, element)
    return decisions


TABLE = {
    "one channel: snapshot at once, no blocking": (1, [(0, "b1")], [snapshot(1)]),
    "first barrier blocks": (2, [(0, "b1")], [BlockChannel(0)]),
    "second of three blocks too": (3, [(0, "b1"), (2, "b1")], [BlockChannel(2)]),
    "last barrier": (2, [(0, "b1"), (1, "b1")], [snapshot(1), UnblockAll()]),
    "next checkpoint": (2, [(0, "b1"), (1, "b1"), (1, "b2")], [BlockChannel(1)]),
    "duplicate after completion": (2, [(0, "b1"), (1, "b1"), (0, "b1")], []),
    "late barrier while a newer one aligns": (2, [(0, "b2"), (1, "b1")], []),
    "newer barrier subsumes": (
        2,
        [(0, "b1"), (1, "b2")],
        [UnblockAll(), AbortCheckpoint(1, SUBSUMED), ForwardCancel(1), BlockChannel(1)],
    ),
    "newer barrier subsumes and completes": (
        2,
        [(0, "b1"), (1, "end"), (0, "b2")],
        [snapshot(2)],
    ),
    "cancel of the aligning one": (
        2,
        [(0, "b1"), (1, "c1")],
        [UnblockAll(), AbortCheckpoint(1, CANCEL), ForwardCancel(1)],
    ),
    "cancel before any barrier": (
        2,
        [(0, "c1")],
        [AbortCheckpoint(1, CANCEL), ForwardCancel(1)],
    ),
    "cancel is forwarded once": (2, [(0, "c1"), (1, "c1")], []),
    "barrier after its cancel": (2, [(0, "c1"), (1, "b1")], []),
    "cancel of an older one": (2, [(0, "b2"), (1, "c1")], []),
    "cancel of a completed one": (2, [(0, "b1"), (1, "b1"), (0, "c1")], []),
    "cancel of a newer one gives up both": (
        2,
        [(0, "b1"), (1, "c2")],
        [
            UnblockAll(),
            AbortCheckpoint(1, SUBSUMED),
            ForwardCancel(1),
            AbortCheckpoint(2, CANCEL),
            ForwardCancel(2),
        ],
    ),
    "end of partition, nothing pending": (2, [(0, "end")], []),
    "end of partition counts as aligned": (
        2,
        [(0, "b1"), (1, "end")],
        [snapshot(1), UnblockAll()],
    ),
    "end of partition of one of three": (3, [(0, "b1"), (1, "end")], []),
    "a closed channel is not waited for": (3, [(2, "end"), (0, "b1"), (1, "b1")], None),
    "one open channel left never blocks": (2, [(0, "end"), (1, "b1")], [snapshot(1)]),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    channels, events, expected = TABLE[case]
    if expected is None:
        expected = [snapshot(1), UnblockAll()]
    assert run(channels, *events) == expected


def test_times_and_options_are_those_of_the_first_barrier() -> None:
    handler = AlignedBarrierHandler(2)
    stop = CheckpointBarrier(1, trigger_ms=100, options=CheckpointOptions(stop=True))
    assert handler.on_barrier(0, stop, 130) == [BlockChannel(0)]
    assert handler.on_barrier(1, stop, 175)[0] == TriggerSnapshot(stop, 45, 30)
    assert handler.on_barrier(0, barrier(2), 180) == [BlockChannel(0)]


def test_a_clock_behind_the_coordinators_gives_no_negative_times() -> None:
    handler = AlignedBarrierHandler(2)
    handler.on_barrier(0, barrier(1), 90)
    assert handler.on_barrier(1, barrier(1), 80)[0] == snapshot(1)


@pytest.mark.parametrize("element", ["b1", "b2", "c1", "end"])
def test_reading_a_blocked_channel_is_our_bug(element: str) -> None:
    handler = AlignedBarrierHandler(2)
    assert feed(handler, 0, "b1") == [BlockChannel(0)]
    with pytest.raises(InternalError, match=r"closed or blocked position=`0`"):
        feed(handler, 0, element)


def test_reading_a_closed_channel_is_our_bug() -> None:
    handler = AlignedBarrierHandler(2)
    feed(handler, 0, "end")
    with pytest.raises(InternalError):
        feed(handler, 0, "b1")


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
        "b1 b2 end",
        "b1 b1 b2",
        "b1 b2 b1",
        "b1 b2 b2",
        "c1 b1 b2",
        "b1 c1 b2",
        "b2 b1",
        "c2 b1",
    )
]
SCRIPTS_OF_THREE = [SCRIPTS[i] for i in (0, 1, 2, 4, 5, 7, 9, 13)]


class World:
    """A handler, what is still queued on its channels, and all that was seen so far."""

    def __init__(self, scripts: tuple[tuple[str, ...], ...]) -> None:
        self.handler = AlignedBarrierHandler(len(scripts))
        self.queues = [list(script) for script in scripts]
        self.read: list[list[str]] = [[] for _ in scripts]
        self.snapshots: list[int] = []
        self.aborts: list[int] = []
        self.seen_first: dict[int, bool] = {}

    def copy(self) -> World:
        other = copy.copy(self)
        other.handler = copy.copy(self.handler)
        for name in ("_open", "_waiting", "_blocked"):
            setattr(other.handler, name, set(getattr(self.handler, name)))
        other.queues = [list(queue) for queue in self.queues]
        other.read = [list(seen) for seen in self.read]
        other.snapshots, other.aborts = list(self.snapshots), list(self.aborts)
        other.seen_first = dict(self.seen_first)
        return other

    def readable(self) -> list[int]:
        return [
            position
            for position, queue in enumerate(self.queues)
            if queue and position not in self.handler._blocked
        ]

    def step(self, position: int) -> None:
        element = self.queues[position].pop(0)
        self.read[position].append(element)
        if element != "end":
            id_ = int(element[1:])
            # An id first heard of when a newer one is known is obsolete: it may end in nothing.
            self.seen_first.setdefault(id_, all(id_ > other for other in self.seen_first))
        decisions = feed(self.handler, position, element)
        for decision, following in zip(decisions, [*decisions[1:], None], strict=False):
            if isinstance(decision, TriggerSnapshot):
                self.check_snapshot(decision.barrier.checkpoint_id)
            elif isinstance(decision, AbortCheckpoint):
                self.aborts.append(decision.checkpoint_id)
                assert following == ForwardCancel(decision.checkpoint_id)
            elif isinstance(decision, BlockChannel):
                assert sum("end" not in seen for seen in self.read) > 1

    def check_snapshot(self, id_: int) -> None:
        """A consistent cut: of each channel exactly what comes before its barrier was read."""
        self.snapshots.append(id_)
        for seen in self.read:
            if f"b{id_}" in seen:
                assert seen.index(f"b{id_}") == len(seen) - 1 or seen[-1] == "end"
            else:
                assert seen[-1] == "end"

    def check_end(self) -> None:
        assert not any(self.queues), "deadlock: a blocked channel was never unblocked"
        assert self.handler._pending is None
        outcomes = Counter(self.snapshots + self.aborts)
        assert all(count == 1 for count in outcomes.values())
        assert self.snapshots == sorted(self.snapshots)
        for id_, newest_when_first_seen in self.seen_first.items():
            assert outcomes[id_] == 1 or not newest_when_first_seen


def explore(world: World) -> int:
    """Follow every order of delivery; the number of leaves."""
    readable = world.readable()
    if not readable:
        world.check_end()
        return 1
    leaves = 0
    for position in readable:
        branch = world.copy()
        branch.step(position)
        leaves += explore(branch)
    return leaves


@pytest.mark.parametrize(("channels", "scripts"), [(2, SCRIPTS), (3, SCRIPTS_OF_THREE)])
def test_every_interleaving(channels: int, scripts: list[tuple[str, ...]]) -> None:
    """Goal: no order of delivery breaks a promise. Method: depth-first over all of them.

    Every script ends by delivering something of checkpoint 2 or by closing, so in the end nothing may
    be left waiting.
    """
    leaves = sum(
        explore(World(chosen)) for chosen in combinations_with_replacement(scripts, channels)
    )
    assert leaves > 600
