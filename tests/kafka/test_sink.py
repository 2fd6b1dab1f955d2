"""The sink of Kafka against a real broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import from_list, kafka_sink, kafka_source
from headgate.errors import JobError, PlanError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import SinkRun
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import CheckTimers, make_context, read_all
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.conftest import broker_killed_at
from headgate.tests.support.connector_runs import Fails
from headgate.tests.support.scenarios import guarded

NewTopic = Callable[..., str]
run = partial(guarded, seconds=600)
HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))


def written(broker: KafkaServer, topic: str, **options: Any) -> list[Any]:
    given = {"schema": {"id": "int64", "text": "string"}, "stop": "latest", **options}
    return run(read_all(kafka_source(topic, bootstrap=broker.bootstrap, **given)))  # type: ignore[no-any-return]


def sink_run(**options: str) -> SinkRun:
    return SinkRun("job", "out", options, None, lambda text: None)


async def write(sink: Any, *batches: pa.RecordBatch) -> None:
    """Write batches, and then what a checkpoint does."""
    sink.bind(batches[0].schema)
    writer = sink.writer()
    writer.open(make_context())
    for batch in batches:
        writer.write(ColumnBatch(batch))
    flush = writer.roll(1)
    assert await asyncio.to_thread(flush) == []
    writer.close()


def test_values_and_metadata_come_back_as_they_were(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic(2, retention_ms="-1")
    sent = datetime(2026, 1, 2, tzinfo=UTC)
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("who", pa.string()),
            ("text", pa.string()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("part", pa.int32()),
            ("marks", HEADERS),
        ]
    )
    rows = [
        [1, "a", 'two\nlines, "quoted"', sent, 1, [{"name": "h", "value": b"\x00"}]],
        [2, None, None, None, 1, None],
    ]
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows), schema)]  # noqa: B905
    metadata = {"key": "who", "timestamp": "at", "partition": "part", "headers": "marks"}
    sink = kafka_sink(topic, bootstrap=broker.bootstrap, metadata=metadata)
    run(write(sink, pa.RecordBatch.from_arrays(columns, schema=schema)))
    read = {"key": "who", "timestamp": "at", "partition": "part", "headers": "marks"}
    first, second = written(broker, topic, metadata=read)
    assert (first["id"], first["text"]) == (1, 'two\nlines, "quoted"')
    assert (first["who"], first["at"], first["part"]) == (b"a", sent, 1)
    assert first["marks"] == [{"name": "h", "value": b"\x00"}]
    assert (second["id"], second["text"], second["who"], second["marks"]) == (2, None, None, None)


def test_raw_values_and_tombstones(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    batch = pa.record_batch({"k": pa.array(["a", "b"]), "v": pa.array([b"\xff", None])})
    sink = kafka_sink(topic, bootstrap=broker.bootstrap, format="raw", metadata={"key": "k"})
    run(write(sink, batch))
    found = written(broker, topic, schema={"v": "binary"}, format="raw", metadata={"key": "k"})
    assert found == [{"v": b"\xff", "k": b"a"}, {"v": None, "k": b"b"}]


def test_keys_go_to_the_partitions_that_java_chooses(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """The expected numbers are those of `toPositive(murmur2(key)) % 7` in Java's client."""
    topic = new_topic(7)
    keys = ["21", "foobar", "a-little-bit-long-string", "abc"]
    hashes = [-973932308, -790332482, -985981536, 479470107]
    batch = pa.record_batch({"k": keys, "id": list(range(4))})
    run(write(kafka_sink(topic, bootstrap=broker.bootstrap, metadata={"key": "k"}), batch))
    found = written(broker, topic, metadata={"partition": "part"})
    assert {row["id"]: row["part"] for row in found} == {
        index: (value & 0x7FFFFFFF) % 7 for index, value in enumerate(hashes)
    }


