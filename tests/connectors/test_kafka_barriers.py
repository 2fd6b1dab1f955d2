"""Writers of Kafka at a barrier, with a client that reports records when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import kafka_sink
from headgate.connectors.kafka.exactly_once import TransactionalWriter
from headgate.connectors.kafka.transactions import PreparedTransaction
from headgate.connectors.kafka.writer import KafkaWriter
from headgate.errors import JobError
from headgate.operators.elements import ColumnBatch
from headgate.testing.connectors import CheckTimers, make_context

GUARD_S = 20.0


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


class HeldBackTransactions(HeldBack):
    """The same with a transaction, which is initialised when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.initialised = threading.Event()

    def init_transactions(self, timeout: float) -> None:
        assert self.initialised.wait(GUARD_S)

    def begin_transaction(self) -> None:
        assert self.initialised.is_set()


class Brokers:
    """The transactions, instead of `TransactionClient`."""

    def __init__(self, *_: Any) -> None:
        self.marked: list[PreparedTransaction] = []

    def open_ids(self, prefix: str) -> list[str]:
        return []

    def prepared(self, id: str, topic: str, checkpoint_id: int) -> PreparedTransaction:
        return PreparedTransaction(id, 1, 1, topic, checkpoint_id)

    def mark(self, prepared: PreparedTransaction) -> None:
        self.marked.append(prepared)

    def abort(self, id: str) -> None:
        pass

    def close(self) -> None:
        pass


def rows(*ids: int) -> ColumnBatch:
    return ColumnBatch(pa.record_batch({"id": list(ids)}))


def values_of(producer: HeldBack) -> list[bytes]:
    return [value for value, _ in producer.waiting]


def run(scenario: Callable[[KafkaWriter, HeldBack], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    producer = HeldBack()
    monkeypatch.setattr("headgate.connectors.kafka.writer.make_producer", lambda *_: producer)
    writer = kafka_sink("topic", bootstrap="127.0.0.1:1").writer()
    assert isinstance(writer, KafkaWriter)

    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            writer.open(make_context(timers=CheckTimers()))
            try:
                await scenario(writer, producer)
            finally:
                writer.close()

    asyncio.run(guarded())


class Transactions:
    """A writer of transactions, its timers, and the producers of these, each made when it is needed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.producers = [HeldBackTransactions() for _ in range(8)]
        self.timers = CheckTimers()
        unused = iter(self.producers)
        module = "headgate.connectors.kafka.committing"
        monkeypatch.setattr(f"{module}.make_producer", lambda *_: next(unused))
        monkeypatch.setattr(f"{module}.TransactionClient", Brokers)
        sink = kafka_sink("topic", bootstrap="127.0.0.1:1", guarantee="exactly_once", buffer=200)
        writer = sink.writer()
        assert isinstance(writer, TransactionalWriter)
        self.writer = writer

    def run(self, scenario: Callable[[], Any]) -> None:
        async def guarded() -> None:
            async with asyncio.timeout(GUARD_S):
                self.writer.open(make_context(timers=self.timers))
                self.producers[0].initialised.set()
                await asyncio.to_thread(self.writer.prepare)
                try:
                    await scenario()
                finally:
                    for producer in self.producers:
                        producer.initialised.set()
                    self.writer.close()

        asyncio.run(guarded())

    async def sent(self, producer: HeldBack, *values: bytes) -> None:
        """Wait until a producer has been handed these."""
        while values_of(producer) != [*values]:
            self.timers.fire()
            await asyncio.sleep(0.002)


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


def test_records_of_a_transaction_do_not_overtake_those_in_front_of_their_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another producer would not know that those are still on their way. The subtask goes on meanwhile."""
    job = Transactions(monkeypatch)
    writer, (one, two, *_) = job.writer, job.producers

    async def scenario() -> None:
        writer.write(rows(1, 2))
        assert values_of(one) == [b'{"id":1}', b'{"id":2}']
        first = settling(writer, 1)
        two.initialised.set()
        writer.write(rows(3))
        assert not writer.backlogged()
        one.report(True)
        for _ in range(20):
            job.timers.fire()
            await asyncio.sleep(0.002)
        assert values_of(two) == []
        assert not first.done()
        one.report(True)
        await job.sent(two, b'{"id":3}')
        assert len(await first) == 1
        writer.write(rows(4))
        assert values_of(two) == [b'{"id":3}', b'{"id":4}']

    job.run(scenario)


def test_the_transaction_of_the_next_records_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records are held meanwhile, up to half of the buffer."""
    job = Transactions(monkeypatch)
    writer, (one, two, *_) = job.writer, job.producers

    async def scenario() -> None:
        writer.write(rows(1))
        first = settling(writer, 1)
        one.report(True)
        assert len(await first) == 1
        writer.write(rows(2))
        assert not writer.backlogged()
        writer.write(rows(*range(10, 22)))
        assert writer.backlogged()
        two.initialised.set()
        await job.sent(two, b'{"id":2}', *(b'{"id":%d}' % id for id in range(10, 22)))
        two.report(*[True] * 13)
        while writer.backlogged():
            job.timers.fire()
            await asyncio.sleep(0.002)

    job.run(scenario)


@pytest.mark.parametrize("aborted", [False, True])
def test_records_that_are_held_at_their_barrier_are_sent_in_their_own_transaction(
    monkeypatch: pytest.MonkeyPatch, aborted: bool
) -> None:
    """By the thread that prepares them, or by the subtask if no checkpoint prepares them yet."""
    job = Transactions(monkeypatch)
    writer, (one, two, three, *_) = job.writer, job.producers

    async def scenario() -> None:
        writer.write(rows(1))
        first = settling(writer, 1)
        writer.write(rows(2))
        precommit = writer.roll(2)
        assert precommit is not None
        writer.write(rows(3))
        two.initialised.set()
        three.initialised.set()
        assert values_of(two) == []
        one.report(True)
        await first
        second = None if aborted else asyncio.create_task(asyncio.to_thread(precommit))
        await job.sent(two, b'{"id":2}')
        for _ in range(20):
            job.timers.fire()
            await asyncio.sleep(0.002)
        assert values_of(three) == []
        assert second is None or not second.done()
        two.report(True)
        await job.sent(three, b'{"id":3}')
        assert len(await (second or asyncio.to_thread(precommit))) == 1
        assert values_of(three) == [b'{"id":3}']

    job.run(scenario)


def test_a_refused_record_of_a_transaction_fails_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Transactions(monkeypatch)
    writer, (one, *_) = job.writer, job.producers

    async def scenario() -> None:
        writer.write(rows(1, 2))
        first = settling(writer, 1)
        one.report(False, True)
        with pytest.raises(JobError, match="were not delivered"):
            await first
        with pytest.raises(JobError, match="were not delivered"):
            writer.write(rows(3))

    job.run(scenario)
