"""The sink of Kafka in transactions: each crash point, killed processes and brokers, lost transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from kafka.errors import TopicAuthorizationFailedError

import headgate as hg
from headgate.connectors import from_list, kafka_sink, kafka_source
from headgate.connectors.kafka.committing import CommittingWriter
from headgate.connectors.kafka.exactly_once import StagedWriter, TransactionalWriter
from headgate.connectors.kafka.sink import KafkaSink
from headgate.connectors.kafka.transactions import PreparedTransaction, TransactionClient
from headgate.errors import JobError
from headgate.operators.clock import SystemClock
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import SinkWriter
from headgate.runtime.job import runnable
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import make_context, read_all
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.conftest import broker_killed_at
from headgate.tests.support.connector_runs import Fails
from headgate.tests.support.scenarios import guarded, prepared

NewTopic = Callable[..., str]
run = partial(guarded, seconds=600)
TRANSACTIONS = "hg-"
"""The ids of transactions begin with this."""


class KilledWriter(TransactionalWriter):
    """One whose process is killed instead of being closed: its transactions stay open."""

    def close(self) -> None:
        self._closed = True


class KilledStagedWriter(StagedWriter):
    """One whose process is killed: what it has staged is gone, and what it commits stays open."""

    def close(self) -> None:
        self._closed = True


class KilledSink(KafkaSink):
    def writer(self) -> SinkWriter:
        staged = self.settings.transactions == "staged"
        return (KilledStagedWriter if staged else KilledWriter)(self.settings)


def sink(broker: KafkaServer, topic: str, *, killed: bool = False, **options: Any) -> KafkaSink:
    made = kafka_sink(
        topic, bootstrap=broker.bootstrap, guarantee="exactly_once", format="raw", **options
    )
    return KilledSink(made.settings, made.guarantee) if killed else made


def batches(count: int, rows: int = 3) -> list[Any]:
    return [
        ColumnBatch(pa.record_batch({"value": [f"{n}-{row}".encode() for row in range(rows)]}))
        for n in range(count)
    ]


async def visible(broker: KafkaServer, topic: str) -> list[Any]:
    source = kafka_source(topic, bootstrap=broker.bootstrap, format="raw", stop="latest")
    return await read_all(source)


async def opened(
    made: KafkaSink, restored: list[bytes] | None = None, **context: Any
) -> SinkWriter:
    """Return a writer. `restored` are the committables of all subtasks in the restored checkpoint."""
    writer = made.writer()
    writer.open(make_context(**context))
    await asyncio.to_thread(writer.prepare)
    if restored is not None:
        await asyncio.to_thread(writer.restored, frozenset(map(writer.name_of, restored)))
    return writer


def prefix_of(writer: SinkWriter) -> str:
    """The beginning of the transactional ids of a sink, which those of other tests do not have."""
    assert isinstance(writer, CommittingWriter)
    return writer._prefix


def test_the_broker_is_killed_between_both_phases(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, killed=True)
        writer = await opened(made)
        writer.write(batches(1)[0])
        committables = await prepared(writer, 1)
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        assert await visible(broker, topic) == []
        other = await opened(made, committables, attempt=2, restored_checkpoint=1)
        permit = CommitPermit("conformance", 0, 1)
        await asyncio.to_thread(other.commit, committables, permit)
        assert len(await visible(broker, topic)) == 3
        await asyncio.to_thread(other.commit, committables, permit)
        assert len(await visible(broker, topic)) == 3
        other.close()

    run(scenario())


def test_a_transaction_that_was_aborted_is_an_error_and_never_silence(
    broker: KafkaServer, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """As after its time-out, when the job was down for too long."""
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, killed=True)
        writer = await opened(made)
        writer.write(batches(1)[0])
        committables = await prepared(writer, 1)
        client = TransactionClient(broker.bootstrap, {})
        client.abort(msgspec.msgpack.decode(committables[0], type=PreparedTransaction).id)
        other = await opened(made, committables, attempt=2, restored_checkpoint=1)
        with pytest.raises(JobError, match="its records are lost") as raised:
            await asyncio.to_thread(other.commit, committables, CommitPermit("conformance", 0, 1))
        assert topic in str(raised.value)
        lenient = await opened(
            sink(broker, topic, on_lost="skip"), committables, attempt=3, restored_checkpoint=1
        )
        with caplog.at_level(logging.WARNING):
            await asyncio.to_thread(lenient.commit, committables, CommitPermit("conformance", 0, 1))
        assert "goes on without records" in caplog.text
        lenient.close()
        assert await visible(broker, topic) == []
        client.close()
        other.close()

    run(scenario())


def test_a_dead_attempt_cannot_write_on(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, killed=True)
        zombie = await opened(made)
        zombie.write(batches(1)[0])
        client = TransactionClient(broker.bootstrap, {})
        while zombie._current.id not in client.open_ids(TRANSACTIONS):  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        client.close()
        other = await opened(made, attempt=2)
        with pytest.raises(JobError, match="could not be prepared"):
            await prepared(zombie, 1)
        with pytest.raises(JobError, match="fenced"):
            zombie.write(batches(1)[0])
        assert await visible(broker, topic) == []
        other.close()

    run(scenario())


def test_a_transaction_that_is_gone_before_it_is_prepared_ends_the_attempt(
    broker: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint must not be declined for ever."""

    def gone(
        self: TransactionClient, id: str, topic: str, checkpoint_id: int
    ) -> PreparedTransaction:
        raise JobError("a transaction was aborted before it was prepared")

    async def scenario() -> None:
        writer = await opened(sink(broker, new_topic()))
        writer.write(batches(1)[0])
        monkeypatch.setattr(TransactionClient, "prepared", gone)
        with pytest.raises(JobError, match="aborted before it was prepared"):
            await prepared(writer, 1)
        with pytest.raises(JobError, match="aborted before it was prepared"):
            writer.write(batches(1)[0])
        writer.close()

    run(scenario())


