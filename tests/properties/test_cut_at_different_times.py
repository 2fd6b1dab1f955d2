"""Subtasks of one step that are cut at different event times go on as if nothing had happened.

Barriers of unaligned checkpoints overtake watermarks, so of each subtask the snapshot may be of another
time. Method: a step at parallelism 3, its subtasks driven to different watermarks, is cut. One life goes
on; another begins from the cut, at some parallelism, and is given the same: the records that were on their
way, then watermarks from the least on, and more records. All that comes out must be the same after each
step, late records included: for each key they are what they would have been.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.operators.elements import WATERMARK_MAX, Batch, ColumnBatch

LEFT, RIGHT = {"k": "long", "a": "long"}, {"k": "long", "b": "long"}
KEYS = 9
LIVES = 8
OPTIONS = {"headgate.task.slice": "1h"}
ON_DISK = {
    "state.backend.type": "rocksdb",
    "taskmanager.memory.managed.size": "16kb",
    "state.backend.rocksdb.writebuffer.size": "64kb",
}


class Recorder:
    """Collects the results of a step, by output."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()

    def emit(self, batch: Batch) -> None:
        self._add("", batch)

    def emit_side(self, tag: str, batch: Batch) -> None:
        self._add(tag, batch)

    def _add(self, tag: str, batch: Batch) -> None:
        records = batch.data.to_pylist() if isinstance(batch, ColumnBatch) else batch.records
        assert batch.timestamps is not None
        times = batch.timestamps.tolist()
        self.rows.update(f"{tag} {row!r} @{time}" for row, time in zip(records, times, strict=True))

    def emit_watermark(self, timestamp: int) -> None: ...

    def emit_idle(self, idle: bool) -> None: ...


# --- the steps --------------------------------------------------------------------------------------


class Each(hg.WindowProcess[int, Any, Any]):
    def on_window(self, key: int, window: Any, records: Any, ctx: Any) -> Iterable[Any]:
        yield key, window.start, window.end, [row.a for row in records]


