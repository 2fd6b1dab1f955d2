"""Files that appear while a job runs are read once each, through crashes, restarts and rescales."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.api.job_definition import definition_of
from headgate.connectors import (
    csv_source,
    files_source,
    hybrid_source,
    json_source,
    parquet_sink,
    parquet_source,
    throttle,
)
from headgate.connectors.files.locations import s3_client
from headgate.errors import HeadgateError, StateError, UsageError
from headgate.operators.source import Source, SplitsLeftOutError
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader
from headgate.tests.support.connector_runs import Fails

SCHEMA = {"id": "long"}
ROWS = 100
MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: grows}
spec:
  sources:
    orders:
      parquet: {path: in, discoverEvery: 10s, rate: 5}
      schema: {id: long}
  sinks:
    out: {from: orders, print: {}}
"""


def put(directory: Path, name: str, first: int, rows: int = ROWS) -> Path:
    """Add a Parquet file of several row groups, as a writer should: it gets its name when it is whole."""
    ids = pa.table({"id": pa.array(range(first, first + rows), pa.int64())})
    being_written = directory / f".{name}"
    pq.write_table(ids, being_written, row_group_size=30)
    return being_written.rename(directory / name)


def keys(source: Source, found: list[bytes]) -> list[str]:
    return [Path(source.split_key(split)).name for split in found]


def known(source: Source, found: list[bytes]) -> dict[str, bytes]:
    return {source.split_key(split): split for split in found}


def job(
    directory: Path,
    *,
    parallelism: int,
    every: str | None,
    at: tuple[int, ...] = (),
    rate: float = 1e9,
) -> hg.Job:
    made = hg.Job("grows", parallelism=parallelism)
    made.checkpoint(every="1h", storage=str(directory / "state"))
    made.restart(hg.fixed_delay(attempts=5, delay="10ms"))
    source = parquet_source(directory / "in", SCHEMA, batch_rows=10, discover_every=every)
    orders = made.read(throttle(source, rate), name="orders")
    seen = orders.map(Fails(directory / "marks", at), into=SCHEMA, name="fails")
    seen.write(parquet_sink(directory / "out", guarantee="exactly_once"), name="out")
    return made


def written(directory: Path) -> list[int]:
    files = (directory / "out").glob("[!.]*.parquet")
    return sorted(row["id"] for file in files for row in pq.read_table(file).to_pylist())


