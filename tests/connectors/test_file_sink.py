"""The promise: whatever crashes when, readers see each record once, and nothing uncommitted."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headgate.connectors import (
    csv_sink,
    files_sink,
    files_source,
    json_sink,
    parquet_sink,
    s3_config,
)
from headgate.connectors.files import s3_drafts
from headgate.connectors.files.locations import s3_client
from headgate.connectors.files.sink import FileSink, FileSizes, FileWriter, PartName
from headgate.errors import HeadgateError, JobError, PlanError, StorageError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import DISCARDED_COUNTER, Guarantee, IfExists, SinkOperator
from headgate.state.snapshot import CommitPermit, RestoredState
from headgate.testing.connectors import (
    CheckMetrics,
    CheckTimers,
    check_sink,
    commit,
    make_context,
    read_all,
)

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
FORMATS = ["parquet", "csv", "json"]


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server, asked twice at most: moto answers 500 where S3 answers 404 NoSuchUpload."""
    monkeypatch.setattr(s3_config, "ATTEMPTS_MAX", 2)
    return s3_server


def batch(*ids: int) -> ColumnBatch:
    rows = [{"id": id_, "name": f"name {id_}" if id_ % 3 else None} for id_ in ids]
    return ColumnBatch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


def visible(path: object, format: str, options: dict[str, str] | None = None) -> list[Any]:
    """Return the files that a reader of the directory sees: those whose names do not begin with a dot."""
    source = files_source(str(path), format=format, schema=SCHEMA, storage_options=options)
    try:
        return asyncio.run(read_all(source))
    except UsageError:
        return []


def ids(rows: list[Any]) -> list[int]:
    return sorted(row["id"] for row in rows)


def prepare(operator: SinkOperator, checkpoint_id: int) -> dict[str, list[bytes]]:
    snapshot = operator.snapshot(checkpoint_id)
    assert snapshot is not None
    return {name: cut.items() for name, cut in snapshot.items.items()}  # type: ignore[operator]


def at_once(call: Callable[[], Any]) -> Any:
    """In place of a thread, where there is no event loop."""
    call()


def start(sink: Any, **given: Any) -> SinkOperator:
    operator = SinkOperator(sink)
    context = make_context(**given)
    in_thread, first = context.run_in_thread, iter([at_once])
    context.run_in_thread = lambda call: next(first, in_thread)(call)
    operator.open(context)
    return operator


def without_threads(operator: SinkOperator) -> SinkOperator:
    operator.context.run_in_thread = at_once
    return operator


@pytest.mark.server
def test_crash_matrix_s3(s3: Any) -> None:
    """Pending uploads must not be visible on S3, and dead ones must be gone at the end."""
    uri, options = f"s3://{s3.bucket}/out", s3.options
    client = s3_client(options)

    def keys() -> list[str]:
        found = client.list_objects_v2(Bucket=s3.bucket)
        return [item["Key"] for item in found.get("Contents", ())]

    def reset() -> None:
        for key in keys():
            client.delete_object(Bucket=s3.bucket, Key=key)
        for upload in client.list_multipart_uploads(Bucket=s3.bucket).get("Uploads", ()):
            client.abort_multipart_upload(
                Bucket=s3.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )

    def read() -> list[Any]:
        rows = []
        for key in keys():
            body = client.get_object(Bucket=s3.bucket, Key=key)["Body"].read()
            rows += pq.read_table(pa.BufferReader(body)).to_pylist()
        return rows

    asyncio.run(
        check_sink(
            lambda: parquet_sink(uri, guarantee="exactly_once"),
            [batch(1, 2), batch(3)],
            read,
            reset,
            options,
            crash_twice=False,
        )
    )


