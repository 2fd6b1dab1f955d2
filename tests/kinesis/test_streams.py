"""The source and the sink of Kinesis: shards and their children, positions, lost records, whole jobs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import from_list, kinesis_sink, kinesis_source, parquet_sink
from headgate.connectors.kinesis.model import ShardSplit, decoded
from headgate.connectors.publishing import parts_within
from headgate.errors import (
    DataError,
    JobError,
    PlanError,
    SourceError,
    StateError,
    StorageError,
    UsageError,
)
from headgate.operators.elements import ColumnBatch
from headgate.operators.source import Source
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context, open_reader, read_all, read_batches
from headgate.testing.servers.kinesis import KinesisServer
from headgate.tests.support.kinesis_cases import KinesisSourceCase

SCHEMA = {"id": "int64"}


@pytest.fixture
def case(server: KinesisServer) -> KinesisSourceCase:
    return KinesisSourceCase(server)


@pytest.fixture
def stream(case: KinesisSourceCase) -> Iterator[str]:
    with case.place() as name:
        yield name


def put(case: KinesisSourceCase, stream: str, *numbers: int) -> None:
    """Records with numbers as partition keys."""
    case.add(stream, [b'{"id": %d}' % n for n in numbers], [str(n) for n in numbers])


def source_of(case: KinesisSourceCase, stream: str, **options: Any) -> Source:
    return case.source(stream, **({"schema": SCHEMA, "batch_rows": 8192} | options))


def ids(source: Source) -> list[int]:
    return sorted(row["id"] for row in asyncio.run(read_all(source)))


def resharded(case: KinesisSourceCase, stream: str) -> list[list[int]]:
    """Divide the shard, and merge the parts; return the records of each time between."""
    times = [list(range(start, start + 20)) for start in (0, 20, 40)]
    put(case, stream, *times[0])
    case.split(stream, "shardId-000000000000")
    put(case, stream, *times[1])
    case.merge(stream, "shardId-000000000001", "shardId-000000000002")
    put(case, stream, *times[2])
    # Kinesalite gives records of new shards times of arrival that are up to a second ahead.
    time.sleep(1.1)
    return times


def test_metadata_and_columns(case: KinesisSourceCase, stream: str) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    put(case, stream, 1)
    kinds = ("partition_key", "sequence_number", "shard", "timestamp")
    source = source_of(case, stream, metadata={kind: kind for kind in kinds})
    (row,) = asyncio.run(read_all(source))
    assert (row["id"], row["partition_key"], row["shard"]) == (1, "1", "shardId-000000000000")
    assert row["sequence_number"].isdecimal()
    assert before < row["timestamp"] <= datetime.now(UTC) + timedelta(seconds=1)
    assert asyncio.run(read_all(source.with_columns(["shard"]))) == [{"shard": row["shard"]}]


def test_where_reading_begins_and_ends(case: KinesisSourceCase, stream: str) -> None:
    put(case, stream, 1, 2)
    time.sleep(0.02)
    between = datetime.now(UTC)
    time.sleep(0.02)
    put(case, stream, 3)
    assert ids(source_of(case, stream)) == [1, 2, 3]
    assert ids(source_of(case, stream, start=between)) == [3]
    assert ids(source_of(case, stream, stop=between)) == [1, 2]
    live = source_of(case, stream, start="latest", stop=None)
    splits = live.splits(1)
    put(case, stream, 4)

    async def read_one() -> list[Any]:
        reader = open_reader(live, splits)
        (batch,) = await read_batches(reader, 1)
        reader.close()
        assert isinstance(batch, ColumnBatch)
        return batch.data.to_pylist()

    time.sleep(0.02)
    assert asyncio.run(read_one()) == [{"id": 4}]


def test_a_bounded_source_reads_all_shards(case: KinesisSourceCase, stream: str) -> None:
    times = resharded(case, stream)
    assert ids(source_of(case, stream)) == sum(times, [])


def test_children_are_discovered(case: KinesisSourceCase, stream: str) -> None:
    resharded(case, stream)
    source = source_of(case, stream, stop=None)
    names = [f"shardId-{number:012}" for number in range(4)]
    assert [decoded(split).shard for split in source.splits(2)] == names[:1]
    found = {source.split_key(split): split for split in source.discover({})}
    assert {key: tuple(source.split_parents(split)) for key, split in found.items()} == {
        names[0]: (),
        names[1]: (names[0],),
        names[2]: (names[0],),
        names[3]: (names[1], names[2]),
    }
    assert [source.split_share(name) for name in names] == [0, 1, 2, 3]
    latest = source_of(case, stream, stop=None, start="latest").splits(1)
    assert [decoded(split).ended for split in latest] == [True, True, True, False]


def until(done: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if done():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")


def test_a_job_reads_children_behind_their_parents(
    case: KinesisSourceCase, stream: str, tmp_path: Path
) -> None:
    """Across a division and a merge, by several subtasks, and through a restart from a savepoint."""
    times = resharded(case, stream)

    def job() -> hg.Job:
        made = hg.Job("shards", parallelism=2)
        made.checkpoint(every="50ms", storage=tmp_path / "checkpoints")
        source = source_of(case, stream, stop=None, discover_every="50ms")
        sink = parquet_sink(str(tmp_path / "out"), guarantee="exactly_once")
        made.read(source, name="in").rebalance().write(sink, name="out")
        return made

    def read() -> list[list[int]]:
        """The records of each checkpoint."""
        files = sorted((tmp_path / "out").glob("[!.]*.parquet"), key=lambda f: f.stat().st_mtime_ns)
        return [pq.read_table(file)["id"].to_pylist() for file in files]

    wanted = sorted(sum(times, []))
    with job().start() as handle:
        until(lambda: sorted(sum(read(), [])) == wanted)
        handle.stop()
    seen: set[int] = set()
    for part in read():
        for number in part:
            older = [time for time in times if number >= time[0] + 20]
            assert all(set(time) <= seen for time in older), f"{number} came too early"
        seen.update(part)
    put(case, stream, 60)
    case.split(stream, "shardId-000000000003")
    put(case, stream, 61)
    with job().start() as handle:
        until(lambda: sorted(sum(read(), [])) == [*wanted, 60, 61])
    assert sorted(sum(read(), [])) == [*wanted, 60, 61]


def test_records_that_have_expired(case: KinesisSourceCase, stream: str) -> None:
    put(case, stream, 1)
    yesterday_ms = int((time.time() - 25 * 3600) * 1000)
    (split,) = source_of(case, stream).splits(1)
    old = msgspec.structs.replace(decoded(split), read_to_ms=yesterday_ms)
    gone = msgspec.structs.replace(decoded(split), shard="shardId-000000000009", read_to_ms=1)

    def read(at: ShardSplit, on_lost: str) -> tuple[list[Any], int]:
        async def read() -> tuple[list[Any], int]:
            context = make_context()
            source = source_of(case, stream, on_lost=on_lost)
            reader = open_reader(source, [msgspec.msgpack.encode(at)], context)
            try:
                batches = await read_batches(reader)
            finally:
                reader.close()
            rows = [row for each in batches for row in each.data.to_pylist()]
            return rows, context.drops.total

        return asyncio.run(read())

    with pytest.raises(SourceError, match=r"was not read in time.*the stream keeps 24 h"):
        read(old, "fail")
    assert read(old, "skip") == ([{"id": 1}], 1)
    with pytest.raises(SourceError, match="was not read in time"):
        read(gone, "fail")


def test_positions_of_another_stream(case: KinesisSourceCase, stream: str) -> None:
    """A stream that was deleted and created again has other sequence numbers."""
    put(case, stream, 1)
    (split,) = source_of(case, stream).splits(1)
    wrong = msgspec.structs.replace(decoded(split), after="49600000000000000000000000000000000000")

    async def read() -> None:
        reader = open_reader(source_of(case, stream), [msgspec.msgpack.encode(wrong)])
        try:
            await read_batches(reader)
        finally:
            reader.close()

    with pytest.raises(SourceError, match="created again"):
        asyncio.run(read())
    with pytest.raises(StateError, match="not those of a Kinesis source"):
        decoded(b"\x01")

    async def restore() -> None:
        open_reader(source_of(case, stream, stop=None), [split])

    with pytest.raises(StateError, match="no stop= any more"):
        asyncio.run(restore())


class Answering:
    """A client whose answers are prepared."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[list[bytes]] = []

    async def put_records(self, StreamName: str, Records: list[Any]) -> Any:
        self.asked.append([each["Data"] for each in Records])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"Records": [{"ErrorCode": code} if code else {} for code in answer]}


