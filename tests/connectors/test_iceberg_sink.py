"""The sink for Iceberg tables: the checks of the conformance kit, types, partitions, and other writers."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import gc
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.types import LongType

import headgate as hg
from headgate.connectors import from_list, iceberg_sink
from headgate.connectors.iceberg import compaction
from headgate.connectors.iceberg.catalog import IcebergCatalog
from headgate.connectors.iceberg.sink import IcebergSink
from headgate.connectors.iceberg.table import IcebergVersion, Part, iceberg_type
from headgate.connectors.tables.compaction import Merge
from headgate.errors import HeadgateError, JobError, PlanError, StorageError, UsageError
from headgate.operators.clock import Clock, SystemClock
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import EpochOutput, GlobalCommit, GuaranteeLike, Sink
from headgate.runtime.manifest import load_job
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import Check, SinkCase, sink_checks
from headgate.tests.support.iceberg_rest import rest_catalog
from headgate.tests.support.operators import operator_context
from headgate.tests.support.skips import thorough_only
from headgate.tests.support.table_cases import IcebergSinkCase, let_readers_be

CHECKS = [check for check in sink_checks() if check.applies_to(IcebergSinkCase)]


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_it_keeps_the_promises_of_the_kit(check: Check[SinkCase]) -> None:
    if check.thorough:
        thorough_only()
    asyncio.run(check.run(IcebergSinkCase()))


NAME = "shop.orders"
NUMBERS = {"n": pa.int64()}


def catalog_of(directory: Path) -> dict[str, str]:
    return {"uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/tables"}


class Compacting(IcebergSinkCase):
    """The sink merges small files as soon as there are two."""

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        sink = super().sink(place, guarantee)
        assert isinstance(sink, IcebergSink)
        return IcebergSink(dataclasses.replace(sink.settings, compact_files=2), sink.if_exists)


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_compaction_keeps_the_promises_of_the_kit(check: Check[SinkCase]) -> None:
    if check.name != "committed_by_two_at_once":
        thorough_only()
    asyncio.run(check.run(Compacting()))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    let_readers_be(tmp_path / "catalog.db")
    with load_catalog("default", **catalog_of(tmp_path)) as found:
        found.create_namespace("shop")
        yield found


def rows_of(catalog: Catalog, key: str = "n") -> list[dict[str, Any]]:
    rows = catalog.load_table(NAME).scan().to_arrow().to_pylist()
    return sorted(rows, key=lambda row: row[key])


def job_of(tmp_path: Path, items: Sequence[Any], schema: dict[str, Any], **options: Any) -> hg.Job:
    job = hg.Job("ice", parallelism=2)
    job.checkpoint(every="1h", storage=tmp_path / "checkpoints")
    numbers = job.read(
        from_list(list(items), schema=pa.schema(schema), batch_rows=100, splits=2), name="items"
    )
    given = {"catalog": catalog_of(tmp_path), **options}
    numbers.write(iceberg_sink(NAME, **given), name="out")
    return job


def test_a_job_creates_the_table_and_appends_one_snapshot(tmp_path: Path, catalog: Catalog) -> None:
    items = [{"n": n, "text": f"t{n}"} for n in range(50)]
    job_of(tmp_path, items, {"n": pa.uint8(), "text": pa.string()}).run()
    assert rows_of(catalog) == items
    (snapshot,) = catalog.load_table(NAME).snapshots()
    assert snapshot.summary is not None
    assert (snapshot.summary["headgate.job"], snapshot.summary["headgate.sink"]) == ("ice", "out")
    assert [
        key for key in catalog.load_table(NAME).properties if key.startswith("headgate/ice/out/")
    ]


def test_values_of_all_types_come_back(tmp_path: Path, catalog: Catalog) -> None:
    moment = datetime.datetime(2026, 1, 31, 12, 30, 15, 123456)
    row = {
        "small": 255,
        "big": 2**32 - 1,
        "half": 1.5,
        "flag": True,
        "day": datetime.date(1969, 12, 31),
        "time": datetime.time(23, 59, 59, 123000),
        "at": moment,
        "zoned": moment.replace(tzinfo=datetime.UTC),
        "price": Decimal("12345.67"),
        "data": b"\x00\xff",
        "fixed": b"1234",
        "odd name/%": "x",
        "tags": ["a", None],
        "part": {"x": 1, "y": None},
        "pairs": [("k", 1), ("l", None)],
    }
    schema = {
        "small": pa.uint8(),
        "big": pa.uint32(),
        "half": pa.float16(),
        "flag": pa.bool_(),
        "day": pa.date32(),
        "time": pa.time32("ms"),
        "at": pa.timestamp("us"),
        "zoned": pa.timestamp("ms", "Europe/Berlin"),
        "price": pa.decimal128(10, 2),
        "data": pa.large_binary(),
        "fixed": pa.binary(4),
        "odd name/%": pa.string(),
        "tags": pa.large_list(pa.string()),
        "part": pa.struct([("x", pa.int8()), ("y", pa.string())]),
        "pairs": pa.map_(pa.string(), pa.int16()),
    }
    nothing = dict.fromkeys(row)
    job_of(tmp_path, [row, nothing], schema).run()
    expected = {**row, "zoned": row["zoned"].replace(microsecond=123000)}
    found = catalog.load_table(NAME).scan().to_arrow().to_pylist()
    assert sorted(found, key=lambda each: each["small"] is None) == [expected, nothing]


@pytest.mark.parametrize(
    "type_", [pa.uint64(), pa.timestamp("ns"), pa.time64("ns"), pa.duration("s")]
)
def test_a_type_that_would_lose_values_is_refused_at_plan_time(
    tmp_path: Path, type_: pa.DataType
) -> None:
    assert iceberg_type(type_) is None
    with pytest.raises(PlanError, match="Iceberg has no type for this column"):
        job_of(tmp_path, [], {"n": pa.int64(), "x": type_}).run()


EVENTS = {
    "n": pa.int64(),
    "at": pa.timestamp("us"),
    "who": pa.string(),
    "price": pa.decimal128(8, 2),
    "raw": pa.binary(),
}


def events() -> list[dict[str, Any]]:
    start = datetime.datetime(2025, 12, 31, 22)
    return [
        {
            "n": n,
            "at": None if n == 7 else start + datetime.timedelta(hours=n),
            "who": None if n == 8 else f"user {n % 3}/x",
            "price": Decimal(n) / 2,
            "raw": bytes([n]),
        }
        for n in range(40)
    ]


def test_files_are_separated_by_all_kinds_of_partitions(tmp_path: Path, catalog: Catalog) -> None:
    wanted = ["month(at)", "bucket(4, n)", "truncate(4, who)", "price"]
    job_of(tmp_path, events(), EVENTS, partition_by=wanted).run()
    assert rows_of(catalog) == events()
    table = catalog.load_table(NAME)
    names = ["at_month", "n_bucket", "who_trunc", "price"]
    assert [field.name for field in table.spec().fields] == names
    for condition, numbers in {
        "at < '2026-01-01T00:00:00'": [0, 1],
        "n = 17": [17],
        "who = 'user 1/x' and n < 9": [1, 4, 7],
        "price = '3.50'": [7],
        "at is null": [7],
        "who is null": [8],
    }.items():
        scan = table.scan(row_filter=condition)
        assert sorted(row["n"] for row in scan.to_arrow().to_pylist()) == numbers, condition
        assert len(list(scan.plan_files())) < 20, condition


def test_a_table_keeps_its_own_partitions(tmp_path: Path, catalog: Catalog) -> None:
    table = catalog.create_table(NAME, pa.schema(EVENTS))
    with table.update_spec() as update:
        update.add_field("at", DayTransform(), "day").add_field("who", IdentityTransform(), "user")
    job_of(tmp_path, events(), EVENTS).run()
    assert rows_of(catalog) == events()
    files = catalog.load_table(NAME).inspect.files().to_pylist()
    days = {file["partition"]["day"] for file in files}
    assert days == {None, *(each["at"].date() for each in events() if each["at"])}
    with pytest.raises(UsageError, match=r"other partitions .*day\(at\), who"):
        job_of(tmp_path, events(), EVENTS, partition_by="day(at)").run()


@pytest.mark.parametrize(
    ("partition", "problem"),
    [
        ("no", "no such column"),
        ("hour(n)", "cannot be partitioned"),
        ("bucket(n)", "no such partition"),
        ("bucket(0, n)", "no such partition"),
        ("week(at)", "no such partition"),
        ("truncate(1, raw)", "cannot be partitioned"),
        (["day(at)", "hour(at)"], "two partitions by time"),
    ],
)
def test_partitions_that_cannot_be_are_refused_at_plan_time(
    tmp_path: Path, partition: str | list[str], problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        job_of(tmp_path, [], EVENTS, partition_by=partition).run()


def test_files_end_at_a_size_and_say_what_is_in_them(tmp_path: Path, catalog: Catalog) -> None:
    items = [{"n": n, "text": None if n % 2 else f"{n:020}"} for n in range(4000)]
    schema = {"n": pa.int64(), "text": pa.string()}
    job_of(tmp_path, items, schema, roll_bytes=4_000, buffer=2_000).run()
    files = catalog.load_table(NAME).inspect.files().to_pylist()
    assert len(files) > 4
    metrics = [file["readable_metrics"] for file in files]
    assert min(each["n"]["lower_bound"] for each in metrics) == 0
    assert max(each["n"]["upper_bound"] for each in metrics) == 3999
    assert sum(each["text"]["null_value_count"] for each in metrics) == 2000
    assert [row["n"] for row in rows_of(catalog)] == list(range(4000))


def test_a_second_run_without_state_is_refused_unless_it_may_append(
    tmp_path: Path, catalog: Catalog
) -> None:
    job_of(tmp_path, [{"n": 1}], NUMBERS).run()
    with pytest.raises(UsageError, match="earlier runs"):
        job_of(tmp_path, [{"n": 1}], NUMBERS).run()
    job_of(tmp_path, [{"n": 1}], NUMBERS, if_exists="append").run()
    assert rows_of(catalog) == [{"n": 1}, {"n": 1}]


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (pa.schema([("m", pa.int64())]), "no such column column=`n`"),
        (pa.schema([("n", pa.int32())]), "another type column=`n` table=`int` stream=`int64`"),
        (pa.schema([("n", pa.uuid())]), "another type"),
        (pa.schema([("n", pa.int64()), pa.field("m", pa.int64(), False)]), "must not be null"),
    ],
)
def test_a_table_that_does_not_fit_is_found_before_the_first_record(
    tmp_path: Path, catalog: Catalog, there: pa.Schema, problem: str
) -> None:
    catalog.create_table(NAME, there)
    with pytest.raises(UsageError, match=problem):
        job_of(tmp_path, [{"n": 1}], NUMBERS).run()


def test_a_table_of_format_version_3_is_refused(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyiceberg.table.metadata.SUPPORTED_TABLE_FORMAT_VERSION", 1)
    with pytest.raises(UsageError, match="format version table=`shop.orders` version=`2`"):
        job_of(tmp_path, [{"n": 1}], NUMBERS).run()


def test_a_manifest_makes_the_same_sink(tmp_path: Path, catalog: Catalog) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: numbers}}
spec:
  checkpoint: {{every: 1h, storage: {tmp_path / "checkpoints"}}}
  sources:
    numbers: {{generator: {{fields: {{n: sequence}}, rows: 10}}}}
  sinks:
    out:
      from: numbers
      iceberg:
        table: {NAME}
        catalog: {{uri: "{catalog_of(tmp_path)["uri"]}", warehouse: "{catalog_of(tmp_path)["warehouse"]}"}}
        partitionBy: ["bucket(2, n)"]
        compactFiles: 2
""")
    load_job(manifest).run()
    assert numbers_of(catalog) == list(range(10))


