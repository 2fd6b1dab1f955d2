"""The sink of Kafka that stages epochs in checkpoints, and writes each in a short transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headgate.connectors import kafka_sink, kafka_source
from headgate.connectors.kafka import committing
from headgate.connectors.kafka.committing import StagedEpoch, TransactionalProducer
from headgate.connectors.kafka.transactions import TransactionClient
from headgate.errors import JobError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.runtime.manifest import load_job
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import read_all
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.test_exactly_once import (
    batches,
    opened,
    prefix_of,
    prepared,
    run,
    sink,
    visible,
)
from headgate.tests.support.operators import ManualClock

NewTopic = Callable[..., str]
DAY_MS = 24 * 3600 * 1000


async def committed(writer: Any, committables: list[bytes], checkpoint_id: int) -> None:
    await asyncio.to_thread(writer.commit, committables, CommitPermit("c", 0, checkpoint_id))


def test_messages_come_back_as_they_were_and_no_transaction_is_open_before(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic(2, retention_ms="-1")
    sent = datetime(2026, 1, 2, tzinfo=UTC)
    schema = pa.schema(
        [
            ("value", pa.binary()),
            ("who", pa.string()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("part", pa.int32()),
            ("marks", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))),
        ]
    )
    rows = [
        [b"\x00 one", "a", sent, 1, [{"name": "h", "value": b"\x00"}]],
        [None, "b", sent, 1, None],
        [b"three", None, sent, 1, []],
    ]
    columns = [
        pa.array(values, field.type)
        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    metadata = {"key": "who", "timestamp": "at", "partition": "part", "headers": "marks"}

    async def scenario() -> None:
        made = sink(broker, topic, transactions="staged", metadata=metadata)
        writer = await opened(made)
        writer.write(ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=schema)))
        committables = await prepared(writer, 1)
        client = TransactionClient(broker.bootstrap, {})
        assert client.open_ids(prefix_of(writer)) == []
        client.close()
        read = kafka_source(
            topic, bootstrap=broker.bootstrap, format="raw", stop="latest", metadata=metadata
        )
        assert await read_all(read) == []
        await committed(writer, committables, 1)
        first, second, third = await read_all(read)
        assert (first["value"], first["who"], first["at"]) == (b"\x00 one", b"a", sent)
        assert (first["part"], first["marks"]) == (1, [{"name": "h", "value": b"\x00"}])
        assert (second["value"], second["who"], second["marks"]) == (None, b"b", None)
        assert (third["value"], third["who"]) == (b"three", None)
        writer.close()

    run(scenario())


def test_a_commit_that_died_in_the_middle_is_made_once(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """Its producer goes on, and can commit nothing any more."""
    from confluent_kafka import KafkaException

    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, transactions="staged", killed=True)
        writer = await opened(made)
        for number in (1, 2):
            writer.write(batches(1)[0])
            committables = await prepared(writer, number)
        epoch = msgspec.msgpack.decode(committables[0], type=StagedEpoch)

        def die() -> TransactionalProducer:
            dead = TransactionalProducer(made.settings, epoch.id)
            dead.initialise()
            dead.begin()
            dead.producer.produce(topic, b"0-0")
            dead.producer.flush(60)
            client.mark(client.prepared(epoch.id, topic, epoch.checkpoint_id))
            return dead

        client = TransactionClient(broker.bootstrap, {})
        dead = await asyncio.to_thread(die)
        assert client.open_ids(prefix_of(writer)) == [epoch.id]
        other = await opened(made, committables, attempt=2, restored_checkpoint=2)
        assert client.open_ids(prefix_of(writer)) == [epoch.id]  # one that commits would have it
        await committed(other, committables, 2)
        assert len(await visible(broker, topic)) == 3
        with pytest.raises(KafkaException, match="newer producer|fenced"):
            await asyncio.to_thread(dead.producer.commit_transaction, 60)
        assert len(await visible(broker, topic)) == 3
        assert client.open_ids(prefix_of(writer)) == []
        client.close()
        other.close()

    run(scenario())


def test_a_process_that_is_overtaken_does_not_commit_what_the_other_has_begun(
    broker: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has written a part of the messages when the first one is about to commit."""
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, transactions="staged", killed=True)
        writer: Any = await opened(made)
        writer.write(batches(1)[0])
        committables = await prepared(writer, 1)
        epoch = msgspec.msgpack.decode(committables[0], type=StagedEpoch)
        others = []
        produce = committing._StagedCommitter._produce

        def overtaken(committer: Any, batch: pa.RecordBatch) -> None:
            produce(committer, batch)
            committer._producer.producer.flush(60)
            other = TransactionalProducer(made.settings, epoch.id)
            other.initialise()
            other.begin()
            other.producer.produce(topic, b"0-0")
            other.producer.flush(60)
            others.append(other)

        with monkeypatch.context() as patch:
            patch.setattr(committing._StagedCommitter, "_produce", overtaken)
            with pytest.raises(JobError, match="another process has taken over"):
                await committed(writer, committables, 1)
        assert len(others) == 1
        assert await visible(broker, topic) == []
        last = await opened(made, committables, attempt=2, restored_checkpoint=1)
        await committed(last, committables, 1)
        assert len(await visible(broker, topic)) == 3
        last.close()

    run(scenario())


