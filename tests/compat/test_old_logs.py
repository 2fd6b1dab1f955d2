"""Goal: a job goes on from the log and the checkpoints that an earlier build left, in every format.

Method: storages that such builds wrote (make_log.py), of a job that was cancelled after two checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headgate.operators.clock import SystemClock
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.local import LocalStore
from headgate.state.sealed import FORMAT_VERSION


@pytest.fixture
def storage(version: str, tmp_path: Path) -> Path:
    """A copy of a kept storage."""
    shutil.copytree(Path(__file__).parent / version / "log", tmp_path / "storage")
    return tmp_path / "storage"


def records_in(storage: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(storage.rglob("log/**/*.json"))]


def test_each_format_is_kept(storage: Path, formats: dict[str, int], version: str) -> None:
    """The log of today as well: a new version keeps a log and a savepoint of the old one (README.md)."""
    found = {record.get("format", 1) for record in records_in(storage)}
    assert found == {formats[version]}
    assert max(formats.values()) == FORMAT_VERSION
    assert all(("checksum" in record) == (found != {1}) for record in records_in(storage))


def test_all_entries_are_read(storage: Path, log_job: Any) -> None:
    async def read() -> Any:
        store = LocalStore(storage / log_job.NAME)
        await store.open()
        log = JobLog(store, "reader", SystemClock())
        await log.load()
        await store.close()
        return log.view

    view = asyncio.run(read())
    assert view.restorable[-1].checkpoint_id == 2
    assert view.ended is not None
    assert view.ended.status.value == "CANCELED"


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_job_goes_on_from_it(lab: Any, log_job: Any, storage: Path, parallelism: int) -> None:
    job, sink = log_job.make_job(str(storage), parallelism)
    ran = lab.run(job)
    assert ran.outcome.status == "FINISHED"
    assert (ran.restores, ran.failures) == ([2], [])
    rows = log_job.ROWS
    assert log_job.totals(sink.rows) == (rows, rows * (rows - 1) // 2)
    assert min(row["rows"] for row in sink.rows) > 1, "it went on, and did not begin again"


@pytest.mark.parametrize("kept", ["v0.1-format-7", "v0.1-format-8"])
@pytest.mark.parametrize("parallelism", [2, 3])
def test_records_on_their_way_are_restored(
    lab: Any, log_job: Any, in_flight_job: Any, tmp_path: Path, parallelism: int, kept: str
) -> None:
    """Up to format 7 each channel has a handle; then there is one for a subtask and exchange."""
    storage = tmp_path / "storage"
    shutil.copytree(Path(__file__).parent / kept / "in-flight", storage)
    job, sink = in_flight_job.make_job(str(storage), parallelism)
    ran = lab.run(job)
    assert ran.outcome.status == "FINISHED"
    assert (ran.restores, ran.failures) == ([2], [])
    rows = in_flight_job.ROWS
    assert log_job.totals(sink.rows) == (rows, rows * (rows - 1) // 2)
    assert min(row["rows"] for row in sink.rows) > 1, "it went on, and did not begin again"