@pytest.mark.parametrize("format", FORMATS)
def test_values_survive(tmp_path: Path, format: str) -> None:
    """Nulls, empty and odd texts, times and extremes come back as they were."""
    schema = pa.schema(
        [
            ("i", pa.int64()),
            ("s", pa.string()),
            ("f", pa.float64()),
            ("b", pa.bool_()),
            ("t", pa.timestamp("ms", tz="UTC")),
            ("n", pa.timestamp("us")),
            ("d", pa.date32()),
        ]
    )
    columns = {
        "i": [2**63 - 1, None, -(2**63)],
        "s": ['a "quoted", text', None, ""],
        "f": [0.1, None, -1e300],
        "b": [True, None, False],
        "t": pa.array([1_735_689_600_123, None, 0], schema.field("t").type),
        "n": pa.array([1_735_689_600_123_456, None, -1], schema.field("n").type),
        "d": pa.array([20_000, None, 0], schema.field("d").type),
    }
    data = pa.RecordBatch.from_pydict(columns, schema=schema)
    sink = files_sink(str(tmp_path), format=format, guarantee="at_least_once")
    sink.bind(schema)
    operator = start(sink)
    operator.process(ColumnBatch(data), 0)
    without_threads(operator).finish()
    operator.close()
    source = files_source(str(tmp_path), format=format, schema=schema)
    assert asyncio.run(read_all(source)) == data.to_pylist()


def test_a_pending_file_is_not_visible_and_its_name_sorts(tmp_path: Path) -> None:
    async def run() -> None:
        operator = start(parquet_sink(str(tmp_path), guarantee="exactly_once"), attempt=3)
        for checkpoint_id in (7, 8):
            operator.process(batch(checkpoint_id), 0)
            prepare(operator, checkpoint_id)
            assert [p.name for p in tmp_path.iterdir()] == [".headgate"]
        await commit(operator, 8)
        operator.close()

    asyncio.run(run())
    names = sorted(p.name for p in tmp_path.glob("part-*"))
    parts = [PartName.parse(name) for name in names]
    assert [(p.attempt, p.after, p.subtask, p.number) for p in parts if p] == [
        (3, 0, 0, 0),
        (3, 7, 0, 1),
    ]
    assert [pq.read_table(tmp_path / name)["id"].to_pylist() for name in names] == [[7], [8]]


@pytest.mark.parametrize("roll_bytes", [1, 4000])
def test_files_end_at_their_size(tmp_path: Path, roll_bytes: int) -> None:
    """Files begun and ended between two barriers are committed with the second, all of them."""

    async def run() -> None:
        sink = json_sink(str(tmp_path), guarantee="exactly_once", roll_bytes=roll_bytes)
        operator = start(sink)
        for number in range(20):
            operator.process(batch(*range(number * 50, number * 50 + 50)), 0)
        prepare(operator, 1)
        assert visible_now(tmp_path) == []
        await commit(operator, 1)
        operator.close()

    asyncio.run(run())
    files = visible_now(tmp_path)
    assert len(files) == 20 if roll_bytes == 1 else 2 < len(files) < 20
    assert ids(visible(tmp_path, "json")) == list(range(1000))


def visible_now(directory: Path) -> list[Path]:
    return sorted(directory.glob("part-*"))


def test_at_least_once_shows_files_when_they_end(tmp_path: Path) -> None:
    async def run() -> None:
        timers = CheckTimers()
        sink = csv_sink(str(tmp_path), guarantee="at_least_once", roll_every="5s")
        operator = start(sink, timers=timers)
        operator.process(batch(1), 0)
        assert [delay for delay, _ in timers.due.values()] == [5000]
        assert visible_now(tmp_path) == []
        timers.fire()
        while not visible_now(tmp_path):  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0)
        operator.process(batch(2), 0)
        assert prepare(operator, 1) == {"committables": []}
        assert len(visible_now(tmp_path)) == 2
        operator.process(batch(3), 0)
        without_threads(operator).finish()
        operator.close()
        assert timers.due == {}

    asyncio.run(run())
    assert ids(visible(tmp_path, "csv")) == [1, 2, 3]


@pytest.mark.parametrize("guarantee", ["at_least_once", "none"])
def test_files_that_are_visible_are_forgotten(tmp_path: Path, guarantee: str) -> None:
    """A job without checkpoints never comes to a barrier: what it remembers must not grow."""

    async def run() -> None:
        operator = start(json_sink(str(tmp_path), guarantee=guarantee, roll_bytes=1))
        writer: Any = operator.writer
        for number in range(30):
            operator.process(batch(number), 0)
        while writer._closed:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0)
        assert len(visible_now(tmp_path)) == 30
        operator.process(batch(30), 0)
        without_threads(operator).finish()
        operator.close()

    asyncio.run(asyncio.wait_for(run(), 120))
    assert ids(visible(tmp_path, "json")) == list(range(31))


