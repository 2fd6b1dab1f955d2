"""The source and the sink of MQTT: acknowledgements, sessions, brokers that die, and whole jobs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list, mqtt_sink, mqtt_source, parquet_sink
from headgate.connectors.acknowledged import QueueSplit
from headgate.errors import DataError, ManifestErrors, PlanError, SourceError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.source import Source, SourceReader
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context
from headgate.testing.servers.mosquitto import MosquittoServer, running
from headgate.tests.support.queue_cases import Topic

SCHEMA = {"id": "int64"}
_numbers = itertools.count()


@pytest.fixture
def topic(server: MosquittoServer) -> Topic:
    return Topic(f"test/{next(_numbers)}", server.url)


def source_of(topic: Topic, **options: Any) -> Source:
    given: dict[str, Any] = {"url": topic.url, "schema": SCHEMA, "client_id": f"job-{topic.name}"}
    return mqtt_source(options.pop("topics", topic.name), **(given | options))


def put(topic: Topic, *numbers: int) -> None:
    topic.publish(*(b'{"id": %d}' % n for n in numbers))


def until(done: Callable[[], bool]) -> None:
    for _ in range(3_000):
        if done():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")


class Reading:
    """A reader in a job whose checkpoints are those of the test."""

    def __init__(self, source: Source, splits: list[bytes] | None = None) -> None:
        self.context = make_context()
        self.rejected: list[Any] = []
        self.reader: SourceReader = source.reader()
        self.reader.open(self.context, self.rejected.append)
        self.reader.add_splits(splits or source.splits(1))
        self.checkpoints = itertools.count(1)

    async def subscribed(self) -> None:
        """Wait for the answer to the subscription."""

        def wait() -> None:
            until(lambda: self.reader._subscribed is not None)  # type: ignore[attr-defined]

        await asyncio.to_thread(wait)

    async def failure(self) -> str:
        """Return why the reader fails."""
        async with asyncio.timeout(60):
            while True:
                try:
                    self.reader.poll()
                except SourceError as error:
                    return error.message
                await asyncio.sleep(0.01)

    async def rows(self, count: int) -> list[Any]:
        """Return the next rows, which must not be more."""
        found: list[Any] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                batch = self.reader.poll()
                if batch is None:
                    await self.reader.wait()
                else:
                    assert isinstance(batch, ColumnBatch)
                    found += batch.data.to_pylist()
        return found

    async def ids(self, count: int) -> list[int]:
        return [row["id"] for row in await self.rows(count)]

    def begin_checkpoint(self) -> int:
        number = next(self.checkpoints)
        self.reader.begin_checkpoint(number)
        self.reader.snapshot()
        return number

    async def close(self) -> None:
        """Close the reader, and wait for the end of its thread."""
        self.reader.close()
        thread = self.reader._thread  # type: ignore[attr-defined]
        if thread is not None:
            await asyncio.to_thread(thread.join, 60)


async def subscribed(source: Source) -> None:
    """Let the session begin."""
    reading = Reading(source)
    await reading.subscribed()
    await reading.close()


def test_messages_are_acknowledged_with_completed_checkpoints(topic: Topic) -> None:
    async def scenario() -> None:
        source = source_of(topic)
        await subscribed(source)
        put(topic, 1, 2, 3)
        first = Reading(source)
        assert await first.ids(3) == [1, 2, 3]
        await first.close()
        put(topic, 4, 5)
        second = Reading(source)
        assert await second.ids(5) == [1, 2, 3, 4, 5]
        one = second.begin_checkpoint()
        put(topic, 6)
        assert await second.ids(1) == [6]
        two = second.begin_checkpoint()
        second.reader.on_checkpoint_aborted(two)
        second.reader.on_checkpoint_complete(one)
        await second.close()
        third = Reading(source)
        assert await third.ids(1) == [6]
        third.reader.on_checkpoint_complete(third.begin_checkpoint())
        put(topic, 7)
        assert await third.ids(1) == [7]
        await third.close()
        last = Reading(source)
        assert await last.ids(1) == [7]
        await last.close()

    asyncio.run(scenario())


def test_a_reader_that_ends_waits_until_its_acknowledgements_are_read(topic: Topic) -> None:
    """A broker that meets the next connection first gives the messages behind them again."""

    async def scenario() -> None:
        source = source_of(topic)
        await subscribed(source)
        for turn in range(5):
            numbers = [1_000 * turn + number for number in range(200)]
            put(topic, *numbers)
            reading = Reading(source)
            assert await reading.ids(200) == numbers
            reading.reader.on_checkpoint_complete(reading.begin_checkpoint())
            await reading.close()

    asyncio.run(scenario())


def test_no_more_come_than_may_be_unacknowledged(topic: Topic) -> None:
    """Mosquitto sends a message more than it may behind its first acknowledgement: two or three come."""

    async def scenario() -> None:
        reading = Reading(source_of(topic, max_unacknowledged=2))
        await reading.subscribed()
        put(topic, *range(5))
        found = await reading.ids(2)
        await asyncio.sleep(0.1)
        assert reading.reader.poll() is None
        while found != list(range(5)):
            reading.reader.on_checkpoint_complete(reading.begin_checkpoint())
            before = len(found)
            while len(found) < min(before + 2, 5):
                found += await reading.ids(1)
            await asyncio.sleep(0.1)
            while isinstance(batch := reading.reader.poll(), ColumnBatch):
                found += [row["id"] for row in batch.data.to_pylist()]
            assert len(found) <= before + 3
        await reading.close()

    asyncio.run(scenario())


def test_bad_messages_are_put_aside_and_acknowledged(topic: Topic) -> None:
    async def scenario() -> None:
        source = source_of(topic, on_bad_record="side_output")
        await subscribed(source)
        topic.publish(b'{"id": 1}', b"?", b'{"id": 2}')
        reading = Reading(source)
        assert await reading.ids(2) == [1, 2]
        rejected = [row for each in reading.rejected for row in each.data.to_pylist()]
        assert [(row["topic"], row["data"]) for row in rejected] == [(topic.name, b"?")]
        reading.reader.on_checkpoint_complete(reading.begin_checkpoint())
        await reading.close()
        put(topic, 3)
        again = Reading(source)
        assert await again.ids(1) == [3]
        assert not again.rejected
        await again.close()

    asyncio.run(scenario())


def test_metadata_and_filters(topic: Topic) -> None:
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.UserProperty = ("unit", "C")

    async def scenario() -> None:
        topic.publish(b'{"id": 0}', topic=f"{topic.name}/kept", retain=True)
        kinds = ("topic", "retained", "properties")
        source = source_of(
            topic, topics=[f"{topic.name}/+", "none/#"], metadata={kind: kind for kind in kinds}
        )
        reading = Reading(source)
        kept = {"id": 0, "topic": f"{topic.name}/kept", "retained": True, "properties": None}
        assert await reading.rows(1) == [kept]
        topic.publish(b'{"id": 1}', topic=f"{topic.name}/new", properties=properties)
        new = {"topic": f"{topic.name}/new", "properties": [{"name": "unit", "value": "C"}]}
        assert await reading.rows(1) == [{"id": 1, "retained": False} | new]
        await reading.close()

    asyncio.run(scenario())


def test_another_client_takes_the_session_over(topic: Topic) -> None:
    async def scenario() -> None:
        source = source_of(topic)
        first, second = Reading(source), Reading(source)
        failing = [asyncio.ensure_future(each.failure()) for each in (first, second)]
        done, left = await asyncio.wait(failing, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        assert "ends one connection after the other" in done.pop().result()
        await first.close()
        await second.close()

    asyncio.run(scenario())


def test_a_broker_that_dies(tmp_path: Path) -> None:
    """What the subtask has already does not come again while it runs."""

    async def scenario(server: MosquittoServer) -> None:
        topic = Topic("dies", server.url)
        reading = Reading(source_of(topic))
        await reading.subscribed()
        put(topic, 1, 2)
        assert await reading.ids(2) == [1, 2]
        saved = server._process.pid
        assert saved is not None
        # The broker writes its sessions to disk when it is asked to end.
        await asyncio.to_thread(server._process.stop)
        await asyncio.to_thread(server.start)
        put(topic, 3)
        assert await reading.ids(1) == [3]
        reading.reader.on_checkpoint_complete(reading.begin_checkpoint())
        await reading.close()
        put(topic, 4)
        again = Reading(source_of(topic))
        assert await again.ids(1) == [4]
        await again.close()

    with running(tmp_path / "server") as server:
        asyncio.run(scenario(server))


def test_a_job_reads_what_comes_while_it_is_down(topic: Topic, tmp_path: Path) -> None:
    asyncio.run(subscribed(source_of(topic)))

    def read() -> list[int]:
        files = (tmp_path / "out").glob("[!.]*.parquet")
        return sorted(n for file in files for n in pq.read_table(file)["id"].to_pylist())

    for start in (0, 10):
        put(topic, *range(start, start + 10))
        job = hg.Job("queue")
        job.checkpoint(every="50ms", storage=tmp_path / "checkpoints")
        sink = parquet_sink(str(tmp_path / "out"), guarantee="exactly_once")
        job.read(source_of(topic), name="in").write(sink, name="out")
        with job.start() as handle:
            until(lambda end=start + 10: set(read()) >= set(range(end)))  # type: ignore[misc]
            handle.stop()
    assert set(read()) == set(range(20))


def test_a_job_without_checkpoints_is_refused(topic: Topic) -> None:
    job = hg.Job("queue")
    job.read(source_of(topic), name="in").write(blackhole(), name="out")
    with pytest.raises(PlanError, match="acknowledges messages at checkpoints"):
        job.run()


def test_topics_of_a_column(topic: Topic) -> None:
    topic.subscribe()
    job = hg.Job("topics")
    rows = [{"id": n, "to": topic.name} for n in range(3)]
    sink = mqtt_sink(topic_column="to", url=topic.url, guarantee="none")
    job.read(from_list(rows, schema={"id": "int64", "to": "string"}), name="in").write(
        sink, name="out"
    )
    job.run()
    assert topic.read() == [b'{"id":%d}' % n for n in range(3)]


def test_mistakes_are_told_where_they_are_made() -> None:
    for wrong, message in (
        ({"topics": []}, "needs a topic"),
        ({"topics": "a/#/b"}, "not a topic"),
        ({"topics": "a/b+"}, "not a topic"),
        ({"url": "localhost:1883"}, "not the address"),
        ({"url": "mqtt://ann:secret@host"}, "not the address"),
        ({"password": "secret"}, "needs a user"),
        ({"max_unacknowledged": 70_000}, "allows fewer"),
        ({"session": "0s"}, "session"),
        ({"metadata": {"key": "k"}}, "no such metadata"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            mqtt_source(**({"topics": "a", "url": "mqtt://host", "schema": SCHEMA} | wrong))  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)
    for arguments, message in (
        ({}, "given once"),
        ({"topic": "a", "topic_column": "b"}, "given once"),
        ({"topic": "a/+"}, "no message can have"),
        ({"topic": "a", "format": "csv"}, "no such format"),
    ):
        with pytest.raises(UsageError, match=message):
            mqtt_sink(**({"url": "mqtt://host"} | arguments))
    schema = pa.schema([("id", pa.int64())])
    for column, message in (("key", "no such column"), ("id", "wrong type")):
        with pytest.raises(PlanError, match=message):
            mqtt_sink(topic_column=column, url="mqtt://host").bind(schema)

    async def call() -> None:
        writer: Any = mqtt_sink(topic_column="to", url="mqtt://host").writer()
        await writer.call(ColumnBatch(pa.RecordBatch.from_pylist([{"id": 1, "to": "a/#"}])))

    with pytest.raises(DataError, match="no topic that MQTT takes"):
        asyncio.run(call())


def test_a_manifest(topic: Topic, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: topics}}
spec:
  checkpoint: {{every: 1h, storage: {tmp_path / "checkpoints"}}}
  sources:
    in:
      mqtt:
        topics: ["{topic.name}", "other/#"]
        url: {topic.url}
        clientId: manifest
        session: 1h
        maxUnacknowledged: 5
        metadata: {{topic: of}}
      schema: {{id: long}}
  sinks:
    out:
      from: in
      mqtt: {{url: "{topic.url}", topicColumn: of, retain: true}}
      guarantee: at_least_once
"""
    file.write_text(text)
    job = load_job(file)
    (source,) = [node.source for node in runnable(job).graph.sources()]
    assert source is not None
    assert source.describe() == f"mqtt({topic.name}, other/#)"
    file.write_text(text.replace("maxUnacknowledged: 5", "maxUnacknowledged: 0"))
    with pytest.raises(ManifestErrors, match="maxUnacknowledged"):
        load_job(file)


