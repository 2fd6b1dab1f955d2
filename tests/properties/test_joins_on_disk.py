"""Joins whose rows are on disk send what those in memory send, whatever happens to their checkpoints.

Method: one life with rows in memory and one with rows on disk, over so little memory that each batch or
two is flushed, and runs are merged all the time. A seed decides over records, watermarks (which subtasks
may get at different times, as behind barriers that overtake them), checkpoints that complete, fail or are
overtaken, and restores at any parallelism. Both lives do the same. What they send must be the same after
each step, and so must be their rows in canonical savepoints.
"""

from __future__ import annotations

import asyncio
import os
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
from headgate.operators.joins.spilling import RowDelta

LEFT = {"k": "string", "n": "long", "a": "long", "word": "string"}
RIGHT = {"k": "string", "n": "long", "b": "long", "price": "double"}
SCHEMAS = [
    pa.schema([("k", pa.string()), ("n", pa.int64()), ("a", pa.int64()), ("word", pa.string())]),
    pa.schema([("k", pa.string()), ("n", pa.int64()), ("b", pa.int64()), ("price", pa.float64())]),
]
ON_DISK = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": "24kb"}
OPTIONS = {"headgate.task.slice": "1h"}
KEYS = 60
LIVES = 12 if os.environ.get("HEADGATE_THOROUGH") else 2
STEPS = 45
LATE = {"allowed_lateness": "30ms"}


def together(key: Any, left: list[Any], right: list[Any]) -> Iterable[Any]:
    yield key, [(row.a, row.word) for row in left], [(row.b, row.price) for row in right]


def joined(window: Any, how: Any) -> Callable[[Any, Any], Any]:
    return lambda left, right: left.window(window).join(right, how=how, suffix="_2", name="step")


def grouped(window: Any) -> Callable[[Any, Any], Any]:
    return lambda left, right: left.window(window).co_group(right, together, name="step")


def as_of(how: Any, **options: Any) -> Callable[[Any, Any], Any]:
    return lambda left, right: left.join_as_of(right, how=how, suffix="_2", name="step", **options)


JOINS: dict[str, tuple[tuple[str, ...], Callable[[Any, Any], Any]]] = {
    "interval": (
        ("k",),
        lambda left, right: left.join(
            right, within=("-60ms", "30ms"), how="full", suffix="_2", name="step"
        ),
    ),
    "tumbling": (("n",), joined(hg.tumbling("50ms"), "left")),
    "tumbling, lateness": (("k",), joined(hg.tumbling("50ms", **LATE), "full")),
    "sliding": (("k", "n"), joined(hg.sliding("70ms", "20ms"), "full")),
    "sliding, lateness": (("n",), joined(hg.sliding("60ms", "20ms", **LATE), "right")),
    "days": (("k",), joined(hg.cumulative("1d", "1h", zone="Europe/Berlin"), "inner")),
    "as of": (("k",), as_of("left")),
    "as of, inner": (("k", "n"), as_of("inner")),
    "as of, valid for": (("n",), as_of("left", valid_for="40ms")),
    "co-group": (("n",), grouped(hg.tumbling("50ms"))),
    "co-group, lateness": (("k",), grouped(hg.sliding("70ms", "20ms", **LATE))),
}
SCALE = {"days": 120_000}
"""Milliseconds of a unit of time; else 1."""


def job_of(name: str) -> hg.Job:
    keys, step = JOINS[name]
    job = hg.Job("joins", max_parallelism=12)
    job.options["pipeline.operator-chaining.enabled"] = "false"
    left, right = (
        job.read(from_list([], schema=schema), name=side).event_time(time).key_by(*keys)
        for side, schema, time in (("left", LEFT, "a"), ("right", RIGHT, "b"))
    )
    step(left, right).write(blackhole(guarantee="none"), name="out")
    return job


class Recorder:
    """What a subtask sends, by output. The order of keys is not defined.

    Args:
        ordered: whether rows have to come in the order of their times between watermarks.
    """

    def __init__(self, *, ordered: bool) -> None:
        self.rows: Counter[str] = Counter()
        self._ordered, self._last = ordered, -(2**63)

    def emit(self, batch: Batch) -> None:
        self.emit_side("", batch)
        times = [self._last, *batch.timestamps.tolist()]  # type: ignore[union-attr]
        if self._ordered:
            assert times == sorted(times)
        self._last = times[-1]

    def emit_side(self, tag: str, batch: Batch) -> None:
        records = batch.data.to_pylist() if isinstance(batch, ColumnBatch) else batch.records
        assert batch.timestamps is not None
        times = batch.timestamps.tolist()
        self.rows.update(f"{tag} {row!r} @{time}" for row, time in zip(records, times, strict=True))

    def emit_watermark(self, timestamp: int) -> None:
        self._last = -(2**63)

    def emit_idle(self, idle: bool) -> None: ...


