"""The source and the sink of NATS: positions, lost messages, ids, and whole jobs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import nats_sink, nats_source
from headgate.connectors.nats.model import overlap
from headgate.errors import JobError, PlanError, SourceError, StateError, UsageError
from headgate.operators.drops import DropKind
from headgate.operators.sink import SinkRun
from headgate.operators.source import Source
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import (
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.testing.servers.nats import NatsServer
from headgate.tests.support.connector_runs import Fails, read_ids, write
from headgate.tests.support.stream_cases import NatsStream

SCHEMA = {"id": "int64"}
_numbers = itertools.count()


@pytest.fixture
def stream(server: NatsServer) -> Iterator[str]:
    name = f"stream-{next(_numbers)}"
    NatsStream(server).do(lambda js: js.add_stream(name=name, subjects=[f"{name}.>"]))
    yield name
    NatsStream(server).do(lambda js: js.delete_stream(name))


def put(server: NatsServer, subject: str, *numbers: int) -> None:
    NatsStream(server).publish(subject, [b'{"id": %d}' % n for n in numbers])


def source_of(server: NatsServer, stream: str, **options: Any) -> Source:
    given: dict[str, Any] = {"url": server.url, "schema": SCHEMA, "stop": "latest"}
    return nats_source(stream, **(given | options))


def ids(rows: list[Any]) -> list[int]:
    return [row["id"] for row in rows]


def test_it_begins_and_ends_where_it_is_told(server: NatsServer, stream: str) -> None:
    put(server, f"{stream}.a", 1, 2)
    time.sleep(0.05)
    put(server, f"{stream}.a", 3)
    (row,) = asyncio.run(read_all(source_of(server, stream, start=3, metadata={"timestamp": "at"})))
    put(server, f"{stream}.a", 4)

    def found(**options: Any) -> list[int]:
        return read_ids(source_of(server, stream, **options))

    assert found() == [1, 2, 3, 4]
    assert found(start=3) == [3, 4]
    assert found(start=5) == []
    assert found(start="latest") == []
    assert found(stop=2) == [1, 2]
    between = row["at"] - timedelta(milliseconds=10)
    assert found(start=between) == [3, 4]
    assert found(stop=between) == [1, 2]
    assert found(start=datetime.now(UTC) + timedelta(days=1)) == []
    for wrong in ({"start": 9}, {"stop": 9}):
        with pytest.raises(UsageError, match="no such message"):
            found(**wrong)


def test_subjects_are_splits_and_metadata_are_columns(server: NatsServer, stream: str) -> None:
    for n in range(6):
        put(server, f"{stream}.{'abc'[n % 3]}", n)
    metadata = {"subject": "from", "sequence": "number"}
    source = source_of(server, stream, subjects=[f"{stream}.a", f"{stream}.c"], metadata=metadata)
    assert len(source.splits(1)) == 2
    rows = asyncio.run(read_all(source, 2))
    assert sorted((row["id"], row["from"][-1], row["number"]) for row in rows) == [
        *((0, "a", 1), (2, "c", 3), (3, "a", 4), (5, "c", 6)),
    ]
    assert asyncio.run(read_all(source.with_columns(["number"])))[0].keys() == {"number"}


def test_messages_that_were_deleted_are_an_error_or_skipped(
    server: NatsServer, stream: str
) -> None:
    put(server, f"{stream}.a", *range(1, 11))

    async def read_on(keep_from: int, on_lost: str) -> tuple[list[int], int]:
        source = source_of(server, stream, batch_rows=1, buffer=1, on_lost=on_lost)
        reader = open_reader(source, source.splits(1))
        assert len(await read_batches(reader, 2)) == 2
        positions = reader.snapshot()
        reader.close()
        NatsStream(server).do(lambda js: js.purge_stream(stream, seq=keep_from))
        context = make_context()
        reader = open_reader(source, positions, context)
        try:
            rows = [row for batch in await read_batches(reader) for row in records_of(batch)]
        finally:
            reader.close()
        return ids(rows), context.drops.counts.get(DropKind.DELETED, 0)

    assert asyncio.run(read_on(3, "fail")) == ([3, 4, 5, 6, 7, 8, 9, 10], 0)
    with pytest.raises(SourceError, match="messages 5 to 6 were deleted"):
        asyncio.run(read_on(7, "fail"))
    assert asyncio.run(read_on(10, "skip")) == ([10], 1)


def test_single_messages_that_were_deleted_are_no_loss(server: NatsServer, stream: str) -> None:
    put(server, f"{stream}.a", *range(1, 6))
    NatsStream(server).do(lambda js: js.delete_msg(stream, 3))
    assert read_ids(source_of(server, stream)) == [1, 2, 4, 5]


def test_what_a_filter_does_not_match_is_no_loss(server: NatsServer, stream: str) -> None:
    put(server, f"{stream}.a", 1)

    async def run() -> list[int]:
        source = source_of(server, stream, subjects=f"{stream}.a", stop=None)
        reader = open_reader(source, source.splits(1))
        found = [row for batch in await read_batches(reader, 1) for row in records_of(batch)]
        await asyncio.to_thread(put, server, f"{stream}.b", 2, 3, 4)
        while b"\xa5after\x04" not in reader.snapshot()[0]:
            reader.poll()
            await asyncio.sleep(0.01)
        positions = reader.snapshot()
        reader.close()
        NatsStream(server).do(lambda js: js.purge_stream(stream, seq=5))
        await asyncio.to_thread(put, server, f"{stream}.a", 5)
        reader = open_reader(source, positions)
        found += [row for batch in await read_batches(reader, 1) for row in records_of(batch)]
        reader.close()
        return ids(found)

    assert asyncio.run(asyncio.wait_for(run(), 120)) == [1, 5]


def test_a_consumer_that_the_server_forgets_is_made_again(server: NatsServer, stream: str) -> None:
    async def forget(js: Any) -> None:
        for consumer in await js.consumers_info(stream):
            await js.delete_consumer(stream, consumer.name)

    async def run() -> list[int]:
        source = source_of(server, stream, stop=None)
        reader = open_reader(source, source.splits(1))
        found = []
        for n in range(1, 4):
            await asyncio.to_thread(put, server, f"{stream}.a", n)
            found += [row for batch in await read_batches(reader, 1) for row in records_of(batch)]
            await asyncio.to_thread(NatsStream(server).do, forget)
        reader.close()
        return ids(found)

    assert asyncio.run(asyncio.wait_for(run(), 120)) == [1, 2, 3]


def test_another_stream_of_the_same_name_is_an_error(server: NatsServer, stream: str) -> None:
    put(server, f"{stream}.a", 1, 2, 3)
    source = source_of(server, stream, start=3)
    splits = source.splits(1)
    made = NatsStream(server)
    made.do(lambda js: js.delete_stream(stream))
    made.do(lambda js: js.add_stream(name=stream, subjects=[f"{stream}.>"]))
    put(server, f"{stream}.a", 1)

    async def read_on() -> None:
        reader = open_reader(source, splits)
        try:
            await read_batches(reader)
        finally:
            reader.close()

    with pytest.raises(SourceError, match="deleted and made again"):
        asyncio.run(read_on())


def test_a_restore_needs_the_end_it_had(server: NatsServer, stream: str) -> None:
    put(server, f"{stream}.a", 1)
    splits = source_of(server, stream).splits(1)

    async def restore() -> None:
        open_reader(source_of(server, stream, stop=None), splits)

    with pytest.raises(StateError, match="no stop= any more"):
        asyncio.run(restore())


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.c", True),
        ("a.*", "a.c.d", False),
        ("a.>", "a.c.d", True),
        ("a.>", "b.>", False),
        ("*.b", "a.*", True),
        ("a", "a.b", False),
    ],
)
def test_filters_that_match_the_same_subject(one: str, other: str, both: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is both


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "redis://host"}, "not the addresses"),
        ({"url": "nats://ann:secret@host"}, "not the addresses"),
        ({"user": "ann"}, "belong together"),
        ({"stream": "a.b"}, "name of a stream"),
        ({"subjects": ["a.>", "a.b"]}, "match two"),
        ({"format": "xml"}, "format"),
        ({"metadata": {"offset": "o"}}, "no such metadata"),
        ({"metadata": {"subject": "id"}}, "same name"),
        ({"start": 0}, "at least 1"),
        ({"stop": datetime(2026, 1, 1)}, "time zone"),
        ({"on_lost": "ignore"}, "no such policy"),
    ],
)
def test_wrong_arguments_of_the_source(options: dict[str, Any], said: str) -> None:
    given = {"url": "nats://host", "schema": SCHEMA, "stream": "orders"} | options
    with pytest.raises(UsageError, match=said) as error:
        nats_source(**given)  # type: ignore[call-overload]
    assert "secret" not in str(error.value)


def test_wrong_arguments_of_the_sink() -> None:
    url = "nats://host"
    for arguments in (
        {},
        {"subject": "a", "metadata": {"subject": "s"}},
        {"subject": "a.*"},
        {"subject": "a", "metadata": {"key": "k"}},
        {"subject": "a", "format": "csv"},
    ):
        with pytest.raises(UsageError):
            nats_sink(url=url, **arguments)  # type: ignore[arg-type]
    sink = nats_sink("a", url=url, metadata={"id": "key"})
    for schema in (None, pa.schema([("id", pa.int64())]), pa.schema([("key", pa.int64())])):
        with pytest.raises(PlanError):
            sink.bind(schema)


def test_ids_and_subjects_of_columns(server: NatsServer, stream: str) -> None:
    metadata = {"id": "key", "subject": "to"}
    sink = nats_sink(url=server.url, metadata=metadata)
    rows = [{"id": n, "key": f"k{n}", "to": f"{stream}.{n % 2}"} for n in range(1_200)]
    data = pa.RecordBatch.from_pylist(rows)
    sink.bind(data.schema)
    write(sink, data)
    write(sink, data)  # as after a failure, within the duplicate window
    assert read_ids(source_of(server, stream)) == list(range(1_200))
    assert read_ids(source_of(server, stream, subjects=f"{stream}.1")) == list(range(1, 1_200, 2))
    with pytest.raises(JobError, match="no subject"):
        write(sink, pa.RecordBatch.from_pylist([{"id": 1, "key": "k", "to": "a b"}]))


def test_an_id_cannot_add_headers(server: NatsServer, stream: str) -> None:
    sink = nats_sink(f"{stream}.a", url=server.url, metadata={"id": "key"})
    write(sink, pa.RecordBatch.from_pylist([{"id": 1, "key": "a\r\nNats-Rollup: all\r\n\r\n"}]))
    (row,) = asyncio.run(read_all(source_of(server, stream, metadata={"headers": "headers"})))
    assert row["headers"] == [{"name": "Nats-Msg-Id", "value": "a  Nats-Rollup: all"}]


def test_an_answer_of_another_program_is_none_of_a_stream(server: NatsServer, stream: str) -> None:
    """A service that subscribes to the subject answers as well, and may be the first."""

    async def publish() -> None:
        async def answer(message: Any) -> None:
            for text in (b"got it", b'{"stream":""}', b"[]"):
                await message.respond(text)

        client = await nats.connect(server.url)
        await client.subscribe(f"{stream}.a", cb=answer)
        await client.flush()
        data = pa.RecordBatch.from_pylist([{"id": n} for n in range(100)])
        await asyncio.to_thread(write, nats_sink(f"{stream}.a", url=server.url), data)
        await client.close()

    asyncio.run(publish())
    assert read_ids(source_of(server, stream)) == list(range(100))


def test_a_refusal_of_one_message_fails_the_attempt(server: NatsServer, stream: str) -> None:
    async def limit(js: Any) -> None:
        await js.update_stream(name=stream, subjects=[f"{stream}.>"], max_msg_size=60)

    NatsStream(server).do(limit)
    sink = nats_sink(f"{stream}.a", url=server.url, metadata={"id": "key"})
    rows = [{"id": n, "key": f"k{n}" * (30 if n == 1 else 1)} for n in range(3)]
    with pytest.raises(JobError, match="exceeds maximum allowed"):
        write(sink, pa.RecordBatch.from_pylist(rows))
    assert read_ids(source_of(server, stream)) == [0, 2]


def test_a_message_that_is_too_large_fails_the_attempt(server: NatsServer, stream: str) -> None:
    sink = nats_sink(f"{stream}.a", url=server.url, format="raw")
    data = pa.RecordBatch.from_pylist([{"value": b"x" * (1 << 21)}])
    with pytest.raises(JobError, match="payload"):
        write(sink, data)


def test_the_duplicate_window_is_announced(server: NatsServer, stream: str) -> None:
    told: list[str] = []
    sink = nats_sink(f"{stream}.a", url=server.url, guarantee="exactly_once")
    sink.check_output(SinkRun("job", "orders", {}, None, told.append))
    assert "120 s" in told[0]


def test_a_job_counts_every_record_once_through_a_failure(
    server: NatsServer, stream: str, tmp_path: Path
) -> None:
    put(server, f"{stream}.in.a", *range(1_000))
    put(server, f"{stream}.in.b", *range(1_000, 2_000))
    job = hg.Job("nats-to-nats", parallelism=2)
    job.checkpoint(every="50ms", storage=str(tmp_path / "state"))
    subjects = [f"{stream}.in.a", f"{stream}.in.b"]
    job.read(source_of(server, stream, subjects=subjects, batch_rows=50), name="numbers").map(
        Fails(tmp_path, (700,)), into={"id": "long"}
    ).write(nats_sink(f"{stream}.out", url=server.url, guarantee="exactly_once"), name="out")
    job.run()
    assert (tmp_path / "700").exists()
    assert sorted(read_ids(source_of(server, stream, subjects=f"{stream}.out"))) == list(
        range(2_000)
    )


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: numbers}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    numbers:
      nats:
        stream: {stream}
        url: {url}
        subjects: ["{stream}.in"]
        metadata: {{sequence: at}}
        start: {{sequence: 2}}
        stop: latest
      schema: {{id: long}}
      onBadRecord: side_output
  sinks:
    out:
      from: numbers
      nats: {{subject: {stream}.out, url: {url}}}
      guarantee: exactly_once
    rejected:
      from: numbers.rejected
      parquet: {{path: {path}/rejected}}
      guarantee: exactly_once
"""


