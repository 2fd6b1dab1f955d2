"""Spark reads the tables that the sinks have written: those of Delta and Iceberg, compacted and not.

Spark needs runtimes of both formats that are made for its version. They exist for Spark 4.0, which is not
the one that the other tests run on, so this one is fetched into the cache of test programs.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import delta_sink, from_list, iceberg_sink
from headgate.connectors.spark.java import find_java
from headgate.testing.servers.programs import NotAvailableError, made_once, run_command
from headgate.tests.support.skips import skip_or_fail, thorough_only

PYSPARK = "4.0.1"
JARS = (
    "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.1",
    "org.xerial:sqlite-jdbc:3.50.3.0",
    "io.delta:delta-spark_2.13:4.0.0",
    "io.delta:delta-storage:4.0.0",
    "org.antlr:antlr4-runtime:4.13.1",
)
FETCH_S_MAX = 1200
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("who", pa.string()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("price", pa.decimal128(10, 2)),
        ("tags", pa.list_(pa.string())),
        ("part", pa.struct([("x", pa.int64()), ("y", pa.string())])),
        ("flag", pa.bool_()),
        ("size", pa.float64()),
        ("data", pa.binary()),
    ]
)
READER = """
import json, sys
from pyspark.sql import SparkSession

place, jars = sys.argv[1:]
settings = {
    "spark.jars": jars,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalog.default": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.default.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
    "spark.sql.catalog.default.uri": f"jdbc:sqlite:{place}/catalog.db",
    "spark.sql.catalog.default.jdbc.schema-version": "V1",
    "spark.sql.catalog.default.warehouse": f"file://{place}/tables",
}
builder = SparkSession.builder.master("local[1]")
for key, value in settings.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
found = {"kinds": {}}
for format, table in (
    ("iceberg", lambda name: spark.table(f"`default`.shop.{name}")),
    ("delta", lambda name: spark.read.format("delta").load(f"{place}/{name}")),
):
    for name in ("plain", "compacted"):
        rows = table(name)
        found[f"{format} {name}"] = sorted(str(row.asDict(True)) for row in rows.collect())
        some = rows.filter("who = 'c' and day = date'2026-01-03'")
        found[f"{format} {name} some"] = sorted(row.id for row in some.collect())
for name in ("plain", "compacted"):
    kinds = spark.sql(f"SELECT operation FROM `default`.shop.{name}.snapshots").collect()
    found["kinds"][name] = [row.operation for row in kinds]
print("FOUND" + json.dumps(found))
"""


def spark_4_0() -> tuple[Path, list[Path]]:
    """Return the directory of a Spark for which there are runtimes of both formats, and their jars."""

    def fetch(directory: Path) -> None:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--target", str(directory / "python"))
        run_command(*pip, f"pyspark=={PYSPARK}", seconds_max=FETCH_S_MAX)
        for jar in JARS:
            run_command(
                *("mvn", "-q", "-B", "dependency:copy", f"-Dartifact={jar}"),
                f"-DoutputDirectory={directory / 'jars'}",
                seconds_max=FETCH_S_MAX,
            )

    jars = ["jars/" + "-".join(jar.split(":")[1:]) + ".jar" for jar in JARS]
    try:
        found = made_once(f"pyspark-{PYSPARK}", [*jars, "python/pyspark/__init__.py"], fetch)
    except NotAvailableError as error:
        skip_or_fail(str(error))
    return found / "python", [found / jar for jar in jars]


def rows_of_all_types() -> list[dict[str, Any]]:
    noon = datetime.datetime(2026, 1, 31, 12, 0, 15, 123456, datetime.UTC)
    return [
        {
            "id": n,
            "who": [None, "a/b", "c"][n % 3],
            "day": datetime.date(2026, 1, 1 + n % 4),
            "at": noon + datetime.timedelta(minutes=n),
            "price": Decimal(n) / 4,
            "tags": ["x", None] if n % 5 else None,
            "part": {"x": n, "y": None},
            "flag": n % 2 == 0,
            "size": n / 8,
            "data": bytes([n]),
        }
        for n in range(60)
    ]


def write(place: Path, name: str, rows: list[dict[str, Any]], **options: Any) -> None:
    """Write the rows into a table of each format, in several checkpoints and by two subtasks."""
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{place}/catalog.db",
        "warehouse": f"file://{place}/tables",
    }
    for first in range(0, len(rows), 20):
        job = hg.Job("spark", parallelism=2)
        job.checkpoint(every="1h", storage=place / f"checkpoints-{name}-{first}")
        items = job.read(
            from_list(rows[first : first + 20], schema=SCHEMA, batch_rows=5, splits=2), name="items"
        )
        by = ["who", "bucket(2, id)", "day(at)"]
        ice = iceberg_sink(
            f"shop.{name}", catalog=catalog, partition_by=by, if_exists="append", **options
        )
        items.write(ice, name="ice")
        delta = delta_sink(place / name, partition_by=["who", "day"], if_exists="append", **options)
        items.write(delta, name="delta")
        job.run()


def test_spark_reads_what_the_sinks_wrote(tmp_path: Path) -> None:
    thorough_only()
    python, jars = spark_4_0()
    rows = rows_of_all_types()
    write(tmp_path, "plain", rows)
    write(tmp_path, "compacted", rows, compact_files=2)
    java = find_java().home_for_spark(tmp_path / "spark")
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path), ",".join(map(str, jars))],
        env={**os.environ, "JAVA_HOME": java, "PYTHONPATH": str(python)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("FOUND")]
    found = json.loads(line.removeprefix("FOUND"))
    wanted = sorted(
        str(
            {**row, "at": row["at"].replace(tzinfo=None), "data": bytearray(row["data"])}
            | {"price": row["price"].quantize(Decimal("0.01"))}
        )
        for row in rows
    )
    some = [row["id"] for row in rows if row["who"] == "c" and row["day"].day == 3]
    for format in ("iceberg", "delta"):
        for name in ("plain", "compacted"):
            assert found[f"{format} {name}"] == wanted, (format, name)
            assert found[f"{format} {name} some"] == some
    assert found["kinds"]["plain"] == ["append"] * 3
    assert set(found["kinds"]["compacted"]) == {"append", "replace"}
