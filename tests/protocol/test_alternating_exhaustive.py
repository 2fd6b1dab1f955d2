"""Barriers that may overtake, on a model of the gate: every order of arrivals, reads, timers and notices.

Goal: no order breaks a promise; above all a snapshot is a cut: of every channel exactly the records in
front of its barrier were either processed before the snapshot or captured.
Method: depth-first over all that may happen next; states that were reached before are not followed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement

import pytest

from headgate.operators.elements import CheckpointBarrier, CheckpointOptions
from headgate.runtime.protocol.barriers.alternating import AlternatingBarrierHandler
from headgate.runtime.protocol.barriers.handler import (
    AbortCheckpoint,
    AbortNotices,
    AlignmentDecision,
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
from headgate.runtime.protocol.ids import ChannelPosition, CheckpointId

OPTIONS = {
    "b": CheckpointOptions(aligned_timeout_ms=50),  # in line, until it is overdue
    "u": CheckpointOptions(aligned_timeout_ms=50, unaligned=True),  # overdue further up already
    "p": CheckpointOptions(savepoint="s"),  # in line for ever
}
TRIGGER_MS = {1: 100, 2: 1000}
TIMES_MS = (100, 150, 1050)
"""Nothing is overdue; 1 is; both are."""


def barrier_of(element: str) -> CheckpointBarrier:
    """`b1`, `u1`, `p1`: a barrier of checkpoint 1."""
    id_ = int(element[1:])
    return CheckpointBarrier(id_, TRIGGER_MS[id_], OPTIONS[element[0]])


def is_barrier(element: str) -> bool:
    return element[0] in OPTIONS and element[1:].isdigit()


Channels = tuple[tuple[str, ...], ...]
"""Elements by channel: barriers, `c1` (a cancel marker), `end`; everything else is a record."""


class World:
    """A handler behind a gate of a few channels. All that changes is replaced, so copies are cheap."""

    def __init__(self, scripts: Channels, notices_max: int) -> None:
        self.scripts = scripts
        self.handler = AlternatingBarrierHandler(len(scripts))
        # The gate.
        self.coming = scripts
        self.queues: Channels = ((),) * len(scripts)
        self.handed_out: tuple[tuple[int, str], ...] = ()  # barriers ahead of all records
        self.blocked: frozenset[int] = frozenset()
        self.capturing: tuple[int, ...] = (0,) * len(scripts)  # what arrives, for which checkpoint
        self.delivered: frozenset[tuple[int, int]] = frozenset()  # barriers read: (channel, id)
        # Time, and the coordinator.
        self.now_ms = TIMES_MS[0]
        self.last_ms = TIMES_MS[-1] if any("2" in e for s in scripts for e in s) else TIMES_MS[1]
        self.timer_ms: int | None = None
        self.notices: tuple[int, ...] = ()
        self.notices_max = notices_max
        # The subtask.
        self.processed: Channels = ((),) * len(scripts)
        self.cut: dict[int, tuple[Channels, Channels]] = {}  # by id: processed before, captured
        self.outcome: dict[int, str] = {}  # what was passed on: "barrier" or "cancel"
        self.state: dict[int, str] = {}  # "aligned" "started" "finished" "dropped"
        self.declined: frozenset[int] = frozenset()
        self.heard_first: dict[int, bool] = {}  # was it the newest by then

    def copy(self) -> World:
        """A twin that shares nothing that changes."""
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        other.handler = object.__new__(AlternatingBarrierHandler)
        other.handler.__dict__.update(self.handler.__dict__)
        for name in ("_open", "_waiting", "_blocked"):
            setattr(other.handler, name, set(getattr(self.handler, name)))
        other.handler._notices = AbortNotices()
        other.handler._notices._ids = set(self.handler._notices._ids)
        for name in ("cut", "outcome", "state", "heard_first"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that nothing can tell apart, but for the lengths of alignments."""
        inner = self.handler
        return (
            self.coming,
            self.queues,
            self.handed_out,
            self.blocked,
            self.capturing,
            self.delivered,
            self.now_ms,
            self.timer_ms,
            self.notices,
            tuple(self.cut.items()),
            frozenset(self.outcome.items()),
            frozenset(self.state.items()),
            self.declined,
            frozenset(self.heard_first.items()),
            inner._current,
            inner._barrier and inner._barrier.options.savepoint,
            inner._collecting,
            frozenset(inner._waiting),
            frozenset(inner._notices._ids),
        )

    # -- what may happen next ---------------------------------------------------------------------

    def channel_moves(self) -> Iterator[Callable[[World], None]]:
        for position, coming in enumerate(self.coming):
            if coming:
                yield lambda world, p=position: world.arrive(p)
        if self.handed_out:
            yield World.take_handed_out
            return
        for position, queue in enumerate(self.queues):
            if queue and position not in self.blocked:
                yield lambda world, p=position: world.read(p)

    def other_moves(self) -> Iterator[Callable[[World], None]]:
        if self.now_ms != self.last_ms:
            yield World.tick
        if self.timer_ms is not None:
            yield World.fire
        if len(self.notices) < self.notices_max:
            for id_ in {1, 2} - set(self.notices):
                yield lambda world, i=id_: world.notice(i)

    def arrive(self, position: int) -> None:
        element, *rest = self.coming[position]
        self.coming = replaced(self.coming, position, tuple(rest))
        if not is_barrier(element):
            if (id_ := self.capturing[position]) and is_record(element):
                self.capture(id_, position, (element,))
            self.queues = replaced(self.queues, position, (*self.queues[position], element))
            return
        barrier = barrier_of(element)
        if self.capturing[position] == barrier.checkpoint_id:
            self.handed_out += ((position, element),)
            self.stop_capturing(position)
        elif barrier.options.unaligned:
            # The place of the barrier in the queue is remembered: records in front of it may be captured.
            self.queues = replaced(self.queues, position, (*self.queues[position], f"<{element}"))
            self.handed_out += ((position, element),)
        else:
            self.queues = replaced(self.queues, position, (*self.queues[position], element))
            if barrier.options.may_overtake:
                self.hear(barrier.checkpoint_id)
                self.apply(self.handler.on_announced(position, barrier, self.now_ms))

    def take_handed_out(self) -> None:
        (position, element), *rest = self.handed_out
        self.handed_out = tuple(rest)
        self.deliver(position, element)

    def read(self, position: int) -> None:
        element, *rest = self.queues[position]
        self.queues = replaced(self.queues, position, tuple(rest))
        if is_record(element):
            self.processed = replaced(
                self.processed, position, (*self.processed[position], element)
            )
        elif element[0] != "<":
            self.deliver(position, element)

    def deliver(self, position: int, element: str) -> None:
        if element == "end":
            self.stop_capturing(position)
            self.apply(self.handler.on_end_of_partition(ChannelPosition(position), self.now_ms))
            return
        id_ = int(element[1:])
        self.hear(id_)
        if element[0] == "c":
            self.apply(self.handler.on_cancel(ChannelPosition(position), CheckpointId(id_)))
            return
        self.delivered |= {(position, id_)}
        barrier = barrier_of(element)
        self.apply(
            self.handler.on_barrier(ChannelPosition(position), barrier, self.now_ms),
            overtook=barrier.options.unaligned,
        )

    def tick(self) -> None:
        self.now_ms = TIMES_MS[TIMES_MS.index(self.now_ms) + 1]

    def fire(self) -> None:
        """The timer fires, perhaps too early, perhaps too late for what it was started for."""
        asked_ms, self.timer_ms = self.timer_ms, None
        assert asked_ms is not None
        decisions = self.handler.on_timer(self.now_ms)
        if self.now_ms < asked_ms:
            assert decisions in ([], [StartTimer(asked_ms)])
        self.apply(decisions)

    def notice(self, id_: int) -> None:
        self.notices += (id_,)
        self.apply(self.handler.on_abort_notice(CheckpointId(id_)))

    def hear(self, id_: int) -> None:
        self.heard_first.setdefault(id_, all(id_ > other for other in self.heard_first))

    # -- the gate's part of a capture -------------------------------------------------------------

    def start_capture(self, id_: int) -> None:
        for position, queue in enumerate(self.queues):
            names = [element.lstrip("<") for element in queue]
            at = next((i for i, e in enumerate(names) if is_barrier(e) and e[1:] == str(id_)), None)
            if at is not None:
                self.capture(id_, position, tuple(filter(is_record, queue[:at])))
                if queue[at][0] != "<":  # the announced barrier is pulled ahead
                    self.handed_out += ((position, queue[at]),)
                    self.queues = replaced(self.queues, position, queue[:at] + queue[at + 1 :])
            elif (position, id_) not in self.delivered and position in self.handler._open:
                self.capture(id_, position, tuple(filter(is_record, queue)))
                if "end" not in queue:
                    self.capturing = replaced(self.capturing, position, id_)

    def capture(self, id_: int, position: int, records: tuple[str, ...]) -> None:
        processed, captured = self.cut[id_]
        self.cut[id_] = processed, replaced(captured, position, captured[position] + records)

    def stop_capturing(self, position: int) -> None:
        self.capturing = replaced(self.capturing, position, 0)

    def end_capture(self, id_: int, how: str) -> None:
        assert self.state[id_] == "started"
        self.state[id_] = how
        if how == "finished" and all(map(in_order, self.scripts)):
            self.check_cut(id_)
        del self.cut[id_]
        self.capturing = tuple(0 if other == id_ else other for other in self.capturing)

    # -- promises ---------------------------------------------------------------------------------

    def apply(self, decisions: list[AlignmentDecision], *, overtook: bool = False) -> None:
        for at, decision in enumerate(decisions):
            match decision:
                case BlockChannel(position):
                    assert position not in self.blocked
                    assert len(self.handler._open) > 1
                    self.blocked |= {position}
                case UnblockAll():
                    assert self.blocked
                    self.blocked = frozenset()
                case StartTimer(at_ms):
                    assert at_ms > self.now_ms
                    self.timer_ms = at_ms
                case StartCapture(id_):
                    following = decisions[at + 1]
                    assert isinstance(following, TriggerSnapshot)
                    assert following.barrier.checkpoint_id == id_
                    assert following.barrier.options.unaligned
                    assert id_ not in self.state
                    assert overtook or self.now_ms >= TRIGGER_MS[id_] + 50
                    self.state[id_] = "started"
                    self.cut[id_] = self.processed, ((),) * len(self.scripts)
                    self.start_capture(id_)
                case TriggerSnapshot(barrier):
                    self.trigger(barrier)
                case FinishCapture(id_):
                    self.end_capture(id_, "finished")
                case DropCapture(id_):
                    self.end_capture(id_, "dropped")
                    declined = (
                        AbortCheckpoint(id_, CheckpointFailure.SUBSUMED) in decisions[at + 1 :]
                    )
                    cancelled = AbortCheckpoint(id_, CheckpointFailure.CANCEL_MARKER) in decisions
                    assert (declined or cancelled) != (id_ in self.notices), "nobody knows, or all"
                case AbortCheckpoint(id_):
                    assert id_ not in self.declined
                    self.declined |= {id_}
                case ForwardCancel(id_):
                    assert id_ not in self.outcome
                    self.outcome[id_] = "cancel"
        self.handler.validate()
        assert self.blocked == self.handler._blocked

    def trigger(self, barrier: CheckpointBarrier) -> None:
        id_ = barrier.checkpoint_id
        assert id_ not in self.outcome
        assert id_ not in self.declined
        self.outcome[id_] = "barrier"
        if not barrier.options.unaligned:
            owing = [p for p in self.handler._open if (p, id_) not in self.delivered]
            assert owing == [], "a snapshot before the last barrier"
            assert id_ not in self.state
            self.state[id_] = "aligned"
            self.cut[id_] = self.processed, ((),) * len(self.scripts)
            if all(map(in_order, self.scripts)):
                self.check_cut(id_)
            del self.cut[id_]

    def check_end(self) -> None:
        assert not any(self.queues), "deadlock: a blocked channel was never unblocked"
        assert not self.blocked
        assert self.handler._barrier is None
        for id_, newest_when_first_heard in self.heard_first.items():
            assert id_ in self.outcome or not newest_when_first_heard, "downstream waits for ever"
        for id_, state in self.state.items():
            assert state != "started", "a capture was never ended"
            if state == "dropped":
                assert id_ in self.declined or id_ in self.notices
            else:
                assert id_ not in self.declined

    def check_cut(self, id_: int) -> None:
        for script, processed, captured in zip(self.scripts, *self.cut[id_], strict=True):
            names = [element[1:] if is_barrier(element) else "" for element in script]
            end = names.index(str(id_)) if str(id_) in names else len(script)
            assert processed + captured == tuple(filter(is_record, script[:end]))


