"""Sources whose record number i is a pure function of i. They are seekable, and paced by the job's
clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..operators.elements import Batch, Positions
from ..operators.source import Record_co, Source, SourceReader
from .arguments import check_count, check_rate

DEFAULT_SPLITS = 8
_PACE_HZ = 50  # a rate-limited source makes about this many batches a second, not one per row
_FAST_PACE_HZ = 125  # at least this many, if the batches have more than `_SMALL_ROWS` rows
_SMALL_ROWS = 8_192
_CLOCK_GRAIN_S = 1e-6  # a sleep may end slightly early by the clock
MakeRows = Callable[[int, int], Batch]
"""Makes `count` rows from row number `first` on."""


class _Split(msgspec.Struct):
    """The blocks `index`, `index + of`, ... of `block` rows each; `position` counts rows of this split."""

    index: int
    of: int
    block: int
    position: int = 0

    @property
    def name(self) -> str:
        """The name of the split in event time."""
        return f"split {self.index}"

    @property
    def next_row(self) -> int:
        """The row number at `position`."""
        block, offset = divmod(self.position, self.block)
        return (block * self.of + self.index) * self.block + offset

    @property
    def left_in_block(self) -> int:
        return self.block - self.position % self.block

    def below(self, row: int) -> int:
        """Return how many rows of the split have a number below `row`."""
        rounds, rest = divmod(row, self.block * self.of)
        return rounds * self.block + min(max(rest - self.index * self.block, 0), self.block)


class RowSource(Source[Record_co]):
    """The base of generated sources: rows 0, 1, 2, ... in blocks that are dealt to a fixed number of
    splits.

    Args:
        rows: the number of rows; None: without end.
        rate: rows per second over the whole source; None: as fast as possible.
        batch_rows: the most rows of a batch.
        splits: the number of splits to which the rows are dealt, which is the highest useful parallelism.
    """

    def __init__(
        self,
        rows: int | None,
        rate: float | None,
        batch_rows: int,
        splits: int = DEFAULT_SPLITS,
    ) -> None:
        if rows is not None:
            check_count("rows", rows, 0)
        if rate is not None:
            check_rate(rate, fix="leave rate out for no limit")
        check_count("batch_rows", batch_rows, 1)
        check_count("splits", splits, 1)
        self.rows = rows
        self.rate = rate
        self.batch_rows = batch_rows
        self.split_count = splits
        self.bounded = rows is not None
        self.at_rest = rows is not None and rate is None

    def splits(self, parallelism: int) -> list[bytes]:
        """Return the splits, which are the same at any parallelism."""
        block = self.batch_rows
        if self.rate:
            # Blocks must be small: a batch waits for its last row, and slow sources would pass on their
            # turn only after minutes.
            paced = max(min(self.rate / _PACE_HZ, _SMALL_ROWS), self.rate / _FAST_PACE_HZ)
            block = max(1, min(block, int(paced)))
        elif self.rows is not None:
            # All splits get some of few rows.
            block = min(block, max(-(-self.rows // self.split_count), _SMALL_ROWS))
        return [
            msgspec.msgpack.encode(_Split(index, self.split_count, block))
            for index in range(self.split_count)
        ]

    def reader(self) -> SourceReader:
        return RowSplitReader(self.make, self.rows, self.rate)

    def make(self, first: int, count: int) -> Batch:
        """Return rows `first` to `first + count - 1`."""
        raise NotImplementedError


class RowSplitReader(SourceReader):
    """Reads its splits merged by row number, so that one reader of all splits keeps their order."""

    can_pause_splits = True

    def __init__(self, make: MakeRows, rows: int | None, rate: float | None) -> None:
        self._make = make
        self._end = rows
        self._rate = rate
        self._splits: list[_Split] = []
        self._paused: frozenset[str] = frozenset()
        self._started_s: float | None = None
        """The (imagined) moment at which row 0 was due."""

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [msgspec.msgpack.decode(split, type=_Split) for split in splits]
        unread = [split for split in added if not self._exhausted(split)]
        self._splits += unread
        for split in unread:
            self.context.splits.opened(split.name)
        if self._rate and self._splits and self._started_s is None:
            # Restart the pace at the next row, or after a restore the source would race to catch up.
            first = min(split.next_row for split in self._splits)
            self._started_s = self.context.clock.monotonic() - first / self._rate

    def poll(self) -> Batch | None:
        split = self._next()
        if split is None:
            return None
        first = split.next_row
        count = self._available(split)
        if self._due_in_s(first + count - 1) > _CLOCK_GRAIN_S:
            return None
        split.position += count
        self.context.splits.reading(split.name)
        if self._exhausted(split):
            self._splits.remove(split)
            self.context.splits.ended(split.name)
        batch = self._make(first, count)
        offsets = range(first, first + count)
        batch.positions = Positions(self.context.operator_name, split.name, offsets)
        return batch

    async def wait(self) -> None:
        """Sleep until the next batch is due. Cancelling it leaves the reader unchanged."""
        delay_s = 0.0
        split = self._next()
        if split is not None:
            delay_s = self._due_in_s(split.next_row + self._available(split) - 1)
        await asyncio.sleep(max(0.0, delay_s))

    @property
    def finished(self) -> bool:
        return not self._splits

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(split) for split in self._splits]

    def lag_records(self) -> Mapping[str, int] | None:
        """Return how many rows are due or, without a rate, how many are left."""
        end = self._end
        if self._rate is not None and self._started_s is not None:
            due = int((self.context.clock.monotonic() - self._started_s) * self._rate) + 1
            end = due if end is None else min(end, due)
        if end is None:
            return None
        return {s.name: max(0, s.below(end) - s.position) for s in list(self._splits)}

    def lag_s(self) -> float | None:
        if self._rate is None:
            return None
        due_in_s = (self._due_in_s(split.next_row) for split in list(self._splits))
        return max(0.0, -min(due_in_s, default=0.0))

    def pause_splits(self, splits: frozenset[str]) -> None:
        self._paused = splits

    def _next(self) -> _Split | None:
        """Return the split with the least row number of those that may be read."""
        free = (split for split in self._splits if split.name not in self._paused)
        return min(free, key=lambda split: split.next_row, default=None)

    def _exhausted(self, split: _Split) -> bool:
        return self._end is not None and split.next_row >= self._end

    def _available(self, split: _Split) -> int:
        """Return how many rows are left in the block and the source, but not more than are wanted."""
        count = split.left_in_block
        if self.rows_wanted is not None:
            count = min(count, self.rows_wanted)
        return count if self._end is None else min(count, self._end - split.next_row)

    def _due_in_s(self, row: int) -> float:
        """Return the seconds until `row` may be read; negative if it is overdue."""
        if self._started_s is None or self._rate is None:
            return 0.0
        return self._started_s + row / self._rate - self.context.clock.monotonic()
