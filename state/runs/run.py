"""A run: files whose ranges of hashes follow one another; how a batch of hashes is found in it, and how
it is written.

The index that a run keeps in memory takes 2 to 3 bytes a row. Hashes are uniform and sorted, so the
distance of a hash from the first one, shifted, is nearly its row: the *fence* has the first row of each
bucket of 2 to 4 rows. Beside it lies one byte of each row's hash, its *fingerprint*. A lookup compares
the eight fingerprints from the start of the bucket, as one word. So of the hashes that a run does not
hold 99 in 100 are turned away without touching a page of its files, and of those it holds the row is
known before the first page is touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..hashing import Hashes, distinct
from ..slots.arrays import ranges
from ..values import Index
from .layout import PackedRows, Records, RowLayout
from .run_file import FilePool, MappedFile, RunFile, write_run_file

# --- the index -------------------------------------------------------------------------------------


_ROWS_PER_BUCKET = 2
_CHUNK_ROWS = 1 << 16
_WINDOW = 8
"""The number of fingerprints in a word."""
_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_WITHIN = np.array([(1 << 8 * rows) - 1 for rows in range(_WINDOW + 1)], np.uint64)
"""For each number of rows in a bucket, a mask of the bytes of a window that belong to it."""
_ONE, _THREE, _SEVEN = np.uint64(1), np.uint64(3), np.uint64(7)


Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True)
class Candidates:
    """Rows that may have the hashes in question.

    Attributes:
        positions: the positions of the hashes among those asked for, which may repeat.
        bases: the first row of the window that was compared.
        matches: words with the top bit set in each byte of the window that agrees.
    """

    positions: Index
    bases: Rows
    matches: Hashes

    def rows(self) -> Rows:
        """Return the first candidate of each."""
        lowest = self.matches & (~self.matches + _ONE)
        return self.bases + (np.bitwise_count(lowest - _ONE) >> 3)

    def take(self, which: Index) -> Candidates:
        """Return some of the candidates, in that order."""
        return Candidates(self.positions[which], self.bases[which], self.matches[which])

    def others(self, which: Index) -> Candidates:
        """Return the candidates behind the first ones of `which`."""
        rest = self.take(which)
        rest.matches &= rest.matches - _ONE
        return rest.take(np.flatnonzero(rest.matches))


class RunIndex:
    """The index of the rows of a run, given as ascending pieces of ascending hashes, with at least one
    row.
    """

    def __init__(self, pieces: Sequence[Hashes]) -> None:
        rows = sum(map(len, pieces))
        self._first, self._last = np.uint64(pieces[0][0]), np.uint64(pieces[-1][-1])
        span = int(self._last - self._first)
        buckets = rows // _ROWS_PER_BUCKET + 1
        # Take the least shift that leaves no more buckets than that.
        self._shift = np.uint64(max(0, span.bit_length() - buckets.bit_length() + 1))
        self._fence = np.zeros((span >> int(self._shift)) + 2, np.uint32)
        self._words = np.zeros(rows // 8 + 2, np.uint64)
        start = 0
        for piece in pieces:
            for low in range(0, len(piece), _CHUNK_ROWS):
                chunk = piece[low : low + _CHUNK_ROWS]
                self._add(start, chunk)
                start += len(chunk)
        np.cumsum(self._fence, out=self._fence)

    @property
    def nbytes(self) -> int:
        """Memory of the index."""
        return self._words.nbytes + self._fence.nbytes

    def _add(self, start: int, hashes: Hashes) -> None:
        self._words.view(np.uint8)[start : start + len(hashes)] = hashes.astype(np.uint8)
        buckets = ((hashes - self._first) >> self._shift).view(np.int64)
        counts = np.bincount(buckets - buckets[0])
        at = int(buckets[0]) + 1
        self._fence[at : at + len(counts)] += counts.astype(np.uint32)

    def probe(self, hashes: Hashes) -> Candidates:
        """Return the rows that may have these ascending hashes."""
        low = int(np.searchsorted(hashes, self._first, "left"))
        high = int(np.searchsorted(hashes, self._last, "right"))
        hashes = hashes[low:high]
        buckets = ((hashes - self._first) >> self._shift).view(np.int64)
        bases = self._fence.take(buckets).astype(np.int64)
        buckets += 1
        sizes = self._fence.take(buckets).astype(np.int64)
        sizes -= bases
        positions = np.arange(low, high)
        found = [self._compare(hashes, bases, sizes, positions)]
        while (crowded := np.flatnonzero(sizes > _WINDOW)).size:
            hashes, positions = hashes[crowded], positions[crowded]
            bases, sizes = bases[crowded] + _WINDOW, sizes[crowded] - _WINDOW
            found.append(self._compare(hashes, bases, sizes, positions))
        if len(found) == 1:
            return found[0]
        return Candidates(
            np.concatenate([one.positions for one in found]),
            np.concatenate([one.bases for one in found]),
            np.concatenate([one.matches for one in found]),
        )

    def _compare(
        self,
        hashes: Hashes,
        bases: Rows,
        sizes: Rows,
        positions: Index,
    ) -> Candidates:
        """Compare the fingerprints of rows base to base + min(size, 8)."""
        index = bases >> 3
        shift = (bases.view(np.uint64) & _SEVEN) << _THREE
        window = self._words.take(index)
        window >>= shift
        index += 1
        high = self._words.take(index)
        high <<= _ONE  # a shift by 64 is undefined, so shift in two steps
        high <<= np.uint64(63) - shift
        window |= high
        window ^= (hashes & np.uint64(0xFF)) * _ONES
        # This sets the top bit of the lowest zero byte, and perhaps of bytes above it.
        matches: Hashes = window - _ONES
        matches &= ~window
        matches &= _TOPS
        matches &= _WITHIN.take(sizes, mode="clip")
        some = np.flatnonzero(matches)
        return Candidates(positions[some], bases[some], matches[some])


# --- the run ---------------------------------------------------------------------------------------


_FAULT_BYTES = 64 << 10
"""The kernel also maps the pages around the one that is touched (fault-around)."""
_PAGE_SHIFT = mmap.PAGESIZE.bit_length() - 1


class Segment:
    """A part of a run: rows `start` to `stop` of a file, at least one.

    No two segments of a run have a hash in common.
    """

    def __init__(self, file: MappedFile, start: int, stop: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self.rows: PackedRows = file.rows.slice(start, stop)
        self.touched_bytes = 0
        """An estimate of the pages that lookups have mapped since the last `forget`."""

    @property
    def first(self) -> int:
        """The least hash of the segment."""
        return int(self.rows.hashes[0])

    @property
    def last(self) -> int:
        """The greatest hash of the segment."""
        return int(self.rows.hashes[-1])

    def __len__(self) -> int:
        return self.stop - self.start

    def note_touched(self, rows: int) -> None:
        """Count the pages that a lookup of this many rows, spread over the file, has mapped."""
        self.touched_bytes = min(self.touched_bytes + rows * _FAULT_BYTES, self.file.size_bytes)

    def forget(self) -> None:
        """Give the mapped pages back to the page cache."""
        self.file.forget()
        self.touched_bytes = 0

    def prefetch(self, rows: Index) -> None:
        """Ask the disk for the pages of the records of ascending rows, all at once."""
        size = self.rows.records.dtype.itemsize
        begin = self.file.records_at + (self.start + rows) * size
        pages = np.unique(np.stack([begin, begin + size - 1]) >> _PAGE_SHIFT)
        breaks = np.flatnonzero(np.diff(pages) > 1)
        starts = pages[np.concatenate([[0], breaks + 1])] << _PAGE_SHIFT
        stops = (pages[np.concatenate([breaks, [-1]])] + 1) << _PAGE_SHIFT
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.file.prefetch(start, stop)


class Hits(msgspec.Struct, frozen=True):
    """Rows found in one segment: `positions` among those asked for, and their packed rows."""

    positions: Index
    rows: PackedRows


class Run:
    """An immutable run of at least one segment, in the order of their hashes."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.index = RunIndex([segment.rows.hashes for segment in segments])
        sizes = [len(segment) for segment in segments]
        self._rows = sum(sizes)
        self._first_rows = np.cumsum([0, *sizes[:-1]])

    def __len__(self) -> int:
        return self._rows

    def find(self, hashes: Hashes, checks: Hashes | None, prefetch: bool) -> list[Hits]:
        """Return the rows of those of ascending `hashes` that are in the run."""
        hits: list[Hits] = []
        candidates = self.index.probe(hashes)
        while candidates.positions.size:
            rows = candidates.rows()
            if (rows[1:] < rows[:-1]).any():
                candidates = candidates.take(np.argsort(rows, kind="stable"))
                rows = candidates.rows()
            positions = candidates.positions
            found = self._take(rows, prefetch)
            same = found["hash"] == hashes[positions]
            if checks is not None:
                same &= found["check"] == checks[positions]
            failed = np.flatnonzero(~same)
            if failed.size:
                kept = np.flatnonzero(same)
                positions, rows, found = positions[kept], rows[kept], found.take(kept)
            if positions.size:
                taken = PackedRows(hashes[positions], found, self._take_variable(rows))
                hits.append(Hits(positions, taken))
            candidates = candidates.others(failed)
        return hits

    def find_all(self, hashes: Hashes, prefetch: bool) -> PackedRows | None:
        """Return all rows that have these ascending, distinct hashes; None if there are none.

        A key with many rows has them side by side, so only the ends of its range are searched.
        """
        asked = distinct(hashes[self.index.probe(hashes).positions])
        found: list[Rows] = []
        for segment, first in zip(self.segments, self._first_rows.tolist(), strict=True):
            own = segment.rows.hashes
            low = int(np.searchsorted(asked, own[0], "left"))
            part = asked[low : int(np.searchsorted(asked, own[-1], "right"))]
            if len(part):
                begins = np.searchsorted(own, part, "left")
                segment.note_touched(len(part))
                found.append(ranges(begins + first, np.searchsorted(own, part, "right") - begins))
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        if not rows.size:
            return None
        records = self._take(rows, prefetch)
        hashes = np.ascontiguousarray(records["hash"])
        return PackedRows(hashes, records, self._take_variable(rows))

    def _take(self, rows: Rows, prefetch: bool) -> Records:
        """Return the records of ascending rows."""
        out = np.empty(len(rows), self.segments[0].rows.records.dtype)
        parts = self._parts(rows)
        if prefetch:
            for segment, part, first in parts:
                segment.prefetch(rows[part] - first)
        for segment, part, first in parts:
            # With mode="raise" numpy would fill a copy of its own first.
            segment.rows.records.take(rows[part] - first, out=out[part], mode="clip")
            segment.note_touched(part.stop - part.start)
        return out

    def _take_variable(self, rows: Rows) -> list[pa.Array]:
        """Return the columns of variable width of ascending rows."""
        if not self.segments[0].rows.variable:
            return []
        taken: list[list[pa.Array]] = []
        for segment, part, first in self._parts(rows):
            indices = pa.array(rows[part] - first)
            taken.append([column.take(indices) for column in segment.rows.variable])
        return [pa.concat_arrays(list(column)) for column in zip(*taken, strict=True)]

    def _parts(self, rows: Rows) -> list[tuple[Segment, slice, int]]:
        """Divide ascending rows by segment, each with its first row."""
        cuts = [*np.searchsorted(rows, self._first_rows).tolist(), len(rows)]
        return [
            (segment, slice(cuts[at], cuts[at + 1]), int(self._first_rows[at]))
            for at, segment in enumerate(self.segments)
            if cuts[at] < cuts[at + 1]
        ]


