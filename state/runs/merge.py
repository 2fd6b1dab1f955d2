"""Merging of runs: the choice of runs, and the sequence of rows, with the row of the newest run for each
identity.

Runs are chosen by size (size-tiered, as in Cassandra and in RocksDB's universal compaction), and are
merged with their neighbours in age only, so that the order of age stays. A group of neighbours is worth
it when each of its runs is at most half as large again as all newer ones of the group together: then the
number of runs, and how often a row is rewritten, grow with the logarithm of state / flush. And everything
is merged when all newer runs together are more than twice the oldest one: so the files take at most three
times the space of the state.

A step of a merge takes the rows of all runs up to a common hash, about as many as fit the processor's
cache. They are read into a buffer that is used again, not through the mapping: that costs no page faults,
and a merge does not count as memory of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..hashing import Hashes
from ..values import Index
from .layout import PackedRows, Records, RowLayout
from .run import Run, Segment
from .run_file import damaged, unreadable

Expired: TypeAlias = Callable[[Records], npt.NDArray[np.bool_]]
"""Returns a mask of the rows that have expired by now; called in any thread."""

_SPACE = 2
_LIKE = 1.5


def choose_runs(sizes: Sequence[int], per_level: int, runs_max: int) -> tuple[int, int] | None:
    """Return the runs to merge into one, as the range [start, stop); None: none are to be merged.

    Args:
        sizes: the sizes of the runs, newest first.
        per_level: the least number of runs in a group.
        runs_max: with more runs than this the newest are merged in any case.
    """
    if len(sizes) >= per_level and sum(sizes[:-1]) > _SPACE * sizes[-1]:
        return 0, len(sizes)
    for start in range(len(sizes) - per_level + 1):
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and sizes[stop] <= _LIKE * total:
            total += sizes[stop]
            stop += 1
        if stop - start >= per_level:
            return start, stop
    if len(sizes) > runs_max:
        return 0, max(2, len(sizes) - runs_max + 1)
    return None


def merged(
    runs: Sequence[Run],
    layout: RowLayout,
    chunk_bytes: int,
    *,
    keep_deleted: bool,
    expired: Expired | None = None,
) -> Iterator[PackedRows]:
    """Yield the rows of `runs` (newest first) in the order of their hashes, without expired ones.

    An expired row can be left out in any merge: older rows of its key, which it hid, have expired too.
    Each piece is valid until the next one is asked for. The files must be pinned.
    """
    chunk_rows = max(1, chunk_bytes // (8 + layout.dtype.itemsize))
    cursors = [_Cursor(run) for run in runs]
    source = layout.empty(chunk_rows + len(runs))
    target = layout.empty(chunk_rows + len(runs))
    try:
        while True:
            live = [cursor for cursor in cursors if cursor.rows_left]
            if not live:
                return
            rows_left = sum(cursor.rows_left for cursor in live)
            upto = min(c.hash_after(1 + chunk_rows * c.rows_left // rows_left) for c in live)
            parts = [cursor.upto(upto) for cursor in live]
            total = sum(stop - start for _, start, stop in parts)
            if total > len(source):
                source, target = layout.empty(total), layout.empty(total)
            piece = _read(live, parts, source[:total])
            if len([part for part in parts if part[2] > part[1]]) > 1:
                piece = newest(piece, layout, target)
            if not keep_deleted:
                deleted = layout.deleted(piece.records)
                if deleted.any():
                    piece = piece.take(np.flatnonzero(~deleted))
            if expired is not None:
                dead = expired(piece.records)
                if dead.any():
                    piece = piece.take(np.flatnonzero(~dead))
            if len(piece):
                yield piece
    finally:
        for cursor in cursors:
            cursor.close()


_Part = tuple[Segment, int, int]


def _read(cursors: Sequence[_Cursor], parts: Sequence[_Part], records: Records) -> PackedRows:
    """Read the rows of all parts, one part after the other, and move the cursors behind them."""
    at = 0
    for cursor, (_, start, stop) in zip(cursors, parts, strict=True):
        cursor.read(records[at : at + stop - start], stop)
        at += stop - start
    slices = [segment.rows.slice(start, stop) for segment, start, stop in parts]
    columns = zip(*(rows.variable for rows in slices), strict=True)
    return PackedRows(
        np.concatenate([rows.hashes for rows in slices]),
        records,
        [pa.concat_arrays(list(column)) for column in columns],
    )


def newest(rows: PackedRows, layout: RowLayout, target: Records) -> PackedRows:
    """Sort the rows of several runs, given newest run first, and keep only the first row of each
    identity. The records are written to `target`, which has room for all of them.
    """
    order = np.argsort(rows.hashes, kind="stable")
    hashes = rows.hashes.take(order)
    same = hashes[1:] == hashes[:-1]
    if same.any():
        checks = layout.checks(rows.records)
        if checks is not None:
            sorted_checks = checks[order]
            if (same & (sorted_checks[1:] != sorted_checks[:-1])).any():
                order, hashes, sorted_checks = _by_identity(rows.hashes, checks)
                same = hashes[1:] == hashes[:-1]
            same &= sorted_checks[1:] == sorted_checks[:-1]
        kept = np.flatnonzero(np.concatenate([[True], ~same]))
        order, hashes = order.take(kept), hashes.take(kept)
    records = target[: len(order)]
    # With mode="raise" numpy would first fill a copy of its own.
    rows.records.take(order, out=records, mode="clip")
    indices = pa.array(order) if rows.variable else None
    return PackedRows(hashes, records, [column.take(indices) for column in rows.variable])


def _by_identity(hashes: Hashes, checks: Hashes) -> tuple[Index, Hashes, Hashes]:
    """Sort stably by both lanes, for the rare case that two keys share the first one."""
    order = np.lexsort((checks, hashes))
    return order, hashes.take(order), checks[order]


class _Cursor:
    """A place in a run, moving forward."""

    def __init__(self, run: Run) -> None:
        self._parts: list[_Part] = [(segment, 0, len(segment)) for segment in run.segments]
        self._parts.reverse()
        self.rows_left = len(run)
        self._file: int | None = None

    def hash_after(self, rows: int) -> int:
        """Return the hash of the row that is `rows` further on, within the segment."""
        segment, start, stop = self._parts[-1]
        return int(segment.rows.hashes[min(start + rows, stop) - 1])

    def upto(self, last: int) -> _Part:
        """Return the rows of the segment up to the hash `last`, which lies within it or behind it."""
        segment, start, stop = self._parts[-1]
        hashes = segment.rows.hashes[start:stop]
        return segment, start, start + int(np.searchsorted(hashes, np.uint64(last), "right"))

    def read(self, records: Records, upto: int) -> None:
        """Read the records of the rows before `upto`, and move there."""
        segment, start, stop = self._parts[-1]
        path = segment.file.file.path
        if self._file is None:
            try:
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise unreadable(path, error) from error
        size = records.dtype.itemsize
        offset = segment.file.records_at + (segment.start + start) * size
        view = records.view(np.uint8).data
        while view:
            try:
                count = os.preadv(self._file, [view], offset)
            except OSError as error:
                raise unreadable(path, error) from error
            if not count:
                raise damaged(path, "it became shorter")
            view, offset = view[count:], offset + count
        self.rows_left -= upto - start
        if upto < stop:
            self._parts[-1] = (segment, upto, stop)
        else:
            self._parts.pop()
            self.close()
            segment.forget()

    def close(self) -> None:
        """Close the file. It is opened again for the next read."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