def test_what_a_dead_commit_has_left_is_aborted_when_the_checkpoint_does_not_need_it(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """As after a restore of an older checkpoint."""
    topic = new_topic()

    async def scenario() -> None:
        made = sink(broker, topic, transactions="staged", killed=True)
        writer = await opened(made)
        writer.write(batches(1)[0])
        (committable,) = await prepared(writer, 1)
        epoch = msgspec.msgpack.decode(committable, type=StagedEpoch)

        def die() -> TransactionalProducer:
            dead = TransactionalProducer(made.settings, epoch.id)
            dead.initialise()
            dead.begin()
            dead.producer.produce(topic, b"0-0")
            dead.producer.flush(60)
            return dead

        dead = await asyncio.to_thread(die)
        client = TransactionClient(broker.bootstrap, {})
        assert client.open_ids(prefix_of(writer)) == [epoch.id]
        other = await opened(made, [], attempt=2, restored_checkpoint=1)
        assert client.open_ids(prefix_of(writer)) == []
        assert dead.id == epoch.id
        client.close()
        other.close()

    run(scenario())


def test_the_kind_may_change_between_two_runs(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()

    async def scenario() -> None:
        staged = sink(broker, topic, transactions="staged", killed=True)
        writer = await opened(staged)
        writer.write(batches(1)[0])
        first = await prepared(writer, 1)
        opening = await opened(sink(broker, topic, killed=True), first, attempt=2)
        await committed(opening, first, 1)
        opening.write(batches(1)[0])
        second = await prepared(opening, 2)
        opening.write(batches(1)[0])
        await prepared(opening, 3)
        assert len(await visible(broker, topic)) == 3
        other = await opened(staged, second, attempt=3, restored_checkpoint=2)
        await committed(other, second, 2)
        assert len(await visible(broker, topic)) == 6
        client = TransactionClient(broker.bootstrap, {})
        assert client.open_ids(prefix_of(writer)) == []
        client.close()
        other.close()

    run(scenario())


def test_an_old_savepoint_is_refused_when_brokers_may_have_forgotten_what_was_committed(
    broker: KafkaServer, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()

    async def scenario() -> None:
        writer = await opened(sink(broker, topic, transactions="staged"))
        writer.write(batches(1)[0])
        committables = await prepared(writer, 1)
        writer.close()
        later = ManualClock()
        later.ms = writer.context.clock.now_ms() + 7 * DAY_MS
        restored: dict[str, Any] = {"restored_checkpoint": 1, "clock": later}
        other = await opened(
            sink(broker, topic, transactions="staged"), committables, attempt=2, **restored
        )
        with pytest.raises(JobError, match="brokers forget after a week"):
            await committed(other, committables, 1)
        other.close()
        lenient = await opened(
            sink(broker, topic, transactions="staged", on_lost="skip"),
            committables,
            attempt=3,
            **restored,
        )
        with caplog.at_level(logging.WARNING):
            await committed(lenient, committables, 1)
        assert "goes on without records" in caplog.text
        assert await visible(broker, topic) == []
        lenient.close()

    run(scenario())


def test_what_could_not_be_written_later_is_refused_at_once(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    async def scenario() -> None:
        topic = new_topic()
        writer = await opened(sink(broker, topic, transactions="staged"))
        large = ColumnBatch(pa.record_batch({"value": [None, b"x" * 999_950]}))
        with pytest.raises(JobError, match="too large") as raised:
            writer.write(large)
        assert "message.max.bytes" in raised.value.fix
        writer.close()
        small = await opened(sink(broker, topic, transactions="staged", buffer=1000))
        with pytest.raises(JobError, match="more output between two checkpoints"):
            small.write(ColumnBatch(pa.record_batch({"value": [b"x" * 100] * 20})))
        small.close()

    run(scenario())


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="exactly-once output only"):
        kafka_sink("t", bootstrap="b:1", transactions="staged")
    with pytest.raises(UsageError, match="no such kind of transactions"):
        kafka_sink("t", bootstrap="b:1", transactions="closed")  # type: ignore[arg-type]
    made = kafka_sink("t", bootstrap="b:1", guarantee="exactly_once", transactions="staged")
    assert made.uncommitted_ms_max is None


def test_the_form_of_a_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: copies}
spec:
  checkpoint: {every: 10s, storage: state}
  sources:
    numbers: {generator: {fields: {n: {kind: sequence}}}}
  sinks:
    out:
      from: numbers
      kafka: {topic: t, bootstrap: "b:1", transactions: staged, buffer: 64mb}
      guarantee: exactly_once
"""
    )
    assert "kafka(t)" in load_job(manifest).explain()
