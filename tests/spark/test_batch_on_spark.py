"""Batch jobs on a real Spark: what Spark carries between the stages, what it runs, what it leaves."""

from __future__ import annotations

import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import (
    collect,
    from_list,
    parquet_sink,
    parquet_source,
    ray_dataset_source,
)
from headgate.connectors.files.drafts import LocalTarget
from headgate.connectors.spark.java import Java
from headgate.errors import StorageError, UsageError, UserCodeError
from headgate.runtime.batch import run as batch_session
from headgate.runtime.batch.run import spark_session
from headgate.runtime.cli.load import RuntimeMode
from headgate.runtime.cli.verbs import explain
from headgate.runtime.manifest import load_job
from headgate.runtime.options.registry import Options
from headgate.tests.support.ray_datasets import FakeDataset

BATCH = {"execution.runtime-mode": "BATCH"}
START = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = {"driver": "long", "price": "long", "at": "timestamp"}
MANIFEST = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: rides}}
spec:
  parallelism: 2
  sources:
    rides:
      parquet: {{path: {read}}}
      schema: {{driver: long, price: long, at: timestamp}}
      eventTime: {{column: at, maxOutOfOrder: 0s}}
  operators:
    dear: {{from: rides, filter: price > 2}}
    some: {{from: dear, select: [driver, 2 * price AS cost, at]}}
    hourly:
      {{from: some, keyBy: driver, window: {{tumbling: 1h}}, aggregate: {{n: count(), cost: sum(cost)}}}}
  sinks:
    out: {{from: hourly, parquet: {{path: {written}}}, guarantee: exactly_once}}
