"""Whole jobs whose workers die, that stop, and go on at another parallelism: one result per record.

Calls take some rounds of the event loop: no clock decides anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.tests.support.held import Paced

ROWS = 240


async def call(n: int) -> tuple[str, int]:
    """Takes up to 300 rounds; every fifth record has no answer."""
    for _ in range(n * 37 % 300):
        await asyncio.sleep(0)
    if n % 5 == 4:
        raise ValueError(f"no answer for {n}")
    return ("answer", n)


async def call_for_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    for n in batch.column("n").to_pylist():
        await call(n)
    return batch


def ordered(stream: Any, **given: Any) -> Any:
    return stream.map_async(call, timeout="1h", max_in_flight=20, name="call", **given)


def unordered(stream: Any, **given: Any) -> Any:
    return ordered(stream, ordered=False, **given)


def keyed(stream: Any, **given: Any) -> Any:
    return ordered(stream.key_with(lambda n: n % 17), **given)


def batches(stream: Any, **given: Any) -> Any:
    rows = stream.map(lambda n: {"n": n}, into={"n": "int64"})
    return rows.map_batches(call_for_batch, rows=7, within="1h", name="call", **given)


KINDS = [ordered, unordered, keyed, batches]


def make_job(
    lab: Any, sink: Any, parallelism: int, kind: Callable[..., Any], storage: str = ""
) -> hg.Job:
    job = hg.Job("calls", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=storage or lab.storage)
    job.restart(attempts=20, delay="10ms")
    source = Paced(numbers(ROWS, batch_rows=8, splits=3), 3)
    made = kind(job.read(source, name="numbers"), on_error="side_output")
    letters = made.failed
    if kind is batches:
        made = made.map(lambda row: ("answer", row.n))
        letters = letters.map(lambda row: ("failed", row.record["n"]))
    else:
        letters = letters.map(lambda letter: ("failed", letter.record))
    made.union(letters).write(sink, name="out", parallelism=1)
    return job


def expected() -> list[Any]:
    return sorted(("failed" if n % 5 == 4 else "answer", n) for n in range(ROWS))


@pytest.mark.parametrize(
    ("parallelism", "kind"), [(1, ordered), (2, ordered), (2, unordered), (2, keyed), (2, batches)]
)
def test_workers_die(lab: Any, faults: Any, parallelism: int, kind: Any) -> None:
    sink = collect(guarantee="exactly_once")
    ran = lab.run(make_job(lab, sink, parallelism, kind), faults.kills(parallelism, 2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 2
    assert sorted(sink.rows) == expected()


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("savepoint", ordered), ("savepoint", unordered), ("savepoint", keyed), ("savepoint", batches),
        ("stop", unordered), ("stop", keyed), ("drain", unordered),
    ],
)  # fmt: skip
def test_it_stops_and_goes_on_at_another_parallelism(lab: Any, kind: Any, way: str) -> None:
    """Behind a savepoint the last checkpoint commits nothing that the savepoint has as under way."""
    sink = collect(guarantee="exactly_once")
    taken: list[str] = []

    async def script(running: Any) -> None:
        await running.checkpoint()
        given = {"savepoint": str(lab.path / "kept")} if way == "savepoint" else {}
        done = await running.request("stop", drain=way == "drain", **given)
        taken.append(done.get("savepoint", ""))

    ran = lab.run(make_job(lab, sink, 2, kind), script, batches=6)
    assert ran.outcome.status == "SUSPENDED", ran.failures
    before = sorted(sink.rows)
    assert len(before) < ROWS
    if way == "drain":
        assert set(before) <= set(expected())
        return
    restore = {"restore_from": taken[0]} if way == "savepoint" else {}
    ran = lab.run(make_job(lab, sink, 3, kind), **restore)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert sorted(sink.rows) == expected()