# --- writing ---------------------------------------------------------------------------------------


class RunWriter:
    """Writes runs one after the other, in one thread, and keeps its buffer between them.

    `new_id` gives each file its id, which is also its name. Files of `pool` are overwritten. A file that
    could not be written is removed again.
    """

    def __init__(
        self,
        directory: Path,
        layout: RowLayout,
        file_bytes: int,
        new_id: Callable[[], str],
        pool: FilePool | None = None,
    ) -> None:
        self._directory, self._layout, self._new_id = directory, layout, new_id
        self._pool = pool
        self._file_bytes = file_bytes
        self._file_rows = max(1, file_bytes // (8 + layout.dtype.itemsize))
        # Records are written as plain bytes: numpy would copy them field by field, seven times slower.
        self._plain = np.dtype(f"V{layout.dtype.itemsize}")
        self.release()

    def write(self, pieces: Iterable[PackedRows]) -> Run | None:
        """Write one run and return it; None if there are no rows."""
        segments: list[Segment] = []
        try:
            self._write_all(pieces, segments)
        except BaseException:
            for segment in segments:
                segment.file.file.unpin()
            raise
        return Run(segments) if segments else None

    @property
    def nbytes(self) -> int:
        """Memory of the buffer."""
        return self._hashes.nbytes + self._records.nbytes

    def release(self) -> None:
        """Give up the memory of the buffer."""
        self._hashes, self._records = np.empty(0, np.uint64), np.empty(0, self._plain)

    def _write_all(self, pieces: Iterable[PackedRows], segments: list[Segment]) -> None:
        held, variable, variable_bytes = 0, list[list[pa.Array]](), 0
        for piece in pieces:
            start = 0
            while start < len(piece):
                full = held >= self._file_rows or (
                    held > 0 and held * self._row_bytes + variable_bytes >= self._file_bytes
                )
                # Rows of one hash stay together, as a lookup goes to one segment only.
                if full and piece.hashes[start] != self._hashes[held - 1]:
                    segments.append(self._seal(held, variable))
                    held, variable, variable_bytes, full = 0, [], 0, False
                stop = min(len(piece), start + max(1, self._file_rows - held))
                last = piece.hashes[start if full else stop - 1]
                stop = int(np.searchsorted(piece.hashes, last, "right"))
                part = piece.slice(start, stop)
                self._reserve(held + len(part))
                self._hashes[held : held + len(part)] = part.hashes
                self._records[held : held + len(part)] = part.records.view(self._plain)
                if part.variable:
                    variable.append(part.variable)
                    variable_bytes += sum(int(column.nbytes) for column in part.variable)
                held += len(part)
                start = stop
        if held:
            segments.append(self._seal(held, variable))

    @property
    def _row_bytes(self) -> int:
        return 8 + int(self._layout.dtype.itemsize)

    def _reserve(self, rows: int) -> None:
        if rows > len(self._hashes):
            # Flushes of a small state need no buffer of full size.
            room = max(rows, min(self._file_rows, 2 * len(self._hashes)))
            hashes, records = np.empty(room, np.uint64), np.empty(room, self._plain)
            hashes[: len(self._hashes)], records[: len(self._records)] = self._hashes, self._records
            self._hashes, self._records = hashes, records

    def _seal(self, held: int, variable: list[list[pa.Array]]) -> Segment:
        columns = [pa.concat_arrays(list(column)) for column in zip(*variable, strict=True)]
        id_ = self._new_id()
        path = self._directory / f"{id_}.arrow"
        file = RunFile(id_, path, self._pool)
        file.pin()
        try:
            records = self._records[:held].view(self._layout.dtype)
            rows = PackedRows(self._hashes[:held], records, columns)
            used_before = self._pool is not None and self._pool.take(path)
            write_run_file(path, self._layout, rows, overwrite=used_before)
            return Segment(MappedFile(file, self._layout, verify=False), 0, held)
        except BaseException:
            file.unpin()
            raise