def test_guarantee_none_writes_in_place(tmp_path: Path) -> None:
    operator = start(csv_sink(str(tmp_path), guarantee="none"))
    operator.process(batch(1), 0)
    assert len(visible_now(tmp_path)) == 1
    without_threads(operator).finish()
    operator.close()
    assert not (tmp_path / ".headgate").exists()
    assert ids(visible(tmp_path, "csv")) == [1]


def drafts(directory: Path) -> list[tuple[int, int, int]]:
    """(attempt, after, subtask) of the drafts of the sink."""
    hidden = directory / ".headgate" / "conformance" / "sink"
    parts = [PartName.parse(path.name) for path in hidden.iterdir()]
    return sorted((p.attempt, p.after, p.subtask) for p in parts if p is not None)


def test_cleanup_deletes_what_is_dead_and_nothing_else(tmp_path: Path) -> None:
    """Leftovers of all kinds; which of them a restore of checkpoint 5 at parallelism 2 may delete."""
    sink = parquet_sink(str(tmp_path), guarantee="exactly_once")
    for attempt in (9, 2, 1):  # newest first, or opening the newer ones would clean up already
        for after in (3, 5, 6):
            for subtask in (0, 1, 2, 3):
                context: dict[str, Any] = {"attempt": attempt, "subtask_index": subtask}
                context["parallelism"] = 4
                operator = start(sink, restored_checkpoint=after, **context)
                operator.process(batch(1), 0)
                prepare(operator, after + 1)
    before = drafts(tmp_path)
    assert len(before) == 36

    metrics = CheckMetrics()
    for index in (0, 1):
        context = {"attempt": 5, "subtask_index": index, "parallelism": 2, "metrics": metrics}
        start(sink, restored_checkpoint=5, **context).close()
    dead = [(attempt, after, subtask) for attempt, after, subtask in before if attempt < 5 <= after]
    assert dead
    assert drafts(tmp_path) == sorted(set(before) - set(dead))
    assert metrics.counts[DISCARDED_COUNTER] == len(dead)


def test_cleanup_leaves_other_subtasks_and_sinks_alone(tmp_path: Path) -> None:
    sink = parquet_sink(str(tmp_path), guarantee="exactly_once")
    for subtask in (0, 1, 2):
        writer = start(sink, attempt=1, subtask_index=subtask, parallelism=3).writer
        writer.write(batch(1))
        writer.roll(1)
    start(sink, attempt=2, subtask_index=1, parallelism=2, operator_name="other").close()
    start(sink, attempt=2, subtask_index=1, parallelism=2).close()
    assert drafts(tmp_path) == [(1, 0, 0), (1, 0, 2)]
    start(sink, attempt=2, subtask_index=0, parallelism=2).close()
    assert drafts(tmp_path) == []


def test_a_job_begun_anew_in_the_same_directory_overwrites_nothing(tmp_path: Path) -> None:
    """With its checkpoints wiped a job counts attempts from 1 again; files must not collide."""

    async def run() -> None:
        for number in range(3):
            operator = start(parquet_sink(str(tmp_path), guarantee="exactly_once"), attempt=1)
            operator.process(batch(number), 0)
            prepare(operator, 1)
            await commit(operator, 1)
            operator.close()

    asyncio.run(run())
    assert ids(visible(tmp_path, "parquet")) == [0, 1, 2]


def test_two_sinks_share_a_directory(tmp_path: Path) -> None:
    async def run() -> None:
        for name in ("left", "right/../.."):
            sink = parquet_sink(str(tmp_path), guarantee="exactly_once")
            operator = start(sink, operator_name=name)
            operator.process(batch(len(name)), 0)
            prepare(operator, 1)
            await commit(operator, 1)
            operator.close()

    asyncio.run(run())
    assert ids(visible(tmp_path, "parquet")) == [4, 11]
    assert len(list((tmp_path / ".headgate" / "conformance").iterdir())) == 2


