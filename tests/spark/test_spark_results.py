"""A query runs once, its result is read exactly once, and comes out as it went in."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.connectors.files import locations
from headgate.connectors.files.locations import s3_client
from headgate.connectors.prepared.result import Result, ResultFile, delete_results
from headgate.connectors.spark.source import SparkSource
from headgate.connectors.spark.task import Task
from headgate.errors import (
    BadRecordError,
    FencedError,
    SourceError,
    StateError,
    StorageError,
    UsageError,
)
from headgate.operators.clock import SystemClock
from headgate.operators.source import SourceRun
from headgate.runtime.coordinator.sources import SourceDirectory, source_run
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.runtime.options.registry import Options
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.local import LocalStore
from headgate.testing.connectors import check_source, open_reader, read_all, read_batches

SCHEMA = {"id": "long"}
IDS = "SELECT id FROM range(0, 20, 1, 2)"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@asynccontextmanager
async def running(storage: str, run: str = "r1") -> Any:
    """A run of a job with a Spark source, and what it announces."""
    said: list[str] = []
    store = LocalStore(Path(storage, "j"))
    await store.open()
    place = SourceDirectory(store, str(store.describe()), "history")
    try:
        yield SourceRun("j", run, "history", "job.py:7", {}, place, said.append), said
    finally:
        await store.close()


async def prepared(source: SparkSource, storage: str, run: str = "r1") -> SparkSource:
    async with running(storage, run) as (context, _):
        return await source.prepare(context)


def rows_of(source: SparkSource, storage: str) -> list[dict[str, Any]]:
    """The rows that a query comes to."""

    async def read() -> list[Any]:
        return await read_all(await prepared(source, storage))

    return asyncio.run(read())


def files_in(storage: str) -> list[Path]:
    """The Parquet files of all results."""
    return sorted(Path(storage).rglob("*.parquet"))


# -- forms ------------------------------------------------------------------------------------------


def test_all_forms_of_a_query(session: Any, asked: list[Task], tmp_path: Path) -> None:
    rows = [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
    frame = session.createDataFrame([(1, "a"), (2, None)], "id bigint, name string").coalesce(1)
    frame.createOrReplaceTempView("people")
    frame.write.parquet(f"{tmp_path}/p")
    (tmp_path / "c.csv").write_text("id;name\n1;a\n2;\n")
    text = {"header": True, "sep": ";", "inferSchema": True}

    def query(spark: Any) -> Any:
        return spark.table("people").orderBy("id")

    forms: list[dict[str, Any]] = [
        {"sql": "SELECT id, name FROM people"},
        {"table": "people"},
        {"path": f"{tmp_path}/p"},
        {"path": f"{tmp_path}/c.csv", "format": "csv", "options": text},
        {"query": query},
    ]
    for number, form in enumerate(forms):
        found = rows_of(hg.spark_source(schema={"id": "long", "name": "string"}, **form),
                        f"{tmp_path}/{number}")  # fmt: skip
        assert sorted(found, key=lambda row: row["id"]) == rows, form


def test_without_a_schema_the_query_is_analysed_and_not_run(asked: list[Task]) -> None:
    source = hg.spark_source(sql="SELECT id, CAST(id AS string) name FROM range(3)")
    assert source.schema.equals(
        pa.schema([pa.field("id", pa.int64(), nullable=False),
                   pa.field("name", pa.string(), nullable=False)])
    )  # fmt: skip
    assert [task.target for task in asked] == [""]


# -- types ------------------------------------------------------------------------------------------

LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-(2**7), 2**7 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    "binary": st.binary(max_size=8),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(UTC)),
    "timestamp_ntz": st.datetimes(),
    "interval day to second": st.timedeltas(timedelta(days=-9999), timedelta(days=9999)),
    "decimal(9,2)": st.decimals(-9999999, 9999999, places=2),
    "decimal(38,6)": st.decimals(-(10**31), 10**31, places=6),
}
Typed = tuple[str, st.SearchStrategy[Any]]


def _array(inner: Typed) -> Typed:
    return f"array<{inner[0]}>", st.lists(st.none() | inner[1], max_size=3)


def _map(inner: Typed) -> Typed:
    return f"map<string,{inner[0]}>", st.dictionaries(LEAVES["string"], inner[1], max_size=3)


def _struct(inner: Typed) -> Typed:
    values = st.fixed_dictionaries({"a": st.none() | inner[1], "b": st.integers(0, 9)})
    return f"struct<a:{inner[0]},b:int>", values


TYPES = st.recursive(
    st.sampled_from(sorted(LEAVES.items())),
    lambda inner: st.one_of(inner.map(_array), inner.map(_map), inner.map(_struct)),
    max_leaves=3,
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[list[Any]]]:
    """A column of each plain type, two nested ones, and rows of values."""
    columns = [*LEAVES.items(), draw(TYPES.map(_map)), draw(TYPES.map(_array))]
    ddl = ", ".join(f"c{number} {name}" for number, (name, _) in enumerate(columns))
    row = st.tuples(*(st.none() | values for _, values in columns)).map(list)
    return ddl, draw(st.lists(row, min_size=1, max_size=4))


def as_read(value: Any) -> Any:
    """A value as Arrow has it in Python: a map is its entries."""
    if isinstance(value, Mapping):
        if value.keys() == {"a", "b"}:
            return {key: as_read(inner) for key, inner in value.items()}
        return [{"key": key, "value": as_read(inner)} for key, inner in value.items()]
    return [as_read(inner) for inner in value] if isinstance(value, list) else value


def unordered(value: Any) -> Any:
    """Spark does not keep the order of a map."""
    if isinstance(value, dict):
        return {key: unordered(inner) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [unordered(each) for each in value]
        entries = all(isinstance(each, dict) and each.keys() == {"key", "value"} for each in inner)
        return sorted(inner, key=lambda entry: entry["key"]) if entries else inner
    return value


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(table=tables())
def test_every_value_of_every_type_comes_out_as_it_went_in(
    asked: list[Task], tmp_path_factory: pytest.TempPathFactory, table: tuple[str, list[list[Any]]]
) -> None:
    ddl, rows = table

    def query(spark: Any) -> Any:
        return spark.createDataFrame(rows, ddl).coalesce(1)

    source = hg.spark_source(query=query)
    found = rows_of(source, str(tmp_path_factory.mktemp("result")))
    expected = [{f"c{i}": as_read(value) for i, value in enumerate(row)} for row in rows]
    assert [unordered(row) for row in found] == [unordered(row) for row in expected]


def test_edges_of_types_and_nulls(asked: list[Task], storage: str) -> None:
    sql = (
        "SELECT double('NaN') nan, date'0001-01-01' first, timestamp'9999-12-31 23:59:59.999999Z' last, "
        "timestamp_ntz'1500-02-28 00:00:00' julian, 0.1bd + 0.2bd exact, interval '1' day span, "
        "CAST(NULL AS array<int>) nothing"
    )
    source = hg.spark_source(sql=sql)
    (row,) = rows_of(source, storage)
    assert math.isnan(row.pop("nan"))
    assert row == {
        "first": date(1, 1, 1),
        "last": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        "julian": datetime(1500, 2, 28),
        "exact": Decimal("0.3"),
        "span": timedelta(days=1),
        "nothing": None,
    }
    nullable = {field.name: field.nullable for field in source.schema}
    assert (nullable["first"], nullable["nothing"]) == (False, True)


def test_times_of_day_where_spark_has_them_on(
    session: Any, asked: list[Task], storage: str
) -> None:
    session.conf.set("spark.sql.timeType.enabled", "true")
    try:
        (row,) = rows_of(hg.spark_source(sql="SELECT time'12:34:56.123456' at"), storage)
    finally:
        session.conf.unset("spark.sql.timeType.enabled")
    assert row == {"at": time(12, 34, 56, 123456)}


def test_a_result_without_rows(asked: list[Task], storage: str) -> None:
    source = hg.spark_source(sql="SELECT id FROM range(20) WHERE id < 0", schema=SCHEMA)
    job, sink = job_of(source, storage, lambda row: {"id": row.id})
    assert job.run().status == "FINISHED"
    assert sink.rows == []
    assert len(asked) == 1


def test_a_value_that_the_declared_schema_cannot_hold_is_a_bad_record(
    asked: list[Task], storage: str
) -> None:
    sql = "SELECT timestamp_micros(1500) t UNION ALL SELECT timestamp_micros(2000)"
    bad = hg.spark_source(sql=sql, schema={"t": "timestamp"})
    with pytest.raises(BadRecordError, match="would lose data"):
        rows_of(bad, storage)
    dropping = hg.spark_source(sql=sql, schema={"t": "timestamp"}, on_bad_record="drop")
    assert rows_of(dropping, storage) == [{"t": datetime(1970, 1, 1, 0, 0, 0, 2000, UTC)}]


def test_a_mismatch_is_refused_before_anything_runs(asked: list[Task], storage: str) -> None:
    # Were it run, it would fail for another reason.
    source = hg.spark_source(sql="SELECT 1 / (id - 1) id FROM range(2)", schema=SCHEMA)
    with pytest.raises(UsageError, match="column=`id` query=`double` schema=`int64`"):
        rows_of(source, storage)
    assert files_in(storage) == []


# -- once -------------------------------------------------------------------------------------------


@in_loop
async def test_a_run_has_one_result(asked: list[Task], storage: str) -> None:
    source = hg.spark_source(sql=IDS, schema=SCHEMA)
    async with running(storage) as (context, said):
        first = await source.prepare(context)
        again = await source.prepare(context)
    assert first.splits(1) == again.splits(2)
    assert len(first.splits(1)) == 2, "a split per file"
    assert len(asked) == 1
    assert said[-1] == "takes the result that Spark made before (20 rows)"


@in_loop
async def test_of_two_coordinators_one_result_counts(asked: list[Task], storage: str) -> None:
    source = hg.spark_source(sql=IDS, schema=SCHEMA)
    async with running(storage) as (context, _):
        one, other = await asyncio.gather(source.prepare(context), source.prepare(context))
    assert len(asked) == 2
    assert one.splits(1) == other.splits(1)
    assert len(await read_all(one)) == 20
    assert len(files_in(storage)) == 2, "what the other one wrote is gone"


@in_loop
async def test_what_is_half_written_is_never_read(asked: list[Task], storage: str) -> None:
    source = hg.spark_source(sql=IDS, schema=SCHEMA)
    await prepared(source, storage)
    (record,) = Path(storage).rglob("result.json")
    # As a coordinator that died in front of the record leaves it, with one file cut off.
    record.unlink()
    left = files_in(storage)
    left[0].write_bytes(left[0].read_bytes()[:50])
    result = await prepared(source, storage)
    assert len(asked) == 2
    assert sorted(row["id"] for row in await read_all(result)) == list(range(20))


@in_loop
async def test_a_new_run_asks_anew_and_the_old_result_goes(asked: list[Task], storage: str) -> None:
    source = hg.spark_source(sql=IDS, schema=SCHEMA)
    await prepared(source, storage, "r1")
    before = set(files_in(storage))
    second = await prepared(source, storage, "r2")
    assert (len(asked), before & set(files_in(storage))) == (2, set())
    kept = await prepared(hg.spark_source(sql=IDS, schema=SCHEMA, keep_result=True), storage, "r3")
    assert len(files_in(storage)) == 4
    async with running(storage) as (context, _):
        await kept.discard(context)
        assert len(files_in(storage)) == 4
        await second.discard(context)
    assert files_in(storage) == []


@in_loop
async def test_a_storage_that_does_not_answer_is_no_result_that_is_gone(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def get_file_info(self, paths: list[str]) -> Any:
            raise OSError("no answer")

    source = hg.spark_source(sql=IDS, schema=SCHEMA)
    async with running(storage) as (context, said):
        name = f"{context.run}-{source.query.shipped().fingerprint()}"
        record = msgspec.json.encode(Result("", [ResultFile("a/b.parquet", 1, "", [1])]))
        await context.storage.create_if_absent(f"{name}/result.json", record)
        monkeypatch.setattr(locations, "filesystem", lambda scheme, options: Silent())
        with pytest.raises(StorageError, match="no answer"):
            await source.prepare(context)
        assert said == []
        assert await context.storage.names("") == [f"{name}/result.json"]


@in_loop
async def test_a_coordinator_that_hung_leaves_the_result_of_a_newer_run_alone(storage: str) -> None:
    store = LocalStore(Path(storage, "j"))
    await store.open()
    older, newer = JobLog(store, "older", SystemClock()), JobLog(store, "newer", SystemClock())
    await older.start_generation(parallelism=1, max_parallelism=8)
    source = hg.spark_source(sql=IDS, schema=SCHEMA)
    node: Any = SimpleNamespace(name="history", origin="job.py:7", source=source)
    spec = SimpleNamespace(name="j", run="r1", checkpoint=SimpleNamespace(storage=storage))
    job: Any = SimpleNamespace(spec=spec, store=store, log=older, options=Options({}))
    context = source_run(job, node)
    assert context.storage is not None
    await context.storage.create_if_absent("r2-x/result.json", b"of the newer run")
    await newer.start_generation(parallelism=1, max_parallelism=8, fresh=True)
    with pytest.raises(FencedError):
        await delete_results(context, keep="r1-x/")
    with pytest.raises(FencedError):
        await source.discard(context)
    assert await context.storage.names("") == ["r2-x/result.json"]
    job.log = newer
    await source.discard(source_run(job, node))
    assert await context.storage.names("") == []
    await store.close()


@in_loop
async def test_positions_are_exact_and_a_result_that_is_gone_is_said(
    asked: list[Task], storage: str
) -> None:
    source = await prepared(hg.spark_source(sql=IDS, schema=SCHEMA, batch_rows=3), storage)
    await check_source(source)
    reader = open_reader(source, source.splits(1))
    await read_batches(reader, 2)
    positions = reader.snapshot()
    reader.close()
    for path in files_in(storage):
        path.unlink()
    with pytest.raises(StateError, match="the result of a Spark query is not there") as caught:
        await read_batches(open_reader(source, positions))
    assert "--fresh" in caught.value.fix
    await prepared(hg.spark_source(sql=IDS, schema=SCHEMA), storage)
    assert len(asked) == 2, "nothing was read of it yet: the query runs again"


def test_spark_here_needs_no_client_of_s3_for_a_result_on_s3(
    asked: list[Task], s3_server: Any
) -> None:
    source = hg.spark_source(sql=IDS, schema=SCHEMA, keep_result=True)
    job, sink = job_of(source, s3_server.uri, lambda row: {"id": row.id})
    runnable(job).override(s3_server.options)
    assert job.run().status == "FINISHED"
    assert sorted(row["id"] for row in sink.rows) == list(range(20))
    assert asked[0].target.startswith("file://")
    found = s3_client(s3_server.options).list_objects_v2(
        Bucket=s3_server.bucket, Prefix="checkpoints/history/sources/"
    )
    kept = sorted(item["Key"].rpartition(".")[2] for item in found["Contents"])
    assert kept == ["json", "parquet", "parquet"]


# -- jobs -------------------------------------------------------------------------------------------


def job_of(source: SparkSource, storage: str, fail_once: Callable[[Any], Any]) -> Any:
    job = hg.Job("history", parallelism=2)
    job.checkpoint(every="1h", storage=storage)
    job.restart(1, delay="0s")
    sink = collect(guarantee="exactly_once")
    job.read(source, name="history").map(fail_once, into=SCHEMA).write(sink, name="out")
    return job, sink


def test_a_restart_reads_again_and_never_asks_again(
    asked: list[Task], storage: str, tmp_path: Path
) -> None:
    failed = tmp_path / "failed"

    def fail_once(row: Any) -> Any:
        if row.id == 15 and not failed.exists():
            failed.touch()
            raise ValueError("once")
        return {"id": row.id}

    job, sink = job_of(hg.spark_source(sql=IDS, schema=SCHEMA), storage, fail_once)
    assert job.run().status == "FINISHED"
    assert sorted(row["id"] for row in sink.rows) == list(range(20))
    assert failed.exists()
    assert [bool(task.target) for task in asked] == [True]
    assert files_in(storage) == [], "the job has finished: nobody needs the result any more"


def test_a_live_source_begins_where_the_result_ends(
    asked: list[Task], storage: str, tmp_path: Path
) -> None:
    failed = tmp_path / "failed"

    def fail_once(row: Any) -> Any:
        if row.id == 21 and not failed.exists():
            failed.touch()
            raise ValueError("once")
        return {"id": row.id}

    def live(end: int | None) -> Any:
        assert end is not None
        return from_list([{"id": end + 1 + n} for n in range(3)], schema=SCHEMA)

    history = hg.spark_source(sql=IDS, schema=SCHEMA)
    source: Any = hg.hybrid_source(history, live, time_column="id")
    job, sink = job_of(source, storage, fail_once)
    assert job.run().status == "FINISHED"
    assert sorted(row["id"] for row in sink.rows) == list(range(23))
    assert failed.exists()
    assert len(asked) == 1
    assert files_in(storage) == []


def test_a_manifest_reads_the_same(asked: list[Task], storage: str, tmp_path: Path) -> None:
    text = f"""\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: history}}