def written(client: Answering) -> None:
    async def write() -> None:
        writer: Any = kinesis_sink("s", region="us-east-1").writer()
        writer.context = make_context()
        writer._client = client
        data = pa.RecordBatch.from_pylist([{"id": 1}, {"id": 2}, {"id": 3}])
        await writer.call(ColumnBatch(data))

    asyncio.run(write())


def test_only_records_that_were_not_stored_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.connectors.aws.PAUSE_S", 0)
    slow = "ProvisionedThroughputExceededException"
    client = Answering(["", slow, "InternalFailure"], [slow, ""], OSError("cut"), [""])
    written(client)
    one, two, three = (b'{"id":%d}' % n for n in (1, 2, 3))
    assert client.asked == [[one, two, three], [two, three], [two], [two]]
    with pytest.raises(JobError, match="AccessDenied"):
        written(Answering(["", "AccessDenied", ""]))
    monkeypatch.setattr("headgate.connectors.aws.AWAY_S", -1)
    with pytest.raises(StorageError, match=f"are not stored.*{slow}"):
        written(Answering([slow] * 3, [slow] * 3))


def test_requests_have_a_size_that_the_service_takes() -> None:
    sizes = [1_000_000] * 7
    assert parts_within(range(7), sizes, 4 << 20) == [range(4), range(4, 7)]
    assert parts_within(range(7), sizes, 4 << 20, 2) == [
        range(n, min(n + 2, 7)) for n in (0, 2, 4, 6)
    ]
    assert parts_within("ab", [9, 1], 8) == ["a", "b"]
    assert parts_within([], [], 8) == []