def test_the_loop_goes_on_while_a_sink_waits_for_its_storage(tmp_path: Path) -> None:
    """Looking for leftovers, committing what was restored, the rest at the end: all in threads."""
    at_work: list[str] = []

    class Slow(FileWriter):
        def prepare(self) -> None:
            at_work.append(threading.current_thread().name)
            super().prepare()

        def commit(self, *given: Any) -> None:
            at_work.append(threading.current_thread().name)
            assert visible_now(tmp_path) == []
            super().commit(*given)

        def _show(self, files: Any) -> None:
            at_work.append(threading.current_thread().name)
            super()._show(files)

    class SlowSink(FileSink):
        def writer(self) -> FileWriter:
            return Slow(self)

    async def run(guarantee: Guarantee, **given: Any) -> None:
        sizes = FileSizes(None, 1 << 20, None, 1 << 20)
        sink = SlowSink(str(tmp_path), "csv", guarantee, sizes, {}, IfExists.ERROR)
        operator = SinkOperator(sink)
        for waiting in (
            operator.open(make_context(**given)),
            operator.restore(RestoredState(items=items)),
        ):
            if waiting is not None:
                await waiting
        operator.process(batch(2), 0)
        if (rest := operator.finish()) is not None:
            await rest
        operator.close()

    first = start(csv_sink(str(tmp_path), guarantee="exactly_once"))
    first.process(batch(1), 0)
    items = prepare(first, 1)
    asyncio.run(run(Guarantee.EXACTLY_ONCE, attempt=2, restored_checkpoint=1))
    assert ids(visible(tmp_path, "csv")) == [1]
    items = {}
    asyncio.run(run(Guarantee.AT_LEAST_ONCE, attempt=3, restored_checkpoint=1))
    assert ids(visible(tmp_path, "csv")) == [1, 2]
    assert len(at_work) == 4
    assert threading.main_thread().name not in at_work


def test_a_lost_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    operator = start(parquet_sink(str(tmp_path), guarantee="exactly_once"))
    operator.process(batch(1), 0)
    items = prepare(operator, 1)
    for path in (tmp_path / ".headgate").rglob("part-*"):
        path.unlink()
    restored = start(
        parquet_sink(str(tmp_path), guarantee="exactly_once"), attempt=2, restored_checkpoint=1
    )
    with pytest.raises(JobError, match=r"neither pending nor committed target=`.*part-"):
        without_threads(restored).restore(RestoredState(items=items))


def test_a_foreign_file_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    operator = start(parquet_sink(str(tmp_path), guarantee="exactly_once"))
    operator.process(batch(1), 0)
    prepare(operator, 1)
    (draft,) = (tmp_path / ".headgate").rglob("part-*")
    (tmp_path / draft.name).write_text("precious")
    with pytest.raises(StorageError, match="another file has the name"):
        operator.writer.commit(
            operator._ledger.due(1),
            CommitPermit("conformance", 1, 1),
        )
    assert (tmp_path / draft.name).read_text() == "precious"
    assert draft.exists()


def test_a_failed_attempt_drops_what_was_never_prepared(tmp_path: Path) -> None:
    operator = start(parquet_sink(str(tmp_path), guarantee="exactly_once", roll_bytes=1))
    operator.process(batch(1), 0)
    operator.process(batch(2), 0)
    assert len(drafts(tmp_path)) == 2
    operator.close()
    assert drafts(tmp_path) == []


def test_a_broken_disk_is_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that failed may succeed when repeated though the data is gone: it must stay failed."""
    import os

    operator = start(parquet_sink(str(tmp_path), guarantee="exactly_once"))
    operator.process(batch(1), 0)
    real = os.fsync

    def broken(descriptor: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError, match="input/output error"):
        prepare(operator, 1)
    monkeypatch.setattr(os, "fsync", real)
    with pytest.raises(StorageError, match="input/output error"):
        prepare(operator, 2)


@pytest.mark.server
def test_s3_parts_are_uploaded_while_writing(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, more than may wait: all arrive, in order, and a failed one is sent again."""
    monkeypatch.setattr(s3_drafts, "PART_BYTES", 5 << 20)
    text = "x" * 1000
    rows = 6000
    data = pa.RecordBatch.from_pydict({"id": range(rows), "name": [text] * rows}, schema=SCHEMA)

    async def run() -> None:
        sink = csv_sink(f"s3://{s3.bucket}/a/b", guarantee="exactly_once")
        operator = start(sink, options={**s3.options, "s3.fast.upload.active.blocks": "1"})
        for _ in range(4):
            operator.process(ColumnBatch(data), 0)
        await asyncio.to_thread(prepare, operator, 1)
        assert visible(f"s3://{s3.bucket}/a/b", "csv", s3.options) == []
        await commit(operator, 1)
        operator.close()

    def visible(path: str, format: str, options: dict[str, str]) -> list[str]:
        found = s3_client(options).list_objects_v2(Bucket=s3.bucket, Prefix="a/b/")
        return [item["Key"] for item in found.get("Contents", ())]

    asyncio.run(run())
    source = files_source(
        f"s3://{s3.bucket}/a/b",
        format="csv",
        schema=SCHEMA,
        storage_options=s3.options,
    )
    assert [row["id"] for row in asyncio.run(read_all(source))] == [*range(rows)] * 4


