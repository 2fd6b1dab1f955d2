"""The log of a loop: in any order of triggers, returns and aborts a cut loses and doubles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from headgate.errors import InternalError
from headgate.operators.loops.queue import FeedbackLog, Range

RECORDS = (2, 1, 2)
"""From outside; each comes back one less until it is 0."""
CHECKPOINTS = 2


def circle(n: int) -> int:
    """Return the sum of a record over all its ways through the loop."""
    return sum(range(n + 1))


@dataclass(frozen=True)
class Cut:
    """The contents of a checkpoint: the sum in the body, records not yet read, and the log."""

    outside: int
    body: int | None = None
    log: tuple[int, ...] | None = None


@dataclass(frozen=True)
class World:
    """A loop of one head and a body that sums; `loop` is the channel from head to body."""

    outside: int = 0
    queue: tuple[int, ...] = ()
    """The records that ever came back."""
    sent: int = 0
    """The number of them that were sent in again."""
    loop: tuple[int | str, ...] = ()
    body: int = 0
    triggered: int = 0
    told: tuple[tuple[str, int, int], ...] = ()
    """The calls of the log: kind, checkpoint, position."""
    cuts: tuple[tuple[int, Cut], ...] = field(default=())

    def log(self) -> FeedbackLog:
        """The log as it is now."""
        log = FeedbackLog()
        for kind, id_, position in self.told:
            if kind == "barrier":
                log.on_barrier(id_, position)
            elif kind == "return":
                log.on_return(id_, position)
            else:
                log.on_abort(id_)
        return log

    def telling(self, kind: str, id_: int, position: int = 0) -> World:
        return replace(self, told=(*self.told, (kind, id_, position)))

    @property
    def aborted(self) -> set[int]:
        return {id_ for kind, id_, _ in self.told if kind == "abort"}

    def next(self) -> Iterator[World]:
        """Yield all possible next events."""
        if self.outside < len(RECORDS):
            sent = (*self.loop, RECORDS[self.outside])
            yield replace(self, outside=self.outside + 1, loop=sent)
        if self.sent < len(self.queue):
            yield replace(self, sent=self.sent + 1, loop=(*self.loop, self.queue[self.sent]))
        if self.triggered < CHECKPOINTS:
            yield self._triggered(self.triggered + 1)
        if self.loop:
            yield self._delivered()
        for id_ in {each for _, each, _ in self.told} - self.aborted:
            yield self.telling("abort", id_)

    def _triggered(self, id_: int) -> World:
        return replace(
            self,
            triggered=id_,
            loop=(*self.loop, f"barrier {id_}"),
            cuts=(*self.cuts, (id_, Cut(self.outside))),
        ).telling("barrier", id_, self.sent)

    def _delivered(self) -> World:
        first, rest = self.loop[0], self.loop[1:]
        if isinstance(first, int):
            back = (first - 1,) if first > 1 else ()
            return replace(self, loop=rest, body=self.body + first, queue=(*self.queue, *back))
        id_ = int(first.split()[1])
        found = self.log().on_return(id_, len(self.queue))
        assert (found is None) == (id_ in self.aborted)
        cuts = dict(self.cuts)
        if found is not None:
            cuts[id_] = replace(cuts[id_], body=self.body, log=self.queue[found.start : found.end])
        after = replace(self, loop=rest, cuts=tuple(cuts.items()))
        return after.telling("return", id_, len(self.queue))


def test_every_interleaving() -> None:
    """The body is directly at the head's channel, so the barrier is back as soon as it has passed it."""
    total = sum(map(circle, RECORDS))
    seen, front, complete = {World()}, [World()], 0
    while front:
        world = front.pop()
        for _, cut in world.cuts:
            if cut.log is not None and cut.body is not None:
                rest = sum(map(circle, RECORDS[cut.outside :]))
                assert cut.body + sum(map(circle, cut.log)) + rest == total, world
                complete += 1
        for following in world.next():
            if following not in seen:
                seen.add(following)
                front.append(following)
    assert len(seen) > 5_000
    assert complete > 1_000
    ended = [each for each in seen if not each.loop and each.sent == len(each.queue)]
    assert any(each.body == total for each in ended)


def test_a_barrier_that_comes_back_is_no_trigger_of_the_next() -> None:
    log = FeedbackLog()
    log.on_barrier(1, 10)
    log.on_barrier(2, 12)
    assert log.on_return(1, 15) == Range(10, 15)
    log.on_barrier(3, 13)
    assert log.on_return(2, 16) == Range(12, 16)
    assert log.floor(20) == 13
    assert log.on_return(3, 20) == Range(13, 20)
    assert log.floor(20) == 20


def test_an_abort_drops_the_log_and_the_late_barrier_is_nothing() -> None:
    log = FeedbackLog()
    log.on_barrier(4, 7)
    log.on_abort(4)
    assert log.floor(9) == 9
    assert log.on_return(4, 11) is None


def test_a_notice_of_a_checkpoint_that_never_came_here_is_nothing() -> None:
    log = FeedbackLog()
    log.on_abort(1)
    log.on_barrier(2, 0)
    assert log.on_return(2, 1) == Range(0, 1)


def test_barriers_go_in_once_and_in_order() -> None:
    log = FeedbackLog()
    log.on_barrier(4, 7)
    with pytest.raises(InternalError, match="out of order"):
        log.on_barrier(4, 8)
