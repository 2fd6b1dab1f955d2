"""The promise: each record once, from any position; bad ones told apart to the byte."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import (
    csv_source,
    files_source,
    json_sink,
    json_source,
    parquet_source,
    throttle,
)
from headgate.connectors.files import blocks, locations
from headgate.connectors.files.blocks import FileSplit
from headgate.connectors.files.locations import s3_client
from headgate.errors import BadRecordError, StateError, StorageError, UsageError
from headgate.operators.source import Source
from headgate.testing.connectors import (
    CheckMetrics,
    check_source,
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
ROWS = [{"id": i, "name": f"näme {i}" * (i % 4) or None} for i in range(23)]


def csv_line(row: dict[str, Any]) -> str:
    return (
        f"{row['id']},{'' if row['name'] is None else json.dumps(row['name'], ensure_ascii=False)}"
    )


def write(path: Path, format: str, rows: list[dict[str, Any]], newline: str = "\n") -> Path:
    """A file with some traps: empty lines, no line break at the end, small row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=5)
        return path
    if format == "csv":
        lines = ["id,name", *map(csv_line, rows)]
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines.insert(len(lines) // 2 + 1, "")
    data = newline.join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


FILES = ["a.csv", "a.json", "a.parquet", "a.csv.gz", "a.json.gz"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("batch_rows", [1, 7])
def test_every_position(tmp_path: Path, name: str, batch_rows: int) -> None:
    """Stop and restore at every record (and every batch of 7), in two files of several splits."""
    format = name.split(".")[1]
    write(tmp_path / "1" / name, format, ROWS[:13])
    write(tmp_path / "2" / name, format, ROWS[13:], "\r\n")
    source = files_source(
        str(tmp_path), format=format, schema=SCHEMA, batch_rows=batch_rows, split_bytes="100b"
    )
    asyncio.run(check_source(source))
    assert asyncio.run(read_all(source)) == ROWS


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_of_any_text(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Random lines, split size and block size: all records, each once, in order."""
    rows = data.draw(
        st.lists(
            st.builds(
                lambda i, n: {"id": i, "name": "x" * n}, st.integers(0, 9), st.integers(1, 30)
            )
        )
    )
    format = data.draw(st.sampled_from(["csv", "json"]))
    path = tmp_path_factory.mktemp("cut") / "file"
    write(path, format, rows, data.draw(st.sampled_from(["\n", "\r\n"])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", data.draw(st.integers(1, 64)))
        source = files_source(
            str(path),
            format=format,
            schema=SCHEMA,
            batch_rows=data.draw(st.integers(1, 5)),
            split_bytes=data.draw(st.integers(1, 200)),
        )
        assert asyncio.run(read_all(source)) == rows


def test_projection_reads_only_these_columns(tmp_path: Path) -> None:
    for format in ("csv", "json", "parquet"):
        write(tmp_path / format, format, ROWS)
        source = files_source(str(tmp_path / format), format=format, schema=SCHEMA)
        narrow = source.with_columns(["name"])
        assert narrow.schema is not None
        assert narrow.schema.names == ["name"]
        assert asyncio.run(read_all(narrow)) == [{"name": row["name"]} for row in ROWS]
        assert len(asyncio.run(read_all(source.with_columns([])))) == len(ROWS)


def test_a_struct_is_a_schema_and_the_row_type(tmp_path: Path) -> None:
    class Person(msgspec.Struct):
        id: int
        name: str | None

    source = csv_source(str(write(tmp_path / "a.csv", "csv", ROWS)), Person)
    assert source.row_type is Person
    assert source.with_columns(["id"]).row_type is None
    assert asyncio.run(read_all(source)) == ROWS


def test_parquet_brings_its_own_schema(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", "parquet", ROWS)
    source = parquet_source(str(tmp_path))
    assert source.schema is not None
    assert source.schema.equals(SCHEMA)
    assert len(source.splits(4)) == 5


# Bad records


def bad_csv() -> tuple[bytes, list[tuple[int, str, str]], list[dict[str, Any]]]:
    """A file, its bad records (offset, part of the reason, text), and its good ones."""
    lines: list[tuple[bytes, str | None]] = [
        (b"1,a", None),
        (b"x,b", "int64"),
        (b"3", "Expected 2 columns"),
        (b"4,d,d", "Expected 2 columns"),
        (b",e", "no value for column `id`"),
        (b"6,\xff", "UTF8"),
        (b'7,"open', "quoted value does not end|Expected 2 columns"),
        (b'8,"still open', "quoted value does not end|Expected 2 columns"),
        (b"9,ret\rurn", "carriage return"),
        (b"10,", None),
        (b"99999999999999999999,k", "int64"),
        (b'12,"l ""l"""', None),
    ]
    good = [{"id": 1, "name": "a"}, {"id": 10, "name": None}, {"id": 12, "name": 'l "l"'}]
    return *_lay_out(b"id,name\n", lines), good


def bad_json() -> tuple[bytes, list[tuple[int, str, str]], list[dict[str, Any]]]:
    lines: list[tuple[bytes, str | None]] = [
        (b'{"id": 1, "name": "a", "more": [1, {"x": 2}]}', None),
        (b'{"id": "2", "name": "b"}', "changed from"),
        (b'{"name": "c"}', "no value for column `id`"),
        (b'{"id": 4', "not a JSON object"),
        (b'"name": "d"}', "not a JSON object"),
        (b'{"id": 5}{"id": 6}', "exactly one line"),
        (b"[7]", "not a JSON object"),
        (b'{"id": 8.5}', "int64"),
        (b'{"id": 9, "name": "\xff"}', "UTF-8"),
        (b'  {"id": 10, "name": null} ', None),
        (b'{"id": 11,}', "."),
        (b'{"id": 12}', None),
    ]
    good = [{"id": 1, "name": "a"}, {"id": 10, "name": None}, {"id": 12, "name": None}]
    return *_lay_out(b"", lines), good


def _lay_out(
    start: bytes, lines: list[tuple[bytes, str | None]]
) -> tuple[bytes, list[tuple[int, str, str]]]:
    data, bad = start, []
    for line, reason in lines:
        if reason is not None:
            bad.append((len(data), reason, line.decode(errors="backslashreplace")))
        data += line + b"\n"
    return data, bad


def read_bad(source: Any) -> tuple[list[Any], list[Any], dict[str, int]]:
    """Good records, rejected records, and the metrics."""
    metrics = CheckMetrics()
    rejected: list[Any] = []
    good: list[Any] = []

    async def run() -> None:
        reader = open_reader(
            source,
            source.splits(1),
            make_context(metrics=metrics),
            lambda batch: rejected.extend(records_of(batch)),
        )
        for batch in await read_batches(reader):
            good.extend(records_of(batch))

    asyncio.run(run())
    return good, rejected, metrics.counts


@pytest.mark.parametrize("case", [bad_csv, bad_json])
@pytest.mark.parametrize("split_bytes", [20, 10_000])
def test_bad_records_are_told_apart_exactly(
    tmp_path: Path, case: Callable[[], Any], split_bytes: int
) -> None:
    data, bad, good = case()
    format = case.__name__.removeprefix("bad_")
    path = tmp_path / "file"
    path.write_bytes(data)
    source = files_source(
        str(path),
        format=format,
        schema=SCHEMA,
        on_bad_record="side_output",
        split_bytes=split_bytes,
    )
    found, rejected, counts = read_bad(source)
    assert found == good
    assert counts == {"source_record_errors": len(bad)}
    assert [(r["file"], r["offset"], r["record"]) for r in rejected] == [
        (str(path), offset, text) for offset, _, text in bad
    ]
    for record, (_, reason, text) in zip(rejected, bad, strict=True):
        assert any(part in record["reason"] for part in reason.split("|")), (text, record["reason"])
    dropping = files_source(str(path), format=format, schema=SCHEMA, on_bad_record="drop")
    assert read_bad(dropping) == (good, [], {"source_record_errors": len(bad)})


@pytest.mark.parametrize("case", [bad_csv, bad_json])
def test_positions_hold_among_bad_records(tmp_path: Path, case: Callable[[], Any]) -> None:
    """Stopped and restored anywhere: rejected records also come exactly once."""
    data, bad, good = case()
    (tmp_path / "file").write_bytes(data)
    source = files_source(
        str(tmp_path / "file"),
        format=case.__name__.removeprefix("bad_"),
        schema=SCHEMA,
        on_bad_record="side_output",
        batch_rows=1,
    )
    asyncio.run(check_source(source))

    async def run(stop: int) -> tuple[list[Any], list[int]]:
        rejected: list[Any] = []
        take = lambda batch: rejected.extend(records_of(batch))  # noqa: E731
        first = open_reader(source, source.splits(1), None, take)
        batches = await read_batches(first, stop)
        first.close()
        batches += await read_batches(open_reader(source, first.snapshot(), None, take))
        return [r for b in batches for r in records_of(b)], [r["offset"] for r in rejected]

    for stop in range(len(good) + 1):
        assert asyncio.run(run(stop)) == (good, [offset for offset, *_ in bad])


def test_failing_names_file_byte_reason_and_record(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,name\n1,a\n2," + "long " * 100 + ",\n")
    with pytest.raises(BadRecordError) as caught:
        asyncio.run(read_all(csv_source(str(path), SCHEMA)))
    assert caught.value.where == f"{path} byte 12"
    assert "Expected 2 columns, got 3" in caught.value.message
    assert "(503 characters)" in caught.value.message
    assert len(caught.value.message) < 800


def test_good_records_before_a_bad_block_are_delivered(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,name\n1,a\n2,b\nx,c\n")

    async def run() -> None:
        source = csv_source(str(path), SCHEMA, batch_rows=1)
        reader = open_reader(source, source.splits(1))
        batches = await read_batches(reader, 2)
        assert [r["id"] for b in batches for r in records_of(b)] == [1, 2]
        with pytest.raises(BadRecordError):
            await read_batches(reader)
        split = msgspec.msgpack.decode(reader.snapshot()[0], type=FileSplit)
        assert split.position == path.read_bytes().index(b"x,c")

    asyncio.run(run())


def test_bad_values_in_parquet(tmp_path: Path) -> None:
    """Values that do not fit the wanted type are bad records, numbered by row."""
    table = pa.table({"id": [1, None, 3, 2**40], "name": ["a", "b", "c", "d"]})
    pq.write_table(table, tmp_path / "a.parquet")
    wanted = pa.schema([pa.field("id", pa.int32(), nullable=False), ("name", pa.string())])
    source = parquet_source(str(tmp_path), wanted, on_bad_record="side_output")
    good, rejected, _ = read_bad(source)
    assert good == [{"id": 1, "name": "a"}, {"id": 3, "name": "c"}]
    assert [r["offset"] for r in rejected] == [1, 3]


def test_a_line_too_long_is_a_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 16)
    monkeypatch.setattr(blocks, "RECORD_MAX_BYTES", 100)
    path = tmp_path / "a.csv"
    path.write_text(f"id,name\n1,a\n2,{'b' * 500}\n3,c\n4,{'d' * 500}")
    source = csv_source(str(path), SCHEMA, on_bad_record="side_output")
    good, rejected, _ = read_bad(source)
    assert [row["id"] for row in good] == [1, 3]
    assert [r["offset"] for r in rejected] == [12, 12 + 503 + 4]
    assert all("longer than 100 bytes" in r["reason"] for r in rejected)


# Files


def test_hidden_and_other_files_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.csv", "csv", ROWS[:1])
    write(tmp_path / "a" / "deep" / "y.csv", "csv", ROWS[1:2])
    write(tmp_path / "a" / ".headgate" / "z.csv", "csv", ROWS[2:3])
    write(tmp_path / "a" / "_SUCCESS", "csv", ROWS[3:4])
    (tmp_path / "a" / "x.txt").write_text("not csv")

    def ids(path: str) -> list[int]:
        return sorted(row["id"] for row in asyncio.run(read_all(csv_source(path, SCHEMA))))

    assert ids(f"{tmp_path}/a/*.csv") == [0]
    assert ids(f"{tmp_path}/a/**/*.csv") == [0, 1]
    assert ids(f"{tmp_path}/[ab]/?.csv") == [0]
    assert ids(f"file://{tmp_path}/a/deep") == [1]


def test_csv_without_header_and_with_other_marks(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"1;NA\n2;b\n")
    source = csv_source(str(path), SCHEMA, header=False, delimiter=";", null_values=("NA",))
    assert asyncio.run(read_all(source)) == [{"id": 1, "name": None}, {"id": 2, "name": "b"}]


def test_byte_order_mark_and_other_column_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfname,more,id\nx,1,2\n")
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"name": "x", "id": 2}\n')
    for format in ("csv", "json"):
        source = files_source(str(tmp_path / f"a.{format}"), format=format, schema=SCHEMA)
        assert asyncio.run(read_all(source)) == [{"id": 2, "name": "x"}]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_not_read_on(tmp_path: Path, name: str) -> None:
    format = name.split(".")[1]
    path = write(tmp_path / name, format, ROWS)

    async def run(change: Callable[[], object]) -> None:
        write(path, format, ROWS)
        source = files_source(str(path), format=format, schema=SCHEMA, batch_rows=1)
        reader = open_reader(source, source.splits(1))
        await read_batches(reader, 2)
        reader.close()
        change()
        with pytest.raises(StateError, match=name):
            await read_batches(open_reader(source, reader.snapshot()))

    asyncio.run(run(lambda: os.utime(path, ns=(1, 1))))
    asyncio.run(run(lambda: os.truncate(path, 30)))
    asyncio.run(run(path.unlink))


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole = write(
        tmp_path / "a.csv.gz",
        "csv",
        [{"id": i, "name": str(random.Random(i).random())} for i in range(999)],
    )
    (tmp_path / "b.csv.gz").write_bytes(whole.read_bytes()[:-300])
    with pytest.raises(StorageError, match=r"b\.csv\.gz"):
        asyncio.run(read_all(csv_source(str(tmp_path / "b.csv.gz"), SCHEMA)))
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(
        UsageError, match=r"not a Parquet file file=`.*c\.parquet"
    ):  # not tried again
        parquet_source(str(tmp_path / "c.parquet"))


def test_a_storage_that_does_not_answer_is_not_the_users_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.csv", "csv", ROWS)
    source = csv_source(str(path), SCHEMA)

    def away(store: Any, info: Any) -> str:
        raise OSError("the network is down")

    async def run() -> None:
        splits = source.splits(1)
        monkeypatch.setattr(blocks, "version_of", away)
        with pytest.raises(StorageError, match=r"a\.csv.*the network is down"):
            await read_batches(open_reader(source, splits))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: files_source("x", format="xml"), "no such file format"),
        (lambda: files_source("x", format="csv"), "needs a schema"),
        (lambda: csv_source("x", SCHEMA, on_bad_record="ignore"), "no such policy"),
        (lambda: csv_source("x", SCHEMA, batch_rows=0), "at least 1"),
        (lambda: csv_source("x", SCHEMA, split_bytes="0b"), "at least 1"),
        (lambda: csv_source("x", SCHEMA, delimiter=""), "one ASCII character"),
        (lambda: csv_source("x", SCHEMA, delimiter="§"), "one ASCII character delimiter=`§`"),
        (lambda: csv_source("x", SCHEMA, delimiter='"'), "one ASCII character"),
        (lambda: csv_source("http://x", SCHEMA), "no such kind of storage"),
        (lambda: csv_source("/nothing/here/*.csv", SCHEMA).splits(1), "no file found"),
        (lambda: csv_source("/nothing/here.csv", SCHEMA).splits(1), "no file found"),
        (lambda: parquet_source("/nothing/here"), "no file found"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_file_without_the_column_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,nome\n1,a\n")
    with pytest.raises(UsageError, match=r"did you mean `nome`"):
        csv_source(str(tmp_path), SCHEMA).splits(1)


def test_poll_does_not_read_by_itself(tmp_path: Path) -> None:
    """Reading happens in threads, at most two blocks ahead."""
    write(tmp_path / "a.json", "json", ROWS)
    calls = []

    async def run() -> None:
        source = json_source(str(tmp_path), SCHEMA, split_bytes="50b")
        context = make_context()
        in_thread = context.run_in_thread

        def counted(call: Callable[[], Any]) -> asyncio.Future[Any]:
            calls.append(call)
            return in_thread(call)

        context.run_in_thread = counted
        reader = open_reader(source, source.splits(1), context)
        assert reader.poll() is None
        assert len(calls) == 1
        await reader.wait()
        assert reader.poll() is not None
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert len(calls) == 2
        reader.close()

    asyncio.run(run())


@pytest.mark.server
@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_s3(s3_server: Any, tmp_path: Path, format: str) -> None:
    """Every position, and a changed object is noticed by its ETag."""
    client = s3_client(s3_server.options)

    def put(key: str, rows: list[dict[str, Any]]) -> None:
        body = write(tmp_path / "file", format, rows).read_bytes()
        client.put_object(Bucket=s3_server.bucket, Key=key, Body=body)

    put("in/1", ROWS[:4])
    put("in/2", ROWS[4:7])
    put("in/.hidden/3", ROWS)
    source = files_source(
        f"s3://{s3_server.bucket}/in",
        format=format,
        schema=SCHEMA,
        batch_rows=2,
        storage_options=s3_server.options,
    )
    asyncio.run(check_source(source, parallelisms=[2]))
    assert asyncio.run(read_all(source)) == ROWS[:7]
    splits = source.splits(1)
    put("in/1", [{**row, "id": row["id"] + 5} for row in ROWS[:4]])
    with pytest.raises(StateError, match="has changed"):
        asyncio.run(read_batches_of(source, splits))


@pytest.mark.server
@pytest.mark.parametrize("rate", [None, 1e9])
def test_s3_as_the_options_of_the_job_say(
    s3_server: Any, tmp_path: Path, rate: float | None
) -> None:
    """Listing, reading and writing: nothing but the job knows where the service is."""
    client = s3_client(s3_server.options)
    body = write(tmp_path / "file", "parquet", ROWS).read_bytes()
    client.put_object(Bucket=s3_server.bucket, Key="in/1", Body=body)
    source: Source = parquet_source(f"s3://{s3_server.bucket}/in", SCHEMA)
    if rate is not None:
        source = throttle(source, rate)
    job = hg.Job("copy", options=s3_server.options)
    sink = json_sink(f"s3://{s3_server.bucket}/out", guarantee="none")
    job.read(source, name="in").write(sink, name="out")
    job.run()
    listed = client.list_objects_v2(Bucket=s3_server.bucket, Prefix="out/")["Contents"]
    lines = [
        json.loads(line)
        for entry in listed
        for line in client.get_object(Bucket=s3_server.bucket, Key=entry["Key"])[
            "Body"
        ].iter_lines()
    ]
    assert [line["id"] for line in lines] == [row["id"] for row in ROWS]


def test_own_storage_options_win_over_those_of_the_job() -> None:
    own = {"s3.endpoint": "http://own"}
    source = csv_source("s3://bucket/in", SCHEMA, storage_options=own)
    configured = source.configure({"s3.endpoint": "http://job", "s3.region": "r", "x": "y"})
    assert configured.storage_options == {"s3.endpoint": "http://own", "s3.region": "r"}
    assert source.storage_options == own
    narrow = configured.with_columns(["id"])
    assert narrow.storage_options == configured.storage_options
    assert configured.schema == source.schema


async def read_batches_of(source: Any, splits: list[bytes]) -> None:
    await read_batches(open_reader(source, splits))


def test_splits_that_come_mixed_up_are_read_in_the_order_of_the_input(tmp_path):
    """After a change of parallelism; otherwise records would come late by whole files."""
    for name in ("a", "b"):
        table = pa.table({"n": pa.array(range(40), pa.int64())})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=10)
    source = files_source(str(tmp_path), format="parquet", batch_rows=4)
    splits = source.splits(1)
    mixed = [*splits[0::2], *splits[1::2]]

    async def read(order):
        batches = await read_batches(open_reader(source, order))
        return [record["n"] for batch in batches for record in records_of(batch)]

    assert asyncio.run(read(mixed)) == asyncio.run(read(splits)) == [*range(40)] * 2


def test_versions_of_many_files_are_asked_for_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On S3 each is a request; there are never more under way than the bound."""
    for number in range(40):
        (tmp_path / f"{number:02}.csv").write_text("id,name\n")
    together, running, lock, peak = threading.Barrier(2), 0, threading.Lock(), 0
    real = locations.version_of

    def version_of(store: Any, info: Any) -> str:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        together.wait(30)
        with lock:
            running -= 1
        return real(store, info)

    monkeypatch.setattr(locations, "version_of", version_of)
    found = locations.find_files(str(tmp_path), {})
    assert [Path(file.path).name for file in found] == [f"{n:02}.csv" for n in range(40)]
    assert 2 <= peak <= locations.REQUESTS_MAX


def test_clients_of_other_stores_send_no_checksums_unasked() -> None:
    """The trailers that AWS takes make other stores refuse uploads."""
    config = s3_client({"s3.endpoint": "http://127.0.0.1:9"}).meta.config
    assert config.request_checksum_calculation == "when_required"
    assert config.response_checksum_validation == "when_required"
    assert config.s3["addressing_style"] == "path"


def test_batches_of_long_parquet_rows_have_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BATCH_BYTES", 1 << 16)
    texts = [random.randbytes(512).hex() for _ in range(300)]
    table = pa.table({"id": range(300), "text": texts, "more": [{"text": text} for text in texts]})
    pq.write_table(table, tmp_path / "long.parquet", use_dictionary=False, compression="none")

    def sizes(columns: list[str]) -> list[int]:
        source = parquet_source(str(tmp_path / "long.parquet")).with_columns(columns)
        reader = open_reader(source, source.splits(1))
        return [len(batch) for batch in asyncio.run(read_batches(reader))]

    assert sizes(["id"]) == [300]
    assert 50 < max(sizes(["id", "text"])) < 65
    assert 50 < max(sizes(["more"])) < 65
