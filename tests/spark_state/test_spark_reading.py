"""Goal: what Spark reads is what the core reads, with Spark's types.

Method: the kept savepoint with every kind of state; rows of Spark beside rows of the core.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from headgate.runtime.offline.snapshot import open_snapshot
from headgate.testing import harness

from .keeper import KEPT, event, keeper_job, read


def load(spark: Any, state: str, path: str = str(KEPT), **options: str) -> Any:
    reader = spark.read.format("headgate").option("operator", "process").option("state", state)
    return reader.options(**options).load(path)


def plain(rows: Any) -> list[str]:
    """Rows of either reader, comparable; Spark gives datetimes without their zone, which is UTC."""
    return sorted(
        repr(_plain(r.asDict(recursive=True) if hasattr(r, "asDict") else r)) for r in rows
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((key, _plain(one)) for key, one in value.items())
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    return bytes(value) if isinstance(value, bytearray) else value


def test_states_as_dataframes(spark: Any) -> None:
    kept = open_snapshot(str(KEPT), {})
    for state in ("account", "mean", "ratios", "rules", "pickled"):
        assert plain(load(spark, state).collect()) == plain(read(kept, "process", state)), state
    frame = load(spark, "visits", ttl="true", partitions="2")
    assert plain(frame.collect()) == plain(read(kept, "process", "visits", ttl=True))
    assert load(spark, "account").schema["value"].dataType.simpleString() == (
        "struct<count:bigint,spent:string,last:timestamp,label:string>"
    )
    maps = {row.id: row.value for row in load(spark, "names", flatten="false").collect()}
    assert maps == {
        row["id"]: dict(row["value"]) for row in read(kept, "process", "names", flatten=False)
    }


def test_filters_and_columns_reduce_what_is_read(spark: Any) -> None:
    frame = load(spark, "total", partitions="12")
    assert frame.rdd.getNumPartitions() > 4
    one = frame.where("id = 100").select("value")
    assert one.rdd.getNumPartitions() == 1
    (expected,) = load(spark, "total", key="100", columns="value").collect()
    assert [tuple(row) for row in one.collect()] == [tuple(expected)]
    assert frame.where("id = 100 and id = 2").collect() == []
    assert load(spark, "total", keyGroups="0-1").where("key_group > 1").collect() == []


@pytest.mark.parametrize(("unit", "pushed"), [("us", True), ("ns", False)])
def test_times_that_spark_cuts_off_are_not_looked_for(unit: Any, pushed: bool) -> None:
    """Several times in nanoseconds are equal to the one that Spark asks for."""
    pytest.importorskip("pyspark", reason="needs headgate[spark]")
    from headgate.spark.data_source import _StateReader

    asked: list[str] = []
    scan = SimpleNamespace(
        type_of=lambda name: pa.timestamp(unit, "UTC"),
        where=lambda name, values: asked.append(name),
    )
    _StateReader(scan)._push("at", [datetime(2026, 1, 1, tzinfo=UTC)])  # type: ignore[arg-type]
    assert asked == ["at"] * pushed


def test_the_table_of_all_states(spark: Any) -> None:
    found = spark.read.format("headgate").load(str(KEPT))
    rows = found.where("operator = 'process' and kind = 'list'").select("state", "rows").collect()
    assert [tuple(row) for row in rows] == [("ratios", 18)]


def test_changes_and_checkpoints_on_s3(spark: Any, s3_server: Any, tmp_path: Path) -> None:
    """Also that options with a dot reach the storage, on the driver and in tasks."""
    import boto3

    with harness(keeper_job()) as running:
        running.push("events", [event("a", 1), event("b", 2)])
        before = Path(running.savepoint(tmp_path))
        running.push("events", [event("b", 5), event("c", 3)])
        after = Path(running.savepoint(tmp_path))
    client = boto3.client(
        "s3", endpoint_url=s3_server.endpoint, region_name="us-east-1",
        aws_access_key_id="testing", aws_secret_access_key="testing",
    )  # fmt: skip
    for path in tmp_path.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), s3_server.bucket, f"kept/{path.relative_to(tmp_path)}")
    addresses = [f"s3://{s3_server.bucket}/kept/{path.name}" for path in (before, after)]
    reader = spark.read.format("headgate").options(**s3_server.options)
    reader = reader.option("operator", "keep").option("state", "total").option("from", addresses[0])
    rows = (
        reader.load(addresses[1]).select("change", "key", "value_before", "value_after").collect()
    )
    assert sorted(map(tuple, rows)) == [("added", "c", None, 3), ("changed", "b", 2, 7)]


def test_errors_name_what_there_is(spark: Any) -> None:
    from pyspark.errors import PySparkException

    for options, text in (
        ({"state": "sum"}, "there are: account"),
        ({"flattern": "true"}, "did you mean `flatten`"),
        ({"key": "[1, 2]"}, "the key has other columns"),
    ):
        with pytest.raises(PySparkException, match=text):
            load(spark, **{"state": "total", **options}).collect()
    with pytest.raises(PySparkException, match="neither a savepoint nor"):
        spark.read.format("headgate").load(str(KEPT.parent)).collect()


def test_without_pyspark_the_line_to_install_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import headgate, headgate.spark\n"
        "try: headgate.spark.register(None)\n"
        "except headgate.errors.UsageError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'headgate[spark]'" in ran.stdout
