"""The queries of docs/savepoints.md run as they stand there, on a savepoint of the job they are about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pytest

import headgate as hg
from headgate.connectors import collect, generator

PAGE = Path(hg.__file__).parent / "docs" / "savepoints.md"
FIELDS = {
    "origin": {"kind": "choice", "values": ["EWR", "JFK", "LGA"]},
    "dep_delay": {"kind": "int", "low": -20, "high": 300},
    "time_hour": {"kind": "timestamp", "every": "1m"},
}


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def savepoint(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A savepoint below `kept`, in the current directory."""
    monkeypatch.chdir(lab.path)
    job = hg.Job("flights", parallelism=2)
    flights = job.read(generator(FIELDS, rate=2000, batch_rows=50), name="flights")
    flights.event_time("time_hour", max_out_of_order="24h").key_by("origin").window(
        hg.tumbling("1h")
    ).agg(
        flights=hg.count(),
        mean_delay=hg.avg("dep_delay"),
        worst_delay=hg.max("dep_delay"),
        name="delays",
    ).write(collect(guarantee="none"), name="results")
    taken: list[str] = []

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        while not sum(v["records_in"] for v in (await running.status())["vertices"]):
            await running.tick()
        await running.tick()
        done = await running.request("stop", savepoint=str(lab.path / "kept"))
        taken.append(done["savepoint"])

    lab.run(job, script)
    return Path(taken[0])


def test_the_queries_of_the_page(savepoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = duckdb.sql(block("sql"))
    assert dict(zip(result.columns, map(str, result.types), strict=True)) == {
        "origin": "VARCHAR",
        "windows": "BIGINT",
        "flights": "HUGEINT",
        "worst_delay": "BIGINT",
    }
    rows = result.fetchall()
    assert [row[0] for row in rows] == ["EWR", "JFK", "LGA"]
    assert all(-20 <= worst <= 300 and n >= windows > 0 for _, windows, n, worst in rows)
    scope: dict[str, Any] = {}
    exec(block("python"), scope)
    assert scope["windows"]["flights"].sum() == sum(row[2] for row in rows)
    assert "window_start" in capsys.readouterr().out
    assert savepoint.parent.name == "kept"
