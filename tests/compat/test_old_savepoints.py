"""Goal: what an earlier version has saved loads for ever, whatever is changed since.

Method: savepoints that were written by that version (make_savepoint.py) with every kind of state. A job
goes on from them, reads the rest of its input, and must come to exactly what plain Python came to.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import pytest
from typer.testing import CliRunner

from headgate.runtime.cli.app import app
from headgate.runtime.job import runnable

BACKEND = {"canonical": "hashmap", "native": "rocksdb"}


def restored(
    lab: Any, state_job: ModuleType, kept: Any, parallelism: int, backend: str, **arguments: Any
) -> tuple[Any, Any]:
    """Go on from a kept savepoint to the end; how it ran, and the sinks."""
    outputs = state_job.Outputs(kept.output)
    job = state_job.make_job(
        kept.directory,
        outputs,
        parallelism=parallelism,
        mark="restored",
        storage=lab.storage,
        **arguments,
    )
    runnable(job).override({"state.backend.type": backend})
    ran = lab.run(job, restore_from=str(kept.savepoint))
    assert ran.outcome.status == "FINISHED"
    assert not ran.failures
    return ran, outputs


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_job_goes_on_from_it(
    lab: Any, state_job: ModuleType, kept: Any, parallelism: int
) -> None:
    backend = BACKEND[kept.savepoint.parent.name]
    _, outputs = restored(lab, state_job, kept, parallelism, backend)
    rows = outputs.rows()
    assert rows.keys() == kept.expected.keys()
    for sink, expected in kept.expected.items():
        assert rows[sink] == expected, sink


def test_it_goes_into_another_backend(lab: Any, state_job: ModuleType, canonical: Any) -> None:
    _, outputs = restored(lab, state_job, canonical, 3, "rocksdb")
    assert outputs.rows() == canonical.expected


def test_a_job_of_another_name_goes_on_from_it(lab: Any, state_job: ModuleType, kept: Any) -> None:
    """Also the identities of keys in its files, which depend on the job's name."""
    backend = BACKEND[kept.savepoint.parent.name]
    _, outputs = restored(lab, state_job, kept, 2, backend, name="fork")
    rows = outputs.rows()
    for sink in ("process", "running", "reduce"):
        assert rows[sink] == kept.expected[sink]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_state_of_subtasks_is_dealt_out(
    lab: Any, state_job: ModuleType, canonical: Any, parallelism: int
) -> None:
    _, outputs = restored(lab, state_job, canonical, parallelism, "hashmap")
    opened = [row for row in outputs.process.rows if "opened by" in row]
    before = [row for row in opened if row["opened by"] == canonical.mark]
    after = [row for row in opened if row["opened by"] == "restored"]
    assert (len(before), len(after)) == (2, parallelism)
    assert all(row["rules"] == {"made by": canonical.mark} for row in after)
    assert all(row["subtasks"] == [f"{canonical.mark} {n}" for n in range(2)] for row in after)
    assert sorted(key for row in after for key in row["met"]) == [0, 1, 2, 100, 101, 102]


def test_it_can_be_inspected(kept: Any) -> None:
    shown = CliRunner().invoke(app, ["savepoint", "inspect", str(kept.savepoint), "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert (found["job"], found["format"]) == ("compat", kept.savepoint.parent.name)
    states = {
        (operator["operator"], state["state"]): state
        for operator in found["operators"]
        for state in operator["states"]
    }
    kinds = {
        state: row["kind"] for (operator, state), row in states.items() if operator == "process"
    }
    assert (kinds.pop("function_watermark", None) is None) == (kept.mark == "v0.1"), "it came later"
    assert kinds == {
        "total": "value", "account": "value", "pickled": "value", "local": "value",
        "ratios": "list", "names": "map", "greatest": "reducing", "mean": "aggregating",
        "lasting": "value", "visits": "map", "met": "split", "subtasks": "union",
        "rules": "broadcast",
    }  # fmt: skip
    total = states["process", "total"]
    assert (total["keys"], total["rows"]) == ({"id": "int64"}, 6)
    assert states["process", "lasting"]["ttl_ms"] == 36_500 * 86_400_000
    assert states["reduce", "reduce"]["kind"] == "reduce"
    assert states["running", "running"]["values"]["price_sum"].startswith("decimal128")
    if found["format"] == "canonical":
        assert states["windows", "windows"]["rows"] > 10


def test_a_job_can_be_checked_against_it(lab: Any, state_job: ModuleType, kept: Any) -> None:
    import asyncio

    from headgate.operators.clock import SystemClock
    from headgate.runtime.savepoint.compare import check
    from headgate.runtime.savepoint.locate import locate
    from headgate.runtime.storage.open_store import open_store_at

    located = asyncio.run(locate(open_store_at, str(kept.savepoint), {}, SystemClock()))
    job = state_job.make_job(
        kept.directory, state_job.Outputs(kept.output), parallelism=3, mark="", storage=lab.storage
    )
    found = check(located, runnable(job).spec())
    assert found.ok()
    assert (found.unclaimed, found.migrated) == ([], [])


def test_duckdb_reads_its_tables(canonical: Any) -> None:
    """Typed columns, one row per key, all subtasks of a state by one pattern."""

    def query(state: str, columns: str) -> list[Any]:
        files = canonical.savepoint / state / "*.parquet"
        return duckdb.sql(f"select {columns} from '{files}' order by all").fetchall()

    assert [id_ for (id_,) in query("process-*/total", "id")] == [0, 1, 2, 100, 101, 102]
    (counts,) = query("process-*/account", "sum(value.count), any_value(typeof(value.spent))")
    (lasting,) = query("process-*/lasting", "sum(value), min(key_group)")
    assert counts == (lasting[0], "VARCHAR")
    assert 0 <= lasting[1] < 12
    running = query("running-*/running", "name, n, price_sum, typeof(price_sum)")
    assert len(running) == 4
    assert sum(row[1] for row in running) == lasting[0]
    assert {row[3] for row in running} == {"DECIMAL(38,2)"}
    windows = query("windows-*/windows", "minute(window_start), sum(n) over ()")
    assert all(row[0] % 5 == 0 for row in windows)
    assert 0 < windows[0][1] < lasting[0]


def test_what_is_kept_is_small(version: str) -> None:
    kept = Path(__file__).parent / version
    sizes = {path: path.stat().st_size for path in kept.rglob("*") if path.is_file()}
    in_flight = {path for path in sizes if path.is_relative_to(kept / "in-flight")}
    assert sum(sizes[path] for path in in_flight) < 30_000
    assert sum(size for path, size in sizes.items() if path not in in_flight) < 300_000
