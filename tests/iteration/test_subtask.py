"""The subtask at the head of a loop, step by step: what it sends, in what order, and what it keeps."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.operators.elements import (
    WATERMARK_MAX,
    CheckpointBarrier,
    CheckpointOptions,
    EndOfData,
    LoopProbe,
    ObjectBatch,
    Watermark,
)
from headgate.operators.loops.head import LOG
from headgate.operators.loops.stored import decode
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate
from headgate.runtime.exchange.partition import PartitionStats
from headgate.runtime.task.chain import NodePartition
from headgate.runtime.task.iteration import (
    FEEDBACK_TURNS,
    LAST_TIMES,
    FeedbackPartition,
    FeedbackPorts,
    IterationSubtask,
)
from headgate.state.snapshot import RestoredState
from headgate.tests.support.tasks import planned, task_environment


class Sent:
    """A result partition that keeps everything."""

    backlogged = False

    def __init__(self) -> None:
        self.elements: list[Any] = []

    def emit(self, batch: ObjectBatch) -> None:
        self.elements += batch.records

    def broadcast(self, element: Any) -> None:
        self.elements.append(element)

    def take(self) -> list[Any]:
        taken, self.elements = self.elements, []
        return taken

    def set_listener(self, wake: Any) -> None: ...

    def stats(self) -> PartitionStats:
        return PartitionStats()

    def close(self) -> None: ...


class Reports:
    def __init__(self) -> None:
        self.acks: dict[int, Any] = {}
        self.rounds: list[tuple[int, int]] = []
        self.ended = False

    def acked(self, checkpoint_id: int, snapshots: Any, timing: Any) -> None:
        self.acks[checkpoint_id] = snapshots

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None:
        raise AssertionError(text)

    def loop_round(self, loop: str, number: int, records: int) -> None:
        self.rounds.append((number, records))

    def finished(self) -> None:
        self.ended = True


class Head:
    """The subtask, two channels into it, its output, and the tail beside it."""

    def __init__(self, path: Path, threads: Any, rounds: bool) -> None:
        job = hg.Job("job")

        def body(stream: Any) -> tuple[Any, Any]:
            return stream.map(abs), stream

        source = job.read(numbers(1), name="in")
        loop = (
            source.iterate_rounds(body, name="loop", max_rounds=9)
            if rounds
            else source.iterate(body, name="loop")
        )
        loop.write(collect(guarantee="none"), name="out")
        plan, vertex = planned(job, "loop")
        self.reports, self.out, self.ports = Reports(), Sent(), FeedbackPorts()
        self.gate = InputGate([InputChannelSpec(number, 0) for number in (0, 1)])
        env = task_environment(plan, vertex, path, threads, reports=self.reports)
        outputs = {vertex.head.id: [NodePartition(None, self.out)]}
        self.subtask = IterationSubtask(env, outputs, self.gate, self.ports)  # type: ignore[arg-type]
        self.tail = FeedbackPartition(self.ports, "loop", 0)
        for number in (0, 1):
            sender = SimpleNamespace(add_credits=lambda count: None)
            self.gate.open(self.gate.attach(number, sender))  # type: ignore[arg-type]

    async def open(self, state: RestoredState | None = None) -> None:
        await self.subtask.prepare(None if state is None else {"loop": state}, False)

    def outside(self, *elements: Any, channel: int = 0) -> None:
        for each in elements:
            if isinstance(each, int):
                self.gate.receive(channel, ObjectBatch([each]), 0)
            else:
                self.gate.receive_control(channel, each)

    def everywhere(self, element: Any) -> None:
        for channel in (0, 1):
            self.outside(element, channel=channel)

    def back(self, *elements: Any) -> None:
        for each in elements:
            if isinstance(each, int):
                self.tail.emit(ObjectBatch([each]))
            else:
                self.tail.broadcast(each)

    async def work(self) -> list[Any]:
        """Mails and steps until there is nothing to do; what was sent."""
        while True:
            if self.subtask._mails:
                await self.subtask._run_mail()
            elif not await self.subtask.step():
                return self.out.take()

    async def log(self, checkpoint_id: int) -> list[int]:
        """The records in the log of an acknowledged checkpoint."""
        await self.subtask.snapshots.drain()
        return [
            record
            for snapshot in self.reports.acks[checkpoint_id]
            for handle in snapshot.handles
            if handle.state == LOG and handle.rows
            for data in _column(handle.inline)
            for record in decode(data).records  # type: ignore[union-attr]
        ]


def _column(data: bytes) -> list[bytes]:

    found: list[bytes] = pq.read_table(io.BytesIO(data)).column("batch").to_pylist()
    return found


Script = Callable[[Head], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def run(script: Script, *, rounds: bool = False) -> None:
        async def main() -> None:
            with ThreadPoolExecutor(1) as threads:
                head = Head(tmp_path / "local", threads, rounds)
                try:
                    await script(head)
                finally:
                    await head.subtask.cancel()

        asyncio.run(main())

    return run


def barrier(checkpoint_id: int, **options: Any) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, CheckpointOptions(**options))


def test_the_cut_is_made_when_the_barrier_is_back(play: Any) -> None:
    async def script(head: Head) -> None:
        await head.open()
        one, two = barrier(1), barrier(2)
        head.outside(1, one, 2)
        assert await head.work() == [1]
        head.outside(one, channel=1)
        assert await head.work() == [one, 2]
        head.back(10)
        head.everywhere(two)
        assert await head.work() == [10, two]
        head.back(11, one, 12, two)
        assert await head.work() == [11, 12]
        assert (await head.log(1), await head.log(2)) == ([10, 11], [11, 12])
        head.subtask._head.queue.validate()
        assert head.subtask._head.queue.memory_bytes == 0

    play(script)


def test_an_aborted_checkpoint_is_not_cut_when_its_barrier_is_back(play: Any) -> None:
    async def script(head: Head) -> None:
        await head.open()
        head.everywhere(barrier(1))
        head.back(10)
        await head.work()
        head.subtask.checkpoint_aborted(1)
        head.everywhere(barrier(2))
        await head.work()
        head.back(11, barrier(1), 12, barrier(2))
        assert await head.work() == [11, 12]
        assert await head.log(2) == [11, 12]
        assert list(head.reports.acks) == [2]

    play(script)


def test_what_was_restored_goes_before_anything_from_outside(play: Any) -> None:
    tables: dict[str, Any] = {}

    async def before(head: Head) -> None:
        await head.open()
        head.everywhere(barrier(1))
        await head.work()
        head.back(*range(10, 20), barrier(1))
        await head.work()
        await head.log(1)
        (snapshot,) = head.reports.acks[1]
        (handle,) = snapshot.handles
        tables[LOG] = pq.read_table(io.BytesIO(handle.inline))

    async def after(head: Head) -> None:
        await head.open(RestoredState(tables=tables))
        head.outside(1)
        head.outside(2, channel=1)
        assert await head.work() == [*range(10, 20), 1, 2]

    play(before)
    play(after)


def test_what_comes_back_and_what_comes_from_outside_take_turns(play: Any) -> None:
    async def script(head: Head) -> None:
        await head.open()
        head.outside(1)
        head.outside(2, channel=1)
        head.back(*range(10, 20))
        sent = await head.work()
        assert sent.index(1) == FEEDBACK_TURNS
        assert [each for each in sent if each >= 10] == list(range(10, 20))
        assert [each for each in sent if each < 10] == [1, 2]

    play(script)


def test_time_ends_in_the_loop_when_it_is_at_rest(play: Any) -> None:
    async def script(head: Head) -> None:
        await head.open()
        head.everywhere(Watermark(50))
        head.outside(1)
        assert await head.work() == [Watermark(50), 1]
        head.everywhere(Watermark(WATERMARK_MAX))
        head.everywhere(EndOfData())
        assert await head.work() == [LoopProbe("loop", 1)]
        head.back(10, LoopProbe("loop", 1))
        assert await head.work() == [10]
        assert head.reports.rounds == [(1, 1)]
        head.subtask.loop_round_over(1, 1)
        assert await head.work() == [LoopProbe("loop", 2)]
        head.back(LoopProbe("loop", 2))
        head.subtask.loop_round_over(2, 0)
        assert await head.work() == [Watermark(LAST_TIMES + 1), LoopProbe("loop", 3)]
        head.back(11, LoopProbe("loop", 3))
        head.subtask.loop_round_over(3, 1)
        assert await head.work() == [11, LoopProbe("loop", 4)]
        head.back(LoopProbe("loop", 4))
        head.subtask.loop_round_over(4, 0)
        assert await head.work() == [Watermark(LAST_TIMES + 2), LoopProbe("loop", 5)]
        head.back(LoopProbe("loop", 5))
        assert not head.reports.ended
        head.subtask.loop_round_over(5, 0)
        assert await head.work() == [Watermark(WATERMARK_MAX), EndOfData()]
        assert head.reports.ended
        head.everywhere(barrier(9))
        assert await head.work() == [barrier(9)]
        head.back(barrier(9))
        await head.work()
        assert await head.log(9) == []

    play(script)


def test_a_round_ends_with_its_watermark_and_goes_on_when_told(play: Any) -> None:
    async def script(head: Head) -> None:
        await head.open()
        head.everywhere(Watermark(50))
        head.outside(1)
        head.back(10)
        assert await head.work() == [1]
        head.everywhere(EndOfData())
        assert await head.work() == [Watermark(0), LoopProbe("loop", 0)]
        head.back(11, LoopProbe("loop", 0), 20)
        assert await head.work() == []
        assert head.reports.rounds == [(0, 2)]
        head.subtask.loop_round_over(0, 5)
        assert await head.work() == [10, 11, Watermark(1), LoopProbe("loop", 1)]
        head.back(LoopProbe("loop", 1))
        await head.work()
        assert head.reports.rounds[-1] == (1, 1)
        head.subtask.loop_round_over(1, 0)
        assert await head.work() == [Watermark(WATERMARK_MAX), EndOfData()]

    play(script, rounds=True)


@pytest.mark.parametrize("rounds", [False, True])
def test_behind_the_barrier_of_a_stop_nothing_is_sent(play: Any, rounds: bool) -> None:
    """Neither what comes back, nor the end of time: only the barrier of the last checkpoint."""

    async def script(head: Head) -> None:
        await head.open()
        head.everywhere(EndOfData())
        probe = (await head.work())[-1]
        stop, last = barrier(1, stop=True), barrier(2)
        head.everywhere(stop)
        assert await head.work() == [stop]
        head.back(10, probe, 11, stop)
        assert await head.work() == []
        head.subtask.loop_round_over(probe.number, 0)
        assert await head.work() == []
        head.everywhere(last)
        assert await head.work() == [last]
        head.back(last)
        assert await head.work() == []
        assert (await head.log(1), await head.log(2)) == ([10, 11], [10, 11])
        assert not head.reports.ended

    play(script, rounds=rounds)