class Twins:
    """Two lives that do the same."""

    def __init__(self, name: str, lives: tuple[Any, Any], rng: random.Random) -> None:
        self.keys, self.lives, self.rng = JOINS[name][0], lives, rng
        self.scale = SCALE.get(name, 1)
        self.outputs: dict[Any, Recorder] = {}
        self.ordered = name.startswith("as of")
        self.now = self.sent = 0
        for life in lives:
            life.wire = self._wire

    def _wire(self, operator: Any) -> None:
        operator.output = self.outputs[operator] = Recorder(ordered=self.ordered)

    async def run(self) -> None:
        await self._start(0)
        actions = [self.feed] * 4 + [self.advance] * 3 + [self.trigger] * 2
        actions += [self.complete] * 2 + [self.abort, self.restore, self.look]
        try:
            for _ in range(STEPS):
                await self.rng.choice(actions)()
                self.compare()
            await self.look()
            for life in self.lives:
                for subtask in life.subtasks:
                    subtask.operator.on_watermark(WATERMARK_MAX)
            self.compare()
        finally:
            for life in self.lives:
                await life.end()
        for life in self.lives:
            assert life.unreachable() == set()

    async def _start(self, restored: int) -> None:
        parallelism = self.rng.randrange(1, 4)
        for life in self.lives:
            await life.start(parallelism, restored)

    async def feed(self) -> None:
        """Rows around the present time, some of them late, of few or many keys and times."""
        rng, side = self.rng, self.rng.randrange(2)
        few, apart = rng.choice([3, KEYS, KEYS]), rng.choice([1, 20])
        columns: list[list[Any]] = [[], [], [], []]
        for _ in range(rng.choice([5, 60, 60])):
            key = rng.randrange(few)
            columns[0].append(None if key == 1 else f"key {key % 40}")
            columns[1].append(key % 50)
            time = (self.now + rng.randrange(-60, 100)) // apart * apart
            columns[2].append(time * self.scale + rng.randrange(self.scale))
            columns[3].append(rng.choice([None, rng.randrange(99)]))
        if side == 0:
            columns[3] = [None if value is None else f"{value}" for value in columns[3]]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMAS[side], strict=True)]
        data = pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[side])
        tokens = list(zip(*(data.column(key).to_pylist() for key in self.keys), strict=True))
        for life in self.lives:
            owners = [life.owner(one[0] if len(one) == 1 else one) for one in tokens]
            for subtask in life.subtasks:
                mine = [at for at, owner in enumerate(owners) if owner is subtask]
                part = data.take(pa.array(mine, pa.int64()))
                times = part.column(2).to_numpy().astype(np.int64)
                if mine:
                    subtask.operator.process(ColumnBatch(part, times), side)

    async def advance(self) -> None:
        """Time goes on in all subtasks, or first in one of them."""
        self.now += self.rng.choice([0, 7, 25])
        number = len(self.lives[0].subtasks)
        which = self.rng.choice([range(number), range(number), [self.rng.randrange(number)]])
        for life in self.lives:
            for at in which:
                life.subtasks[at].operator.on_watermark(self.now * self.scale)

    async def trigger(self) -> None:
        if len(self.lives[0].pending) < 2:
            for life in self.lives:
                life.trigger(self.now)
            await asyncio.sleep(0)  # its threads begin, and records go on

    async def complete(self) -> None:
        await self._end_one("complete", self.rng.randrange(1, 3))

    async def abort(self) -> None:
        await self._end_one("abort")

    async def _end_one(self, how: str, *rest: int) -> None:
        if self.lives[0].pending:
            at = self.rng.randrange(len(self.lives[0].pending))
            for life in self.lives:
                await getattr(life, how)(life.pending[at], *rest)

    async def restore(self) -> None:
        """A failure, and a new attempt from any checkpoint that is kept, or from none."""
        memory, disk = self.lives
        for life in self.lives:
            await life.end()
        assert list(memory.kept) == list(disk.kept)
        restored = self.rng.choice([*memory.kept, max(memory.kept, default=0)])
        self.now = memory.kept[restored][1] if restored else 0
        await self._start(restored)
        await self.look()

    async def look(self) -> None:
        memory, disk = [self._rows(await life.tables()) for life in self.lives]
        assert disk == memory

    def _rows(self, tables: dict[str, list[dict[str, Any]]]) -> list[str]:
        """Rows without their numbers, and without what a restore would leave out."""
        bounds = {row["key_group"]: row for row in tables["time"]}
        return sorted(
            f"{name} { ({key: value for key, value in row.items() if key != '_row'}) }"
            for name, rows in tables.items()
            for row in rows
            if name == "time" or row["_time"] >= bounds[row["key_group"]][f"{name}_gone_before"]
        )

    def compare(self) -> None:
        """What has come out since the last time."""
        memory, disk = (
            sum((self.outputs[one.operator].rows for one in life.subtasks), Counter[str]())
            for life in self.lives
        )
        assert disk - memory == Counter(), "came out again, or wrong"
        assert memory - disk == Counter(), "is missing"
        self.sent += disk.total()
        for output in self.outputs.values():
            output.rows.clear()


@pytest.mark.parametrize("name", JOINS)
def test_rows_on_disk_are_joined_like_those_in_memory(
    new_life: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, freeze = [], RowDelta.freeze

    def noted(delta: Any) -> None:
        flushed.append(delta.size)
        freeze(delta)

    monkeypatch.setattr(RowDelta, "freeze", noted)
    sent = 0
    for seed in range(LIVES):
        job = job_of(name)
        lives = new_life(job, OPTIONS), new_life(job, {**OPTIONS, **ON_DISK})
        twins = Twins(name, lives, random.Random(seed))
        asyncio.run(twins.run())
        sent += twins.sent
    assert sent > 100 * LIVES
    assert len(flushed) > 5 * LIVES