"""


@pytest.fixture
def rides(tmp_path: Path) -> list[dict[str, Any]]:
    """Rides far out of order, also in a file of several row groups."""
    rows = [
        {
            "driver": number % 5,
            "price": number * 7 % 11,
            "at": START + timedelta(minutes=number * 37 % 600),
        }
        for number in range(300)
    ]
    columns = pa.schema(
        [("driver", pa.int64()), ("price", pa.int64()), ("at", pa.timestamp("ms", "UTC"))]
    )
    pq.write_table(
        pa.Table.from_pylist(rows, columns), tmp_path / "rides.parquet", row_group_size=70
    )
    return rows


def hourly(rows: list[dict[str, Any]]) -> dict[tuple[int, datetime], tuple[int, int]]:
    """By driver and hour: how many, and what they cost."""
    found: dict[tuple[int, datetime], tuple[int, int]] = {}
    for row in rows:
        if row["price"] > 2:
            key = row["driver"], row["at"].replace(minute=0)
            count, cost = found.get(key, (0, 0))
            found[key] = count + 1, cost + 2 * row["price"]
    return found


def written(directory: Path) -> dict[tuple[int, datetime], tuple[int, int]]:
    table = pq.ParquetDataset(directory).read()
    rows = table.to_pylist()
    found = {(row["driver"], row["window_start"]): (row["n"], row["cost"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_manifest_and_a_script_from_files_to_files(
    session: Any, rides: list[dict[str, Any]], tmp_path: Path
) -> None:
    read = str(tmp_path / "rides.parquet")
    load_job(MANIFEST.format(read=read, written=tmp_path / "yaml"), options=BATCH).run()
    job = hg.Job("rides", parallelism=2, options=BATCH)
    (
        job.read(parquet_source(read, schema=COLUMNS), name="rides")
        .event_time("at", max_out_of_order="0s")
        .filter("price > 2")
        .select("driver", "2 * price AS cost", "at")
        .key_by("driver")
        .window(hg.tumbling("1h"))
        .agg(n=hg.count(), cost=hg.sum("cost"), name="hourly")
        .write(parquet_sink(str(tmp_path / "python"), guarantee="exactly_once"), name="out")
    )
    job.run()
    assert written(tmp_path / "yaml") == written(tmp_path / "python") == hourly(rides)


def test_two_inputs_of_objects_and_two_sinks_of_one_step(session: Any) -> None:
    left, right, twice = collect(), collect(), collect()
    job = hg.Job("pairs", parallelism=2, options=BATCH)
    numbers = job.read(from_list(list(range(20)), splits=3), name="numbers")
    squares = numbers.map(lambda number: (number, number * number), name="squares")
    squares.write(left, name="left")
    keyed = squares.union(numbers.map(lambda number: (number, -1), name="ones"))
    total = keyed.key_with(lambda pair: pair[0]).reduce(
        lambda one, other: (one[0], max(one[1], other[1])), name="greatest"
    )
    total.write(right, name="right")
    total.map(lambda pair: pair[0] * 2, name="double").write(twice, name="twice")
    job.run()
    assert sorted(left.rows) == [(n, n * n) for n in range(20)]
    assert {(n, n * n) for n in range(20)} <= set(right.rows)
    assert sorted(twice.rows) == sorted(2 * n for n, _ in right.rows)
    assert len(right.rows) == 40


def test_sources_without_records_and_of_nulls_and_nan(session: Any) -> None:
    """One has no records, and one has keys and values that are missing, and numbers that are none."""
    values = [(None, math.nan), (None, None), ("", -0.0), ("", 1.5), ("ä", None), ("ä", 3.5)]
    odd = [
        {"key": key, "value": value, "exact": Decimal(f"{number}.125"), "at": START}
        for number, (key, value) in enumerate(values)
    ]
    schema = {"key": "string", "value": "double", "exact": "decimal(20,3)", "at": "timestamp"}
    found = {}
    for mode in ("STREAMING", "BATCH"):
        out = collect(guarantee="none")
        job = hg.Job("odd", parallelism=2, options={"execution.runtime-mode": mode})
        none = job.read(from_list([], schema=schema), name="none")
        some = job.read(from_list(odd, schema=schema, splits=3), name="some")
        (
            none.union(some)
            .event_time("at", max_out_of_order="0s")
            .key_by("key")
            .window(hg.tumbling("1h"))
            .agg(n=hg.count(), v=hg.count("value"), s=hg.sum("exact"), m=hg.max("exact"), name="w")
            .write(out, name="out")
        )
        job.run()
        found[mode] = sorted(map(repr, out.rows))
    assert found["BATCH"] == found["STREAMING"]
    assert len(found["BATCH"]) == 3


def test_a_job_that_fails_says_why_and_leaves_nothing_to_see(session: Any, tmp_path: Path) -> None:
    def refuse_seven(row: Any) -> int:
        return 1 // (row.n - 7)

    job = hg.Job("fails", options=BATCH)
    rows = job.read(
        from_list([{"n": n} for n in range(10)], schema={"n": "long"}, batch_rows=1), name="rows"
    )
    rows.write(parquet_sink(str(tmp_path / "out"), guarantee="none"), name="out")
    rows.map(refuse_seven, name="refuse").write(collect(), name="never")
    with pytest.raises(UserCodeError, match="refuse") as failed:
        job.run()
    assert "ZeroDivisionError" in str(failed.value)
    visible = [
        path for path in (tmp_path / "out").rglob("*.parquet") if ".headgate" not in path.parts
    ]
    assert visible == []


def test_the_output_of_the_batch_before_stays_until_that_of_this_one_is_committed(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(*numbers: int) -> hg.Job:
        job = hg.Job("numbers", options=BATCH)
        rows = job.read(from_list([{"n": n} for n in numbers], schema={"n": "long"}), name="rows")
        rows.write(parquet_sink(str(tmp_path), guarantee="exactly_once"), name="out")
        return job

    def found() -> list[int]:
        files = tmp_path.glob("*.parquet")
        return sorted(n for file in files for n in pq.read_table(file)["n"].to_pylist())

    def refuses(*_: Any) -> None:
        raise StorageError("the disk is full")

    batch(1, 2).run()
    with pytest.raises(UsageError, match="1 file of earlier runs|2 files of earlier runs"):
        batch(3).run()
    with monkeypatch.context() as broken:
        broken.setattr(LocalTarget, "commit", refuses)
        with pytest.raises(StorageError, match="the disk is full"):
            batch(3).run(if_exists="overwrite")
    assert found() == [1, 2]
    batch(4).run(if_exists="overwrite")
    assert found() == [4]


def test_a_session_of_another_thread_is_used_and_left_alone(session: Any) -> None:
    def run() -> None:
        with spark_session(Options({}), "elsewhere") as beside:
            assert beside.sparkContext is session.sparkContext

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()
    assert session.range(3).count() == 3


@pytest.mark.parametrize("refused", [False, True])
def test_the_java_of_a_session_of_its_own_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """The stand-in for Java ends with its input, as the real one does."""
    pyspark = pytest.importorskip("pyspark")
    java = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    context, sessions = pyspark.SparkContext, pyspark.sql.SparkSession
    monkeypatch.setattr(context, "_gateway", None)
    monkeypatch.setattr(context, "_jvm", None)
    monkeypatch.setattr(context, "_active_spark_context", None)
    monkeypatch.setattr(batch_session, "find_java", lambda: Java("/none"))
    builder, own = MagicMock(), MagicMock()
    own.conf.get.return_value = "true" if refused else "false"
    builder.master.return_value = builder.appName.return_value = builder
    builder.config.return_value = builder

    def start() -> Any:
        context._gateway = SimpleNamespace(proc=java, shutdown=lambda: None)
        return own

    builder.getOrCreate.side_effect = start
    monkeypatch.setattr(sessions, "builder", builder)
    with java:
        with (
            pytest.raises(UsageError) if refused else nullcontext(),
            spark_session(Options({}), "alone"),
        ):
            assert java.poll() is None
        assert java.returncode == 0
    assert context._gateway is None
    own.stop.assert_called_once()


def test_explain_shows_the_plan_of_spark(
    session: Any, rides: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(MANIFEST.format(read=tmp_path / "rides.parquet", written=tmp_path / "out"))
    explain(file, runtime_mode=RuntimeMode.BATCH)
    shown = capsys.readouterr().out
    assert shown.count("MapInArrow") >= 2
    assert "Exchange" in shown
    assert "Sort" in shown


def test_a_spark_source_is_asked_before_and_gone_afterwards(
    session: Any, asked: list[Any], tmp_path: Path
) -> None:
    out = collect()
    job = hg.Job("asks", options={**BATCH, "io.tmp.dirs": str(tmp_path)})
    query = hg.spark_source(sql="SELECT id FROM range(50)", schema={"id": "long"})
    job.read(query, name="ids").filter("id % 2 = 0").write(out, name="out")
    job.run()
    assert sorted(row["id"] for row in out.rows) == list(range(0, 50, 2))
    assert len(asked) == 1
    assert list(tmp_path.glob("headgate-batch-*")) == []


def test_a_ray_dataset_is_computed_before_and_gone_afterwards(session: Any, tmp_path: Path) -> None:
    computed = tmp_path / "computed"

    def numbers() -> FakeDataset:
        with computed.open("a") as file:
            file.write("once\n")
        return FakeDataset([pa.table({"id": [*range(n, n + 10)]}) for n in range(0, 50, 10)])

    out, temporary = collect(), tmp_path / "tmp"
    job = hg.Job("rays", parallelism=2, options={**BATCH, "io.tmp.dirs": str(temporary)})
    source = ray_dataset_source(numbers, {"id": "long"}, split_bytes="80b")
    job.read(source, name="ids").filter("id % 2 = 0").write(out, name="out")
    job.run()
    assert sorted(row["id"] for row in out.rows) == list(range(0, 50, 2))
    assert computed.read_text() == "once\n"
    assert list(temporary.iterdir()) == []