class Noting(hg.KeyedProcess[int, Any, Any]):
    """Says whether records come behind the watermark, and counts them until a timer fires."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: Any, ctx: Any) -> Iterable[Any]:
        self.seen.set(self.seen.get() + 1)
        ctx.event_time.at(ctx.timestamp // 7 * 7 + 7, tag=str(ctx.timestamp // 7))
        yield record.a, ctx.timestamp <= ctx.watermark

    def on_timer(self, timer: Any, ctx: Any) -> Iterable[Any]:
        yield ctx.key, timer.timestamp, self.seen.get()
        self.seen.clear()


class NotingBatches(hg.KeyedBatchProcess[int, Any, Any]):
    """Rows that are not behind the watermark."""

    def on_batch(self, groups: Any, ctx: Any) -> Iterable[pa.RecordBatch]:
        for _, rows in groups:
            if ctx.timestamp > ctx.watermark:
                yield rows


class Remembering(hg.KeyedProcess[int, Any, Any]):
    """Remembers records for 10 ms of event time."""

    last = hg.ValueState[int](ttl=hg.StateTtl("10ms", time="event"))
    some = hg.MapState[int, int](ttl=hg.StateTtl("10ms", time="event", update="read_and_write"))

    def on_record(self, record: Any, ctx: Any) -> Iterable[Any]:
        yield record.a, self.last.get(), self.some.get(record.a % 3), sorted(self.some.items())
        self.last.set(record.a)
        self.some.put(record.a % 3, record.a)


class Both(hg.CoProcess[int, Any, Any, Any]):
    """Says of the records of two streams whether they come behind the watermark."""

    def on_first(self, record: Any, ctx: Any) -> Iterable[Any]:
        yield record.a, ctx.timestamp <= ctx.watermark

    def on_second(self, record: Any, ctx: Any) -> Iterable[Any]:
        yield record.b, ctx.timestamp <= ctx.watermark


def aggregated(window: Any) -> Callable[[Any, Any], Any]:
    return lambda left, _: left.window(window).agg(
        n=hg.count(), total=hg.sum("a"), highest=hg.max("a"), name="step"
    )


def summed(window: Any) -> Callable[[Any, Any], Any]:
    return lambda left, _: left.window(window).agg(n=hg.count(), total=hg.sum("a"), name="step")


def handled(window: Any, **options: Any) -> Callable[[Any, Any], Any]:
    def step(left: Any, _: Any) -> Any:
        return left.window(window, **options).process(Each(), name="step")

    return step


def together(key: int, left: list[Any], right: list[Any]) -> Iterable[Any]:
    yield key, [row.a for row in left], [row.b for row in right]


def pattern() -> Any:
    return (
        hg.cep.begin("first")
        .where(lambda row: row.a % 2 == 0)
        .followed_by("second")
        .where(lambda row: row.a % 2 == 1)
        .within("9ms")
    )


def matched(left: Any, _: Any) -> Any:
    return left.match(pattern(), name="step", select=lambda m: (m["first"][0].a, m["second"][0].a))


LATE = {"allowed_lateness": "7ms"}
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "tumbling": summed(hg.tumbling("10ms")),
    "tumbling, lateness": summed(hg.tumbling("10ms", **LATE)),
    "sliding": summed(hg.sliding("20ms", "5ms")),
    "sliding, lateness": summed(hg.sliding("20ms", "5ms", **LATE)),
    "sliding, two stacks": aggregated(hg.sliding("15ms", "5ms", **LATE)),
    "cumulative": summed(hg.cumulative("20ms", "5ms")),
    "cumulative, lateness": aggregated(hg.cumulative("20ms", "5ms", **LATE)),
    "tumbling, early": summed(hg.tumbling("10ms", emit_rows=1, **LATE)),
    "sliding, early": aggregated(hg.sliding("15ms", "5ms", emit_rows=1, **LATE)),
    "session": aggregated(hg.session("4ms")),
    "session, lateness": aggregated(hg.session("4ms", **LATE)),
    "records in tumbling": handled(hg.tumbling("10ms", **LATE)),
    "records in sliding": handled(hg.sliding("15ms", "5ms")),
    "records in sessions": handled(hg.session("4ms", **LATE)),
    "trigger": handled(hg.tumbling("10ms", **LATE), trigger=hg.triggers.ContinuousEventTime("3ms")),
    "evictor": handled(hg.session("4ms", **LATE), evictor=hg.evictors.Time("3ms")),
    "reduce": lambda left, _: left.window(hg.session("4ms", **LATE)).reduce(
        lambda a, b: a if a.a >= b.a else b, name="step"
    ),
    "interval join": lambda left, right: left.join(right, within=("-9ms", "5ms"), name="step"),
    "interval join, full": lambda left, right: left.join(
        right, within=("-9ms", "5ms"), how="full", name="step"
    ),
    "window join": lambda left, right: left.window(hg.sliding("10ms", "5ms", **LATE)).join(
        right, how="full", name="step"
    ),
    "co-group": lambda left, right: left.window(hg.tumbling("10ms")).co_group(
        right, together, name="step"
    ),
    "as-of join": lambda left, right: left.join_as_of(right, how="left", name="step"),
    "as-of join, valid for": lambda left, right: left.join_as_of(
        right, how="left", valid_for="9ms", name="step"
    ),
    "timers": lambda left, _: left.process(Noting(), name="step"),
    "batches": lambda left, _: left.process(NotingBatches(), name="step", into=LEFT),
    "time to live": lambda left, _: left.process(Remembering(), name="step"),
    "two streams": lambda left, right: left.connect(right).process(Both(), name="step"),
    "pattern": matched,
}


def job_of(name: str) -> hg.Job:
    job = hg.Job("cut", max_parallelism=12)
    job.options["pipeline.operator-chaining.enabled"] = "false"
    left, right = (
        job.read(from_list([], schema=schema), name=side).event_time(time).key_by("k")
        for side, schema, time in (("left", LEFT, "a"), ("right", RIGHT, "b"))
    )
    STEPS[name](left, right).write(blackhole(guarantee="none"), name="out")
    return job


# --- the job ---------------------------------------------------------------------------------------


class Story:
    """One life that goes on, and one that begins from its cut."""

    def __init__(self, life: Any, sides: int, rng: random.Random) -> None:
        self.rng, self.sides = rng, sides
        self.outputs: dict[Any, Recorder] = {}
        self.here, self.numbers = life, iter(range(100_000))
        self.here.wire = self._wire

    def _wire(self, operator: Any) -> None:
        operator.output = self.outputs[operator] = Recorder()

    def taken(self, life: Any) -> Counter[str]:
        """Return the output since the last call."""
        found: Counter[str] = Counter()
        for subtask in life.subtasks:
            found.update(self.outputs[subtask.operator].rows)
            self.outputs[subtask.operator].rows.clear()
        return found

    def rows(self, near: int) -> list[tuple[int, int, int, int]]:
        """Side, key, number and time of some records."""
        rng = self.rng
        return [
            (
                rng.randrange(self.sides),
                rng.randrange(KEYS),
                next(self.numbers),
                near + rng.randrange(-25, 25),
            )
            for _ in range(rng.randrange(25))
        ]

    def push(self, life: Any, rows: list[tuple[int, int, int, int]]) -> None:
        for subtask in life.subtasks:
            for side, names in enumerate((LEFT, RIGHT)[: self.sides]):
                mine = [row for row in rows if row[0] == side and life.owner(row[1]) is subtask]
                if mine:
                    _, keys, values, times = zip(*mine, strict=True)
                    data = pa.record_batch([pa.array(keys), pa.array(values)], names=list(names))
                    batch = ColumnBatch(data, np.array(times, np.int64))
                    subtask.operator.process(batch, side)

    def advance(self, life: Any, timestamp: int) -> None:
        for subtask in life.subtasks:
            subtask.operator.on_watermark(timestamp)

    async def checkpoint(self, life: Any) -> int:
        pending = life.trigger(None)
        await life.complete(pending, 3)
        return int(pending.id)

    async def run(self) -> None:
        rng, here = self.rng, self.here
        await here.start(3)
        watermarks = [rng.randrange(10) for _ in here.subtasks]
        for _ in range(3):
            self.push(here, self.rows(max(watermarks)))
            for at, subtask in enumerate(here.subtasks):
                watermarks[at] += rng.choice([0, 3, rng.randrange(40)])
                subtask.operator.on_watermark(watermarks[at])
            if rng.random() < 0.5:
                await self.checkpoint(here)
        cut = await self.checkpoint(here)
        there = here.twin()
        await there.start(rng.randrange(1, 5), cut)
        self.taken(here)
        now = min(watermarks)
        try:
            for _ in range(4):
                rows = self.rows(max(now, rng.choice(watermarks)))
                for life in (here, there):
                    self.push(life, rows)
                self.compare(there)
                now += rng.randrange(15)
                for life in (here, there):
                    self.advance(life, now)
                self.compare(there)
                if rng.random() < 0.4:
                    again = await self.checkpoint(there)
                    await there.end()
                    await there.start(rng.randrange(1, 5), again)
            for life in (here, there):
                self.advance(life, WATERMARK_MAX)
            self.compare(there)
        finally:
            await there.end()
            await here.end()

    def compare(self, there: Any) -> None:
        expected, found = self.taken(self.here), self.taken(there)
        assert found - expected == Counter(), "came out again, or wrong"
        assert expected - found == Counter(), "is missing"


TWO = ("join", "co-group", "two streams")


@pytest.mark.parametrize("name", STEPS)
def test_the_restored_go_on_like_those_that_were_cut(new_life: Any, name: str) -> None:
    job = job_of(name)
    sides = 2 if any(word in name for word in TWO) else 1
    for seed in range(LIVES):
        life = new_life(job, OPTIONS)
        asyncio.run(Story(life, sides, random.Random(seed)).run())


@pytest.mark.parametrize("name", ["tumbling, lateness", "time to live", "records in sessions"])
def test_the_same_on_disk(new_life: Any, name: str) -> None:
    for seed in range(2):
        life = new_life(job_of(name), {**OPTIONS, **ON_DISK})
        asyncio.run(Story(life, 1, random.Random(seed)).run())