@pytest.mark.server
def test_s3_parts_of_an_encoder_that_writes_when_it_is_closed(s3: Any) -> None:
    """A Parquet row group is written at the barrier, in an I/O thread: larger than a part."""
    rows = 30_000
    texts = [random.Random(row).randbytes(500).hex() for row in range(rows)]
    data = pa.RecordBatch.from_pydict({"id": range(rows), "name": texts}, schema=SCHEMA)

    async def run() -> None:
        sink = parquet_sink(f"s3://{s3.bucket}/late", guarantee="exactly_once")
        operator = start(sink, options=s3.options)
        operator.process(ColumnBatch(data), 0)
        await asyncio.to_thread(prepare, operator, 1)
        await commit(operator, 1)
        operator.close()

    asyncio.run(run())
    source = files_source(
        f"s3://{s3.bucket}/late", format="parquet", schema=SCHEMA, storage_options=s3.options
    )
    assert [row["id"] for row in asyncio.run(read_all(source))] == [*range(rows)]


@pytest.mark.server
def test_s3_cleanup_aborts_dead_uploads_only(s3: Any) -> None:
    uri, options = f"s3://{s3.bucket}/out", s3.options
    client = s3_client(options)

    def uploads() -> list[tuple[int, int, int]]:
        found = client.list_multipart_uploads(Bucket=s3.bucket).get("Uploads", ())
        parts = [PartName.parse(upload["Key"].removeprefix("out/")) for upload in found]
        return sorted((p.attempt, p.after, p.subtask) for p in parts if p is not None)

    def begin(attempt: int, after: int, subtask: int) -> None:
        operator = start(
            parquet_sink(uri, guarantee="exactly_once"),
            attempt=attempt,
            restored_checkpoint=after,
            subtask_index=subtask,
            parallelism=3,
            options=options,
        )
        operator.process(batch(1), 0)
        prepare(operator, after + 1)

    begin(1, 4, 0)
    begin(1, 5, 0)
    begin(1, 5, 2)
    begin(7, 5, 1)
    assert uploads() == [(1, 4, 0), (1, 5, 0), (1, 5, 2), (7, 5, 1)]
    for subtask in (0, 1):
        start(
            parquet_sink(uri, guarantee="exactly_once"),
            attempt=2,
            restored_checkpoint=5,
            subtask_index=subtask,
            parallelism=2,
            options=options,
        ).close()
    assert uploads() == [(1, 4, 0), (7, 5, 1)]


@pytest.mark.server
def test_s3_commit_of_a_lost_upload_is_an_error(s3: Any) -> None:
    """Neither the upload nor our object is there: another object under the key is not ours."""
    uri, options = f"s3://{s3.bucket}/out", s3.options
    client = s3_client(options)
    operator = start(parquet_sink(uri, guarantee="exactly_once"), options=options)
    operator.process(batch(1), 0)
    items = prepare(operator, 1)
    (upload,) = client.list_multipart_uploads(Bucket=s3.bucket)["Uploads"]
    key = upload["Key"]
    client.abort_multipart_upload(Bucket=s3.bucket, Key=key, UploadId=upload["UploadId"])
    client.put_object(Bucket=s3.bucket, Key=key, Body=b"foreign")
    restored = start(
        parquet_sink(uri, guarantee="exactly_once"),
        attempt=2,
        restored_checkpoint=1,
        options=options,
    )
    with pytest.raises(StorageError, match=key):
        without_threads(restored).restore(RestoredState(items=items))


