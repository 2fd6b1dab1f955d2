"""Scans of running jobs: pages of one checkpoint, over HTTP, as Arrow, and who may ask."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.connectors import blackhole, choice, from_list, generator
from headgate.errors import HeadgateError, JobNotReady, ScanOver
from headgate.operators.queries import QueryableState
from headgate.runtime.cli.app import app
from headgate.runtime.coordinator.scanned_columns import to_stream
from headgate.runtime.query import AsyncQueryClient
from headgate.runtime.rest.routes import ROUTES
from headgate.state.keyed.keys import OPAQUE_KEYS, keys_of_columns
from headgate.tests.rest.conftest import QUERY_TOKEN, serving
from headgate.tests.rest.test_server import valid

from .conftest import ROWS, USERS, model, queryable_job, shown
from .test_jobs import COMMITTED, at_rest, reaches, sums

(SCAN,) = [route for route in ROUTES if route.name == "scan"]


async def scan(job: Any, state: str, **given: Any) -> tuple[int, dict[str, Any]]:
    """Return the checkpoint of a scan, and all its rows."""
    rows: dict[str, Any] = {}
    more: dict[str, Any] = {}
    while True:
        page = await job.request("scan", state=state, **given, **more)
        for row in page["rows"]:
            assert row["key"] not in rows
            rows[row["key"]] = shown({**page, **row})
        if page["next"] is None:
            return page["checkpoint"], rows
        more = {"next": page["next"]}
        await asyncio.sleep(0.002)


async def scan_committed(job: Any, found: dict[int, Any], over: asyncio.Event, seed: int) -> None:
    """Scan random states as of checkpoints until `over`."""
    rng = random.Random(seed)
    while not over.is_set():
        state = rng.choice(COMMITTED)
        try:
            checkpoint, rows = await scan(job, state, level="committed", limit=4)
        except (JobNotReady, ScanOver):
            await asyncio.sleep(0.005)
            continue
        assert found.setdefault(checkpoint, {}).setdefault(state, rows) == rows


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_scans_are_of_one_checkpoint(lab: Any, backend: str) -> None:
    """In small pages, across owners, a dead worker, a crash of the coordinator, and a rescale."""
    found: dict[int, dict[str, Any]] = {}

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        over = asyncio.Event()
        asking = asyncio.get_running_loop().create_task(scan_committed(job, found, over, 1))
        try:
            await job.checkpoint()
            job.kill(random.Random(2))
            await job.checkpoint()
            await job.crash_coordinator()
            await job.checkpoint()
            await job.request("rescale", parallelism=3)
            await at_rest(job, model(ROWS))
            done = await job.checkpoint()
            await reaches(found, done)
            for state in ("sums", "latest", "first"):
                expected = {user: values[state] for user, values in model(ROWS).items()}
                assert await scan(job, state, limit=3) == (None, expected)
                assert await scan(job, state) == (None, expected)
        finally:
            over.set()
            await asking

    made = queryable_job(lab, **{"state.backend.type": backend})
    assert lab.run(made, script).outcome.status == "FINISHED"
    assert len(found) > 2
    for _, states in sorted(found.items()):
        totals = {sums(rows) for state, rows in states.items() if "sums" in state}
        assert len(totals) <= 1
        for through in totals:
            expected = model(ROWS[:through])
            for state, rows in states.items():
                assert rows == {user: values[state] for user, values in expected.items()}


def test_a_scan_ends_with_its_checkpoint_and_its_job(lab: Any) -> None:
    """A token stays at its checkpoint, and is refused when that cannot be."""

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        await at_rest(job, model(ROWS))
        done = await job.checkpoint()
        first = await job.request("scan", state="sums", level="committed", limit=2)
        assert first["checkpoint"] >= done
        for _ in range(3):
            await job.checkpoint()
        second = await job.request("scan", state="sums", next=first["next"], limit=2)
        assert second["checkpoint"] == first["checkpoint"]
        with pytest.raises(ScanOver):  # each token is for one page
            await job.request("scan", state="sums", next=first["next"])
        await job.request("rescale", parallelism=3)
        await job.until("status", status="RUNNING")
        with pytest.raises(ScanOver):
            await job.request("scan", state="sums", next=second["next"])
        left = [await begun(job) for _ in range(8)]
        assert all(left)
        with pytest.raises(JobNotReady, match="too many scans"):
            await job.request("scan", state="sums", limit=1)

    assert lab.run(queryable_job(lab), script).outcome.status == "FINISHED"


async def begun(job: Any) -> str:
    """Begin a scan."""
    while True:
        try:
            return str((await job.request("scan", state="sums", limit=1))["next"])
        except JobNotReady:
            await asyncio.sleep(0.01)


def job_over_http() -> hg.Job:
    job = hg.Job("odd", parallelism=2, options={"headgate.queries.timeout": "60s"})
    schema = {"user": "string", "n": "int64", "at": "timestamp"}
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    listed = [{"user": f"u{n % USERS}", "n": n, "at": at} for n in range(100)]
    rows = job.read(from_list(listed, schema=schema), name="in")
    made = rows.key_by("user").agg(n=hg.count(), at=hg.max("at"), name="one", queryable="sums")
    made.write(blackhole(), name="out")
    by_both = rows.key_by("user", "n").agg(times=hg.count(), name="two", queryable="times")
    by_both.write(blackhole(), name="out-2")
    return job


def test_scans_over_http(lab: Any, tmp_path: Path) -> None:
    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        async with serving(job) as api, api.client() as client:
            while True:
                try:
                    if len((await client.scan("times", {})).rows) == 100:
                        break
                except JobNotReady:
                    pass
                await asyncio.sleep(0.01)
            status, headers, body = await api.ask("GET", "/v1/job/state/sums/scan?limit=4")
            assert (status, headers["Cache-Control"]) == (200, "no-store")
            valid(SCAN, status, body)
            assert (len(body["rows"]), body["level"], body["checkpoint"]) == (4, "live", None)
            for path, expected, error in (
                ("sum/scan", 404, "StateNotFound"),
                ("sums/scan?level=dirty", 400, "UsageError"),
                ("sums/scan?level=committed", 400, "UsageError"),
                ("sums/scan?limit=x", 400, ""),
                ("sums/scan?next=1.1", 410, "ScanOver"),
                ("times/scan?from=a", 400, "UsageError"),
                ("times/scan?prefix=a", 400, "UsageError"),
                ("times/scan?prefix=[3]", 400, "UsageError"),
            ):
                status, _, body = await api.ask("GET", f"/v1/job/state/{quote(path, '/?=')}")
                assert (path, status, body["error"]) == (path, expected, error)
                valid(SCAN, status, body)
            for token, status in ((QUERY_TOKEN, 200), (None, 401), ("wrong", 401)):
                path = "/v1/job/state/sums/scan"
                assert (await api.ask("GET", path, token=token))[0] == status

            async def connect() -> Any:
                return await api.client().__aenter__()

            async with AsyncQueryClient(connect, 10) as state:
                found = [row.key async for row in state.scan("sums", prefix="u1")]
                assert sorted(found) == ["u1", "u10"]
                found = [row.key async for row in state.scan("sums", start="u3", stop="u5")]
                assert sorted(found) == ["u3", "u4"]
                table = await state.table("times", prefix=("u4",))
                assert table.column("user").to_pylist() == ["u4"] * 9
                assert table.schema.names == ["user", "n", "times"]
                sums_ = pl.from_arrow(await state.table("sums")).sort("user")
                assert sums_["n"].sum() == 100
                assert sums_.schema["at"] == pl.Datetime("ms", "UTC")
                pages = [page async for page in state.streams("times", {"limit": "7"})]
                assert len(pages) > 10
                whole = pa.concat_tables([pa.ipc.open_stream(page).read_all() for page in pages])
                assert sorted(whole.column("n").to_pylist()) == list(range(100))
                with pytest.raises(HeadgateError):
                    await state.table("nothing")

    assert lab.run(job_over_http(), script).outcome.status == "FINISHED"


def test_values_of_each_type_as_arrow() -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    values = pa.schema(
        [
            ("value", pa.struct([("n", pa.decimal128(10, 2)), ("at", pa.timestamp("us", "UTC"))])),
        ]
    )
    keys = keys_of_columns([pa.field("user", pa.string())])
    state = QueryableState("s", "s", "value", keys, ("user",), False, values)
    stream = to_stream(state, [("a", b'{"n":"12.50","at":"2026-01-31T12:00:00Z"}'), ("b", b"null")])
    assert pa.ipc.open_stream(stream).read_all().to_pylist() == [
        {"user": "a", "value": {"n": Decimal("12.50"), "at": at}},
        {"user": "b", "value": None},
    ]
    unknown = QueryableState("s", "s", "value", OPAQUE_KEYS)
    stream = to_stream(unknown, [(("a", 1), b'{"x":[1]}')])
    table = pa.ipc.open_stream(stream).read_all()
    assert table.to_pylist() == [{"key": '["a",1]', "value": '{"x":[1]}'}]
    lists = pa.schema(
        [("value", pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())])))]
    )
    state = QueryableState("s", "s", "map", keys, ("value",), False, lists)
    table = pa.ipc.open_stream(to_stream(state, [("a", b'[{"key":"x","value":1}]')])).read_all()
    assert table.to_pylist() == [{"value": "a", "value_value": [{"key": "x", "value": 1}]}]


def test_the_command(tmp_path: Path) -> None:
    job = hg.Job("endless", parallelism=2)
    users = [f"u{n}" for n in range(USERS)]
    made = job.read(generator({"user": choice(users)}, rate=2_000), name="in").key_by("user")
    made.agg(n=hg.count(), name="sums", queryable="sums").write(blackhole(), name="out")
    ran = CliRunner()
    with job.start(), hg.query.connect("endless") as state:
        while len({row.key for row in state.scan("sums")}) < USERS:
            pass
        lines = ran.invoke(app, ["query", "endless", "sums", "--from", "u3", "--to", "u5"]).stdout
        found = [json.loads(line) for line in lines.splitlines()]
        assert sorted(row["key"] for row in found) == ["u3", "u4"]
        path = tmp_path / "sums.arrows"
        done = ran.invoke(app, ["query", "endless", "sums", "--all", "--arrow", str(path)])
        assert done.stderr == f"wrote {USERS} rows to {path}\n"
        assert state.table("sums", prefix="u1").num_rows == 2
        assert pa.ipc.open_stream(path).read_all().num_rows == USERS
        assert ran.invoke(app, ["query", "endless", "sums", "u1", "--all"]).exception is not None
