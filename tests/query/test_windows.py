"""The open windows of a key, as clients read them: random records, watermarks, failures and rescales."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import JobNotReady, PlanError
from headgate.state.keyed.base import ABSENT
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]
Steps = Callable[..., Step]
SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64()), ("t", pa.int64())])
USERS = [f"u{n}" for n in range(7)]
MINUTE = 60_000
KINDS: dict[str, Any] = {
    "tumbling": hg.tumbling("1m"),
    "tumbling with lateness": hg.tumbling("1m", allowed_lateness="90s"),
    "tumbling with early results": hg.tumbling("1m", emit_rows=1_000_000),
    "sliding": hg.sliding("3m", every="1m"),
    "sliding with lateness": hg.sliding("3m", every="1m", allowed_lateness="90s"),
    "cumulative": hg.cumulative("3m", step="1m"),
}


def windows_of(time: int, kind: str) -> list[tuple[int, int]]:
    """Return start and end of the windows that have this time."""
    first = time - time % MINUTE
    if kind.startswith("tumbling"):
        return [(first, first + MINUTE)]
    if kind.startswith("sliding"):
        return [(first - n * MINUTE, first + (3 - n) * MINUTE) for n in range(3)]
    start = time - time % (3 * MINUTE)
    return [(start, end) for end in range(first + MINUTE, start + 4 * MINUTE, MINUTE)]


def by_user() -> Any:
    (stream,) = streams()
    columns = stream.map(lambda record: record, into=SCHEMA)
    return columns.event_time("t", max_out_of_order="1h").key_by("user")


def made(kind: str) -> Any:
    aggregates: dict[str, Any] = {"n": hg.count(), "top": hg.max("n"), "total": hg.sum("n")}
    return by_user().window(KINDS[kind]).agg(**aggregates, name="agg", queryable="agg")


def push(step: Step, rows: list[tuple[str, int, int]], key: str | None = "user") -> None:
    columns = zip(*rows, strict=True)
    data = pa.RecordBatch.from_arrays(
        [pa.array(column, type_) for column, type_ in zip(columns, SCHEMA.types, strict=True)],
        schema=SCHEMA,
    )
    step.push_columns(data, [time for _, _, time in rows], key=key)


def shown(model: dict[Any, list[int]], user: str, watermark: int, lateness: int) -> Any:
    rows = [
        {
            "window_start": datetime.fromtimestamp(start / 1000, UTC),
            "window_end": datetime.fromtimestamp(end / 1000, UTC),
            "n": len(numbers),
            "top": max(numbers),
            "total": sum(numbers),
        }
        for (of, start, end), numbers in sorted(model.items())
        if of == user and end - 1 + lateness > watermark
    ]
    return rows or ABSENT


def answers(step: Step, users: list[str]) -> dict[str, Any]:
    """Return what the owners answer for keys that are asked for together."""
    found: dict[str, Any] = {}
    for owner, operator in enumerate(step.operators):
        mine = [user for user in users if step._owner(user) == owner]
        for user, value in zip(mine, operator.query_many("agg", mine), strict=True):
            assert found.setdefault(user, value) == value
    return found


def scanned(step: Step) -> dict[str, Any]:
    """Return what a scan of all subtasks finds of users, and of some other keys; each key comes once."""
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for operator in step.operators:
        scan = operator.scan("agg")
        for keys in scan.pieces:
            assert not seen & set(keys)
            seen |= set(keys)
            read = [*(key for key in keys if key in USERS), *keys[:2]]
            found |= zip(read, operator.query_many("agg", read), strict=True)
        scan.close()
    return {user: value for user, value in found.items() if value is not ABSENT}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_has_the_keys_that_stay(steps: Steps, kind: str) -> None:
    """Those with windows throughout come once, whatever comes and expires during the scan."""
    rng = random.Random(f"scan {kind}")
    step = steps(made(kind), options={"taskmanager.memory.managed.size": "256kb"})
    (operator,) = step.operators
    keys = [f"k{n}" for n in range(5_000)]
    for minute in range(4):
        push(step, [(key, 1, (minute + rng.randrange(3)) * MINUTE) for key in keys])
        scan = operator.scan("agg")
        found = list(next(scan.pieces))
        step.watermark(minute * MINUTE)
        push(step, [(f"new{n}", 1, (minute + 2) * MINUTE) for n in range(1 + minute * 1_000)])
        found += [key for piece in scan.pieces for key in piece]
        scan.close()
        assert len(found) == len(set(found))
        assert set(keys) <= set(found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_windows_of_a_key(steps: Steps, kind: str) -> None:
    rng = random.Random(kind)
    options = {"taskmanager.memory.managed.size": "256kb"}
    step = steps(made(kind), rng.choice((1, 2, 3)), options=options)
    model: dict[Any, list[int]] = {}
    others: set[str] = set()
    lateness, watermark = KINDS[kind].allowed_lateness_ms, 0
    step.watermark(watermark)
    for _ in range(40):
        match rng.randrange(12):
            case 0 if rng.random() < 0.3:
                step.restart(rng.choice((1, 2, 3)))
            case 1 | 2 | 3:
                watermark += rng.choice((1_000, MINUTE, 2 * MINUTE))
                step.watermark(watermark)
            case 4:
                # Many keys in one window, which so get a table of their own, or lie on disk.
                numbers, time = range(rng.randrange(3_000, 6_000)), watermark + 5 * MINUTE
                push(step, [(f"other{n}", n, time) for n in numbers])
                others |= {f"other{n}" for n in numbers}
            case _:
                rows = [
                    (
                        rng.choice(USERS),
                        rng.randrange(100),
                        max(0, watermark + rng.randrange(-3 * MINUTE, 6 * MINUTE)),
                    )
                    for _ in range(rng.choice((1, 5, 100)))
                ]
                push(step, rows)
                for user, n, time in rows:
                    for start, end in windows_of(time, kind):
                        if end - 1 + lateness > watermark:
                            model.setdefault((user, start, end), []).append(n)
        asked = [*rng.sample(USERS, 2), "nobody"]
        together = {user: shown(model, user, watermark, lateness) for user in asked}
        assert answers(step, [*asked, asked[0]]) == together
        alone = step.operators[step._owner(asked[0])].query("agg", asked[0])
        assert alone == together[asked[0]]
        if rng.random() < 0.3:
            wanted = {user: shown(model, user, watermark, lateness) for user in USERS}
            found = scanned(step)
            assert {user for user in found if user not in wanted} <= others
            assert {user: found.get(user, ABSENT) for user in USERS} == wanted


@pytest.mark.parametrize(
    ("window", "queryable", "message"),
    [
        (hg.count_window(3), "agg", "these windows cannot be queried"),
        (hg.tumbling("1m"), "a b", "cannot be the name"),
        (hg.tumbling("1m"), hg.count(), "no result can be called so"),
    ],
)
def test_what_cannot_be_queried_is_a_mistake(window: Any, queryable: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        by_user().window(window).agg(n=hg.count(), name="agg", queryable=queryable)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_windows_of_a_job_that_fails(lab: Any, parallelism: int) -> None:
    rows = [{"user": f"u{n % 7}", "n": n, "t": n * 100} for n in range(1_000)]
    job = hg.Job("clicks", parallelism=parallelism)
    job.checkpoint(every="20ms", storage=lab.storage)
    job.restart(hg.fixed_delay(attempts=10, delay="1ms"))
    schema = {"user": "string", "n": "int64", "t": "int64"}
    read = job.read(from_list(rows, schema=schema, batch_rows=50), name="in")
    windows = read.event_time("t", max_out_of_order="0s").key_by("user").window(hg.tumbling("1h"))
    windows.agg(n=hg.count(), name="hours", queryable="hours").write(blackhole(), name="out")

    async def count(job: Any, user: str) -> int:
        while True:
            try:
                answer = await job.request("query", state="hours", key=user)
            except JobNotReady:
                await asyncio.sleep(0.01)
                continue
            if not answer["found"]:
                return 0
            (window,) = answer["value"]
            assert window["window_start"] == "1970-01-01T00:00:00Z"
            assert window["window_end"] == "1970-01-01T01:00:00Z"
            return window["n"]

    async def script(job: Any) -> None:
        await job.until("status", status="RUNNING")
        await job.checkpoint()
        job.kill(random.Random(1))
        for user in ("u0", "u6"):
            wanted = sum(row["user"] == user for row in rows)
            while (found := await count(job, user)) != wanted:
                assert found < wanted
                await asyncio.sleep(0.01)
        page = await job.request("scan", state="hours")
        assert {row["key"]: row["value"][0]["n"] for row in page["rows"]} == {
            f"u{n}": sum(row["user"] == f"u{n}" for row in rows) for n in range(7)
        }
        arrow = await job.request("scan", state="hours", prefix="u1", arrow=True)
        (row,) = pa.ipc.open_stream(arrow["stream"]).read_all().to_pylist()
        assert (row["user"], json.loads(row["value"])[0]["n"]) == ("u1", 143)

    assert lab.run(job, script).outcome.status == "FINISHED"