spec:
  checkpoint: {{every: 1h, storage: {storage}}}
  sources:
    history:
      spark:
        sql: {IDS}
        master: local[2]
        conf: {{spark.driver.memory: 1g}}
        batchRows: 4
      schema: {{id: long}}
  sinks:
    out: {{from: history, json: {{path: {tmp_path}/out}}, guarantee: exactly_once}}
"""
    assert load_job(text).run().status == "FINISHED"
    lines = [line for path in (tmp_path / "out").rglob("*.json*") for line in path.open()]
    assert len(lines) == 20
    plan = asked[0].plan
    assert (plan.master, plan.conf) == ("local[2]", {"spark.driver.memory": "1g"})
    wrong = load_job(text.replace("{id: long}", "{idd: long}"))
    with pytest.raises(UsageError, match="no such column column=`idd`") as caught:
        wrong.run(fresh=True, if_exists="append")
    assert caught.value.where.startswith("manifest:7")


# -- failures ---------------------------------------------------------------------------------------


def _of_udf(spark: Any) -> Any:
    from pyspark.sql.functions import udf

    numbers = udf(lambda number: {}[number], "bigint")
    return spark.range(0, 1, 1, 1).select(numbers("id").alias("id"))


def _streams(spark: Any) -> Any:
    return spark.readStream.format("rate").load()


@pytest.mark.parametrize(
    ("query", "kind", "message"),
    [
        ({"sql": "SELECT id FROM nowhere"}, UsageError, r"Spark refuses the query: .*`nowhere`"),
        ({"sql": "SELEKT 1"}, UsageError, r"Spark refuses the query: .*SELEKT"),
        (
            {"sql": "SELECT 1 div (id - 1) id FROM range(2)"},
            SourceError,
            r"Spark failed: \[DIVIDE_BY_ZERO\] Division by zero",
        ),
        ({"query": _of_udf}, SourceError, "Spark failed: KeyError: 0"),
        (
            {"query": lambda spark: 1 // 0},
            SourceError,
            r"raised ZeroDivisionError: .*spark_results.py",
        ),
        ({"query": lambda spark: None}, UsageError, "must return a DataFrame.*`NoneType`"),
        ({"query": _streams}, UsageError, "has no end"),
    ],
)
def test_a_failure_is_said_with_its_cause(
    asked: list[Task], storage: str, query: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        rows_of(hg.spark_source(schema=SCHEMA, **query), storage)
    assert "job.py:7" in str(caught.value)
    assert len(str(caught.value)) < 800, "the whole story is in `detail` and in the log"


@in_loop
async def test_spark_elsewhere_needs_a_storage_that_it_reaches(storage: str) -> None:
    source = hg.spark_source(sql=IDS, schema=SCHEMA, master="spark://spark.example.org:7077")
    with pytest.raises(UsageError, match="cannot write into a directory of this machine"):
        await prepared(source, storage)
