"""The sink for Delta tables: the checks of the conformance kit, types, partitions, and other writers."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from deltalake.table import TableOptimizer

import headgate as hg
from headgate.connectors import delta_sink, from_list
from headgate.connectors.delta.sink import DeltaSink
from headgate.connectors.delta.table import DeltaVersion, Part, delta_type
from headgate.errors import HeadgateError, JobError, PlanError, UsageError
from headgate.operators.sink import EpochOutput, GlobalCommit, GuaranteeLike, Sink
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import Check, SinkCase, sink_checks
from headgate.tests.support.skips import thorough_only
from headgate.tests.support.table_cases import DeltaSinkCase

CHECKS = [check for check in sink_checks() if check.applies_to(DeltaSinkCase)]


def rows_of(table: Path, *columns: str) -> list[dict[str, Any]]:
    found = DeltaTable(str(table)).to_pyarrow_table(columns=list(columns) or None)
    return found.to_pylist()


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_it_keeps_the_promises_of_the_kit(check: Check[SinkCase]) -> None:
    if check.thorough:
        thorough_only()
    asyncio.run(check.run(DeltaSinkCase()))


class Compacting(DeltaSinkCase):
    """The sink merges small files as soon as there are two."""

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        sink = super().sink(place, guarantee)
        assert isinstance(sink, DeltaSink)
        return DeltaSink(dataclasses.replace(sink.settings, compact_files=2), sink.if_exists)


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_compaction_keeps_the_promises_of_the_kit(check: Check[SinkCase]) -> None:
    if check.name not in ("once_after_any_crash", "committed_by_two_at_once"):
        thorough_only()
    asyncio.run(check.run(Compacting()))


def job_of(tmp_path: Path, items: Sequence[Any], schema: dict[str, Any], **options: Any) -> hg.Job:
    job = hg.Job("delta", parallelism=2)
    job.checkpoint(every="1h", storage=tmp_path / "checkpoints")
    numbers = job.read(
        from_list(list(items), schema=pa.schema(schema), batch_rows=100, splits=2), name="items"
    )
    numbers.write(delta_sink(tmp_path / "table", **options), name="out")
    return job


def test_a_job_creates_the_table_and_appends_one_version(tmp_path: Path) -> None:
    items = [{"n": n, "text": f"t{n}"} for n in range(50)]
    assert job_of(tmp_path, items, {"n": pa.uint8(), "text": pa.string()}).run().status
    table = DeltaTable(str(tmp_path / "table"))
    assert table.version() == 1
    assert sorted(rows_of(tmp_path / "table"), key=lambda row: row["n"]) == items
    history = table.history()[0]
    assert (history["headgate.job"], history["headgate.sink"]) == ("delta", "out")


def test_values_of_all_types_come_back(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 1, 31, 12, 30, 15, 123456)
    row = {
        "small": 255,
        "big": 2**32 - 1,
        "half": 1.5,
        "flag": True,
        "day": datetime.date(1969, 12, 31),
        "at": moment,
        "zoned": moment.replace(tzinfo=datetime.UTC),
        "price": Decimal("12345.67"),
        "data": b"\x00\xff",
        "tags": ["a", None],
        "part": {"x": 1, "y": None},
    }
    schema = {
        "small": pa.uint8(),
        "big": pa.uint32(),
        "half": pa.float32(),
        "flag": pa.bool_(),
        "day": pa.date32(),
        "at": pa.timestamp("us"),
        "zoned": pa.timestamp("ms", "Europe/Berlin"),
        "price": pa.decimal128(10, 2),
        "data": pa.large_binary(),
        "tags": pa.large_list(pa.string()),
        "part": pa.struct([("x", pa.int8()), ("y", pa.string())]),
    }
    nothing = dict.fromkeys(row)
    job_of(tmp_path, [row, nothing], schema).run()
    expected = {**row, "zoned": row["zoned"].replace(microsecond=123000)}
    found = rows_of(tmp_path / "table")
    assert sorted(found, key=lambda each: each["small"] is None) == [expected, nothing]


@pytest.mark.parametrize(
    "type_", [pa.uint64(), pa.timestamp("ns"), pa.time32("s"), pa.duration("s")]
)
def test_a_type_that_would_lose_values_is_refused_at_plan_time(
    tmp_path: Path, type_: pa.DataType
) -> None:
    assert delta_type(type_) is None
    with pytest.raises(PlanError, match="Delta has no type for this column"):
        job_of(tmp_path, [], {"n": pa.int64(), "x": type_}).run()


def test_rows_are_separated_by_partition_columns(tmp_path: Path) -> None:
    days = [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2), None]
    items = [
        {"row": n, "day": days[n % 3], "who": "a b/c=d" if n % 2 else None, "ok": n % 5 == 0}
        for n in range(30)
    ]
    schema = {"row": pa.int64(), "day": pa.date32(), "who": pa.string(), "ok": pa.bool_()}
    job_of(tmp_path, items, schema, partition_by=["day", "who", "ok"]).run()
    table = DeltaTable(str(tmp_path / "table"))
    assert table.metadata().partition_columns == ["day", "who", "ok"]
    assert sorted(rows_of(tmp_path / "table", *schema), key=lambda row: row["row"]) == items
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert sum(action["num_records"] for action in actions) == 30
    assert len({(a["partition.day"], a["partition.who"], a["partition.ok"]) for a in actions}) > 6


def test_files_end_at_a_size_and_say_what_is_in_them(tmp_path: Path) -> None:
    items = [{"n": n, "text": None if n % 2 else f"{n:020}"} for n in range(4000)]
    schema = {"n": pa.int64(), "text": pa.string()}
    job_of(tmp_path, items, schema, roll_bytes=4_000, buffer=2_000).run()
    actions = pa.table(
        DeltaTable(str(tmp_path / "table")).get_add_actions(flatten=True)
    ).to_pylist()
    assert len(actions) > 4
    assert min(action["min.n"] for action in actions) == 0
    assert max(action["max.n"] for action in actions) == 3999
    assert sum(action["null_count.text"] for action in actions) == 2000
    assert sorted(row["n"] for row in rows_of(tmp_path / "table")) == list(range(4000))


def test_a_second_run_without_state_is_refused_unless_it_may_append(tmp_path: Path) -> None:
    items, schema = [{"n": 1}], {"n": pa.int64()}
    job_of(tmp_path, items, schema).run()
    with pytest.raises(UsageError, match="earlier runs"):
        job_of(tmp_path, items, schema).run()
    job_of(tmp_path, items, schema, if_exists="append").run()
    assert rows_of(tmp_path / "table") == [{"n": 1}, {"n": 1}]


def test_another_writer_may_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, original = tmp_path / "table", DeltaTable.create_write_transaction
    other = pa.table({"n": pa.array([-1], pa.int64())})
    write_deltalake(table, other)
    lost: list[str] = []

    def meanwhile(self: DeltaTable, *given: Any, **named: Any) -> None:
        if len(lost) < 3:
            lost.append("race")
            write_deltalake(table, other, mode="append")
        original(self, *given, **named)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", meanwhile)
    job_of(tmp_path, [{"n": n} for n in range(10)], {"n": pa.int64()}).run()
    assert sorted(row["n"] for row in rows_of(table)) == [-1] * 4 + list(range(10))


def commit_several(table: Path, count: int, **options: Any) -> None:
    """Make commits of one run, each with a file of one row."""
    sink = delta_sink(table, **options)
    sink.bind(pa.schema({"n": pa.int64()}))
    for id_ in range(1, count + 1):
        epoch = EpochOutput(
            id_, (msgspec.msgpack.encode(part_in(table, f"part-{id_}.parquet", [id_])),)
        )
        sink.commit_globally(GlobalCommit("job", "out", {}, CommitPermit("job", 0, id_), (epoch,)))


def test_small_files_are_merged_after_commits(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"n": pa.array([], pa.int64())}))
    commit_several(tmp_path, 30, compact_files=10)
    table = DeltaTable(str(tmp_path))
    assert len(table.file_uris()) < 20
    assert sum(each["operation"] == "OPTIMIZE" for each in table.history()) >= 2
    assert sorted(row["n"] for row in rows_of(tmp_path)) == list(range(1, 31))
    commit(tmp_path, "job", part_in(tmp_path, "part-1.parquet", [1]))
    assert len(rows_of(tmp_path)) == 30  # the marks are still there


def test_a_compaction_that_fails_fails_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(TableOptimizer, "compact", fail)
    write_deltalake(tmp_path, pa.table({"n": pa.array([], pa.int64())}))
    commit_several(tmp_path, 6, compact_files=2)
    assert len(rows_of(tmp_path)) == 6
    warnings = [each for each in caplog.messages if "no space left" in each]
    assert len(warnings) == 1
    assert "not merged" in warnings[0]


def test_files_are_merged_within_their_partition(tmp_path: Path) -> None:
    days = [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2), None]
    items = [
        {"row": n, "day": days[n % 3], "who": "b=c/d" if n % 2 else None, "ok": n % 5 == 0}
        for n in range(60)
    ]
    schema = {"row": pa.int64(), "day": pa.date32(), "who": pa.string(), "ok": pa.bool_()}
    by = ["day", "who", "ok"]
    job_of(tmp_path, items, schema, partition_by=by, compact_files=2).run()
    actions = pa.table(
        DeltaTable(str(tmp_path / "table")).get_add_actions(flatten=True)
    ).to_pylist()
    assert len(actions) == len(
        {tuple(each[f"partition.{name}"] for name in by) for each in actions}
    )
    assert sorted(rows_of(tmp_path / "table", *schema), key=lambda row: row["row"]) == items


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        ({"m": [1]}, "no such column column=`n`"),
        ({"n": ["text"]}, "another type"),
    ],
)
def test_a_table_that_does_not_fit_is_found_before_the_first_record(
    tmp_path: Path, there: dict[str, Any], problem: str
) -> None:
    write_deltalake(tmp_path / "table", pa.table(there))
    with pytest.raises(UsageError, match=problem):
        job_of(tmp_path, [{"n": 1}], {"n": pa.int64()}).run()


def test_a_null_in_a_required_column_is_an_error_with_its_name(tmp_path: Path) -> None:
    table = tmp_path / "table"
    columns = pa.schema([pa.field("n", pa.int64(), nullable=False), ("m", pa.int64())])
    DeltaTable.create(table, schema=Schema.from_arrow(columns))
    schema = {"n": pa.int64(), "m": pa.int64()}
    job_of(tmp_path, [{"n": 1, "m": None}], schema).run()
    job = job_of(tmp_path, [{"n": None, "m": 1}], schema, if_exists="append")
    with pytest.raises(HeadgateError, match="has a null column=`n`"):
        job.run(fresh=True)
    assert rows_of(table) == [{"n": 1, "m": None}]


def test_other_partitions_and_rules_for_writers_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, pa.table({"n": [1], "day": ["x"]}), partition_by=["day"])
    schema = {"n": pa.int64(), "day": pa.string()}
    with pytest.raises(UsageError, match="other partitions"):
        job_of(tmp_path, [], schema).run()
    DeltaTable(str(table)).alter.add_constraint({"small": "n < 10"})
    with pytest.raises(UsageError, match="rules for its writers"):
        job_of(tmp_path, [], schema, partition_by="day").run()


def test_a_table_that_is_gone_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match="the Delta table is gone"):
        DeltaVersion(str(tmp_path / "none"), {}, pa.schema([]), ())


def part_in(table: Path, name: str, numbers: list[int]) -> Part:
    """Write a file of the column `n` into a table whose log does not have it."""
    pq.write_table(pa.table({"n": pa.array(numbers, pa.int64())}), table / name)
    size = (table / name).stat().st_size
    return Part("run", name, size, len(numbers), 0, {}, "{}", job="old", sink="out")


def commit(table: Path, job: str, part: Part, **options: Any) -> None:
    sink = delta_sink(table, **options)
    sink.bind(pa.schema({"n": pa.int64()}))
    epoch = EpochOutput(1, (msgspec.msgpack.encode(part),))
    sink.commit_globally(GlobalCommit(job, "out", {}, CommitPermit(job, 0, 1), (epoch,)))


def test_a_job_under_another_name_does_not_repeat_what_its_savepoint_has(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"n": pa.array([0], pa.int64())}))
    part = part_in(tmp_path, "part.parquet", [1])
    commit(tmp_path, "old", part)
    DeltaTable(str(tmp_path)).optimize.compact()  # its file has left the table, and its row has not
    commit(tmp_path, "new", part)
    assert sorted(row["n"] for row in rows_of(tmp_path)) == [0, 1]


def test_maintenance_of_the_table_forgets_no_commit(tmp_path: Path) -> None:
    """Small files are put together, the old ones deleted, and the log is cut."""
    write_deltalake(tmp_path, pa.table({"n": pa.array([0], pa.int64())}))
    part = part_in(tmp_path, "part.parquet", [1])
    commit(tmp_path, "old", part)
    table = DeltaTable(str(tmp_path))
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    table.create_checkpoint()
    for log in (tmp_path / "_delta_log").glob("*.json"):
        log.unlink()
    assert not (tmp_path / "part.parquet").exists()
    commit(tmp_path, "old", part)
    assert sorted(row["n"] for row in rows_of(tmp_path)) == [0, 1]


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (pa.table({"n": ["text"]}), "another type"),
        (pa.table({"m": [1]}), "no such column"),
    ],
)
def test_a_table_that_was_replaced_gets_no_files_of_other_columns(
    tmp_path: Path, there: pa.Table, problem: str
) -> None:
    write_deltalake(tmp_path, there)
    with pytest.raises(UsageError, match=problem):
        commit(tmp_path, "job", part_in(tmp_path, "part.parquet", [1]))
    assert DeltaTable(str(tmp_path)).version() == 0


def test_files_that_were_deleted_before_their_commit_do_not_break_the_table(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"n": pa.array([0], pa.int64())}))
    part = part_in(tmp_path, "part.parquet", [1])
    (tmp_path / "part.parquet").unlink()
    with pytest.raises(JobError, match="part.parquet"):
        commit(tmp_path, "job", part)
    assert rows_of(tmp_path) == [{"n": 0}]
