"""Every order of events for two subtasks and a few checkpoints, against promises kept outside.

Goal: no order of acks (repeated, late), declines, timeouts, publish answers, requests and crashes breaks
a promise. Method: breadth-first over all events that may happen next; states that were reached before are
not followed twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest

from headgate.runtime.protocol.checkpoint_decisions import (
    Discard,
    FailJob,
    NotifyAborted,
    NotifyComplete,
    Publish,
    RequestDone,
    RequestFailed,
    Trigger,
)
from headgate.runtime.protocol.checkpoint_settings import CheckpointSettings
from headgate.runtime.protocol.checkpoints import CheckpointCoordinator, Phase
from headgate.runtime.protocol.failures import CheckpointFailure
from headgate.runtime.protocol.ids import SubtaskId

SUBTASKS = (SubtaskId(0, 0), SubtaskId(1, 0))
CHECKPOINTS_MAX = 2
DISTURBANCES_MAX = 2
"""How many things may go wrong in one run; two is what it takes for one to hit the handling of another."""


class World:
    """A coordinator and its shell: what was asked, what was answered, which files exist."""

    def __init__(self, tolerable_failures: int, max_concurrent: int) -> None:
        settings = CheckpointSettings(None, 1000, 0, max_concurrent, tolerable_failures)
        self.coordinator = CheckpointCoordinator[str](settings)
        self.now_ms = 0
        self.triggered: list[int] = []
        self.acked: set[tuple[int, SubtaskId]] = set()
        self.files: set[str] = set()
        self.publishing: set[int] = set()
        self.published: set[int] = set()
        self.uncertain: set[int] = set()
        self.completed: set[int] = set()
        self.aborted: set[int] = set()
        self.answered: dict[str, str] = {}
        self.disturbances = DISTURBANCES_MAX
        self.requested = 0
        self.apply(self.coordinator.start(SUBTASKS, 1, 0))

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that nothing can tell apart."""
        inner = self.coordinator
        pending = tuple(
            (p.checkpoint_id, p.trigger_ms, p.token, p.options, p.final, p.publishing, p.deletable)
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
            tuple(inner._requests),
            tuple(inner._aborted),
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
        for id_ in self.triggered:
            for subtask in SUBTASKS:
                if (id_, subtask) not in self.acked:
                    yield lambda world, i=id_, s=subtask: world.ack(i, s)
        yield from (lambda world, i=id_: world.publish(i) for id_ in self.publishing)
        if self.coordinator.phase is Phase.IDLE and not self.publishing:
            yield World.restart
        if self.disturbances:
            yield from self.disturbing_moves()

    def disturbing_moves(self) -> Iterator[Callable[[World], None]]:
        for id_, subtask in self.acked:
            yield lambda world, i=id_, s=subtask: world.disturb(lambda: world.ack(i, s))
        for id_ in self.triggered:
            yield lambda world, i=id_: world.disturb(lambda: world.decline(i, SUBTASKS[0]))
        for id_ in self.publishing:
            for certain in (True, False):
                yield lambda world, i=id_, c=certain: world.disturb(
                    lambda: world.fail_publish(i, certain=c)
                )
        for disturbance in (World.expire, World.crash, World.shut_down):
            yield lambda world, d=disturbance: world.disturb(lambda: d(world))

    def disturb(self, disturbance: Callable[[], None]) -> None:
        self.disturbances -= 1
        disturbance()

    def ask(self, *, stop: bool, final: bool) -> None:
        token = f"t{self.requested}"
        self.requested += 1
        self.answered[token] = ""
        self.apply(self.coordinator.request(self.now_ms, token=token, stop=stop, final=final))

    def ack(self, id_: int, subtask: SubtaskId) -> None:
        self.acked.add((id_, subtask))
        self.files.add(f"{id_}/{subtask}")
        self.apply(self.coordinator.acked(id_, subtask, f"{id_}/{subtask}", self.now_ms))

    def decline(self, id_: int, subtask: SubtaskId) -> None:
        reason = CheckpointFailure.ASYNC_EXCEPTION
        self.apply(self.coordinator.declined(id_, subtask, reason, self.now_ms))

    def publish(self, id_: int) -> None:
        self.publishing.remove(id_)
        self.published.add(id_)
        self.apply(self.coordinator.published(id_, self.now_ms))

    def fail_publish(self, id_: int, *, certain: bool) -> None:
        self.publishing.remove(id_)
        if not certain:
            self.uncertain.add(id_)
        self.apply(self.coordinator.publish_failed(id_, self.now_ms, certain=certain))

    def expire(self) -> None:
        self.now_ms += 1000
        self.apply(self.coordinator.tick(self.now_ms))

    def crash(self) -> None:
        self.apply(self.coordinator.job_failed(self.now_ms))

    def shut_down(self) -> None:
        self.apply(self.coordinator.shutdown(self.now_ms, superseded=False))

    def restart(self) -> None:
        next_id = max(self.triggered, default=0) + 1
        self.apply(self.coordinator.start(SUBTASKS, next_id, self.now_ms))

    # -- promises ---------------------------------------------------------------------------------

    def apply(self, decisions: list) -> None:
        for decision in decisions:
            match decision:
                case Trigger(id_):
                    assert id_ > max(self.triggered, default=0)
                    self.triggered.append(id_)
                case Publish(id_, acks=acks):
                    assert not self.publishing, "two publications at once"
                    assert id_ > max(self.published, default=0)
                    assert id_ not in self.aborted
                    assert all((id_, subtask) in self.acked for subtask in SUBTASKS)
                    assert acks == {subtask: f"{id_}/{subtask}" for subtask in SUBTASKS}
                    self.publishing.add(id_)
                case NotifyComplete(id_):
                    assert id_ in self.published
                    assert id_ not in self.completed | self.aborted
                    self.completed.add(id_)
                case NotifyAborted(id_):
                    assert id_ not in self.published | self.publishing | self.aborted
                    self.aborted.add(id_)
                case Discard(id_, payloads):
                    assert id_ not in self.published | self.publishing | self.uncertain
                    self.files -= set(payloads)
                case RequestDone(token, id_):
                    assert id_ in self.completed
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
        for id_ in self.published | self.publishing:
            assert {f"{id_}/{subtask}" for subtask in SUBTASKS} <= self.files
        if self.coordinator.phase in (Phase.IDLE, Phase.ENDED, Phase.CLOSED):
            assert pending == self.publishing, "something was left pending"
            assert all(self.answered.values()), "a request was never answered"


@pytest.mark.parametrize(("tolerable_failures", "max_concurrent"), [(0, 2), (1, 1), (1, 2)])
def test_every_order_of_events(tolerable_failures: int, max_concurrent: int) -> None:
    frontier = [World(tolerable_failures, max_concurrent)]
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
