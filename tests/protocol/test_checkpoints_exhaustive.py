"""Every order of events for two subtasks and a few checkpoints, against promises kept outside.

Goal: no order of acks (repeated, late), declines, timeouts, publish answers, requests and crashes breaks
a promise; nor is a file ever deleted that a complete checkpoint, or one under way, refers to.
Method: breadth-first over all events that may happen next; states that were reached before are not
followed twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest

from headgate.runtime.protocol.checkpoints.coordinator import (
    CheckpointCoordinator,
    Discard,
    FailJob,
    NotifyAborted,
    NotifyComplete,
    Phase,
    Publish,
    RequestDone,
    RequestFailed,
    StartCheckpoint,
)
from headgate.runtime.protocol.checkpoints.settings import CheckpointRules
from headgate.runtime.protocol.failures import CheckpointFailure
from headgate.runtime.protocol.ids import SubtaskId

SUBTASKS = (SubtaskId(0, 0), SubtaskId(1, 0))
CHECKPOINTS_MAX = 2
DISTURBANCES_MAX = 2
"""The most failures of one run; two are enough for one to hit the handling of another."""


class World:
    """A coordinator and its shell: what was asked, what was answered, which files exist."""

    def __init__(
        self, tolerable_failures: int, max_concurrent: int, savepoints_max: int, unaligned: bool
    ) -> None:
        self.unaligned = unaligned
        self.savepoints_max = savepoints_max
        self.savepoints_asked = 0
        settings = CheckpointRules(
            None, 1000, 0, max_concurrent, tolerable_failures, unaligned=unaligned
        )
        self.coordinator = CheckpointCoordinator[str](settings)
        self.now_ms = 0
        self.triggered: list[int] = []
        self.acked: set[tuple[int, SubtaskId]] = set()
        self.files: set[str] = set()
        self.base_of: dict[int, int] = {}
        self.savepoints: dict[int, str] = {}
        self.publishing: set[int] = set()
        self.published: set[int] = set()
        self.uncertain: set[int] = set()
        self.completed: set[int] = set()
        self.aborted: set[int] = set()
        self.answered: dict[str, str] = {}
        # Unaligned checkpoints only change when one starts, so one failure is enough.
        self.disturbances = 1 if unaligned else DISTURBANCES_MAX
        self.requested = 0
        # The attempt was restored from checkpoint 1.
        self.triggered.append(1)
        self.published.add(1)
        self.files |= self.own_files(1)
        self.apply(self.coordinator.start(SUBTASKS, 2, 0, base=1))

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that nothing can tell apart."""
        inner = self.coordinator
        pending = tuple(
            (p.checkpoint_id, p.trigger_ms, p.token, p.options, p.final, p.publishing)
            for p in inner._by_age()
        )
        outside = [
            self.acked,
            self.files,
            self.publishing,
            self.published,
            self.uncertain,
            self.aborted,
        ]
        return (
            pending,
            inner.phase,
            tuple(inner._requests._checkpoints),
            tuple(inner._requests._savepoints),
            tuple(inner._aborted._options),
            inner._base,
            tuple(self.base_of.items()),
            inner._failures_in_a_row,
            inner._last_failed,
            self.now_ms,
            self.disturbances,
            tuple(self.triggered),
            tuple(self.answered.items()),
            *map(frozenset, outside),
        )

    # -- what may happen next ---------------------------------------------------------------------

    def moves(self) -> Iterator[Callable[[World], None]]:
        if self.requested < CHECKPOINTS_MAX:
            yield lambda world: world.ask(stop=False, final=False)
            yield lambda world: world.ask(stop=True, final=False)
            yield lambda world: world.ask(stop=False, final=True)
            if self.savepoints_asked < self.savepoints_max:
                yield lambda world: world.ask(stop=False, final=False, savepoint=True)
                yield lambda world: world.ask(stop=True, final=False, savepoint=True)
        for id_ in self.triggered[1:]:
            for subtask in SUBTASKS:
                if (id_, subtask) not in self.acked:
                    yield lambda world, i=id_, s=subtask: world.ack(i, s)
            if not any((id_, subtask) in self.acked for subtask in SUBTASKS):
                yield lambda world, i=id_: world.ack(i, *SUBTASKS)
        yield from (lambda world, i=id_: world.publish(i) for id_ in self.publishing)
        if self.coordinator.phase is Phase.IDLE and not self.publishing:
            yield World.restart
        if self.disturbances:
            yield from self.disturbing_moves()

    def disturbing_moves(self) -> Iterator[Callable[[World], None]]:
        for id_, subtask in self.acked:
            yield lambda world, i=id_, s=subtask: world.disturb(lambda: world.ack(i, s))
        for id_ in self.triggered[1:]:
            yield lambda world, i=id_: world.disturb(lambda: world.decline(i, SUBTASKS[0]))
        for id_ in self.publishing:
            yield lambda world, i=id_: world.disturb(lambda: world.fail_publish(i))
        for disturbance in (World.expire, World.crash):
            yield lambda world, d=disturbance: world.disturb(lambda: d(world))

    def disturb(self, disturbance: Callable[[], None]) -> None:
        self.disturbances -= 1
        disturbance()

    def ask(self, *, stop: bool, final: bool, savepoint: bool = False) -> None:
        token = f"t{self.requested}"
        self.requested += 1
        self.savepoints_asked += savepoint
        self.answered[token] = ""
        self.apply(
            self.coordinator.request(
                self.now_ms,
                token=token,
                stop=stop,
                final=final,
                savepoint=f"savepoint-{token}" if savepoint else "",
            )
        )

    def ack(self, id_: int, *subtasks: SubtaskId) -> None:
        acks = {subtask: f"{id_}/{subtask}" for subtask in subtasks}
        self.acked.update((id_, subtask) for subtask in subtasks)
        self.files.update(acks.values())
        self.apply(self.coordinator.acked(id_, acks, self.now_ms))

    def decline(self, id_: int, subtask: SubtaskId) -> None:
        reason = CheckpointFailure.ASYNC_EXCEPTION
        self.apply(self.coordinator.declined(id_, subtask, reason, self.now_ms))

    def publish(self, id_: int) -> None:
        self.publishing.remove(id_)
        self.published.add(id_)
        self.apply(self.coordinator.published(id_, self.now_ms))
        if id_ not in self.savepoints:
            self.trim()

    def trim(self) -> None:
        """As the shell does: only the newest is kept, and what one under way builds on."""
        newest = max(id_ for id_ in self.published if id_ not in self.savepoints)
        keep_from = min(newest, self.coordinator.oldest_base or newest)
        kept = {id_ for id_ in self.published | self.uncertain if id_ >= keep_from}
        needed = set().union(*map(self.references, kept))
        for id_ in self.published - self.savepoints.keys() - kept:
            self.files -= self.own_files(id_) - needed

    def own_files(self, id_: int) -> set[str]:
        return {f"{id_}/{subtask}" for subtask in SUBTASKS}

    def references(self, id_: int) -> set[str]:
        """Files of a checkpoint: its own, and those of what it builds on.

        Every second one is written in full, although it might build on another.
        """
        base = self.base_of.get(id_, 0) if id_ % 2 else 0
        return self.own_files(id_) | (self.references(base) if base else set())

    def fail_publish(self, id_: int) -> None:
        self.publishing.remove(id_)
        if id_ not in self.savepoints:
            self.uncertain.add(id_)
        self.apply(self.coordinator.publish_failed(id_, self.now_ms))

    def expire(self) -> None:
        self.now_ms += 1000
        self.apply(self.coordinator.tick(self.now_ms))

    def crash(self) -> None:
        self.apply(self.coordinator.job_failed(self.now_ms))

    def restart(self) -> None:
        next_id = max(self.triggered, default=0) + 1
        # An uncertain publication has been settled by now: assume that it was there.
        self.published |= self.uncertain
        self.uncertain.clear()
        restored = max((i for i in self.published if i not in self.savepoints), default=0)
        self.apply(self.coordinator.start(SUBTASKS, next_id, self.now_ms, base=restored))

    # -- promises ---------------------------------------------------------------------------------

    def apply(self, decisions: list) -> None:
        for decision in decisions:
            match decision:
                case StartCheckpoint(id_, _, options):
                    assert id_ > max(self.triggered, default=0)
                    self.triggered.append(id_)
                    if options.may_overtake:
                        assert self.unaligned
                        pending = set(self.coordinator.pending_ids)
                        assert not pending & self.savepoints.keys(), "it would overtake a savepoint"
                    if options.savepoint:
                        self.savepoints[id_] = options.savepoint
                        assert options.base == 0
                    else:
                        assert options.base == 0 or options.base in self.published
                        self.base_of[id_] = options.base
                case Publish(id_, options=options, acks=acks):
                    if id_ not in self.savepoints:
                        others = self.publishing - self.savepoints.keys()
                        assert not others, "two publications at once"
                        completed = self.published - self.savepoints.keys()
                        assert id_ > max(completed, default=0)
                    assert id_ not in self.aborted
                    assert all((id_, subtask) in self.acked for subtask in SUBTASKS)
                    assert acks == {subtask: f"{id_}/{subtask}" for subtask in SUBTASKS}
                    self.publishing.add(id_)
                case NotifyComplete(id_):
                    assert id_ in self.published
                    assert id_ not in self.savepoints
                    assert id_ not in self.completed | self.aborted
                    self.completed.add(id_)
                case NotifyAborted(id_):
                    assert id_ not in self.published | self.publishing | self.aborted
                    self.aborted.add(id_)
                case Discard(id_, options, payloads):
                    assert id_ not in self.publishing | self.uncertain
                    assert options.savepoint == self.savepoints.get(id_, "")
                    if id_ in self.published:
                        assert id_ in self.savepoints, "a complete checkpoint was discarded"
                        assert self.coordinator.phase is Phase.IDLE
                        self.published.remove(id_)
                        self.aborted.add(id_)
                    self.files -= set(payloads)
                case RequestDone(token, id_):
                    assert id_ in self.completed | (self.savepoints.keys() & self.published)
                    assert self.answered[token] == ""
                    self.answered[token] = "done"
                case RequestFailed(token):
                    assert self.answered[token] == ""
                    self.answered[token] = "failed"
                case FailJob():
                    assert self.coordinator.phase is Phase.IDLE
        self.coordinator.validate()
        self.check()

    def check(self) -> None:
        pending = set(self.coordinator.pending_ids)
        assert set(self.triggered) == pending | self.published | self.aborted
        assert self.publishing <= pending
        kept = pending | self.published | self.uncertain
        assert {file for file in self.files if int(file.split("/")[0]) not in kept} == set()
        for id_ in self.publishing | (self.savepoints.keys() & self.published):
            assert self.references(id_) <= self.files
        newest = max(self.published - self.savepoints.keys(), default=0)
        assert not newest or self.references(newest) <= self.files
        for id_ in pending - self.savepoints.keys():
            assert self.references(id_) - self.own_files(id_) <= self.files, "a base was deleted"
        if self.coordinator.phase in (Phase.IDLE, Phase.ENDED):
            left = (
                pending
                if self.coordinator.phase is Phase.IDLE
                else pending - self.savepoints.keys()
            )
            assert left <= self.publishing, "something was left pending"
            waiting = {p.token for p in self.coordinator._pending.values()}
            unanswered = {token for token, answer in self.answered.items() if not answer}
            assert unanswered <= waiting, "a request was never answered"


@pytest.mark.parametrize(
    ("tolerable_failures", "max_concurrent", "savepoints_max", "unaligned"),
    [(0, 2, 0, False), (1, 1, 0, False), (1, 2, 0, False), (0, 1, 1, False), (0, 1, 1, True)],
)
def test_every_order_of_events(
    tolerable_failures: int, max_concurrent: int, savepoints_max: int, unaligned: bool
) -> None:
    frontier = [World(tolerable_failures, max_concurrent, savepoints_max, unaligned)]
    seen = {frontier[0].key()}
    while frontier:
        reached = []
        for world in frontier:
            frozen = pickle.dumps(world)
            for move in world.moves():
                branch = pickle.loads(frozen)
                move(branch)
                key = branch.key()
                if key not in seen:
                    seen.add(key)
                    reached.append(branch)
        frontier = reached
    assert len(seen) > 1000