def test_a_reader_without_a_broker_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.connectors.mqtt.reader.AWAY_S", 0)

    async def scenario() -> None:
        source = mqtt_source("a", url="mqtt://127.0.0.1:1", schema=SCHEMA)
        with pytest.raises(SourceError, match=r"127\.0\.0\.1:1"):
            source.splits(1)
        reading = Reading(source, [b"\x81\xa6number\x00"])
        assert "cannot be used" in await reading.failure()
        await reading.close()

    asyncio.run(scenario())


def test_messages_gather_while_small_pieces_wait() -> None:
    """No broker is asked for this. Behind its bound, a broker gives one message after the other."""

    async def scenario() -> None:
        source = mqtt_source("a", url="mqtt://127.0.0.1:1", schema=SCHEMA, batch_rows=100)
        reader: Any = source.reader()
        reader.open(make_context(), lambda batch: None)
        reader._positions = {"consumer-0": QueueSplit(0)}

        def receive(*numbers: int) -> None:
            for n in numbers:
                data = b'{"id": %d}' % n
                reader._receive(
                    SimpleNamespace(topic="a", payload=data, qos=1, dup=False, mid=n + 1)
                )
                reader._hand_on()

        def waiting() -> list[int]:
            return [len(piece.marks) for piece in reader._shared.pieces]

        receive(0)
        assert waiting() == [1]
        receive(*range(1, 50))
        assert waiting() == [1]
        reader.poll()
        receive(50)
        assert waiting() == [50]
        receive(*range(51, 151))  # enough for a piece of its own
        assert waiting() == [50, 100]

    asyncio.run(scenario())