def is_record(element: str) -> bool:
    return element in ("x", "y", "z")


def in_order(script: tuple[str, ...]) -> bool:
    """Without what no sender does: barriers twice, or backwards."""
    ids = [element[1:] for element in script if is_barrier(element) or element[0] == "c"]
    return ids == sorted(set(ids))


def replaced(items: tuple, at: int, item: object) -> tuple:
    return (*items[:at], item, *items[at + 1 :])


def explore(scripts: Channels, notices_max: int) -> int:
    """Follow every order of events; the number of states."""
    first = World(scripts, notices_max)
    seen = {first.key()}
    stack = [first]
    while stack:
        world = stack.pop()
        moves = list(world.channel_moves())
        if not moves:
            world.check_end()
        for move in [*moves, *world.other_moves()]:
            branch = world.copy()
            move(branch)
            key = branch.key()
            if key not in seen:
                seen.add(key)
                stack.append(branch)
    return len(seen)


def scripts_of(*texts: str) -> list[tuple[str, ...]]:
    return [tuple(text.split()) for text in texts]


# Every script ends by delivering something of checkpoint 2 or by closing, so in the end nothing waits.
PAIRS = scripts_of(
    "x b1 y b2", "x u1 u2", "u1 y p2", "p1 b2", "b1 x end", "x end", "c1 b2", "b1 c2"
)  # fmt: skip
PAIRS_WITH_NOTICES = scripts_of("x b1 p2", "u1 b2", "b1 end")
ODD_PAIRS = scripts_of("b1 b1 b2", "u1 u1 b2", "b2 b1", "u2 u1", "c1 b1 b2")
TRIPLES = scripts_of("x b1 end", "u1 end", "c1 end")


@pytest.mark.parametrize(
    ("channels", "scripts", "notices_max"),
    [(2, PAIRS, 0), (2, PAIRS_WITH_NOTICES, 1), (2, ODD_PAIRS, 0), (3, TRIPLES, 0)],
)
def test_every_order_of_events(
    channels: int, scripts: list[tuple[str, ...]], notices_max: int
) -> None:
    states = sum(
        explore(chosen, notices_max) for chosen in combinations_with_replacement(scripts, channels)
    )
    assert states > 3_000


def test_one_channel_never_waits() -> None:
    """There is nothing to align: the worlds of one channel are those of two where one has closed."""
    for script in [*PAIRS, *ODD_PAIRS]:
        assert explore((script,), 1) > 10
