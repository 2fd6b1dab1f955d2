"""Writers of Kafka at a barrier, with a client that reports records when the test says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import kafka_sink
from headgate.connectors.kafka.writer import KafkaWriter
from headgate.errors import JobError
from headgate.operators.elements import ColumnBatch
from headgate.testing.connectors import CheckTimers, make_context

GUARD_S = 60.0


class Refusal:
    """The error of a record that no broker took."""

    def str(self) -> str:
        return "refused"


class HeldBack:
    """A producer that holds the callback of each record until it has reported it, as librdkafka does."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[bytes, Callable[[Any, Any], None]]] = deque()
        self._due: deque[bool] = deque()

    def produce(self, topic: str, value: bytes, key: Any, partition: int, on_delivery: Any) -> None:
        self.waiting.append((value, on_delivery))

    def report(self, *outcomes: bool) -> None:
        """Report the oldest records when the producer is polled next; True: it has arrived."""
        self._due += outcomes

    def poll(self, timeout: float) -> int:
        for _ in range(len(self._due)):
            arrived, (value, on_delivery) = self._due.popleft(), self.waiting.popleft()
            if not arrived:
                on_delivery(Refusal(), value)
        return 0

    flush = poll

    def purge(self) -> None:
        self.report(*[False] * len(self.waiting))

    def __len__(self) -> int:
        return len(self.waiting)


def rows(*ids: int) -> ColumnBatch:
    return ColumnBatch(pa.record_batch({"id": list(ids)}))


def run(scenario: Callable[[KafkaWriter, HeldBack], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    producer = HeldBack()
    monkeypatch.setattr("headgate.connectors.kafka.writer.make_producer", lambda *_: producer)
    writer = kafka_sink("topic", bootstrap="127.0.0.1:1").writer()
    assert isinstance(writer, KafkaWriter)

    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            writer.open(make_context(timers=CheckTimers()))
            await scenario(writer, producer)
            writer.close()

    asyncio.run(guarded())


def settling(writer: KafkaWriter, checkpoint_id: int) -> asyncio.Task[list[bytes]]:
    """Return the pre-commit of a barrier, which runs."""
    precommit = writer.roll(checkpoint_id)
    assert precommit is not None
    return asyncio.create_task(asyncio.to_thread(precommit))


def test_a_barrier_stops_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint waits for those in front of it only, whatever is on its way behind it."""

    async def scenario(writer: KafkaWriter, producer: HeldBack) -> None:
        writer.write(rows(1, 2))
        first = settling(writer, 1)
        assert not writer.backlogged()
        writer.write(rows(3))
        second = settling(writer, 2)
        writer.write(rows(4))
        assert not writer.backlogged()
        producer.report(True)
        await asyncio.sleep(0.05)
        assert not first.done()
        producer.report(True)
        assert await first == []
        assert not second.done()
        assert len(producer) == 2
        producer.report(True)
        assert await second == []
        assert len(producer) == 1

    run(scenario, monkeypatch)


def test_reports_of_later_records_do_not_stand_for_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Partitions have no order among each other, so a record behind the barrier may arrive first."""

    async def scenario(writer: KafkaWriter, producer: HeldBack) -> None:
        writer.write(rows(1))
        first = settling(writer, 1)
        writer.write(rows(2, 3))
        producer.waiting.rotate(-1)
        producer.report(True, True)
        await asyncio.sleep(0.05)
        assert len(producer) == 1
        assert not first.done()
        producer.report(True)
        assert await first == []

    run(scenario, monkeypatch)


def test_a_refused_record_fails_the_checkpoint_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(writer: KafkaWriter, producer: HeldBack) -> None:
        writer.write(rows(1, 2))
        first = settling(writer, 1)
        writer.write(rows(3))
        producer.report(True, False)
        with pytest.raises(JobError, match="were not delivered"):
            await first
        with pytest.raises(JobError, match="were not delivered"):
            writer.write(rows(4))

    run(scenario, monkeypatch)


def test_a_checkpoint_without_records_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(writer: KafkaWriter, producer: HeldBack) -> None:
        writer.write(rows(1))
        first = settling(writer, 1)
        assert writer.roll(2) is None
        producer.report(True)
        await first

    run(scenario, monkeypatch)


def test_a_writer_that_is_closed_ends_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(writer: KafkaWriter, producer: HeldBack) -> None:
        writer.write(rows(1))
        first = settling(writer, 1)
        await asyncio.sleep(0.02)
        writer.close()
        with pytest.raises(JobError, match="closed|not delivered"):
            await first

    run(scenario, monkeypatch)


def test_the_end_of_the_data_waits_for_all_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(writer: KafkaWriter, producer: HeldBack) -> None:
        writer.write(rows(1, 2))
        finish = writer.finish()
        assert finish is not None
        ending = asyncio.create_task(asyncio.to_thread(finish))
        producer.report(True)
        await asyncio.sleep(0.05)
        assert not ending.done()
        producer.report(True)
        await ending

    run(scenario, monkeypatch)
