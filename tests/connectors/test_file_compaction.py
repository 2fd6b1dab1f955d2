"""Small files of a file sink are merged before they become visible: once, after any failure."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import files_sink, generator, json_sink, parquet_sink, s3_config, sequence
from headgate.connectors.files import drafts
from headgate.connectors.files.drafts import LocalTarget
from headgate.connectors.files.locations import s3_client
from headgate.connectors.files.sink import FileSink, PartName
from headgate.errors import CorruptError, JobError, StorageError, UsageError
from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.sink import GuaranteeLike, SinkOperator
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context
from headgate.testing.connectors.context import open_sink, pre_commit
from headgate.testing.connectors.sink_checks import CrashPoint, _SinkJob, commit
from headgate.tests.support.connector_cases import (
    CsvSink,
    FileSinkCase,
    JsonSink,
    LinesSink,
    ParquetSink,
)
from headgate.tests.support.damaged_parts import drafts_in
from headgate.tests.support.skips import thorough_only

FORMATS = {"csv": CsvSink, "json": JsonSink, "parquet": ParquetSink, "text": LinesSink}
Crash = tuple[int, CrashPoint]


async def check_crashes(
    make: Callable[[], FileSink],
    batches: Sequence[Batch],
    records: Sequence[Sequence[Any]],
    read: Callable[[], list[Any]],
    crashes: Sequence[Crash],
    options: dict[str, str] | None = None,
    *,
    close: bool = True,
) -> None:
    """Run a sink through crashes. Readers always see whole epochs, none before its checkpoint, each once.

    Args:
        close: whether the writer of a crashed attempt is closed; a killed process closes nothing.
    """
    job = _SinkJob(make(), batches, options)

    def seen() -> int:
        found = sorted(read(), key=repr)
        for epochs in range(job.log.epoch + 1):
            if found == sorted(itertools.chain(*records[:epochs]), key=repr):
                return epochs
        raise AssertionError(f"after {crashes}: not the records of whole epochs: {found}")

    before = 0
    for crash in crashes:
        await job.run(await job.start(), crash, close=close)
        assert seen() >= before
        before = seen()
    operator = await job.start()
    assert seen() >= before
    await job.run(operator, None)
    assert seen() == len(batches), crashes


def all_crashes(epochs: int) -> list[Crash]:
    return [(epoch, point) for epoch in range(epochs) for point in CrashPoint]


def case_crashes(
    case: FileSinkCase,
    crashes: Sequence[Sequence[Crash]],
    every: int,
    close: Sequence[bool] = (True, False),
) -> None:
    """Run a sink of files on local disk through sequences of crashes."""
    rows = case.records()[:8]
    batches = case.batches(rows)
    records = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    for each, closed in itertools.product(crashes, close):
        with case.place() as place:

            def make(place: Path = place) -> FileSink:
                return files_sink(
                    place,
                    format=case.format,  # type: ignore[arg-type]
                    guarantee="exactly_once",
                    compact_every=every,
                )

            def read(place: Path = place) -> list[Any]:
                return case.visible(place)

            asyncio.run(check_crashes(make, batches, records, read, each, close=closed))
            assert not case.pending(place), each


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_all_formats_are_merged(format: str) -> None:
    case_crashes(FORMATS[format](), [[(3, CrashPoint.AFTER_PREPARE)]], every=2)


def test_any_crash() -> None:
    case_crashes(JsonSink(), [[crash] for crash in all_crashes(4)], every=2)


@pytest.mark.parametrize("every", [2, 3])
def test_any_two_crashes(every: int) -> None:
    thorough_only()
    pairs = [
        [first, second]
        for first, second in itertools.product(all_crashes(4), repeat=2)
        if second[0] >= first[0]
    ]
    case_crashes(JsonSink(), pairs, every, close=[False])


@pytest.mark.server
def test_any_crash_on_s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_config, "ATTEMPTS_MAX", 2)  # moto answers 500 where S3 answers 404
    s3 = s3_server
    client = s3_client(s3.options)

    def keys(prefix: str) -> list[str]:
        found = client.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)
        return [item["Key"] for item in found.get("Contents", ())]

    rows = ParquetSink().records()[:6]
    batches = ParquetSink().batches(rows)
    records = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    for number, crash in enumerate(all_crashes(2)[5:]):
        prefix = f"out{number}/"

        def make(prefix: str = prefix) -> FileSink:
            return parquet_sink(
                f"s3://{s3.bucket}/{prefix}", guarantee="exactly_once", compact_every=2
            )

        def read(prefix: str = prefix) -> list[Any]:
            found = []
            for key in keys(f"{prefix}part-"):
                body = client.get_object(Bucket=s3.bucket, Key=key)["Body"].read()
                found += pq.read_table(pa.BufferReader(body)).to_pylist()
            return found

        asyncio.run(check_crashes(make, batches, records, read, [crash], s3.options))
        assert keys(f"{prefix}.headgate/") == []
        uploads = client.list_multipart_uploads(Bucket=s3.bucket, Prefix=prefix)
        assert not uploads.get("Uploads")


# -- one writer ----------------------------------------------------------------------------------------


def rows(*ids: int) -> ColumnBatch:
    return ColumnBatch(pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int64())}))


def sink_in(directory: Path, **options: Any) -> FileSink:
    return json_sink(directory, guarantee="exactly_once", **{"compact_every": 3, **options})


def ids_in(directory: Path) -> list[int]:
    files = sorted(directory.glob("part-*"))
    return [int(line[6:-1]) for file in files for line in file.read_text().splitlines()]


class Writer:
    """One writer, whose checkpoints are complete and committed unless the test says otherwise."""

    def __init__(self, sink: FileSink) -> None:
        self.sink = sink
        self.attempt = 0
        self.checkpoint = 0
        self.items: dict[str, list[bytes]] = {}
        self.operator: SinkOperator

    def start(self, checkpoint: int = 0, items: Any = None, **context: Any) -> None:
        """Start an attempt, which restores a checkpoint if its items are given."""
        self.attempt += 1
        given = make_context(attempt=self.attempt, restored_checkpoint=checkpoint, **context)
        self.operator = asyncio.run(self._open(given, items))

    async def _open(self, context: Any, items: Any) -> SinkOperator:
        return await open_sink(self.sink, context, items)

    def prepare(self, *ids: int) -> dict[str, list[bytes]]:
        """Write rows, and take a checkpoint that is not complete yet."""

        async def run() -> dict[str, list[bytes]]:
            if ids:
                self.operator.process(rows(*ids), 0)
            self.checkpoint += 1
            return await pre_commit(self.operator, self.checkpoint) or {}

        self.items = asyncio.run(run())
        return self.items

    def commit(self) -> None:
        asyncio.run(commit(self.operator, self.checkpoint))

    def write(self, *ids: int) -> None:
        self.prepare(*ids)
        self.commit()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(sink_in(tmp_path))
    made.start()
    yield made
    made.operator.close()


def test_the_files_of_some_checkpoints_appear_as_one(tmp_path: Path, writer: Writer) -> None:
    for id_ in (1, 2):
        writer.write(id_)
    assert ids_in(tmp_path) == []
    assert len(drafts_in(str(tmp_path))) == 2
    writer.write(3)
    assert ids_in(tmp_path) == [1, 2, 3]
    (file,) = tmp_path.glob("part-*")
    name = PartName.parse(file.name)
    assert name is not None
    assert (name.after, name.number) == (0, 0)
    assert drafts_in(str(tmp_path)) == []


def test_files_do_not_wait_for_more_records(tmp_path: Path, writer: Writer) -> None:
    writer.write(1)
    writer.write()
    assert ids_in(tmp_path) == []
    writer.write()
    assert ids_in(tmp_path) == [1]


def test_the_end_of_the_data_shows_everything(tmp_path: Path, writer: Writer) -> None:
    writer.write(1)
    writer.operator.process(rows(2), 0)
    writer.operator.finish()
    writer.write()
    assert ids_in(tmp_path) == [1, 2]


def test_large_groups_and_large_files_do_not_wait(tmp_path: Path) -> None:
    writer = Writer(sink_in(tmp_path, compact_every=100, compact_bytes=100))
    writer.start()
    writer.write(*range(20))
    assert ids_in(tmp_path) == list(range(20))
    writer.write(*range(20, 25))
    assert len(ids_in(tmp_path)) == 20
    writer.write(*range(25, 30))
    assert ids_in(tmp_path) == list(range(30))
    writer.operator.close()


def test_an_aborted_checkpoint_loses_nothing(tmp_path: Path, writer: Writer) -> None:
    writer.write(1)
    writer.write(2)
    writer.prepare(3)  # which merges, and is not completed
    assert ids_in(tmp_path) == []
    writer.write(4)
    assert ids_in(tmp_path) == [1, 2, 3]
    writer.write(5)
    writer.write(6)
    assert ids_in(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_merge_that_fails_is_repeated(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write(1)
    writer.write(2)
    original, failures = LocalTarget.begin_merged, [2]

    def begin_merged(self: LocalTarget, *args: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise StorageError("no space left")
        return original(self, *args)

    monkeypatch.setattr(LocalTarget, "begin_merged", begin_merged)
    for id_ in (3, 4):
        with pytest.raises(StorageError, match="no space left"):
            writer.prepare(id_)
    writer.write(5)
    assert ids_in(tmp_path) == [1, 2, 3]
    writer.write()
    assert ids_in(tmp_path) == [1, 2, 3, 4, 5]


def test_a_file_that_could_not_be_made_durable_stays_an_error(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any) -> None:
        raise OSError("the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(drafts, "sync", fail)
        with pytest.raises(StorageError, match="the disk is broken"):
            writer.prepare(1)
    with pytest.raises(StorageError, match="the disk is broken"):
        writer.prepare(2)


def test_two_writers_become_one(tmp_path: Path) -> None:
    """The held files of both are merged at the next checkpoint, each group by itself."""
    items: list[bytes] = []
    for subtask in range(2):
        writer = Writer(sink_in(tmp_path))
        writer.start(subtask_index=subtask, parallelism=2)
        writer.write(10 * subtask)
        writer.write(10 * subtask + 1)
        items += writer.items["committables"]
        writer.operator.close()
    one = Writer(sink_in(tmp_path))
    one.attempt, one.checkpoint = 1, 2
    one.start(2, {"committables": items})
    one.write(20)
    assert ids_in(tmp_path) == [0, 1, 10, 11]
    one.operator.finish()
    one.write()
    assert ids_in(tmp_path) == [0, 1, 10, 11, 20]
    one.operator.close()


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "none"])
def test_a_job_without_the_option_shows_what_was_held(
    tmp_path: Path, writer: Writer, guarantee: GuaranteeLike
) -> None:
    writer.write(1)
    writer.write(2)
    writer.operator.close()
    writer.sink = json_sink(tmp_path, guarantee=guarantee)
    writer.start(2, writer.items)
    writer.write(3)
    assert sorted(ids_in(tmp_path)) == [1, 2, 3]
    assert drafts_in(str(tmp_path)) == []


def test_other_columns_and_formats_are_not_mixed_with_what_was_held(tmp_path: Path) -> None:
    writer = Writer(parquet_sink(tmp_path, guarantee="exactly_once", compact_every=3))
    writer.start()
    writer.write(1)
    writer.operator.close()
    writer.sink = sink_in(tmp_path)
    writer.start(1, writer.items)
    for id_ in (2, 3, 4):
        writer.write(id_)
    (file,) = tmp_path.glob("*.parquet")
    assert pq.read_table(file).to_pylist() == [{"id": 1}]
    (file,) = tmp_path.glob("*.json")
    assert file.read_text() == "".join(f'{{"id":{id_}}}\n' for id_ in (2, 3, 4))
    writer.operator.close()


def test_an_older_checkpoint_may_be_restored_after_the_merge(
    tmp_path: Path, writer: Writer
) -> None:
    """Its held files are visible by now: they are neither missed nor written again."""
    writer.write(1)
    writer.write(2)
    older = writer.items
    writer.write(3)
    writer.operator.close()
    writer.start(2, older)
    assert ids_in(tmp_path) == [1, 2, 3]
    writer.write(4)
    writer.operator.finish()
    writer.write()
    assert ids_in(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("merges", [False, True])
def test_a_savepoint_with_more_of_a_group_than_was_merged_is_refused(
    tmp_path: Path, merges: bool
) -> None:
    """The job fails behind the savepoint, goes on from the checkpoint before it, and merges without 2.

    The savepoint has the files of the group, or is the one that has merged them.
    """
    killed = Writer(sink_in(tmp_path, compact_every=2 if merges else 3))
    killed.start()
    killed.write(1)
    checkpoint = killed.items
    savepoint = killed.prepare(2)
    job = Writer(killed.sink)
    job.attempt, job.checkpoint = 1, 2
    job.start(1, checkpoint)
    job.write()
    assert ids_in(tmp_path) == [1]
    job.operator.close()
    run = Writer(killed.sink)
    run.attempt, run.checkpoint = 2, 3

    def begin() -> None:
        run.start(2, savepoint)
        run.prepare(3)

    with pytest.raises(JobError, match="is gone(?s:.)*begin with a newer savepoint"):
        begin()
    killed.operator.close()


def test_any_checkpoint_of_a_group_may_be_restored_after_a_restart_has_merged_it(
    tmp_path: Path, writer: Writer
) -> None:
    writer.write(1)
    older = writer.items
    writer.write(2)
    writer.operator.close()
    writer.start(2, writer.items)
    writer.write(3)
    assert ids_in(tmp_path) == [1, 2]
    writer.operator.close()
    for checkpoint in (1, 2):
        writer.start(checkpoint, older)
        writer.write(10 * checkpoint)
        writer.operator.finish()
        writer.write()
        assert ids_in(tmp_path) == [1, 2, 10, 20][: 2 + checkpoint]
        writer.operator.close()


def test_a_held_file_that_is_gone_or_damaged_is_an_error(tmp_path: Path, writer: Writer) -> None:
    writer.write(1)
    writer.write(2)
    draft = drafts_in(str(tmp_path))[0]
    draft.write_bytes(draft.read_bytes().replace(b"1", b"7"))
    with pytest.raises(CorruptError, match=draft.name):
        writer.prepare(3)
    draft.unlink()
    with pytest.raises(JobError, match=f"neither held nor merged draft=`.*{draft.name}"):
        writer.prepare(4)
    assert ids_in(tmp_path) == []


def test_dead_attempts_leave_nothing(tmp_path: Path, writer: Writer) -> None:
    writer.write(1)
    items = writer.items
    writer.prepare(2)
    writer.prepare(3)  # merges
    assert len(drafts_in(str(tmp_path))) == 4
    writer.operator.close()
    writer.start(1, items)
    assert len(drafts_in(str(tmp_path))) == 1
    writer.write(4)
    assert ids_in(tmp_path) == [1]


def test_old_output_stays_until_something_is_visible(tmp_path: Path, writer: Writer) -> None:
    for id_ in (1, 2):
        writer.write(id_)
        assert not writer.operator.wrote
    writer.write(3)
    assert writer.operator.wrote


def test_jobs_leave_few_files(tmp_path: Path) -> None:
    job = hg.Job("compacted", parallelism=2)
    job.checkpoint(every="20 ms", storage=tmp_path / "checkpoints")
    numbers = job.read(generator({"n": sequence()}, rows=3000, rate=10_000), name="items")
    numbers.write(
        parquet_sink(tmp_path / "out", guarantee="exactly_once", compact_every=1000), name="out"
    )
    job.run()
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(files) == 2
    found = pa.concat_tables([pq.read_table(file) for file in files]).column("n").to_pylist()
    assert sorted(found) == list(range(3000))


def test_a_manifest_makes_the_same_sink(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: numbers}}
spec:
  checkpoint: {{every: 20 ms, storage: {tmp_path / "checkpoints"}}}
  sources:
    numbers: {{generator: {{fields: {{id: sequence}}, rows: 2000, rate: 10000}}}}
  sinks:
    out:
      from: numbers
      json: {{path: {tmp_path / "out"}, compactEvery: 1000, compactBytes: 1 mb}}
      guarantee: exactly_once
""")
    load_job(manifest).run()
    assert len(list((tmp_path / "out").glob("part-*"))) == 1
    assert sorted(ids_in(tmp_path / "out")) == list(range(2000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compact_every": 1}, "at least 2 compact_every=`1`"),
        ({"compact_bytes": "1mb"}, "only with compact_every"),
        ({"compact_every": 2, "compact_bytes": "x"}, "not a size"),
        ({"compact_every": 2, "guarantee": "at_least_once"}, "are not merged"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        json_sink("x", **{"guarantee": "exactly_once", **options})


def test_a_group_that_another_process_has_merged_is_done(tmp_path: Path) -> None:
    writer = Writer(sink_in(tmp_path))
    writer.start()
    writer.write(1)
    draft = drafts_in(str(tmp_path))[0]
    (tmp_path / draft.name).write_bytes(draft.read_bytes())
    draft.unlink()
    writer.write(2)
    writer.write(3)
    assert ids_in(tmp_path)[0] == 1
    writer.operator.close()
