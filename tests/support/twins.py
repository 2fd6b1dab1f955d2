"""A step whose state is on disk beside the same step in memory, whatever happens to its checkpoints.

Method: one life with state in memory and one with state on disk, over so little memory that each batch or
two is flushed, and runs are merged all the time. A seed decides over records, watermarks (which subtasks
may get at different times, as behind barriers that overtake them), checkpoints that complete, fail or are
overtaken, and restores at any parallelism. Both lives do the same. What they send must be the same after
each step, and so must be their rows in canonical savepoints.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.operators.elements import WATERMARK_MAX, Batch, ColumnBatch

SCHEMAS = [
    pa.schema([("k", pa.string()), ("n", pa.int64()), ("a", pa.int64()), ("word", pa.string())]),
    pa.schema([("k", pa.string()), ("n", pa.int64()), ("b", pa.int64()), ("price", pa.float64())]),
]
KEYS = 60
STEPS = 45


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
    """Two lives that do the same: one in memory, one on disk.

    Args:
        keys: the columns of the key.
        ordered: see `Recorder`.
        inputs: the number of inputs, whose rows have the columns of `SCHEMAS`.
        scale: milliseconds of a unit of time.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        lives: tuple[Any, Any],
        rng: random.Random,
        *,
        ordered: bool = False,
        inputs: int = 1,
        scale: int = 1,
    ) -> None:
        self.keys, self.lives, self.rng = keys, lives, rng
        self.ordered, self.inputs, self.scale = ordered, inputs, scale
        self.outputs: dict[Any, Recorder] = {}
        self.now = self.sent = 0
        for life in lives:
            life.wire = self._wire

    def _wire(self, operator: Any) -> None:
        operator.output = self.outputs[operator] = Recorder(ordered=self.ordered)

    async def run(self) -> None:
        """Live, and check after each step that both have sent the same."""
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
        rng, side = self.rng, self.rng.randrange(self.inputs)
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
        """A barrier passes all subtasks."""
        if len(self.lives[0].pending) < 2:
            for life in self.lives:
                life.trigger(self.now)
            await asyncio.sleep(0)  # its threads begin, and records go on

    async def complete(self) -> None:
        """A checkpoint is complete."""
        await self._end_one("complete", self.rng.randrange(1, 3))

    async def abort(self) -> None:
        """A checkpoint fails."""
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
        """Compare canonical savepoints."""
        memory, disk = [self.rows(await life.tables()) for life in self.lives]
        assert disk == memory

    def rows(self, tables: dict[str, list[dict[str, Any]]]) -> list[str]:
        """Return the rows of a canonical savepoint that a restore would not leave out."""
        raise NotImplementedError

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
