"""The yardstick of keyed aggregation: count, sum and max per key in numpy, and nothing around it.

A plain open-addressing table that holds the keys themselves (linear probing, at most half full, doubled by
making it again), dense slots, one array per aggregate updated with `ufunc.at`. Timestamps are believed to
ascend, keys to be integers without nulls and not the least one, sums to fit. No cut can be taken, no row
can come late. It makes what the engine makes: the results of a window when it ends, or the updated row of
each key a batch touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Slots = npt.NDArray[np.intp]
Columns = tuple[Ints, Ints, Ints]
"""Keys, values and event times (ms) of a batch."""

_EMPTY = np.iinfo(np.int64).min
_FIRST_CELLS = 1_024


class BareTable:
    """Keys to slots, and three aggregates by slot."""

    def __init__(self) -> None:
        self.size = 0
        self._cells = np.full(_FIRST_CELLS, _EMPTY)
        self._slots = np.zeros(_FIRST_CELLS, np.int32)
        self._arrays = [np.zeros(_FIRST_CELLS // 2, np.int64) for _ in range(5)]
        self.reset()

    def reset(self) -> None:
        """Forget all keys; the memory is used again."""
        self.size = 0
        self._cells.fill(_EMPTY)
        for array, initial in zip(self._arrays, (0, 0, 0, _EMPTY, 0), strict=True):
            array.fill(initial)

    def add(self, keys: Ints, values: Ints) -> Slots:
        """Add a batch; returns the slot of each row."""
        slots = self._lookup(keys).astype(np.intp)  # ufunc.at is a third slower on smaller indices
        _, count, total, highest, _ = self._arrays
        np.add.at(count, slots, 1)
        np.add.at(total, slots, values)
        np.maximum.at(highest, slots, values)
        return slots

    def results(self) -> list[Ints]:
        """Key, count, sum and max of all keys, copied."""
        return [array[: self.size].copy() for array in self._arrays[:4]]

    def updated(self, slots: Slots) -> list[Ints]:
        """The same of the keys of a batch, each once, where its last row stood."""
        order, last = np.arange(len(slots)), self._arrays[4]
        last[slots] = order
        touched = slots[last.take(slots) == order]
        return [array.take(touched) for array in self._arrays[:4]]

    def _lookup(self, keys: Ints) -> npt.NDArray[np.int32]:
        if self.size + len(keys) > len(self._cells) // 2:
            self._grow(self.size + len(keys))
        mask = len(self._cells) - 1
        at = _mixed(keys).view(np.int64) & mask
        rest = np.flatnonzero(self._cells.take(at) != keys)
        while rest.size:
            here, wanted = at[rest], keys[rest]
            found = self._cells.take(here)
            free = np.flatnonzero(found == _EMPTY)
            if free.size:
                self._insert(here[free], wanted[free])
                found = self._cells.take(here)
            left = found != wanted
            rest = rest[left]
            at[rest] = (here[left] + 1) & mask
        return self._slots.take(at)

    def _insert(self, at: Ints, keys: Ints) -> None:
        """Claim free cells; of several keys at one cell the last one gets it."""
        self._cells[at] = keys
        won = self._cells.take(at) == keys
        at, keys = at[won], keys[won]
        order = np.arange(len(at), dtype=np.int32)
        self._slots[at] = order  # rows of one key share a cell: one of them is its owner
        owner = self._slots.take(at) == order
        at, keys = at[owner], keys[owner]
        self._slots[at] = np.arange(self.size, self.size + len(at), dtype=np.int32)
        self._arrays[0][self.size : self.size + len(at)] = keys
        self.size += len(at)

    def _grow(self, wanted: int) -> None:
        cells = len(self._cells)
        while wanted > cells // 2:
            cells *= 2
        held = self._arrays[0][: self.size]
        for index, initial in enumerate((0, 0, 0, _EMPTY, 0)):
            larger = np.full(cells // 2, initial)
            larger[: self.size] = self._arrays[index][: self.size]
            self._arrays[index] = larger
        self._cells, self._slots = np.full(cells, _EMPTY), np.zeros(cells, np.int32)
        slots, mask = np.arange(self.size, dtype=np.int32), cells - 1
        at = _mixed(held).view(np.int64) & mask
        while slots.size:
            free = self._cells.take(at) == _EMPTY
            self._cells[at[free]] = held[slots[free]]
            mine = self._cells.take(at) == held[slots]
            self._slots[at[mine]] = slots[mine]
            slots, at = slots[~mine], (at[~mine] + 1) & mask


def _mixed(keys: Ints) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser."""
    h = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h ^= h >> np.uint64(shift)
        h *= np.uint64(factor)
    h ^= h >> np.uint64(31)
    return h


@dataclass(frozen=True, slots=True)
class BareRun:
    """The result of a pass over batches."""

    rate: float
    """Rows per second of processor time, behind the warm-up."""
    wall_rate: float
    """Rows per second."""
    longest_ms: float
    """Processor time of the longest batch."""
    rows_out: int


def run_windows(batches: Sequence[Columns], size_ms: int, warm_rows: int) -> BareRun:
    """Results of each key and window, when the window is over."""
    table = BareTable()

    def step(batch: Columns, window: int | None) -> tuple[int, int]:
        keys, values, times = batch
        out, first, last = 0, int(times[0]) // size_ms, int(times[-1]) // size_ms
        cuts = [0, len(times)]
        if first != last:
            cuts[1:1] = np.searchsorted(times, np.arange(first + 1, last + 1) * size_ms).tolist()
        for number, (low, high) in enumerate(pairwise(cuts)):
            if window not in (None, first + number):
                out += len(table.results()[0])
                table.reset()
            window = first + number
            table.add(keys[low:high], values[low:high])
        return window or 0, out

    return _timed(batches, step, warm_rows, lambda: len(table.results()[0]))


def run_running(batches: Sequence[Columns], warm_rows: int) -> BareRun:
    """The updated rows of each batch."""
    table = BareTable()

    def step(batch: Columns, _: int | None) -> tuple[int, int]:
        return 0, len(table.updated(table.add(batch[0], batch[1]))[0])

    return _timed(batches, step, warm_rows, lambda: 0)


def _timed(
    batches: Sequence[Columns],
    step: Callable[[Columns, int | None], tuple[int, int]],
    warm_rows: int,
    end: Callable[[], int],
) -> BareRun:
    marks = [_Mark(time.monotonic(), time.process_time(), 0, 0)]
    window: int | None = None
    for batch in batches:
        window, out = step(batch, window)
        before = marks[-1]
        rows, rows_out = before.rows + len(batch[0]), before.rows_out + out
        marks.append(_Mark(time.monotonic(), time.process_time(), rows, rows_out))
    rows_out = marks[-1].rows_out + end()
    wall, cpu = time.monotonic(), time.process_time()
    warm = next(mark for mark in marks if mark.rows >= warm_rows)
    rows = marks[-1].rows - warm.rows
    longest = max(later.cpu - before.cpu for before, later in pairwise(marks))
    return BareRun(rows / (cpu - warm.cpu), rows / (wall - warm.wall), 1000 * longest, rows_out)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The moment behind a batch."""

    wall: float
    cpu: float
    rows: int
    rows_out: int
