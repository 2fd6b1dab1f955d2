"""Acknowledgements of a worker's subtasks go to the coordinator together, and never wait for long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.runtime.control.messages import CheckpointAcked, SubtaskAck
from headgate.runtime.worker.reports import INLINE_BYTES_MAX, GatheredAcks
from headgate.state.snapshot import OperatorSnapshot, StateHandle
from headgate.testing.loop import VirtualClock, VirtualLoop

SUBTASKS = 3


def ack(index: int, inline: bytes | None = None) -> SubtaskAck:
    handle = StateHandle(
        state="s", kind="items", size_bytes=1, checksum="", rows=1, inline=inline
    )  # fmt: skip
    return SubtaskAck(
        vertex=0, index=index, snapshots=(OperatorSnapshot(operator="o", handles=(handle,)),),
        finished=False, sync_ms=0.0, async_ms=0.0, alignment_ms=0.0,
    )  # fmt: skip


class Gathering:
    """A worker with three subtasks, and what it has sent."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(1)
        self.messages: list[CheckpointAcked] = []
        clock = VirtualClock(self.loop)
        self.acks = GatheredAcks(self.messages.append, lambda attempt: SUBTASKS, clock)
        self.acks.delay_ms = 200

    def add(self, index: int, checkpoint_id: int = 7, attempt: int = 1, **given: bytes) -> None:
        async def add() -> None:
            self.acks.add(attempt, checkpoint_id, ack(index, **given))

        self.loop.run_until_complete(add())

    def wait(self, ms: int) -> None:
        self.loop.drive(self.loop.time() + ms / 1000)

    @property
    def sent(self) -> list[tuple[int, int, list[int]]]:
        return [
            (each.attempt, each.checkpoint_id, [subtask.index for subtask in each.subtasks])
            for each in self.messages
        ]


@pytest.fixture
def worker() -> Iterator[Gathering]:
    worker = Gathering()
    yield worker
    worker.loop.close()


def test_the_last_subtask_sends_all(worker: Gathering) -> None:
    worker.add(0)
    worker.wait(100)
    worker.add(2)
    assert worker.sent == []
    worker.add(1)
    assert worker.sent == [(1, 7, [0, 2, 1])]
    held = [subtask.held_ms for subtask in worker.messages[0].subtasks]
    assert held == [pytest.approx(100), 0, 0], "statistics tell the times of subtasks apart"
    worker.wait(1000)
    assert len(worker.sent) == 1


def test_the_wait_for_others_is_bounded(worker: Gathering) -> None:
    worker.add(0)
    worker.wait(199)
    assert worker.sent == []
    worker.wait(2)
    assert worker.sent == [(1, 7, [0])]
    worker.add(1)
    worker.wait(201)
    assert worker.sent == [(1, 7, [0]), (1, 7, [1])]


def test_attempts_and_checkpoints_are_not_mixed(worker: Gathering) -> None:
    worker.add(0, attempt=1)
    worker.add(0, attempt=2)
    worker.add(0, checkpoint_id=8, attempt=2)
    worker.acks.flush()
    assert worker.sent == [(1, 7, [0]), (2, 7, [0]), (2, 8, [0])]


def test_without_a_delay_each_is_sent_at_once(worker: Gathering) -> None:
    worker.acks.delay_ms = 0
    worker.add(0)
    worker.add(1)
    assert worker.sent == [(1, 7, [0]), (1, 7, [1])]


def test_much_state_in_the_messages_does_not_wait(worker: Gathering) -> None:
    worker.add(0, inline=bytes(INLINE_BYTES_MAX))
    assert worker.sent == [(1, 7, [0])]