def test_a_restart_of_one_subtask_leaves_the_transactions_of_others_alone(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """As when one region of a job restarts. Those of subtasks that are gone are aborted."""
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, killed=True)
        pair = [await opened(made, subtask_index=index, parallelism=2) for index in range(2)]
        for writer in pair:
            writer.write(batches(1)[0])
        dead, alive = (writer._current.id for writer in pair)  # type: ignore[attr-defined]
        client = TransactionClient(broker.bootstrap, {})
        while not {dead, alive} <= set(client.open_ids(TRANSACTIONS)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await opened(made, attempt=2, parallelism=2)
        left = client.open_ids(TRANSACTIONS)
        assert alive in left
        assert dead not in left
        committables = await prepared(pair[1], 1)
        await asyncio.to_thread(pair[1].commit, committables, CommitPermit("c", 0, 1))
        assert len(await visible(broker, topic)) == 3
        pair[1].write(batches(1)[0])
        orphan = pair[1]._current.id  # type: ignore[attr-defined]
        while orphan not in client.open_ids(TRANSACTIONS):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await opened(made, [], attempt=3, parallelism=1, restored_checkpoint=1)
        assert orphan not in client.open_ids(TRANSACTIONS)
        client.close()

    run(scenario())


def test_nothing_stays_open_when_a_writer_is_closed(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()

    async def scenario() -> None:
        writer = await opened(sink(broker, topic))
        writer.write(batches(1)[0])
        id = writer._current.id  # type: ignore[attr-defined]
        client = TransactionClient(broker.bootstrap, {})
        while id not in client.open_ids(TRANSACTIONS):  # noqa: ASYNC110  it is begun in the background
            await asyncio.sleep(0.05)
        writer.close()
        while id in client.open_ids(TRANSACTIONS):  # noqa: ASYNC110  and aborted there
            await asyncio.sleep(0.05)
        client.close()

    run(scenario())


def test_a_writer_uses_few_transactional_ids(broker: KafkaServer, new_topic: NewTopic) -> None:
    """One takes records, one waits to be committed, and one is ready; a commit sets its id free."""
    topic = new_topic()

    async def scenario() -> None:
        writer = await opened(sink(broker, topic))
        ids, committables = set(), list[bytes]()
        for checkpoint_id in range(1, 7):
            writer.write(batches(1)[0])
            (committable,) = await prepared(writer, checkpoint_id)
            permit = CommitPermit("c", 0, checkpoint_id)
            await asyncio.to_thread(writer.commit, [committable], permit)
            # Again, as after an answer that was lost: the id is in use, or will be.
            await asyncio.to_thread(writer.commit, [*committables, committable], permit)
            ids.add(msgspec.msgpack.decode(committable, type=PreparedTransaction).id)
            committables.append(committable)
        assert len(ids) <= 3
        assert len({writer.name_of(each) for each in committables}) == 6
        assert len(await visible(broker, topic)) == 18
        writer.close()

    run(scenario())


def test_a_transaction_under_an_id_that_was_used_before_is_aborted_or_committed_as_it_should_be(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """A checkpoint names one transaction of an id, and another of the same id is dead."""
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, killed=True)
        writer = await opened(made)
        named: list[list[bytes]] = []
        for checkpoint_id in range(1, 5):
            writer.write(batches(1)[0])
            named.append(await prepared(writer, checkpoint_id))
            if checkpoint_id < 4:
                permit = CommitPermit("c", 0, checkpoint_id)
                await asyncio.to_thread(writer.commit, named[-1], permit)
        client = TransactionClient(broker.bootstrap, {})
        (used,) = client.open_ids(prefix_of(writer))
        assert used == msgspec.msgpack.decode(named[1][0], type=PreparedTransaction).id
        # A restore of checkpoint 4 leaves its transaction alone, one of checkpoint 2 aborts it.
        await opened(made, named[3], attempt=2, restored_checkpoint=4)
        assert used in client.open_ids(prefix_of(writer))
        other = await opened(made, named[1], attempt=3, restored_checkpoint=2)
        assert used not in client.open_ids(prefix_of(writer))
        await asyncio.to_thread(other.commit, named[1], CommitPermit("c", 0, 2))
        with pytest.raises(JobError, match="its records are lost"):
            await asyncio.to_thread(other.commit, named[3], CommitPermit("c", 0, 4))
        assert len(await visible(broker, topic)) == 9
        client.close()
        other.close()

    run(scenario())


@pytest.mark.parametrize(
    ("described", "asked"),
    [
        pytest.param([-1, 1, 1], [[1]], id="a broker has died"),
        pytest.param([1, 2, 2, 2], [[1], [2]], id="a coordinator moves"),
        pytest.param([None, None, None], [None, None], id="the log is hidden"),
    ],
)
def test_open_transactions_are_listed_once_all_of_them_have_a_coordinator(
    described: list[int | None], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of a dead attempt would be missed, and readers would wait for it. No broker is needed."""
    listed = []

    class Admin:
        _manager = SimpleNamespace(cluster=SimpleNamespace(_coordinators={}))

        def describe_topics(self, topics: list[str]) -> list[dict[str, Any]]:
            leader = described.pop(0)
            if leader is None:
                return [{"error_code": TopicAuthorizationFailedError.errno, "partitions": []}]
            place = {"partition_index": 0, "leader_id": leader, "leader_epoch": 0}
            return [{"error_code": 0, "partitions": [place]}]

        def list_transactions(self, brokers: Any, *, state_filters: list[str]) -> dict[int, Any]:
            listed.append(brokers)
            if brokers is None and len(listed) == 1:
                return {}  # no broker was known
            return {
                1: [SimpleNamespace(transactional_id="hg-1")] if len(listed) == len(asked) else []
            }

    monkeypatch.setattr("headgate.connectors.kafka.transactions._PAUSE_S", 0)
    client = object.__new__(TransactionClient)
    client._admin, client._clock = Admin(), SystemClock()
    assert client.open_ids("hg-") == ["hg-1"]
    assert listed == asked
    assert described == []


def test_a_checkpoint_of_a_version_without_names_is_restored(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """Its transactional ids say behind which checkpoint they were begun, and none is used again."""
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, killed=True)
        old = await opened(made)
        old.write(batches(1)[0])
        committables = await prepared(old, 1)
        dead = await opened(made, committables, attempt=2, restored_checkpoint=1)
        dead.write(batches(1)[0])
        await prepared(dead, 2)
        client = TransactionClient(broker.bootstrap, {})
        assert len(client.open_ids(prefix_of(old))) == 2
        other = await opened(made, attempt=3, restored_checkpoint=1)
        await asyncio.to_thread(other.restored, None)
        assert len(client.open_ids(prefix_of(old))) == 1
        await asyncio.to_thread(other.commit, committables, CommitPermit("c", 0, 1))
        assert len(await visible(broker, topic)) == 3
        client.close()
        other.close()

    run(scenario())


def test_an_epoch_without_records_needs_no_transaction(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()

    async def scenario() -> None:
        writer = await opened(sink(broker, topic))
        assert writer.roll(1) is None
        assert writer.roll(2) is None
        writer.write(batches(1)[0])
        (committable,) = await prepared(writer, 3)
        await asyncio.to_thread(writer.commit, [committable], CommitPermit("c", 0, 3))
        assert len(await visible(broker, topic)) == 3
        writer.close()

    run(scenario())


def test_a_time_out_beyond_that_of_the_brokers_is_an_error_at_the_first_record(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    async def scenario() -> None:
        writer = await opened(sink(broker, new_topic(), transaction_timeout="2h"))
        with pytest.raises(JobError, match="no transaction can be begun") as raised:
            writer.write(batches(1)[0])
        assert "transaction.max.timeout.ms" in raised.value.fix
        writer.close()

    run(scenario())


class Numbers(Fails):
    """Makes records of numbers, and raises at some of them, once each."""

    def __call__(self, record: Any) -> Any:
        super().__call__(record)
        return {"id": record}


@pytest.mark.parametrize(("parallelism", "transactions"), [(1, "open"), (2, "open"), (2, "staged")])
def test_every_record_is_there_once_when_job_and_broker_fail(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path, parallelism: int, transactions: Any
) -> None:
    topic, rows = new_topic(3), 1_500
    job = hg.Job(f"writes-{parallelism}", parallelism=parallelism)
    job.checkpoint(every="50ms", storage=str(tmp_path / "state"))
    job.restart(hg.fixed_delay(attempts=10, delay="10ms"))
    numbers = job.read(from_list(list(range(rows)), batch_rows=10, splits=2), name="numbers")
    made = numbers.map(Numbers(tmp_path, (300, 900, 1_400)), into={"id": "int64"}, name="fails")
    out = kafka_sink(
        topic,
        bootstrap=broker.bootstrap,
        guarantee="exactly_once",
        transactions=transactions,
    )
    made.write(out, name="out")

    with broker_killed_at(tmp_path / "900", broker):
        job.run()
    source = kafka_source(topic, bootstrap=broker.bootstrap, schema={"id": "int64"}, stop="latest")
    assert sorted(row["id"] for row in run(read_all(source))) == list(range(rows))


@pytest.mark.parametrize(
    ("every", "timeout", "options", "refused"),
    [
        ("10s", "15m", {}, False),
        ("5m", "15m", {}, True),
        ("10s", "10m", {}, True),
        ("10s", "60s", {"execution.checkpointing.timeout": "30s"}, False),
        ("30s", "60s", {"execution.checkpointing.timeout": "30s"}, True),
        ("10s", "15m", {"execution.checkpointing.interval-during-backlog": "10m"}, True),
    ],
)
def test_a_transaction_must_live_longer_than_a_checkpoint_takes(
    tmp_path: Path, every: str, timeout: str, options: dict[str, str], refused: bool
) -> None:
    """Otherwise brokers abort it although nothing fails. No broker is asked for this."""
    job = hg.Job("copies", options=options)
    job.checkpoint(every=every, storage=str(tmp_path))
    source = kafka_source("s", bootstrap="nowhere:1", schema={"id": "int64"})
    made = kafka_sink(
        "t", bootstrap="nowhere:1", guarantee="exactly_once", transaction_timeout=timeout
    )
    job.read(source, name="numbers").write(made, name="out")
    found = [str(problem) for problem in runnable(job).problems()]
    assert bool(found) == refused
    assert all("transaction_timeout=" in problem for problem in found)
