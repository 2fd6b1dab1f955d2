"""The source and the sink of RabbitMQ: positions, lost messages, envelopes, and whole jobs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rstream import AMQPMessage, schema
from rstream.constants import OffsetType

import headgate as hg
from headgate.connectors import rabbitmq_sink, rabbitmq_source
from headgate.connectors.functions.loop_thread import in_thread
from headgate.connectors.rabbitmq.client import Broker, connected
from headgate.connectors.rabbitmq.envelope import NotAMessageError, unwrap, wrap
from headgate.connectors.rabbitmq.publisher import RabbitPublisher
from headgate.errors import JobError, SourceError, StateError, UsageError
from headgate.operators.drops import DropKind
from headgate.operators.source import Source
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import (
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.testing.servers.rabbitmq import RabbitServer
from headgate.tests.support.connector_runs import Fails, read_ids, write
from headgate.tests.support.rabbitmq_cases import RabbitStream

SCHEMA = {"id": "int64"}
_numbers = itertools.count()
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def stream(server: RabbitServer) -> Iterator[str]:
    name = f"stream-{next(_numbers)}"
    RabbitStream(server).create(name)
    yield name
    RabbitStream(server).delete(name)


def url_of(server: RabbitServer) -> str:
    return RabbitStream(server).direct_url


def put(server: RabbitServer, stream: str, *numbers: int) -> None:
    RabbitStream(server).publish(stream, [wrap(b'{"id": %d}' % n) for n in numbers])


def source_of(server: RabbitServer, streams: Any, **options: Any) -> Source:
    given: dict[str, Any] = {"url": url_of(server), "schema": SCHEMA, "stop": "latest"}
    return rabbitmq_source(streams, **(given | options))


def ids(rows: list[Any]) -> list[int]:
    return [row["id"] for row in rows]


def test_it_begins_and_ends_where_it_is_told(server: RabbitServer, stream: str) -> None:
    put(server, stream, 0, 1)
    time.sleep(0.05)
    put(server, stream, 2)
    (row,) = asyncio.run(read_all(source_of(server, stream, start=2, metadata={"timestamp": "at"})))
    put(server, stream, 3)

    def found(**options: Any) -> list[int]:
        return read_ids(source_of(server, stream, **options))

    assert found() == [0, 1, 2, 3]
    assert found(start=2) == [2, 3]
    assert found(start=4) == []
    assert found(start="latest") == []
    assert found(stop=1) == [0, 1]
    between = row["at"] - timedelta(milliseconds=10)
    assert found(start=between) == [2, 3]
    assert found(stop=between) == [0, 1]
    assert found(start=1, stop=between) == [1]
    assert found(start=between, stop=between) == []
    assert found(stop=datetime.now(UTC) + timedelta(days=1)) == [0, 1, 2, 3]
    assert found(start=datetime.now(UTC) + timedelta(days=1)) == []
    for wrong in ({"start": 9}, {"stop": 9}):
        with pytest.raises(UsageError, match="no such message"):
            found(**wrong)


def test_a_start_in_the_middle_of_a_chunk(server: RabbitServer, stream: str) -> None:
    sink = rabbitmq_sink(stream, url=url_of(server))
    write(sink, pa.RecordBatch.from_pylist([{"id": n} for n in range(500)]))
    assert read_ids(source_of(server, stream, start=123, batch_rows=50)) == list(range(123, 500))
    assert read_ids(source_of(server, stream, start=123, stop=130)) == list(range(123, 131))


def test_streams_are_splits_and_metadata_are_columns(server: RabbitServer, stream: str) -> None:
    other = f"{stream}-b"
    RabbitStream(server).create(other)
    put(server, stream, 0, 1)
    put(server, other, 2)
    source = source_of(server, [stream, other], metadata={"stream": "of", "offset": "at"})
    assert len(source.splits(1)) == 2
    rows = asyncio.run(read_all(source, 2))
    assert sorted((row["id"], row["of"], row["at"]) for row in rows) == [
        (0, stream, 0),
        (1, stream, 1),
        (2, other, 0),
    ]
    assert asyncio.run(read_all(source.with_columns(["at"])))[0].keys() == {"at"}
    RabbitStream(server).delete(other)


def test_messages_that_were_deleted_are_an_error_or_skipped(server: RabbitServer) -> None:
    stream = f"short-{next(_numbers)}"
    limits = {"max-length-bytes": "2000", "stream-max-segment-size-bytes": "1000"}
    RabbitStream(server).create(stream, **limits)
    put(server, stream, 0)

    async def read_on(positions: list[bytes], on_lost: str) -> tuple[list[int], int]:
        context = make_context()
        source = source_of(server, stream, stop=None, on_lost=on_lost, metadata={"offset": "at"})
        reader = open_reader(source, positions, context)
        try:
            rows = [row for batch in await read_batches(reader, 1) for row in records_of(batch)]
        finally:
            reader.close()
        return [row["at"] for row in rows], int(context.drops.counts.get(DropKind.DELETED, 0))

    positions = source_of(server, stream, stop=None, start=1).splits(1)
    put(server, stream, *range(1, 80))
    deadline = time.monotonic() + 60
    while read_ids(source_of(server, stream))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(SourceError, match=r"messages 1 to \d+ were deleted"):
        asyncio.run(read_on(positions, "fail"))
    found, lost = asyncio.run(read_on(positions, "skip"))
    assert found[0] > 1
    assert lost == found[0] - 1


def test_notes_of_the_broker_are_no_loss(server: RabbitServer, stream: str) -> None:
    put(server, stream, 0)

    async def note(client: Any) -> None:
        await client.store_offset(stream, "another-reader", 0)
        await client.query_offset(stream, "another-reader")

    RabbitStream(server).do(note)
    time.sleep(0.5)
    put(server, stream, 1)
    rows = asyncio.run(read_all(source_of(server, stream, start=1, metadata={"offset": "at"})))
    assert ids(rows) == [1]
    assert rows[0]["at"] >= 1


def test_the_end_of_a_connection_is_no_pause_and_leaves_nothing(
    server: RabbitServer, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subtask ends one for each of its streams when it begins, and another one when it ends."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def run() -> None:
        async def noted(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(seconds)

        broker = Broker(url_of(server), "guest", "guest")
        async with connected(broker, stream, "headgate-tests") as connection:
            where = schema.OffsetSpec.from_params(OffsetType.FIRST, None)
            await connection.subscribe(0, where, [].append, 1)
            writer = connection.client._conn._writer
            monkeypatch.setattr(asyncio, "sleep", noted)
        assert writer.is_closing()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert pauses == []


def test_another_stream_of_the_same_name_is_an_error(server: RabbitServer, stream: str) -> None:
    put(server, stream, 0, 1, 2)
    source = source_of(server, stream, start=2)
    splits = source.splits(1)
    made = RabbitStream(server)
    made.delete(stream)
    made.create(stream)
    put(server, stream, 0)

    async def read_on() -> None:
        reader = open_reader(source, splits)
        try:
            await read_batches(reader)
        finally:
            reader.close()

    with pytest.raises(SourceError, match="deleted and made again"):
        asyncio.run(read_on())


def test_a_restore_needs_the_end_it_had(server: RabbitServer, stream: str) -> None:
    put(server, stream, 1)
    splits = source_of(server, stream).splits(1)

    async def restore() -> None:
        open_reader(source_of(server, stream, stop=None), splits)

    with pytest.raises(StateError, match="no stop= any more"):
        asyncio.run(restore())


def test_envelopes(server: RabbitServer, stream: str) -> None:
    message = AMQPMessage(body=b'{"id": 2}', application_properties={"kind": "a"})
    RabbitStream(server).publish(stream, [wrap(b'{"id": 1}'), bytes(message), b'{"id": 3}'])
    rows = asyncio.run(
        read_all(
            source_of(server, stream, metadata={"properties": "with"}, on_bad_record="drop"),
        )
    )
    assert rows == [
        {"id": 1, "with": None},
        {"id": 2, "with": [{"name": "kind", "value": "a"}]},
    ]
    with pytest.raises(JobError, match=r"not a message of AMQP 1\.0"):
        read_ids(source_of(server, stream))
    assert read_ids(source_of(server, stream, envelope="none", start=2)) == [3]


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_what_is_wrapped_is_unwrapped(size: int) -> None:
    data = b"\x00" * size
    assert unwrap(wrap(data)).data == data
    if size:
        assert unwrap(bytes(AMQPMessage(body=data))).data == data


def test_all_sections_of_data_are_read() -> None:
    assert unwrap(wrap(b"one,") + wrap(b" two")).data == b"one, two"
    assert unwrap(b"\x00\x53\x77\xa1\x03abc").data == b"abc"


@pytest.mark.parametrize("message", [b"", b"{}", b"\x00\x53\x75", b"\x00\x53\x75\xa0\x05abc"])
def test_what_is_no_message_is_told(message: bytes) -> None:
    with pytest.raises(NotAMessageError):
        unwrap(message)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "amqp://host"}, "not the addresses"),
        ({"url": "rabbitmq-stream://ann:secret@host"}, "not the addresses"),
        ({"streams": ""}, "name of a stream"),
        ({"streams": ["a", "a"]}, "each of them once"),
        ({"format": "xml"}, "format"),
        ({"envelope": "letter"}, "no such envelope"),
        ({"metadata": {"subject": "o"}}, "no such metadata"),
        ({"metadata": {"offset": "id"}}, "same name"),
        ({"start": -1}, "at least 0"),
        ({"start": datetime(2026, 1, 1)}, "time zone"),
        ({"stop": "earliest"}, "not a position"),
        ({"stop": datetime(2026, 1, 1)}, "time zone"),
        ({"on_lost": "ignore"}, "no such policy"),
    ],
)
def test_wrong_arguments_of_the_source(options: dict[str, Any], said: str) -> None:
    given = {"url": "rabbitmq-stream://host", "schema": SCHEMA, "streams": "orders"} | options
    with pytest.raises(UsageError, match=said) as error:
        rabbitmq_source(**given)  # type: ignore[call-overload]
    assert "secret" not in str(error.value)


def test_numbers_tell_repeats_also_on_another_connection(server: RabbitServer, stream: str) -> None:
    sink = rabbitmq_sink(stream, url=url_of(server))
    first = pa.RecordBatch.from_pylist([{"id": n} for n in range(1_200)])
    more = pa.RecordBatch.from_pylist([{"id": n} for n in range(1_200, 1_300)])

    async def publish() -> None:
        for _ in range(2):
            publisher = RabbitPublisher(sink.settings, sink.settings.target)
            await publisher.open(make_context())
            await publisher.publish(first, "one", 1)
            await publisher.publish(more, "one", 1_201)
            await publisher.close()

    in_thread(publish)
    assert read_ids(source_of(server, stream)) == list(range(1_300))


def test_a_message_that_is_too_large_fails_the_attempt(server: RabbitServer, stream: str) -> None:
    sink = rabbitmq_sink(stream, url=url_of(server), format="raw")
    data = pa.RecordBatch.from_pylist([{"value": b"x" * (1 << 21)}])
    with pytest.raises(JobError, match="too large"):
        write(sink, data)
    write(sink, pa.RecordBatch.from_pylist([{"value": b"x" * 900_000}] * 3))
    source = rabbitmq_source(stream, url=url_of(server), format="raw", stop="latest")
    assert [len(row["value"]) for row in asyncio.run(read_all(source))] == [900_000] * 3


def test_a_job_counts_every_record_once_through_a_failure(
    server: RabbitServer, stream: str, tmp_path: Path
) -> None:
    streams = [f"{stream}-in-{n}" for n in range(2)]
    for n, name in enumerate(streams):
        RabbitStream(server).create(name)
        rows = [{"id": n * 1_000 + k} for k in range(1_000)]
        write(rabbitmq_sink(name, url=url_of(server)), pa.RecordBatch.from_pylist(rows))
    job = hg.Job("rabbit-to-rabbit", parallelism=2)
    job.checkpoint(every="50ms", storage=str(tmp_path / "state"))
    job.read(source_of(server, streams, batch_rows=50), name="numbers").map(
        Fails(tmp_path, (700,)), into={"id": "long"}
    ).write(rabbitmq_sink(stream, url=url_of(server), guarantee="exactly_once"), name="out")
    job.run()
    assert (tmp_path / "700").exists()
    assert sorted(read_ids(source_of(server, stream))) == list(range(2_000))


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: numbers}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    numbers:
      rabbitmq:
        streams: ["{stream}"]
        url: {url}
        metadata: {{offset: at}}
        start: {{offset: 1}}
        stop: latest
      schema: {{id: long}}
  sinks:
    out:
      from: numbers
      parquet: {{path: {path}/out}}
      guarantee: exactly_once
    again:
      from: numbers
      rabbitmq: {{stream: "{stream}", url: {url}}}
      guarantee: at_least_once
"""


def test_a_manifest(server: RabbitServer, stream: str, tmp_path: Path) -> None:
    put(server, stream, 5, 6, 7)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST.format(path=tmp_path, stream=stream, url=url_of(server)))
    load_job(manifest).run()
    assert pq.read_table(tmp_path / "out").to_pylist() == [{"id": 6, "at": 1}, {"id": 7, "at": 2}]
    assert read_ids(source_of(server, stream, start=3)) == [6, 7]
