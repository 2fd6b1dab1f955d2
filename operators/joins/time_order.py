"""Rows in order of time, for operators that release them as event time passes.

Most rows arrive in about the order in which they are released. New rows wait unsorted; they are
sorted and merged into the main part once they are an eighth of it. So a watermark costs two binary
searches and a look at the new rows, and a row is sorted a few times at most. Columnar timers work
in the same way: a sorted main part and an unsorted tail.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...state.values import Index

TAIL_MIN: Final = 16_384
TAIL_SHARE: Final = 8
_LAST: Final = np.iinfo(np.int64).max


class TimeOrder:
    """Row numbers by time (ms)."""

    def __init__(self) -> None:
        self._times: Index = np.zeros(0, np.int64)
        self._rows: Index = np.zeros(0, np.int64)
        self._next = 0  # the first sorted row that is still there
        self._tail: list[tuple[Index, Index]] = []
        self._tail_rows = 0
        self._tail_first = _LAST

    def __len__(self) -> int:
        return len(self._times) - self._next + self._tail_rows

    def add(self, times: Index, rows: Index) -> None:
        """Add rows."""
        if not len(times):
            return
        self._tail.append((times, rows))
        self._tail_rows += len(times)
        self._tail_first = min(self._tail_first, int(times.min()))

    def due(self, before: int) -> Index:
        """Remove the rows before `before`; return them by time, then by number."""
        if self._tail_first < before and self._tail_rows > max(
            TAIL_MIN, (len(self._times) - self._next) // TAIL_SHARE
        ):
            self._merge()
        upto = int(np.searchsorted(self._times, before))
        times, rows = self._times[self._next : upto], self._rows[self._next : upto]
        self._next = max(self._next, upto)
        if self._tail_first >= before:
            return rows
        late_times, late_rows = self._from_tail(before)
        times, rows = np.concatenate([times, late_times]), np.concatenate([rows, late_rows])
        # Rows of the tail arrived later than those of the main part, so a stable sort is by number,
        # too.
        return rows[np.argsort(times, kind="stable")]

    def _from_tail(self, before: int) -> tuple[Index, Index]:
        times, rows = self._joined_tail()
        due = times < before
        rest = ~due
        self._tail, self._tail_rows, self._tail_first = [], 0, _LAST
        self.add(times[rest], rows[rest])
        return times[due], rows[due]

    def _joined_tail(self) -> tuple[Index, Index]:
        times, rows = zip(*self._tail, strict=True)
        return np.concatenate(times), np.concatenate(rows)

    def _merge(self) -> None:
        times, rows = self._joined_tail()
        times = np.concatenate([self._times[self._next :], times])
        rows = np.concatenate([self._rows[self._next :], rows])
        order = np.argsort(times, kind="stable")  # two nearly sorted runs: linear
        self._times, self._rows, self._next = times[order], rows[order], 0
        self._tail, self._tail_rows, self._tail_first = [], 0, _LAST

    def renumber(self, numbers: Index) -> None:
        """Renumber the rows: row i becomes `numbers[i]`."""
        self._times, self._rows = self._times[self._next :], numbers[self._rows[self._next :]]
        self._next = 0
        self._tail = [(times, numbers[rows]) for times, rows in self._tail]
