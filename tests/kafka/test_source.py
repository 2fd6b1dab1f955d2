"""The source of Kafka against a real broker."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from headgate.connectors import kafka_source
from headgate.connectors.kafka import client
from headgate.connectors.kafka.client import ErrorListener, make_consumer, patiently
from headgate.connectors.kafka.model import PartitionSplit
from headgate.connectors.kafka.source import _find_places
from headgate.errors import BadRecordError, SourceError, UsageError
from headgate.operators.drops import DropKind
from headgate.operators.elements import Batch
from headgate.testing.connectors import (
    CheckMetrics,
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.support.kafka_client import FakeClient, FakeMessage
from headgate.tests.support.scenarios import guarded
from headgate.tests.support.threads import begun

NewTopic = Callable[..., str]
SCHEMA = {"id": "int64", "name": "string"}
DEAD = "127.0.0.1:1"
"""An address at which nothing listens."""
run = partial(guarded, seconds=600)


def rows(first: int, count: int) -> list[bytes | None]:
    return [
        json.dumps({"id": id_, "name": f"n{id_}"}).encode() for id_ in range(first, first + count)
    ]


def ids(records: list[Any]) -> list[int]:
    return [record["id"] for record in records]


def source(broker: KafkaServer, *topics: str, **options: Any) -> Any:
    given = {"schema": SCHEMA, "stop": "latest", **options}
    return kafka_source(topics, bootstrap=broker.bootstrap, **given)


# -- reading ------------------------------------------------------------------------------------------


def test_partitions_go_to_subtasks_and_back(broker: KafkaServer, new_topic: NewTopic) -> None:
    """Splits of one subtask are read on by three, and those by one again."""
    topic = new_topic(5)
    for partition in range(5):
        broker.produce(topic, rows(100 * partition, 20), partition=partition)

    async def scenario() -> None:
        made = source(broker, topic, batch_rows=3)
        found: list[int] = []
        splits = made.splits(1)
        for parallelism in (1, 3, 1):
            positions: list[bytes] = []
            for subtask in range(parallelism):
                reader = open_reader(made, splits[subtask::parallelism])
                for batch in await read_batches(reader, 4):
                    found += ids(records_of(batch))
                positions += reader.snapshot()
                reader.close()
            splits = positions
        reader = open_reader(made, splits)
        for batch in await read_batches(reader):
            found += ids(records_of(batch))
        reader.close()
        assert sorted(found) == [100 * partition + n for partition in range(5) for n in range(20)]
        for partition in range(5):
            own = [id_ for id_ in found if id_ // 100 == partition]
            assert own == sorted(own)

    run(scenario())


def test_metadata_become_columns(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic(2, retention_ms="-1")
    broker.produce(
        topic,
        rows(0, 2),
        partition=1,
        keys=[b"k0", None],
        timestamps_ms=[1_000, 2_000],
        headers=[("trace", b"\x01")],
    )
    columns = {
        "topic": "from",
        "partition": "part",
        "offset": "at",
        "timestamp": "sent",
        "key": "key",
        "headers": "headers",
    }
    made = source(broker, topic, metadata=columns)
    first, second = run(read_all(made))
    assert first == {
        "id": 0,
        "name": "n0",
        "from": topic,
        "part": 1,
        "at": 0,
        "sent": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        "key": b"k0",
        "headers": [{"name": "trace", "value": b"\x01"}],
    }
    assert (second["at"], second["key"]) == (1, None)
    narrow = made.with_columns(["at", "name"])
    assert narrow.schema.names == ["name", "at"]
    assert run(read_all(narrow)) == [{"name": "n0", "at": 0}, {"name": "n1", "at": 1}]


def test_raw_values_and_csv(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    broker.produce(topic, [b"1,a", b"2,b"])
    raw = kafka_source(topic, bootstrap=broker.bootstrap, format="raw", stop="latest")
    assert raw.schema == pa.schema([("value", pa.binary())])
    assert run(read_all(raw)) == [{"value": b"1,a"}, {"value": b"2,b"}]
    text = source(broker, topic, format="raw", schema={"line": "string"})
    assert run(read_all(text)) == [{"line": "1,a"}, {"line": "2,b"}]
    assert ids(run(read_all(source(broker, topic, format="csv")))) == [1, 2]


def test_aborted_transactions_are_skipped_up_to_the_end(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    """The last offsets of the partition are those of an aborted record and of its mark."""
    from confluent_kafka import Producer

    topic = new_topic()
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "transactional.id": topic, "log_level": 0}
    )
    producer.init_transactions(30)
    for commit, first in ((True, 0), (False, 10), (True, 20), (False, 30)):
        producer.begin_transaction()
        for value in rows(first, 3):
            producer.produce(topic, value=value)
        producer.flush(30)
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    assert ids(run(read_all(source(broker, topic)))) == [0, 1, 2, 20, 21, 22]
    everything = source(broker, topic, read_uncommitted=True)
    assert len(run(read_all(everything))) == 12


# -- where it starts and stops ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"start": "latest"}, []),
        ({"start": 3_500}, [3, 4, 5]),
        ({"start": datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)}, [4, 5]),
        ({"start": 9_999_999}, []),
        ({"stop": 3_500}, [0, 1, 2]),
        ({"start": 2_000, "stop": 4_000}, [1, 2]),
        ({"start": "committed", "group": "nobody"}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_where_it_starts_and_stops(
    broker: KafkaServer, new_topic: NewTopic, options: dict[str, Any], expected: list[int]
) -> None:
    topic = new_topic(retention_ms="-1")
    broker.produce(topic, rows(0, 6), timestamps_ms=[1_000 * second for second in range(1, 7)])
    assert ids(run(read_all(source(broker, topic, **options)))) == expected


def test_given_offsets(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    for partition in range(2):
        broker.produce(topic, rows(100 * partition, 6), partition=partition)
    made = source(broker, topic, start={topic: {0: 4}}, stop={topic: {0: 5, 1: 2}})
    assert sorted(ids(run(read_all(made)))) == [4, 100, 101]
    for strange in ({topic: {2: 1}}, {f"{topic}x": {0: 1}}):
        with pytest.raises(UsageError, match="a partition that is not read"):
            source(broker, topic, start=strange).splits(1)
    wrong = source(broker, topic, start={topic: {0: 7}})
    with pytest.raises(UsageError, match="no such offset") as raised:
        wrong.splits(1)
    assert "0 to 6" in raised.value.fix


def test_what_comes_behind_the_end_is_not_read(broker: KafkaServer, new_topic: NewTopic) -> None:
    """The end is that at the start, even if the topic grows while it is read."""
    topic = new_topic()
    broker.produce(topic, rows(0, 5))
    made = source(broker, topic, batch_rows=2)
    splits = made.splits(1)
    broker.produce(topic, rows(5, 5))

    async def scenario() -> None:
        reader = open_reader(made, splits)
        found = [id_ for batch in await read_batches(reader) for id_ in ids(records_of(batch))]
        assert found == [0, 1, 2, 3, 4]
        assert reader.snapshot() == []
        reader.close()

    run(scenario())


# -- unreadable and lost records ----------------------------------------------------------------------

BAD = [b'{"id": 1', b"}", b'{"id": 2}{"id": 3}', None, b'{"id": "x"}']


def test_an_unreadable_record_fails_the_job_and_names_its_place(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()
    broker.produce(topic, [*rows(0, 2), *BAD])
    with pytest.raises(BadRecordError) as raised:
        run(read_all(source(broker, topic)))
    assert raised.value.where == f"{topic}/0 offset 2"
    assert '{"id": 1' in str(raised.value)


def test_unreadable_records_go_to_the_side_output_with_key_and_value(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()
    values = [*rows(0, 1), *BAD, *rows(1, 1)]
    broker.produce(topic, values, keys=[b"%d" % n for n in range(len(values))])
    rejected: list[Batch] = []

    async def scenario() -> list[int]:
        made = source(broker, topic, on_bad_record="side_output")
        reader = open_reader(made, made.splits(1), reject=rejected.append)
        batches = await read_batches(reader)
        reader.close()
        return [id_ for batch in batches for id_ in ids(records_of(batch))]

    assert run(scenario()) == [0, 1]
    found = [row for batch in rejected for row in records_of(batch)]
    assert [row["value"] for row in found] == BAD
    assert [row["offset"] for row in found] == [1, 2, 3, 4, 5]
    assert [row["key"] for row in found] == [b"1", b"2", b"3", b"4", b"5"]
    assert "tombstone" in found[3]["reason"]


def test_dropped_records_are_counted(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    broker.produce(topic, [*BAD, *rows(7, 1)])
    metrics = CheckMetrics()

    async def scenario() -> list[int]:
        made = source(broker, topic, on_bad_record="drop")
        reader = open_reader(made, made.splits(1), make_context(metrics=metrics))
        batches = await read_batches(reader)
        reader.close()
        return [id_ for batch in batches for id_ in ids(records_of(batch))]

    assert run(scenario()) == [7]
    assert metrics.counts["source_record_errors"] == len(BAD)


@pytest.mark.parametrize("on_lost", ["fail", "skip"])
def test_records_that_were_deleted_are_never_skipped_silently(
    broker: KafkaServer,
    new_topic: NewTopic,
    on_lost: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from confluent_kafka import TopicPartition

    topic = new_topic()
    broker.produce(topic, rows(0, 10))
    made = source(broker, topic, on_lost=on_lost)
    splits = made.splits(1)
    admin = broker.admin()
    for deleted in admin.delete_records([TopicPartition(topic, 0, 6)]).values():
        deleted.result(30)
    context = make_context()

    async def scenario() -> list[int]:
        reader = open_reader(made, splits, context)
        try:
            batches = await read_batches(reader)
        finally:
            reader.close()
        return [id_ for batch in batches for id_ in ids(records_of(batch))]

    if on_lost == "fail":
        with pytest.raises(SourceError, match="records 0 to 5 were deleted"):
            run(scenario())
        return
    with caplog.at_level(logging.WARNING):
        assert run(scenario()) == [6, 7, 8, 9]
    assert context.drops.counts == {DropKind.DELETED: 6}
    assert "records were deleted before they were read" in caplog.text


# -- splits, metrics and checkpoints ------------------------------------------------------------------


def test_paused_partitions_wait_and_others_go_on(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    for partition in range(2):
        broker.produce(topic, rows(100 * partition, 10), partition=partition)

    async def scenario() -> None:
        made = source(broker, topic, batch_rows=3)
        reader = open_reader(made, made.splits(1))
        reader.pause_splits(frozenset({f"{topic}/0"}))
        found: list[int] = []
        while len(found) < 10:
            batch = reader.poll()
            if batch is None:
                await reader.wait()
            else:
                found += ids(records_of(batch))
        assert found == list(range(100, 110))
        reader.pause_splits(frozenset())
        found = [id_ for batch in await read_batches(reader) for id_ in ids(records_of(batch))]
        assert found == list(range(10))
        reader.close()

    run(scenario())


def test_few_rows_at_a_time_with_exact_positions(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    broker.produce(topic, rows(0, 20))

    async def scenario() -> None:
        made = source(broker, topic)
        splits, found = made.splits(1), []
        while True:
            reader = open_reader(made, splits)
            reader.rows_wanted = 3
            batches = await read_batches(reader, 1)
            found.append([id_ for batch in batches for id_ in ids(records_of(batch))])
            splits = reader.snapshot()
            reader.close()
            if not splits:
                break
        assert found == [list(range(n, min(n + 3, 20))) for n in range(0, 20, 3)]

    run(scenario())


def test_the_group_has_the_offsets_of_completed_checkpoints_only(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    topic = new_topic()
    broker.produce(topic, rows(0, 10))
    group = f"group-of-{topic}"
    reporter = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "log_level": 0})

    def committed() -> int:
        return int(reporter.committed([TopicPartition(topic, 0)], timeout=300)[0].offset)

    async def scenario() -> None:
        made = source(broker, topic, group=group)
        reader = open_reader(made, made.splits(1))
        reader.rows_wanted = 3
        for checkpoint_id in (1, 2, 3):
            await read_batches(reader, 1)
            reader.begin_checkpoint(checkpoint_id)
            reader.snapshot()
        assert committed() < 0
        reader.on_checkpoint_aborted(1)
        reader.on_checkpoint_complete(2)
        while committed() != 6:  # noqa: ASYNC110  the client writes it in the background
            await asyncio.sleep(0.05)
        reader.close()
        resumed = source(broker, topic, group=group, start="committed")
        assert ids(await read_all(resumed)) == [6, 7, 8, 9]

    run(scenario())


def test_the_lag_is_that_of_the_mailbox(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    broker.produce(topic, rows(0, 10))

    async def scenario() -> None:
        made = source(broker, topic, stop=None)
        reader = open_reader(made, made.splits(1))
        reader.rows_wanted = 4
        await read_batches(reader, 1)
        while not (lag := reader.lag_records()):  # noqa: ASYNC110
            await asyncio.sleep(0)  # the thread looks it up
        assert lag == {f"{topic}/0": 6}
        assert reader.lag_s() is not None
        reader.rows_wanted = None
        await read_batches(reader, 1)
        assert reader.lag_records() == {f"{topic}/0": 0}
        assert reader.lag_s() == 0.0
        reader.close()

    run(scenario())


# -- errors -------------------------------------------------------------------------------------------


def test_errors_of_a_start_say_what_is_wrong(
    broker: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    with pytest.raises(UsageError, match="no such topic") as missing:
        source(broker, f"{topic}x").splits(1)
    assert topic in missing.value.fix
    monkeypatch.setattr("headgate.connectors.kafka.client.ANSWER_S_MAX", 1.0)
    with pytest.raises(SourceError, match="cannot be used") as dead:
        kafka_source(topic, bootstrap=DEAD, schema=SCHEMA).splits(1)
    assert "refused" in str(dead.value)
    with pytest.raises(UsageError, match="properties of the Kafka client are wrong"):
        source(broker, topic, properties={"no.such.property": "1"}).splits(1)


class ConsumerOfANewLeader:
    """A consumer whose broker leads its partitions only after some requests, as after a start."""

    def __init__(self, consumer: Any, refusals: int) -> None:
        self._consumer = consumer
        self.refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def get_watermark_offsets(self, *arguments: Any, **options: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
        return self._consumer.get_watermark_offsets(*arguments, **options)


def test_a_broker_that_does_not_lead_yet_is_asked_again(
    broker: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    broker.produce(topic, rows(0, 3))
    made: list[ConsumerOfANewLeader] = []

    def make(*arguments: Any) -> Any:
        made.append(ConsumerOfANewLeader(make_consumer(*arguments), 2))
        return made[-1]

    monkeypatch.setattr("headgate.connectors.kafka.source.make_consumer", make)
    assert len(source(broker, topic).splits(1)) == 1
    assert [each.refusals for each in made] == [0]


def test_a_broker_that_never_leads_is_an_error(
    broker: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()

    def make(*arguments: Any) -> Any:
        return ConsumerOfANewLeader(make_consumer(*arguments), 1_000_000)

    monkeypatch.setattr("headgate.connectors.kafka.source.make_consumer", make)
    monkeypatch.setattr("headgate.connectors.kafka.client.ANSWER_S_MAX", 0.3)
    with pytest.raises(SourceError, match="cannot be used"):
        source(broker, topic).splits(1)


def test_a_topic_that_is_deleted_ends_the_attempt(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    broker.produce(topic, rows(0, 3))

    async def scenario() -> None:
        soon = {"topic.metadata.propagation.max.ms": "500"}
        made = source(broker, topic, stop=None, properties=soon)
        reader = open_reader(made, made.splits(1))
        await read_batches(reader, 1)
        admin = broker.admin()
        for deleted in admin.delete_topics([topic], operation_timeout=300).values():
            deleted.result(30)
        with pytest.raises(SourceError, match="topic does not exist"):
            await read_batches(reader, 1)
        reader.close()

    run(scenario())


def test_it_goes_on_after_the_broker_was_killed(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    broker.produce(topic, rows(0, 3))

    async def scenario() -> None:
        made = source(broker, topic, stop=None)
        reader = open_reader(made, made.splits(1))
        found = [id_ for batch in await read_batches(reader, 1) for id_ in ids(records_of(batch))]
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        await asyncio.to_thread(broker.produce, topic, rows(3, 3))
        while len(found) < 6:
            for batch in await read_batches(reader, 1):
                found += ids(records_of(batch))
        assert found == [0, 1, 2, 3, 4, 5]
        reader.close()

    run(scenario())


def test_the_last_record_and_the_end_of_a_partition_may_come_together() -> None:
    """No broker is asked for this."""

    async def read() -> None:
        source = kafka_source("t", bootstrap="nowhere:1", format="raw", stop="latest")
        reader: Any = source.reader()
        reader.open(make_context(operator_name="source"), lambda batch: None)
        split = PartitionSplit("t", 0, 0, 2)
        reader._positions, reader._going_on = {split.name: split}, {split.name: None}
        reader.context.splits.opened(split.name)
        end = FakeMessage("t", 0, 2, None, KafkaError(KafkaError._PARTITION_EOF))
        reader._consumer = FakeClient(
            [FakeMessage("t", 0, 0, b"v"), FakeMessage("t", 0, 1, b"v"), end]
        )
        reader.fetch()
        batch = reader.poll()
        assert len(batch) == 2
        assert reader.finished
        assert reader.poll() is None

    run(read())


def test_messages_of_several_partitions_are_decoded_together_and_stay_apart() -> None:
    """One partition ends, one has bad records only, and one has some among its good ones."""
    values = {
        0: [b'{"id":0}', b'{"id":1}', b'{"id":2}'],
        1: [b"[]", b"{"],
        2: [b'{"id":20}', b"x", b'{"id":22}', b'{"id":23}'],
    }
    messages = [
        FakeMessage("t", partition, offset, found[offset])
        for offset in range(4)
        for partition, found in values.items()
        if offset < len(found)
    ]

    async def read() -> None:
        schema = {"id": "int64"}
        source = kafka_source("t", bootstrap="nowhere:1", schema=schema, on_bad_record="drop")
        reader: Any = source.reader()
        reader.open(make_context(operator_name="source"), lambda batch: None)
        stops = {0: 2, 1: None, 2: None}
        splits = [PartitionSplit("t", number, 0, stop) for number, stop in stops.items()]
        reader._positions = {split.name: split for split in splits}
        reader._consumer = FakeClient(messages)
        reader._topics = {"t"}
        reader.fetch()
        pieces = {piece.position.partition: piece for piece in reader._shared.pieces}
        assert [
            (number, piece.position.offset, piece.ended, list(piece.marks))
            for number, piece in pieces.items()
        ] == [(0, 2, True, [0, 1]), (1, 2, False, []), (2, 4, False, [0, 2, 3])]
        found = [piece.batch.column("id").to_pylist() for piece in pieces.values()]
        assert found == [[0, 1], [], [20, 22, 23]]
        bad = [[message.offset for message, _ in piece.bad] for piece in pieces.values()]
        assert bad == [[], [0, 1], [1]]

    run(read())


def test_records_gather_while_small_pieces_wait() -> None:
    """No broker is asked for this."""

    async def read() -> None:
        source = kafka_source("t", bootstrap="nowhere:1", format="raw")
        reader: Any = source.reader()
        reader.open(make_context(operator_name="source"), lambda batch: None)
        splits = {split.name: split for split in (PartitionSplit("t", n, 0) for n in range(2))}
        reader._positions, reader._going_on = splits, dict.fromkeys(splits)
        client = reader._consumer = FakeClient([])
        for name in splits:
            reader.context.splits.opened(name)
        first, waits = next(iter(splits)), threading.Event()
        reader._topics = {"t"}

        def look() -> None:
            assert reader._commands_or_room() == []
            waits.set()

        def fetches() -> Future[None]:
            waits.clear()
            return begun(look)

        fetches().result()  # nothing waits
        client.messages += [FakeMessage("t", 0, 0, b"v")]
        reader.fetch()
        looking = fetches()
        assert not waits.wait(0.05)
        reader.poll()
        looking.result()
        client.messages += [FakeMessage("t", 0, n, b"v") for n in range(1, 4_000)]
        reader.fetch()
        fetches().result()  # there is much in the pieces
        while reader.poll() is not None:
            pass
        client.messages += [FakeMessage("t", 0, 4_000, b"v")]
        reader.fetch()
        reader.pause_splits(frozenset([first]))
        assert reader._commands_or_room() != []  # those that pause the partition
        fetches().result()  # pieces of paused partitions do not count

    run(read())


@pytest.mark.parametrize(
    "code", [KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART]
)
def test_a_topic_that_was_created_just_now_is_waited_for(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker is asked for this. The partitions of a new topic have no leaders for a moment."""
    new = SimpleNamespace(error=KafkaError(KafkaError.LEADER_NOT_AVAILABLE), partitions={})
    there = SimpleNamespace(error=None, partitions={0: None, 1: None})
    answers = [SimpleNamespace(error=KafkaError(code), partitions={}), new, new, there]

    class Consumer:
        def list_topics(self, topic: str = "t", *, timeout: float) -> Any:
            return SimpleNamespace(topics={"t": answers.pop(0)})

    monkeypatch.setattr(client, "_AGAIN_S", 0)
    settings: Any = kafka_source("t", bootstrap="nowhere:1", format="raw")
    assert _find_places(Consumer(), settings.settings, ErrorListener()) == [("t", 0), ("t", 1)]
    assert answers == []


def test_a_partition_that_the_client_does_not_know_yet_is_asked_for_again() -> None:
    """It was made just now: on a busy broker the conformance kit has met that."""
    answers: list[Any] = [KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION)), 7]

    def request() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(request) == 7