def test_a_message_with_the_identifier_of_a_lost_one_is_not_taken_for_that() -> None:
    """A broker whose disk had an older state forgets a message, and gives its identifier to another."""

    async def scenario() -> None:
        source = mqtt_source("a", url="mqtt://127.0.0.1:1", schema=SCHEMA)
        reader: Any = source.reader()
        reader.open(make_context(), lambda batch: None)
        reader._positions = {"consumer-0": QueueSplit(0)}
        acknowledged: list[int] = []
        client = SimpleNamespace(ack=lambda packet, quality: acknowledged.append(packet))

        def receive(n: int, *, dup: bool) -> None:
            data = b'{"id": %d}' % n
            reader._receive(SimpleNamespace(topic="a", payload=data, qos=1, dup=dup, mid=1))
            reader._hand_on()

        def taken() -> list[int]:
            batch = reader.poll()
            return [] if batch is None else batch.data.column("id").to_pylist()

        def complete(checkpoint_id: int) -> None:
            reader.on_checkpoint_complete(checkpoint_id)
            reader._acknowledge_due(SimpleNamespace(client=client))

        receive(1, dup=False)
        receive(1, dup=True)
        assert (taken(), taken()) == ([1], [])
        reader.begin_checkpoint(1)
        receive(2, dup=True)
        complete(1)
        assert (taken(), acknowledged) == ([2], [])
        reader.begin_checkpoint(2)
        complete(2)
        assert acknowledged == [1]

    asyncio.run(scenario())
