"""A union, and a loop, of streams of which one has nulls where the other never has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import blackhole, json_source
from headgate.testing import harness


class Reading(msgspec.Struct, frozen=True):
    place: str
    n: int
    at: int


async def slowly(record: Any) -> Any:
    await asyncio.sleep(1)
    return {"place": record.place, "n": record.n}


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def newer(before: Any, record: Any) -> Any:
    return record


COLUMNS = {"place": "string", "n": "long"}
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "calls": lambda both, other: both.map_async(slowly, into=COLUMNS, timeout="1m", name="x"),
    "calls of a key": lambda both, other: both.key_by("place").map_async(
        slowly, into=COLUMNS, timeout="1m", name="x"
    ),
    "micro-batches": lambda both, other: both.map_batches(same, rows=7, within="1m", name="x"),
    "reduce": lambda both, other: both.key_by("place").reduce(newer, name="x"),
    "interval join": lambda both, other: both.key_by("place").join(
        other.key_by("place"), within=("0s", "0s"), how="left", suffix="_other", name="x"
    ),
    "window join": lambda both, other: (
        both.key_by("place")
        .window(hg.tumbling("1m"))
        .join(other.key_by("place"), how="left", suffix="_other", name="x")
    ),
    "as-of join": lambda both, other: both.key_by("place").join_as_of(
        other.key_by("place"), how="left", suffix="_other", name="x"
    ),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_union_keeps_them(step: Callable[[Any, Any], Any]) -> None:
    job = hg.Job("nulls", max_parallelism=12)
    job.checkpoint(every="1h", storage="never-made")
    full, gappy, other = (
        job.read(json_source("never-read", Reading), name=name).event_time("at")
        for name in ("full", "gappy", "other")
    )
    both = full.union(gappy.select("place", "NULLIF(n, 3) AS n", "at"))
    assert [field.nullable for field in full.schema] == [False] * 3
    assert [field.nullable for field in both.schema] == [False, True, False]
    step(both, other).write(blackhole(guarantee="exactly_once"), name="out")
    records = [Reading("pq"[n % 2], n, n) for n in range(6)]
    with harness(job, parallelism=2) as h:
        for _ in range(2):
            h.push("full", records)
            h.push("gappy", records)
            h.checkpoint()
            h.crash()
        h.advance_time("5s")
        h.end()
        rows = h.drain("out")
    expected = [None if gap and n == 3 else n for n in range(6) for gap in (False, True)] * 2
    assert sorted((row["n"] for row in rows), key=repr) == sorted(expected, key=repr)


async def ways_round(record: Any) -> Any:
    """Null in the second of three ways round."""
    await asyncio.sleep(1)
    n = None if record.at == 0 else 7
    return {"place": record.place, "n": n, "at": record.at + 1}


def body(stream: Any) -> tuple[Any, Any]:
    kept = stream.key_by("place").reduce(newer, name="kept")
    asked = kept.map_async(ways_round, into={**COLUMNS, "at": "long"}, timeout="1m", name="asked")
    return asked.filter("at < 3"), asked


def test_a_loop_keeps_them() -> None:
    job = hg.Job("nulls", max_parallelism=12)
    job.checkpoint(every="1h", storage="never-made")
    readings = job.read(json_source("never-read", Reading), name="readings")
    out = readings.iterate(body, name="loop")
    out.write(blackhole(guarantee="exactly_once"), name="out")
    with harness(job) as h:
        for n in range(4):
            h.push("readings", Reading("p", n, 0))
            h.advance_time("600ms")
            h.checkpoint()
            h.crash()
        h.advance_time("10s")
        h.end()
        rows = [(row["n"], row["at"]) for row in h.drain("out")]
    assert sorted(rows, key=repr) == sorted([(None, 1), (7, 2), (7, 3)] * 4, key=repr)