def test_wider_columns_other_orders_and_absent_columns_are_fine(
    tmp_path: Path, catalog: Catalog
) -> None:
    wide = [("more", pa.string()), ("x", pa.decimal128(20, 2)), ("n", pa.int64())]
    catalog.create_table(NAME, pa.schema(wide))
    items = [{"n": 1, "x": Decimal("1.25")}]
    job_of(tmp_path, items, {"n": pa.int32(), "x": pa.decimal128(8, 2)}).run()
    assert rows_of(catalog) == [{"more": None, **items[0]}]


def test_a_null_in_a_required_column_is_an_error_with_its_name(
    tmp_path: Path, catalog: Catalog
) -> None:
    catalog.create_table(NAME, pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    with pytest.raises(HeadgateError, match="has a null column=`n`"):
        job_of(tmp_path, [{"n": 1}, {"n": None}], NUMBERS).run()


# -- commits that are repeated, late, or beside those of others ---------------------------------------


def sink_of(directory: Path, **options: Any) -> IcebergSink:
    sink = iceberg_sink(NAME, catalog={**catalog_of(directory), **options})
    sink.bind(pa.schema(NUMBERS))
    return sink


def part_of(
    sink: IcebergSink,
    tmp_path: Path,
    numbers: list[int],
    before: Callable[[], None] = lambda: None,
    clock: Clock = SystemClock(),
    attempt: int = 1,
) -> bytes:
    """Write a file as a subtask does, after `before`, and return its committable."""
    writer = sink.writer()
    writer.open(
        operator_context(
            job_name="old",
            operator_name="out",
            run_id="run",
            attempt=attempt,
            local_directory=lambda: tmp_path,
            clock=clock,
        )
    )
    writer.prepare()
    before()
    writer.write(ColumnBatch(pa.RecordBatch.from_pydict({"n": pa.array(numbers, pa.int64())})))
    move = writer.roll(1)
    assert move is not None
    (made,) = move()
    writer.close()
    return made


def commit(sink: IcebergSink, part: bytes, job: str = "old", checkpoint: int = 1) -> None:
    epoch = EpochOutput(checkpoint, (part,))
    permit = CommitPermit(job, 0, checkpoint)
    sink.commit_globally(GlobalCommit(job, "out", {}, permit, (epoch,)))


def numbers_of(catalog: Catalog) -> list[int]:
    return [row["n"] for row in rows_of(catalog)]


@pytest.fixture
def table(catalog: Catalog) -> Table:
    made = catalog.create_table(NAME, pa.schema(NUMBERS))
    made.append(pa.table({"n": pa.array([0], pa.int64())}))
    return made


def around_commits(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None], after: Callable[[int], None]
) -> None:
    """Call functions before and after each commit of a sink, with the number of the commit."""
    original, count = SqlCatalog.commit_table, [0]

    def commit_table(self: SqlCatalog, table: Table, requirements: Any, updates: Any) -> Any:
        if not any(key.startswith("headgate/") for key in str(updates).split("'")):
            return original(self, table, requirements, updates)
        count[0] += 1
        before(count[0])
        done = original(self, table, requirements, updates)
        after(count[0])
        return done

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)