def wait_for(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoint_until(handle: hg.JobHandle, rows: int, directory: Path) -> None:
    def visible() -> bool:
        with contextlib.suppress(HeadgateError):  # the job restarts
            handle.checkpoint()
        assert handle.status()["status"] != "FAILED"
        return len(written(directory)) >= rows

    wait_for(visible)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("in", "marks"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("parallelism", [1, 3])
def test_files_that_appear_are_read_once(directory: Path, parallelism: int) -> None:
    """A file is found, read in part, and lost by a crash; others come while the job is down, and it
    starts again at another parallelism."""
    inbox = directory / "in"
    put(inbox, "a.parquet", 0)
    with job(directory, parallelism=parallelism, at=(150,), every="50ms").start() as handle:
        checkpoint_until(handle, ROWS, directory)
        put(inbox, "b.parquet", 100)
        wait_for((directory / "marks" / "150").exists)
        checkpoint_until(handle, 2 * ROWS, directory)
        put(inbox, "c.parquet", 200)
        checkpoint_until(handle, 3 * ROWS, directory)
        handle.stop()
    put(inbox, "d.parquet", 300)
    put(inbox, "e.parquet", 400)
    with job(directory, parallelism=4 - parallelism, every="50ms").start() as handle:
        checkpoint_until(handle, 5 * ROWS, directory)
        put(inbox, "f.parquet", 500)
        checkpoint_until(handle, 6 * ROWS, directory)
        handle.stop()
    assert written(directory) == list(range(6 * ROWS))


def test_an_empty_directory_is_waited_for(directory: Path) -> None:
    for first in (0, ROWS):
        with job(directory, parallelism=2, every="50ms").start() as handle:
            wait_for(lambda handle=handle: handle.status()["status"] == "RUNNING")
            if not first:
                handle.stop()
                continue
            put(directory / "in", "a.parquet", 0)
            checkpoint_until(handle, ROWS, directory)
            handle.stop()
    assert written(directory) == list(range(ROWS))


def test_a_bounded_run_does_not_know_what_it_has_read(directory: Path) -> None:
    put(directory / "in", "a.parquet", 0)
    put(directory / "in", "b.parquet", ROWS)
    with job(directory, parallelism=1, every=None, rate=0.01).start() as handle:
        checkpoint_until(handle, 10, directory)
        handle.stop()
    with pytest.raises(StateError, match="does not say which files had been read") as raised:
        job(directory, parallelism=1, every="50ms").run()
    assert "leave discover_every out" in str(raised.value)


def test_a_run_without_the_option_reads_what_was_found(directory: Path) -> None:
    for name, first in (("a.parquet", 0), ("b.parquet", ROWS)):
        put(directory / "in", name, first)
    with job(directory, parallelism=1, every="50ms", rate=100).start() as handle:
        checkpoint_until(handle, 10, directory)
        handle.stop()
    put(directory / "in", "c.parquet", 2 * ROWS)
    job(directory, parallelism=1, every=None).run()
    assert written(directory) == list(range(2 * ROWS))


def test_files_being_written_are_passed_over(directory: Path) -> None:
    inbox = directory / "in"
    put(inbox, "a.parquet", 0)
    for name in (".b.parquet", "_c.parquet", "d.parquet.tmp", "part-0.inprogress.1", "e.parquet"):
        (inbox / name).write_bytes(b"half" if name != "e.parquet" else b"")
    (inbox / "_temporary").mkdir()
    (inbox / "_temporary" / "f.parquet").write_bytes(b"half")
    source = parquet_source(inbox, SCHEMA, discover_every="10s")
    assert keys(source, source.discover({})) == ["a.parquet"]
    assert set(keys(source, source.splits(1))) == {"a.parquet"}


def test_one_bad_file_holds_up_no_other(directory: Path) -> None:
    inbox = directory / "in"
    put(inbox, "a.parquet", 0)
    (inbox / "b.parquet").write_bytes(b"not whole yet")
    source = parquet_source(inbox, SCHEMA, discover_every="10s")
    with pytest.raises(SplitsLeftOutError, match=r"not a Parquet file .*b\.parquet") as raised:
        source.discover({})
    assert keys(source, raised.value.found) == ["a.parquet"]
    (inbox / "b.parquet").unlink()
    put(inbox, "b.parquet", ROWS)
    assert keys(source, source.discover({})) == ["a.parquet", "b.parquet"]


@pytest.mark.parametrize("format", ["csv", "json"])
def test_a_file_that_changes_is_named_and_not_read_again(directory: Path, format: Any) -> None:
    path = directory / "in" / "a"
    lines = ["id", "1", "2"] if format == "csv" else ['{"id": 1}', '{"id": 2}']
    path.write_text("\n".join(lines) + "\n")
    source = files_source(directory / "in", format=format, schema=SCHEMA, discover_every="10s")
    before = source.discover({})
    os.utime(path, ns=(1, 1))
    with pytest.raises(SplitsLeftOutError, match=r"changed .*no file is read twice") as raised:
        source.discover(known(source, before))
    assert raised.value.found == before
    assert "another name" in str(raised.value)


def test_what_is_known_is_not_opened_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(directory / "in", "a.parquet", 0)
    source = parquet_source(directory / "in", SCHEMA, discover_every="10s")
    before = source.discover({})
    monkeypatch.setattr("headgate.connectors.files.source.parquet_footer", None)
    assert source.discover(known(source, before)) == before
    (directory / "in" / "a.parquet").unlink()
    assert source.discover(known(source, before)) == []


@pytest.mark.server
def test_a_bucket_grows(s3_server: Any, directory: Path) -> None:
    """A prefix without an object is empty, and an object that is written again is noticed by its ETag."""
    client = s3_client(s3_server.options)

    def upload(name: str, first: int) -> None:
        body = put(directory / "in", "body", first).read_bytes()
        client.put_object(Bucket=s3_server.bucket, Key=f"grows/{name}", Body=body)

    source = parquet_source(
        f"s3://{s3_server.bucket}/grows",
        SCHEMA,
        discover_every="10s",
        storage_options=s3_server.options,
    )
    assert source.splits(1) == source.discover({}) == []
    upload("a.parquet", 0)
    upload("b.parquet.tmp", 0)
    before = source.discover({})
    assert keys(source, before) == ["a.parquet"]
    assert {source.split_key(split) for split in source.splits(1)} == known(source, before).keys()
    upload("a.parquet", 0)  # the same bytes at another time
    upload("c.parquet", ROWS)
    found = source.discover(known(source, before))
    assert keys(source, found) == ["a.parquet", "c.parquet"]
    upload("a.parquet", ROWS)
    with pytest.raises(SplitsLeftOutError, match=r"grows/a\.parquet"):
        source.discover(known(source, found))


def test_the_parts_of_a_file_have_one_key(directory: Path) -> None:
    """Also after a reader has taken them apart, and whatever `split_bytes` is later."""
    path = directory / "in" / "a"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(100)))
    source = json_source(directory / "in", SCHEMA, discover_every="10s", split_bytes=200)
    (found,) = source.discover({})
    reader = open_reader(source, [found])
    parts = reader.snapshot()
    reader.close()
    assert len(parts) > 2
    assert {source.split_key(split) for split in [found, *parts, *source.splits(1)]} == {str(path)}
    wide = json_source(directory / "in", SCHEMA, discover_every="10s")
    assert [wide.split_key(split) for split in wide.discover({})] == [str(path)]


def test_a_manifest_can_say_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    path = directory / "job.yaml"
    path.write_text(MANIFEST)
    (source,) = [node.source for node in definition_of(load_job(path)).graph.sources()]
    assert source is not None
    assert (source.discovers, source.discover_every_ms, source.bounded) == (True, 10_000, False)


def test_what_cannot_be(directory: Path) -> None:
    inbox = directory / "in"
    with pytest.raises(UsageError, match="no file yet"):
        parquet_source(inbox, discover_every="10s")
    with pytest.raises(UsageError, match="discover_every"):
        parquet_source(inbox, SCHEMA, discover_every="0s")
    with pytest.raises(UsageError, match="no such directory"):
        csv_source(directory / "absent" / "*.csv", SCHEMA, discover_every="1s").splits(1)
    growing = throttle(csv_source(inbox, SCHEMA, discover_every="1s"), 10)
    with pytest.raises(UsageError, match="does not look for further splits"):
        hybrid_source(csv_source(inbox, SCHEMA), growing)
    with pytest.raises(UsageError, match="the history has no end"):
        hybrid_source(growing, csv_source(inbox, SCHEMA))
