"""A run: files whose ranges of hashes follow one another, found in by a batch of hashes at a time."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..hashing import Hashes
from ..values import Index
from .index import Rows, RunIndex
from .layout import PackedRows, Records
from .run_file import MappedFile

_FAULT_BYTES = 64 << 10
"""The kernel maps the pages around the one that is touched as well (fault-around)."""
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
        """Its least hash."""
        return int(self.rows.hashes[0])

    @property
    def last(self) -> int:
        """Its greatest hash."""
        return int(self.rows.hashes[-1])

    def __len__(self) -> int:
        return self.stop - self.start

    def note_touched(self, rows: int) -> None:
        """Count the pages that so many rows, spread over the file, map."""
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


@dataclass(frozen=True, slots=True)
class Hits:
    """Rows found in one segment: `positions` among those asked for, and their packed rows."""

    positions: Index
    rows: PackedRows


class Run:
    """Segments in the order of their hashes, at least one; immutable."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.index = RunIndex([segment.rows.hashes for segment in segments])
        sizes = [len(segment) for segment in segments]
        self._rows = sum(sizes)
        self._first_rows = np.cumsum([0, *sizes[:-1]])

    def __len__(self) -> int:
        return self._rows

    def find(self, hashes: Hashes, checks: Hashes | None, prefetch: bool) -> list[Hits]:
        """The rows of those of ascending `hashes` that are here."""
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

    def _take(self, rows: Rows, prefetch: bool) -> Records:
        """The records of ascending rows."""
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
        """The columns of variable width of ascending rows."""
        if not self.segments[0].rows.variable:
            return []
        taken: list[list[pa.Array]] = []
        for segment, part, first in self._parts(rows):
            indices = pa.array(rows[part] - first)
            taken.append([column.take(indices) for column in segment.rows.variable])
        return [pa.concat_arrays(list(column)) for column in zip(*taken, strict=True)]

    def _parts(self, rows: Rows) -> list[tuple[Segment, slice, int]]:
        """Ascending rows by segment, with the segment's first row."""
        cuts = [*np.searchsorted(rows, self._first_rows).tolist(), len(rows)]
        return [
            (segment, slice(cuts[at], cuts[at + 1]), int(self._first_rows[at]))
            for at, segment in enumerate(self.segments)
            if cuts[at] < cuts[at + 1]
        ]
