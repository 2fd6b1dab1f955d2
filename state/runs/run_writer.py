"""Writes the rows of a run, which come in pieces in the order of their hashes, to files of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from .file_pool import FilePool
from .layout import PackedRows, RowLayout
from .run import Run, Segment
from .run_file import MappedFile, RunFile, write_run_file


class RunWriter:
    """Writes runs, one after the other, from one thread; keeps its buffer between them.

    `new_id` gives each file its id, which is its name as well. Files of `pool` are written over. A file
    that could not be written is removed again.
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
        # Records as plain bytes: numpy would copy them field by field, seven times slower.
        self._plain = np.dtype(f"V{layout.dtype.itemsize}")
        self.release()

    def write(self, pieces: Iterable[PackedRows]) -> Run | None:
        """Write one run. None if there are no rows."""
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
                # Rows of one hash stay together: a lookup goes to one segment only.
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