def nothing(number: int) -> None:
    pass


def test_another_writer_may_be_faster(
    tmp_path: Path, catalog: Catalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(number: int) -> None:
        if number <= 3:
            catalog.load_table(NAME).append(pa.table({"n": pa.array([-number], pa.int64())}))

    around_commits(monkeypatch, meanwhile, nothing)
    sink = sink_of(tmp_path)
    commit(sink, part_of(sink, tmp_path, [1, 2]))
    assert numbers_of(catalog) == [-3, -2, -1, 0, 1, 2]
    kept = {
        manifest["path"]
        for manifest in catalog.load_table(NAME).inspect.all_manifests().to_pylist()
    }
    there = {f"file://{path}" for path in (tmp_path / "tables").rglob("*-m*.avro")}
    assert there == kept, "manifests of lost races are left behind"


def test_a_commit_whose_answer_was_lost_is_not_repeated(
    tmp_path: Path, catalog: Catalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(number: int) -> None:
        raise OSError("the connection was reset")

    around_commits(monkeypatch, nothing, lose)
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    with pytest.raises(StorageError, match="connection was reset"):
        commit(sink, part)
    commit(sink, part)
    assert numbers_of(catalog) == [0, 1]


def test_a_refusal_of_what_was_done_leaves_the_table_whole(
    tmp_path: Path, catalog: Catalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        raise CommitFailedException("a proxy has sent the request twice")

    around_commits(monkeypatch, nothing, refuse)
    sink = sink_of(tmp_path)
    commit(sink, part_of(sink, tmp_path, [1]))
    assert numbers_of(catalog) == [0, 1]


def test_a_late_commit_of_an_attempt_that_was_replaced_adds_nothing(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    """The library would load the table again, and add the files a second time."""
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    late = IcebergVersion(catalog, NAME, sink.settings.schema, ())
    read = msgspec.msgpack.decode(part, type=Part)
    assert late.committed("headgate/old/out/run/1", [read]) is None
    commit(sink, part)
    assert not late.add([read], {"headgate/old/out/run/1": 1}, {})
    commit(sink, part)
    assert numbers_of(catalog) == [0, 1]


def test_a_job_under_another_name_does_not_repeat_what_its_savepoint_has(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    commit(sink, part, "old")
    commit(sink, part, "new")
    assert numbers_of(catalog) == [0, 1]


@pytest.mark.parametrize("lost", ["properties", "snapshots"])
def test_one_of_two_marks_is_enough(
    tmp_path: Path, catalog: Catalog, table: Table, lost: str
) -> None:
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    commit(sink, part)
    table = catalog.load_table(NAME)
    if lost == "properties":
        forget_properties(table)
    else:
        expire_snapshots(table)
    commit(sink, part)
    assert numbers_of(catalog) == [0, 1]


def forget_properties(table: Table) -> None:
    with table.transaction() as transaction:
        transaction.remove_properties(*(key for key in table.properties if "headgate" in key))


def expire_snapshots(table: Table) -> None:
    """Expire all snapshots of a table but a new one of another writer."""
    table.append(pa.table({"n": pa.array([], pa.int64())}))
    newest = table.metadata.current_snapshot_id
    old = [each.snapshot_id for each in table.snapshots() if each.snapshot_id != newest]
    table.maintenance.expire_snapshots().by_ids(old).commit()


def test_a_job_without_records_for_a_week_can_write(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    """No snapshot is left that was there when it began, and it has no mark yet."""

    class Later(SystemClock):
        days = 0

        def now_ms(self) -> int:
            return super().now_ms() + 86_400_000 * self.days

    clock = Later()

    def week() -> None:
        expire_snapshots(catalog.load_table(NAME))
        clock.days = 7

    sink = sink_of(tmp_path)
    commit(sink, part_of(sink, tmp_path, [1], week, clock))
    assert numbers_of(catalog) == [0, 1]


@pytest.mark.parametrize("answer", ["0", "1"])
def test_a_table_that_has_lost_its_marks_is_an_error_until_somebody_answers(
    tmp_path: Path, catalog: Catalog, table: Table, answer: str
) -> None:
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    commit(sink, part)
    forget_properties(catalog.load_table(NAME))
    expire_snapshots(catalog.load_table(NAME))
    with pytest.raises(JobError, match="property=`headgate/old/out/run/1`"):
        commit(sink, part)
    with catalog.load_table(NAME).transaction() as transaction:
        transaction.set_properties({"headgate/old/out/run/1": answer})
    commit(sink, part)
    assert numbers_of(catalog) == ([0, 1, 1] if answer == "0" else [0, 1])


def test_files_that_were_deleted_before_their_commit_do_not_break_the_table(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    sink = sink_of(tmp_path)
    part = msgspec.msgpack.decode(part_of(sink, tmp_path, [1]), type=Part)
    old = msgspec.structs.replace(part, written_ms=0)
    Path(part.path.removeprefix("file://")).unlink()
    with pytest.raises(JobError, match=Path(part.path).name):
        commit(sink, msgspec.msgpack.encode(old))
    assert numbers_of(catalog) == [0]


def commit_several(tmp_path: Path, first: int, last: int) -> None:
    """Make commits of one run, each with a file of one row, and merge small files of tens."""
    sink = sink_of(tmp_path)
    sink.settings = dataclasses.replace(sink.settings, compact_files=10)
    for id_ in range(first, last + 1):
        commit(sink, part_of(sink, tmp_path, [id_], attempt=id_), checkpoint=id_)


def test_small_files_are_merged_after_commits(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    commit_several(tmp_path, 1, 21)
    found = catalog.load_table(NAME)
    assert len(found.inspect.files()) < 16
    kinds = [each.summary.operation for each in found.snapshots() if each.summary]
    assert kinds.count(Operation.REPLACE) >= 2
    assert Operation.OVERWRITE not in kinds
    summary = found.snapshots()[-1].summary
    assert summary is not None
    assert summary["total-records"] == "22"
    assert numbers_of(catalog) == list(range(22))
    assert found.scan(row_filter="n == 7").to_arrow().to_pylist() == [{"n": 7}]
    commit_several(tmp_path, 1, 5)  # the marks are still there
    assert numbers_of(catalog) == list(range(22))


def test_what_is_merged_after_one_commit_is_bounded(
    tmp_path: Path, catalog: Catalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(tmp_path)
    for id_ in range(1, 13):
        commit(sink, part_of(sink, tmp_path, [id_], attempt=id_), checkpoint=id_)
    small = max(catalog.load_table(NAME).inspect.files().column("file_size_in_bytes").to_pylist())
    monkeypatch.setattr(compaction, "MERGED_BYTES_MAX", 7 * small)
    monkeypatch.setattr(
        compaction, "due_merges", lambda found, *given: [Merge(found[0][0], 3 * small, 0)]
    )
    counts = []
    for _ in range(3):
        compaction.compact(catalog, NAME, "part", 2, 128 << 20)
        counts.append(len(catalog.load_table(NAME).inspect.files()))
    assert counts[0] == 13 - 6 + 2
    assert counts[-1] < counts[0]
    assert numbers_of(catalog) == list(range(13))


def test_rows_that_are_deleted_during_a_compaction_do_not_come_back(
    tmp_path: Path, catalog: Catalog, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = compaction._merge
    made: list[str] = []

    def merge(*args: Any) -> Any:
        if not made:
            catalog.load_table(NAME).delete("n == 3")
        file = original(*args)
        made.append(file.file_path)
        return file

    monkeypatch.setattr(compaction, "_merge", merge)
    commit_several(tmp_path, 1, 11)
    assert numbers_of(catalog) == [0, 1, 2, *range(4, 12)]
    assert made
    assert not any(Path(path.removeprefix("file://")).exists() for path in made)


def test_files_with_columns_of_their_own_time_are_merged(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    commit_several(tmp_path, 1, 5)
    with table.update_schema() as update:
        update.add_column("more", LongType())
    commit_several(tmp_path, 6, 12)
    assert len(catalog.load_table(NAME).inspect.files()) < 10
    assert numbers_of(catalog) == list(range(13))


def test_files_are_merged_within_their_partition(tmp_path: Path, catalog: Catalog) -> None:
    items = [{"n": n, "who": [None, "a/b", "c"][n % 3], "at": n} for n in range(60)]
    schema = {"n": pa.int64(), "who": pa.string(), "at": pa.int64()}
    by = ["who", "bucket(2, at)"]
    job_of(tmp_path, items, schema, partition_by=by, compact_files=2).run()
    partitions = catalog.load_table(NAME).inspect.files().column("partition").to_pylist()
    assert len(partitions) == len({str(each) for each in partitions}) == 6
    assert rows_of(catalog) == items


def test_a_table_that_was_replaced_gets_no_files_of_the_former_one(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    catalog.drop_table(NAME)
    with pytest.raises(StorageError, match="the Iceberg table is gone"):
        commit(sink, part)
    catalog.create_table(NAME, pa.schema([("x", pa.int64()), ("n", pa.int64())]))
    with pytest.raises(JobError, match="replaced by another one"):
        commit(sink, part)


def test_other_partitions_wait_until_what_was_written_is_committed(
    tmp_path: Path, catalog: Catalog, table: Table
) -> None:
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    with table.update_spec() as update:
        update.add_identity("n")
    with pytest.raises(JobError, match="got other partitions"):
        commit(sink, part)


# -- a REST catalog, and secrets ----------------------------------------------------------------------

TOKEN = "no-token-of-ours"


@pytest.mark.parametrize("status", [500, 409])
def test_a_rest_catalog_that_loses_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("ICEBERG_TOKEN", TOKEN)
    with rest_catalog(tmp_path, TOKEN) as (rest, address):
        given = {"uri": address, "token": "env:ICEBERG_TOKEN"}
        rest.lost_status = status
        job = job_of(tmp_path, events(), EVENTS, catalog=given, partition_by="day(at)")
        rest.lost = 1
        job.run()
        assert rest.lost == 0
        assert rows_of(rest.catalog) == events()


def test_secrets_are_in_no_error_and_no_description(tmp_path: Path) -> None:
    with rest_catalog(tmp_path, "another") as (_, address):
        given = {"uri": address.replace("//", f"//ann:{TOKEN}@"), "token": TOKEN}
        sink = iceberg_sink(NAME, catalog=given)
        assert TOKEN not in repr(sink.settings)
        assert TOKEN not in sink.describe()
        job = job_of(tmp_path, [], NUMBERS, catalog=given)
        assert TOKEN not in job.explain()
        with pytest.raises(StorageError, match="not authorized") as found:
            job.run()
        assert TOKEN not in str(found.value)


def test_a_column_that_was_removed_and_added_again_is_another_one(
    tmp_path: Path, catalog: Catalog
) -> None:
    """Its number is another one, so readers would find nothing in the files of the former column."""
    table = catalog.create_table(NAME, pa.schema([("n", pa.int64()), ("more", pa.string())]))
    sink = sink_of(tmp_path)
    part = part_of(sink, tmp_path, [1])
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("n")
    with table.update_schema() as update:
        update.add_column("n", LongType())
    with pytest.raises(JobError, match=r"was removed .* number=`1`"):
        commit(sink, part)
    assert rows_of(catalog) == []


def test_secrets_in_parameters_and_in_properties_of_storages_are_not_shown() -> None:
    secrets = {
        "uri": f"postgresql+psycopg://db/catalog?user=ann&password={TOKEN}",
        "adls.account-key": f"{TOKEN}1",
        "adls.connection-string": f"AccountKey={TOKEN}2",
        "header.X-Api-Key": f"{TOKEN}3",
    }
    catalog = IcebergCatalog({**secrets, "warehouse": "s3://lake"})
    assert TOKEN not in repr(catalog)
    assert TOKEN not in str(catalog)
    assert "'warehouse': 's3://lake'" in repr(catalog)
    with (
        pytest.raises(StorageError, match=r"db/catalog\?\*\*\*`: no") as found,
        catalog._reaching(catalog.properties),
    ):
        raise OSError(f"no {TOKEN} {TOKEN}3")
    assert TOKEN not in str(found.value)


def test_relative_paths_are_those_of_the_process_that_makes_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = iceberg_sink(NAME, catalog={"uri": "sqlite:///catalog.db", "warehouse": "tables"})
    assert sink.settings.catalog.properties == catalog_of(tmp_path)


@pytest.mark.parametrize(
    ("table", "given", "problem"),
    [
        ("orders", {"uri": "sqlite:///x"}, "not the name of a table"),
        (NAME, {}, "no address"),
        (NAME, {"uri": "env:CATALOG"}, "kind of the catalog cannot be told"),
        (NAME, {"uri": "thrift://x", "type": "hive"}, "no such kind of catalog"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    table: str, given: dict[str, str], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        iceberg_sink(table, catalog=given)


def test_a_cursor_that_only_the_collector_finds_does_not_lock_the_catalog_for_ever(
    tmp_path: Path, catalog: Catalog
) -> None:
    class Garbage:
        def __init__(self) -> None:
            self.itself = self
            self.connection = sqlite3.connect(tmp_path / "catalog.db", check_same_thread=False)
            self.cursor = self.connection.execute("SELECT 1 FROM iceberg_tables")

    catalog.close()
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    schema = pa.schema({"n": pa.int64()})
    for name in (NAME, "shop.others"):
        catalog.create_table(name, schema)
    uri = f"{catalog_of(tmp_path)['uri']}?timeout=0.05"
    with load_catalog("default", **{**catalog_of(tmp_path), "uri": uri}) as impatient:
        version = IcebergVersion(impatient, NAME, schema, {})
        gc.disable()
        try:
            Garbage()
            assert not version.add([], {"mark": 1}, {})
            version = IcebergVersion(impatient, NAME, schema, {})
            assert version.add([], {"mark": 1}, {})
        finally:
            gc.enable()
    assert catalog.load_table(NAME).properties["mark"] == "1"