def test_a_sink_with_keys(case: KinesisSourceCase, stream: str) -> None:
    job = hg.Job("keys")
    rows = [{"id": n, "key": f"k{n}"} for n in range(3)]
    sink = kinesis_sink(stream, endpoint=case.url, partition_key="key", guarantee="none")
    records = from_list(rows, schema={"id": "int64", "key": "string"})
    job.read(records, name="in").write(sink, name="out")
    job.run()
    source = source_of(
        case, stream, schema={"id": "int64", "key": "string"}, metadata={"partition_key": "of"}
    )
    assert asyncio.run(read_all(source)) == [row | {"of": row["key"]} for row in rows]


def test_mistakes_are_told_where_they_are_made() -> None:
    for wrong, message in (
        ({"stream": "a b"}, "not the name of a stream"),
        ({"start": "first"}, "not a position"),
        ({"stop": datetime(2026, 1, 1)}, "no time zone"),
        ({"on_lost": "never"}, "no such policy"),
        ({"metadata": {"key": "k"}}, "no such metadata"),
        ({"endpoint": "localhost:1"}, "not the address"),
        ({"every": "1ms"}, "every"),
    ):
        with pytest.raises(UsageError, match=message):
            kinesis_source(**({"stream": "s", "schema": SCHEMA} | wrong))
    schema = pa.schema([("id", pa.int64())])
    for column, message in (("key", "no such column"), ("id", "wrong type")):
        with pytest.raises(PlanError, match=message):
            kinesis_sink("s", partition_key=column).bind(schema)
    with pytest.raises(PlanError, match="Python objects"):
        kinesis_sink("s").bind(None)
    with pytest.raises(UsageError, match="no such format"):
        kinesis_sink("s", format="csv")

    async def call() -> None:
        writer: Any = kinesis_sink("s", partition_key="key").writer()
        await writer.call(ColumnBatch(pa.RecordBatch.from_pylist([{"key": ""}])))

    with pytest.raises(DataError, match="no partition key"):
        asyncio.run(call())


def test_a_manifest(case: KinesisSourceCase, stream: str, tmp_path: Path) -> None:
    put(case, stream, 1, 2)
    with case.place() as out:
        file = tmp_path / "job.yaml"
        file.write_text(
            f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: shards}}
spec:
  sources:
    in:
      kinesis:
        stream: {stream}
        endpoint: {case.url}
        start: {{time: "2020-01-01T00:00:00Z"}}
        stop: latest
        metadata: {{partition_key: key}}
        every: 10ms
        discoverEvery: 1m
      schema: {{id: long}}
  sinks:
    out:
      from: in
      kinesis: {{stream: {out}, endpoint: "{case.url}", partitionKey: key}}
      guarantee: none
"""
        )
        load_job(file).run()
        found = [json.loads(line) for line in raw(case, out)]
        assert found == [{"id": 1, "key": "1"}, {"id": 2, "key": "2"}]


def raw(case: KinesisSourceCase, stream: str) -> list[bytes]:
    source = source_of(case, stream, schema=None, format="raw")
    return [row["value"] for row in asyncio.run(read_all(source))]