def test_a_manifest_reads_and_writes_streams(
    server: NatsServer, stream: str, tmp_path: Path
) -> None:
    put(server, f"{stream}.in", 1, 2, 3)
    NatsStream(server).publish(f"{stream}.in", [b"?"])
    file = tmp_path / "numbers.yaml"
    file.write_text(MANIFEST.format(stream=stream, url=server.url, path=tmp_path))
    load_job(file).run()
    rows = asyncio.run(
        read_all(
            source_of(server, stream, subjects=f"{stream}.out", schema={"id": "long", "at": "long"})
        )
    )
    assert rows == [{"id": 2, "at": 2}, {"id": 3, "at": 3}]
    ((bad,),) = [pq.read_table(file).to_pylist() for file in tmp_path.glob("rejected/*.parquet")]
    assert (bad["sequence"], bad["data"]) == (4, b"?")


def test_secrets_are_read_where_they_are_used(
    server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, f"{stream}.a", 1)
    monkeypatch.setenv("NATS_PASSWORD", "right")
    monkeypatch.setenv("NATS_URL", server.url)
    source = source_of(server, stream, url="env:NATS_URL", user="ann", password="env:NATS_PASSWORD")
    assert read_ids(source) == [1]
    shown = repr(source.settings) + source.describe()  # type: ignore[attr-defined]
    assert "right" not in shown