class RecordingClient:
    """Stands for S3: an empty bucket that writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._listing = ""

    def get_paginator(self, name: str) -> RecordingClient:
        self._listing = name
        return self

    def paginate(self, **given: Any) -> list[Any]:
        self.calls.append((self._listing, given))
        return []

    def __getattr__(self, name: str) -> Callable[..., dict[str, str]]:
        def call(**given: Any) -> dict[str, str]:
            self.calls.append((name, given))
            return {"UploadId": "upload", "ETag": "etag"}

        return call

    def named(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == name]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingClient:
    client = RecordingClient()
    monkeypatch.setattr(s3_drafts, "s3_client", lambda options: client)
    return client


def test_a_restart_lists_only_its_own_part_of_the_prefix(recording: RecordingClient) -> None:
    """The directory may hold years of other files."""
    for attempt in (1, 2):
        start(
            parquet_sink("s3://bucket/out", guarantee="exactly_once"),
            attempt=attempt,
            subtask_index=1,
            parallelism=4,
        ).close()
    listed = [given["Prefix"] for given in recording.named("list_objects_v2")]
    objects = [prefix for prefix in listed if ".headgate" not in prefix]
    tag = objects[0].removeprefix("out/part-")[:8]
    assert PartName.parse(f"{PartName(tag, 1, 0, 0, 0)}.csv") == PartName(tag, 1, 0, 0, 0)
    held = {prefix.rpartition("/")[2] for prefix in listed if prefix not in objects}
    assert held == {f"part-{tag}-", *(f"part-{tag}-{attempt:010}-" for attempt in (1, 2))}
    assert objects == [f"out/part-{tag}-{attempt:010}-" for attempt in (1, 2)]
    uploads = {given["Prefix"] for given in recording.named("list_multipart_uploads")}
    assert uploads == {f"out/part-{tag}-", *objects}


def test_each_part_is_sent_with_its_md5(recording: RecordingClient) -> None:
    """So the server refuses a part that changed on its way."""
    operator = start(csv_sink("s3://bucket/out", guarantee="exactly_once"))
    operator.process(batch(1, 2), 0)
    prepare(operator, 1)
    (part,) = recording.named("upload_part")
    assert b64decode(part["ContentMD5"]) == hashlib.md5(part["Body"]).digest()


def test_what_is_dropped_is_not_uploaded_first(recording: RecordingClient) -> None:
    """A Parquet encoder writes its rows when it is closed, more than a part of them."""
    texts = [random.Random(row).randbytes(500).hex() for row in range(30_000)]
    data = pa.RecordBatch.from_pydict({"id": range(30_000), "name": texts}, schema=SCHEMA)

    async def run() -> None:
        operator = start(parquet_sink("s3://bucket/out", guarantee="exactly_once"))
        operator.process(ColumnBatch(data), 0)
        operator.close()

    asyncio.run(run())  # waits for the threads
    assert recording.named("upload_part") == []
    assert recording.named("create_multipart_upload") == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parquet_sink("x", guarantee="twice"), "no such guarantee"),
        (lambda: parquet_sink("x", guarantee="none", roll_bytes="3"), "not a size"),
        (lambda: parquet_sink("x", guarantee="none", roll_every=3), "needs a unit"),
        (lambda: parquet_sink("ftp://x", guarantee="none"), "no such kind of storage"),
        (lambda: parquet_sink("s3:///x", guarantee="none"), "malformed"),
        (lambda: files_sink("x", format="orc", guarantee="none"), "no such file format"),
        (
            lambda: parquet_sink("x", guarantee="none", storage_options={"s3.endpont": ""}),
            "unknown storage option",
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_streams_that_do_not_fit_are_refused_at_plan_time() -> None:
    with pytest.raises(PlanError, match="add into="):
        parquet_sink("x", guarantee="none").bind(None)
    nested = pa.schema([("a", pa.list_(pa.int64()))])
    with pytest.raises(PlanError, match="column=`a`"):
        csv_sink("x", guarantee="none").bind(nested)
    json_sink("x", guarantee="none").bind(nested)
    parquet_sink("x", guarantee="none").bind(nested)


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadgateError, match="cannot be made"):
        start(parquet_sink(str(tmp_path / "file" / "out"), guarantee="exactly_once"))
