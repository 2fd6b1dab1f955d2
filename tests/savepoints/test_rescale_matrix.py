"""A job with every kind of state, restored at another parallelism: its results are those of a batch job."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, generator, sequence

ROWS, KEYS, WINDOW_MS, GROUPS = 1_200, 48, 500, 24
CHANGES = [(1, 2), (2, 3), (3, 7), (7, 3), (3, 1), (4, 8)]
RESTORED_FROM = ["savepoint", "checkpoint", "resume"]


class Everything(hg.KeyedProcess[int, Any, dict[str, Any]]):
    """Tells what its operator state holds when it begins, and all about a key with its last record."""

    total = hg.ValueState[int](default=0)
    seen = hg.ListState[int]()
    residues = hg.MapState[str, int]()
    greatest = hg.ReducingState[int](max)
    met = hg.OperatorListState[int]()
    subtasks = hg.OperatorListState[int](redistribution="union")

    def __init__(self, run: str) -> None:
        self.run = run

    def open(self, ctx: Any) -> None:
        self.first = True
        if not self.subtasks.get():
            self.subtasks.add(ctx.subtask_index)

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterator[dict[str, Any]]:
        if self.first:
            self.first = False
            yield {"run": self.run, "met": self.met.get(), "subtasks": self.subtasks.get()}
        if not self.total.exists():
            self.met.add(ctx.key)
        n = record.n
        self.total.set(self.total.get() + n)
        self.seen.add(n)
        residue = str(n % 5)
        self.residues.put(residue, (self.residues.get(residue) or 0) + 1)
        self.greatest.add(n)
        seen = sorted(self.seen.get())
        yield {
            "key": ctx.key,
            "count": len(seen),
            "all": (
                None
                if len(seen) < ROWS // KEYS
                else {
                    "total": self.total.get(),
                    "seen": seen,
                    "residues": dict(self.residues.items()),
                    "greatest": self.greatest.get(),
                }
            ),
        }


@dataclass
class Sinks:
    """The output of the job, over all its runs."""

    process: Any = field(default_factory=lambda: collect(guarantee="exactly_once"))
    reduce: Any = field(default_factory=lambda: collect(guarantee="exactly_once"))
    running: Any = field(default_factory=lambda: collect(guarantee="exactly_once"))
    windows: Any = field(default_factory=lambda: collect(guarantee="exactly_once"))


def make_job(
    lab: Any, sinks: Sinks, run: str, parallelism: int, *, rate: float | None, backend: str
) -> hg.Job:
    job = hg.Job("matrix", parallelism=parallelism, max_parallelism=GROUPS)
    job.checkpoint(every="50ms", storage=lab.storage, retain=3)
    job.options["state.backend.type"] = backend
    job.options["io.tmp.dirs"] = str(lab.path)
    source = generator({"n": sequence()}, rows=ROWS, rate=rate, batch_rows=10, splits=8)
    rows = job.read(source, name="rows").select("n", f"n % {KEYS} AS key", "n AS at")
    events = rows.event_time("at", max_out_of_order="1d")
    by_key = events.key_by("key")
    by_key.process(Everything(run), name="process").write(sinks.process, name="process-out")
    by_key.agg(n=hg.count(), total=hg.sum("n"), top=hg.max("n"), name="running").write(
        sinks.running, name="running-out"
    )
    by_key.window(hg.tumbling(f"{WINDOW_MS}ms")).agg(
        c=hg.count(), total=hg.sum("n"), name="windows"
    ).write(sinks.windows, name="windows-out")
    (
        events.map(lambda row: (row.key, 1, row.n))
        .key_with(lambda record: record[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1], a[2] + b[2]), name="reduce")
        .write(sinks.reduce, name="reduce-out")
    )
    return job


def numbers_of(key: int) -> list[int]:
    return list(range(key, ROWS, KEYS))


def told(sinks: Sinks) -> list[dict[str, Any]]:
    """Return the output of the process function for its keys."""
    return [row for row in sinks.process.rows if "key" in row]


def assert_results(sinks: Sinks) -> None:
    every = [(key, k + 1) for key in range(KEYS) for k in range(ROWS // KEYS)]
    assert Counter((row["key"], row["count"]) for row in told(sinks)) == Counter(every)
    assert {row["key"]: row["all"] for row in told(sinks) if row["all"] is not None} == {
        key: {
            "total": sum(numbers_of(key)),
            "seen": numbers_of(key),
            "residues": Counter(str(n % 5) for n in numbers_of(key)),
            "greatest": max(numbers_of(key)),
        }
        for key in range(KEYS)
    }

    assert Counter((key, count) for key, count, _ in sinks.reduce.rows) == Counter(every)
    assert {key: total for key, k, total in sinks.reduce.rows if k == ROWS // KEYS} == {
        key: sum(numbers_of(key)) for key in range(KEYS)
    }

    running = sorted(sinks.running.rows, key=lambda row: row["n"])
    assert len({(row["key"], row["n"]) for row in running}) == len(running)
    assert {row["key"]: (row["n"], row["total"], row["top"]) for row in running} == {
        key: (ROWS // KEYS, sum(numbers_of(key)), max(numbers_of(key))) for key in range(KEYS)
    }

    def window_of(n: int) -> int:
        return n // WINDOW_MS * WINDOW_MS

    expected = Counter(
        (key, start, len(list(inside)), total)
        for key in range(KEYS)
        for start, group in itertools.groupby(numbers_of(key), window_of)
        for inside in [list(group)]
        for total in [sum(inside)]
    )
    assert (
        Counter(
            (row["key"], int(row["window_start"].timestamp() * 1000), row["c"], row["total"])
            for row in sinks.windows.rows
        )
        == expected
    )


def assert_operator_state(sinks: Sinks, run: str, met: set[int], before: int, after: int) -> None:
    """Split items went to one subtask each, union items to all."""
    begun = [row for row in sinks.process.rows if row.get("run") == run]
    assert len(begun) == after
    assert Counter(key for row in begun for key in row["met"]) == Counter(met)
    assert [sorted(row["subtasks"]) for row in begun] == after * [list(range(before))]


def stop(lab: Any, place: str, found: list[str]) -> Any:
    async def script(job: Any) -> None:
        await job.checkpoint()
        if place == "savepoint":
            found.append((await job.request("stop", savepoint=str(lab.path)))["savepoint"])
        else:
            number = (await job.request("stop"))["checkpoint"]
            found.append(f"{lab.storage}/matrix@{number}")

    return script


def check(lab: Any, before: int, after: int, place: str, backend: str) -> None:
    sinks, found = Sinks(), []
    first = make_job(lab, sinks, "first", before, rate=None, backend=backend)
    assert lab.run(first, stop(lab, place, found), batches=5).outcome.status == "SUSPENDED"
    met = {row["key"] for row in told(sinks)}
    assert 0 < len(told(sinks)) < ROWS
    second = make_job(lab, sinks, "second", after, rate=None, backend=backend)
    ran = lab.run(second, restore_from=None if place == "resume" else found[0])
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.restores) == 1
    assert not ran.failures
    assert_operator_state(sinks, "second", met, before, after)
    assert_results(sinks)


@pytest.mark.parametrize("place", RESTORED_FROM)
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_rescaled_in_memory(lab: Any, before: int, after: int, place: str) -> None:
    check(lab, before, after, place, "hashmap")


@pytest.mark.parametrize("place", RESTORED_FROM)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_rescaled_on_rocksdb(lab: Any, before: int, after: int, place: str) -> None:
    pytest.importorskip("rocksdict")
    check(lab, before, after, place, "rocksdb")
