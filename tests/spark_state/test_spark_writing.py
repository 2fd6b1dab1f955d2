"""Goal: a job that goes on from what Spark wrote has what the DataFrames had, and all else as before.

Method: a savepoint of a real job with every kind of state, read and written by Spark on two threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.errors import StateError, UsageError
from headgate.testing import harness

from .keeper import ask, event, keeper_job, read

KEYS = [f"key {number}" for number in range(12)]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: Any) -> tuple[str, list[Any]]:
    """A savepoint of a job, and what the job said of its state."""
    with harness(keeper_job()) as running:
        running.push("events", [event(key, n, "ab"[n % 2]) for n, key in enumerate(KEYS, 1)])
        path = running.savepoint(tmp_path_factory.mktemp("taken"))
        return path, ask(running, KEYS)


def frame_of(spark: Any, path: str, state: str, **options: str) -> Any:
    reader = spark.read.format("headgate").option("operator", "keep").option("state", state)
    return reader.options(**options).load(path)


def resumed(path: str) -> tuple[list[Any], list[Any]]:
    """Return the state of a job that goes on, and the results of its timers."""
    with harness(keeper_job(3, max_parallelism=None), restore_from=path) as running:
        said = ask(running, KEYS)
        running.advance_time("30s")
        return said, sorted(running.drain("out"))


def test_written_as_read_and_with_other_key_groups(
    spark: Any, taken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the zone of the session; what is not written is taken over by tasks."""
    from headgate.spark import SavepointWriter, savepoint_writer

    path, said = taken
    monkeypatch.setattr(savepoint_writer, "COPY_HERE_BYTES", 0)
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    writer = SavepointWriter(spark, base=path, max_parallelism=40)
    for state in ("total", "by_kind", "timers_processing"):
        writer.put("keep", state, frame_of(spark, path, state))
    writer.put("keep", "lasting", frame_of(spark, path, "lasting", ttl="true"))
    written = writer.write(str(tmp_path))
    spark.conf.set("spark.sql.session.timeZone", before)
    used = [
        {row["key"]: row["last_used"] for row in read(one, "keep", "lasting", ttl=True)}
        for one in (path, written)
    ]
    assert used[0] == used[1]
    told, timers = resumed(written)
    assert told == said
    assert timers == [(key, "timer", "soon") for key in sorted(KEYS)]


def test_repaired_and_first_states(spark: Any, taken: Any, tmp_path: Path) -> None:
    from headgate.spark import SavepointWriter

    path, said = taken
    total = frame_of(spark, path, "total")
    repaired = total.where(f"key != '{KEYS[0]}'").selectExpr("key", "-value as value")
    first = SavepointWriter(spark, job=keeper_job()).put("keep", "total", repaired)
    told, timers = resumed(first.write(str(tmp_path)))
    assert [one[:3] for one in told] == [
        (key, 0 if key == KEYS[0] else -total, None) for key, total, *_ in said
    ]
    assert timers == []


def test_refused_rows_leave_nothing_behind(spark: Any, taken: Any, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    from headgate.spark import SavepointWriter

    path, _ = taken
    total = frame_of(spark, path, "total")
    with pytest.raises(StateError, match="`value` is string, and int64 in the state"):
        SavepointWriter(spark, base=path).put(
            "keep", "total", total.selectExpr("key", "string(value) as value")
        )
    writer = SavepointWriter(spark, base=path).put("keep", "total", total.union(total))
    with pytest.raises(PySparkException, match="several rows of one key"):
        writer.write(str(tmp_path))
    with pytest.raises(UsageError, match="neither base nor job"):
        SavepointWriter(spark)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