def test_a_record_that_the_topic_refuses_fails_the_attempt(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic(max_message_bytes="1000")
    batch = pa.record_batch({"id": [1], "text": ["x" * 2_000]})
    with pytest.raises(JobError, match="were not delivered") as raised:
        run(write(kafka_sink(topic, bootstrap=broker.bootstrap), batch))
    assert "max.message.bytes" in raised.value.fix


def test_a_small_buffer_holds_the_writer_up_and_loses_nothing(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()
    texts = [f"{index:05}" + "x" * 1_000 for index in range(2_000)]
    batch = pa.record_batch({"id": list(range(2_000)), "text": texts})
    run(write(kafka_sink(topic, bootstrap=broker.bootstrap, buffer=20_000), batch))
    assert [row["id"] for row in written(broker, topic)] == list(range(2_000))


def test_a_record_larger_than_the_buffer_is_an_error(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    batch = pa.record_batch({"id": [1], "text": ["x" * 30_000]})
    with pytest.raises(JobError, match="larger than the buffer"):
        run(write(kafka_sink(new_topic(), bootstrap=broker.bootstrap, buffer=20_000), batch))


def test_a_checkpoint_waits_for_its_own_records_only(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """Those behind its barrier may be on their way for as long as they like."""
    topic = new_topic()

    async def scenario() -> None:
        timers = CheckTimers()
        writer = kafka_sink(topic, bootstrap=broker.bootstrap).writer()
        writer.open(make_context(timers=timers))
        writer.write(ColumnBatch(pa.record_batch({"id": [1], "text": ["first"]})))
        first = writer.roll(1)
        assert first is not None
        await asyncio.to_thread(first)
        writer.write(ColumnBatch(pa.record_batch({"id": [2], "text": ["second"]})))
        second = writer.roll(2)
        assert second is not None
        await asyncio.to_thread(second)
        await asyncio.to_thread(broker.kill)
        writer.write(ColumnBatch(pa.record_batch({"id": [3], "text": ["third"]})))
        await asyncio.to_thread(second)
        third = writer.roll(3)
        assert third is not None
        timers.fire()
        assert not writer.backlogged()
        writer.write(ColumnBatch(pa.record_batch({"id": [4], "text": ["fourth"]})))
        settling = asyncio.create_task(asyncio.to_thread(third))
        await asyncio.sleep(0.1)
        assert not settling.done()
        await asyncio.to_thread(broker.start)
        await settling
        fourth = writer.roll(4)
        assert fourth is not None
        await asyncio.to_thread(fourth)
        writer.close()

    run(scenario())
    assert [row["id"] for row in written(broker, topic)] == [1, 2, 3, 4]


def test_records_that_no_broker_takes_in_time_fail_their_checkpoint(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """Only failures are reported, so a lost report would be a lost record."""
    topic = new_topic()
    first, second = (
        pa.record_batch({"id": list(ids), "text": ["x" * 100] * len(ids)})
        for ids in (range(100), range(100, 200))
    )
    run(write(kafka_sink(topic, bootstrap=broker.bootstrap), first))
    properties = {"message.timeout.ms": "500"}

    async def scenario() -> None:
        writer = kafka_sink(topic, bootstrap=broker.bootstrap, properties=properties).writer()
        writer.open(make_context())
        writer.write(ColumnBatch(second))
        settle = writer.roll(1)
        assert settle is not None
        with pytest.raises(JobError, match="were not delivered"):
            await asyncio.to_thread(settle)
        with pytest.raises(JobError, match="were not delivered"):  # also one that comes later
            writer.write(ColumnBatch(second))
        writer.close()

    broker.kill()
    try:
        run(scenario())
    finally:
        broker.start()
    assert [row["id"] for row in written(broker, topic)] == list(range(100))


def test_one_refused_record_among_many_fails_its_checkpoint(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic(3, max_message_bytes="100000")

    async def scenario(large: int) -> None:
        writer = kafka_sink(topic, bootstrap=broker.bootstrap).writer()
        writer.open(make_context())
        for checkpoint_id in (1, 2):
            texts = ["x"] * 500
            if checkpoint_id == 2:
                texts[large] = "x" * 200_000
            writer.write(ColumnBatch(pa.record_batch({"id": list(range(500)), "text": texts})))
            settle = writer.roll(checkpoint_id)
            assert settle is not None
            if checkpoint_id == 1:
                await asyncio.to_thread(settle)
        with pytest.raises(JobError, match="were not delivered"):
            await asyncio.to_thread(settle)
        writer.close()

    for large in (0, 250, 499):
        run(scenario(large))


def test_errors_of_a_start_say_what_is_wrong(
    broker: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    kafka_sink(topic, bootstrap=broker.bootstrap).check_output(sink_run())
    with pytest.raises(UsageError, match="no such topic"):
        kafka_sink(f"{topic}x", bootstrap=broker.bootstrap).check_output(sink_run())
    monkeypatch.setattr("headgate.connectors.kafka.client.ANSWER_S_MAX", 1.0)
    with pytest.raises(JobError, match="cannot be used"):
        kafka_sink(topic, bootstrap="127.0.0.1:1").check_output(sink_run())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"format": "xml"}, "no such format"),
        ({"guarantee": "twice"}, "no such guarantee"),
        ({"transaction_timeout": "1ms"}, "transaction_timeout"),
        ({"metadata": {"offset": "o"}}, "not given such metadata"),
        ({"properties": {"acks": "1"}}, "set by headgate"),
        ({"buffer": 0}, "buffer"),
        (
            {"guarantee": "exactly_once", "properties": {"ssl.key.pem": "x"}},
            "does not support this property",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        kafka_sink("t", bootstrap="b:1", **arguments)


@pytest.mark.parametrize(
    ("arguments", "schema", "text"),
    [
        ({}, None, "made of columns"),
        ({"metadata": {"key": "k"}}, {"id": pa.int64()}, "no such column"),
        ({"metadata": {"key": "id"}}, {"id": pa.int64(), "v": pa.int64()}, "wrong type"),
        ({"metadata": {"key": "k"}}, {"k": pa.string()}, "no column is left"),
        ({"format": "raw"}, {"a": pa.string(), "b": pa.string()}, "one column"),
        ({}, {"d": pa.duration("s")}, "json has no form"),
    ],
)
def test_columns_that_do_not_fit(
    arguments: dict[str, Any], schema: dict[str, pa.DataType] | None, text: str
) -> None:
    sink = kafka_sink("t", bootstrap="b:1", **arguments)
    with pytest.raises(PlanError, match=text):
        sink.bind(None if schema is None else pa.schema(list(schema.items())))


class Numbers(Fails):
    """Makes records of numbers, and raises at some of them, once each."""

    def __call__(self, record: Any) -> Any:
        super().__call__(record)
        return {"id": record, "text": f"t{record}"}


def test_nothing_is_lost_when_job_and_broker_fail(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    """From a list through failures to a topic: every record is there, and those of a key are in order."""
    topic = new_topic(3)
    rows = 2_000
    job = hg.Job("writes", parallelism=2)
    job.checkpoint(every="20ms", storage=str(tmp_path / "state"))
    job.restart(hg.fixed_delay(attempts=10, delay="10ms"))
    numbers = job.read(from_list(list(range(rows)), batch_rows=20, splits=2), name="numbers")
    fails = Numbers(tmp_path, (500, 1_200, 1_900))
    made = numbers.map(fails, into={"id": "int64", "text": "string"}, name="fails")
    made.write(kafka_sink(topic, bootstrap=broker.bootstrap), name="out")

    with broker_killed_at(tmp_path / "500", broker):
        job.run()
    assert {row["id"] for row in written(broker, topic)} == set(range(rows))


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: copies}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    numbers:
      generator: {{fields: {{id: sequence, user: {{kind: pattern, prefix: u, distinct: 3}}}}, rows: 10}}
  sinks:
    out:
      from: numbers
      kafka: {{topic: {topic}, bootstrap: "{bootstrap}", metadata: {{key: user}}}}
      guarantee: at_least_once
"""


def test_a_manifest_writes_to_a_topic(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    file = tmp_path / "copies.yaml"
    file.write_text(MANIFEST.format(topic=topic, bootstrap=broker.bootstrap, path=tmp_path))
    load_job(file).run()
    found = written(broker, topic, schema={"id": "int64"}, metadata={"key": "user"})
    assert sorted(row["id"] for row in found) == list(range(10))
    assert json.loads(json.dumps(sorted({row["user"].decode() for row in found})))[0].startswith(
        "u"
    )


def test_no_more_records_are_wanted_while_half_of_the_buffer_waits(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """The writer says so instead of waiting in `write`, and a timer wakes its subtask."""
    batch = pa.record_batch({"key": ["k"] * 100, "value": [b"v" * 6_999] * 100})
    topic = new_topic()

    async def scenario(bootstrap: str, *, ends: bool) -> None:
        timers = CheckTimers()
        sink = kafka_sink(
            topic, bootstrap=bootstrap, format="raw", metadata={"key": "key"}, buffer=1_400_000
        )
        sink.bind(batch.schema)
        writer = sink.writer()
        writer.open(make_context(timers=timers))
        writer.write(ColumnBatch(batch))
        assert not ends or not writer.backlogged()
        writer.write(ColumnBatch(batch.slice(0, 90)))
        while ends and writer.backlogged():
            await asyncio.sleep(0.01)
            timers.fire()
        assert ends or writer.backlogged()
        timers.fire()
        assert writer.backlogged() is not ends
        writer.close()
        timers.fire()
        assert not timers.due

    run(scenario("127.0.0.1:1", ends=False))
    run(scenario(broker.bootstrap, ends=True))


def test_the_next_transaction_is_waited_for_outside_of_write(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    batch = ColumnBatch(pa.record_batch({"value": [b"v"]}))

    async def scenario() -> None:
        timers = CheckTimers()
        sink = kafka_sink(
            new_topic(), bootstrap=broker.bootstrap, format="raw", guarantee="exactly_once"
        )
        writer = sink.writer()
        writer.open(make_context(timers=timers))
        await asyncio.to_thread(writer.prepare)
        assert not writer.backlogged()
        writer.write(batch)
        writer.roll(1)
        while writer.backlogged():
            timers.fire()
            await asyncio.sleep(0.01)
        writer.write(batch)
        writer.close()

    run(scenario())
