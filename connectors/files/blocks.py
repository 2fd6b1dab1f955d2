"""Readers of one split of a file, block by block, in an I/O thread.

A split is a byte range of whole lines (CSV, JSON), a whole compressed file, or a row group (Parquet).
Each block is returned as pieces, each with the position at which reading goes on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from ...errors import StateError, StorageError
from .decode import BOM, BadRecord, Lines, cast_rows, decode, excerpt
from .locations import version_of
from .verified import open_row_group

BLOCK_BYTES = 1 << 20
_BATCH_BYTES = 1 << 24
"""The size of the columns of a batch of Parquet rows."""
_SEEK_BYTES = 1 << 16
RECORD_MAX_BYTES = 16 << 20
"""A longer line is unreadable: it would have to be held in memory whole."""


class FileSplit(msgspec.Struct):
    """A part of a file and the position of the next record in it.

    Positions are byte offsets (in the uncompressed text), or row numbers in a row group.
    """

    path: str
    size_bytes: int
    version: str
    position: int
    end: int | None = None
    """The end of the split; None: the end of the file."""
    row_group: int | None = None
    header: list[str] = []
    """The columns of a CSV file."""
    checksums: list[str] = []
    """The checksums of the footer and the row group, if they were measured (`verified.py`)."""


@dataclass(slots=True)
class FilePiece:
    """Some consecutive records; `position` is that of the next ones."""

    position: int
    batch: pa.RecordBatch | None = None
    bad: list[BadRecord] = field(default_factory=list)
    last: bool = False
    """True if the split ends behind this piece."""
    ends: Sequence[int] | npt.NDArray[np.int64] = ()
    """The position at which each row of the batch ends; empty if rows were left out."""
    starts: npt.NDArray[np.int64] | range | None = None
    """The position at which each row of the batch begins."""

    def take(self, rows: int) -> FilePiece:
        """Cut off the first `rows`, fewer than there are `ends`, and return them as a piece."""
        assert self.batch is not None  # the caller has checked it
        first = FilePiece(int(self.ends[rows - 1]), self.batch.slice(0, rows))
        self.batch, self.ends = self.batch.slice(rows), self.ends[rows:]
        if self.starts is not None:
            first.starts, self.starts = self.starts[:rows], self.starts[rows:]
        return first


class BlockReader(Protocol):
    """Reads a split from its position on. Used by one thread at a time."""

    def next_block(self) -> list[FilePiece]:
        """Return the next pieces, at least one. The last one of the split is marked."""
        ...

    def close(self) -> None: ...


def open_unchanged(store: pafs.FileSystem, split: FileSplit) -> None:
    """Make sure that the file is the one from which the split was cut.

    Raises:
        StateError: the file is gone or has changed, so the position means nothing any more.
        StorageError: the storage failed.
    """
    try:
        info = store.get_file_info(split.path)
        there = info.type == pafs.FileType.File
        same = there and info.size == split.size_bytes and version_of(store, info) == split.version
    except (OSError, pa.ArrowException) as error:
        raise storage_error(split.path, error) from error
    if same:
        return
    problem = "an input file has changed since the job began to read it"
    if not there:
        problem = "an input file is gone"
    raise StateError(
        f"{problem} file=`{split.path}` position=`{split.position}`",
        fix="put the file back as it was, or start the job fresh; write new data to new files",
    )


def storage_error(path: str, error: Exception) -> StorageError:
    """Return the error for a file that could not be read at all."""
    return StorageError(f"a file could not be read file=`{path}`: {error}")


def is_compressed(path: str) -> bool:
    """Return True for files that can only be read from their start."""
    return path.endswith(".gz")


class TextReader:
    """Reads lines from a byte range, or from a compressed file."""

    def __init__(
        self,
        store: pafs.FileSystem,
        split: FileSplit,
        convert: Callable[[Lines], pa.RecordBatch],
        batch_rows: int,
    ) -> None:
        open_unchanged(store, split)
        self._path = split.path
        self._convert = convert
        self._batch_rows = batch_rows
        self._position = split.position
        self._end = split.end
        self._rest = b""
        """The start of a line whose end has not been read yet. It begins at `_position`."""
        self._stream = open_text(store, split.path, split.position)

    def next_block(self) -> list[FilePiece]:
        try:
            data, at_end = self._read_lines()
        except (OSError, pa.ArrowException) as error:
            raise storage_error(self._path, error) from error
        if data is None:
            return [self._skip_line()]
        pieces = list(self._pieces(data)) or [FilePiece(self._position)]
        pieces[-1].position = self._position
        pieces[-1].last = at_end
        return pieces

    def close(self) -> None:
        self._stream.close()

    def _read_lines(self) -> tuple[bytes | None, bool]:
        """Return whole lines, and whether the split ends behind them; None instead of lines if one is far
        too long.
        """
        chunks: list[bytes] = []
        chunk, size = self._rest, 0
        while True:
            if cut := chunk.rfind(b"\n") + 1:
                self._rest = chunk[cut:]
                return b"".join([*chunks, chunk[:cut]]), False
            chunks.append(chunk)
            size += len(chunk)
            if size > RECORD_MAX_BYTES:
                self._rest = b"".join(chunks)
                return None, False
            chunk = self._read_after(size)
            if not chunk:
                self._rest = b""
                return b"".join(chunks), True

    def _read_after(self, held: int) -> bytes:
        """Return the next bytes; `held` bytes behind the position have been read already."""
        wanted = BLOCK_BYTES
        if self._end is not None:
            wanted = min(wanted, self._end - self._position - held)
        return bytes(self._stream.read(wanted)) if wanted > 0 else b""

    def _pieces(self, data: bytes) -> Iterator[FilePiece]:
        base = self._position
        self._position += len(data)
        if base == 0 and data.startswith(BOM):
            data, base = data[len(BOM) :], len(BOM)
        lines = Lines.split(data)
        for start in range(0, len(lines), self._batch_rows):
            yield self._piece(lines.part(start, start + self._batch_rows), base)

    def _piece(self, lines: Lines, base: int) -> FilePiece:
        decoded = decode(len(lines), lambda start, stop: self._convert(lines.part(start, stop)))
        bad = [
            BadRecord(
                base + int(lines.starts[index]),
                reason,
                lines.line(index).decode(errors="backslashreplace"),
            )
            for index, reason in decoded.bad
        ]
        piece = FilePiece(base + int(lines.ends[-1]), decoded.batch(), bad)
        piece.starts = np.delete(base + lines.starts, [index for index, _ in decoded.bad])
        if not bad:
            piece.ends = base + lines.ends
        return piece

    def _skip_line(self) -> FilePiece:
        """Skip a line that is too long to hold; only its beginning is kept for the report."""
        offset, start = self._position, self._rest[:1024]
        chunk = self._rest
        self._rest = b""
        try:
            while chunk and b"\n" not in chunk:
                self._position += len(chunk)
                chunk = self._read_after(0)
        except (OSError, pa.ArrowException) as error:
            raise storage_error(self._path, error) from error
        cut = chunk.find(b"\n") + 1
        self._position += cut
        self._rest = chunk[cut:]
        reason = f"longer than {RECORD_MAX_BYTES:,} bytes"
        return FilePiece(
            self._position, None, [BadRecord(offset, reason, excerpt(start))], last=not chunk
        )


class ParquetReader:
    """Reads one row group."""

    def __init__(
        self, store: pafs.FileSystem, split: FileSplit, schema: pa.Schema, batch_rows: int
    ) -> None:
        open_unchanged(store, split)
        self._path = split.path
        self._schema = schema
        self._position = split.position
        self._skip = split.position
        self._end = split.end or 0
        try:
            self._file = _opened(store, split)
            group = self._file.metadata.row_group(split.row_group)
            self._batches: Iterator[Any] = self._file.iter_batches(
                batch_size=_rows_within(group, schema.names, batch_rows),
                row_groups=[split.row_group],
                columns=schema.names,
                use_threads=False,
            )
        except (OSError, pa.ArrowException) as error:
            raise storage_error(self._path, error) from error

    def next_block(self) -> list[FilePiece]:
        try:
            batch = next(self._batches, None)
            while batch is not None and batch.num_rows <= self._skip:
                self._skip -= batch.num_rows
                batch = next(self._batches, None)
        except (OSError, pa.ArrowException) as error:
            raise storage_error(self._path, error) from error
        if batch is None:
            return [FilePiece(self._position, last=True)]
        rows = batch.slice(self._skip)
        self._skip = 0
        first = self._position
        self._position += rows.num_rows
        decoded = decode(rows.num_rows, lambda a, b: cast_rows(rows.slice(a, b - a), self._schema))
        bad = [
            BadRecord(first + index, reason, str(rows.slice(index, 1).to_pylist()[0]))
            for index, reason in decoded.bad
        ]
        last = self._position >= self._end
        piece = FilePiece(self._position, decoded.batch(), bad, last)
        if bad:
            rows_read = np.arange(first, self._position, dtype=np.int64)
            piece.starts = np.delete(rows_read, [index for index, _ in decoded.bad])
        else:
            piece.starts = range(first, self._position)
            piece.ends = range(first + 1, self._position + 1)
        return [piece]

    def close(self) -> None:
        self._file.close(force=True)


def _rows_within(group: Any, columns: Sequence[str], most: int) -> int:
    """Return how many rows of a row group take about `_BATCH_BYTES`, but no more than `most`."""
    size = 0
    for number in range(group.num_columns):
        part = group.column(number)
        path = part.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            size += part.total_uncompressed_size
    rows: int = _BATCH_BYTES * group.num_rows // max(1, size)
    return max(1, min(most, rows))


def _opened(store: pafs.FileSystem, split: FileSplit) -> pq.ParquetFile:
    """Return the open file of a Parquet split, verified if the split has checksums."""
    if split.checksums:
        group = split.row_group or 0
        return open_row_group(store, split.path, split.size_bytes, group, split.checksums)
    # Pre-buffering joins the many small reads of columns into few large ones. On a disk small reads cost
    # less than memory for whole row groups.
    remote = not isinstance(store, pafs.LocalFileSystem)
    return pq.ParquetFile(store.open_input_file(split.path), pre_buffer=remote)


def open_text(store: pafs.FileSystem, path: str, position: int) -> Any:
    """Return a stream of the text of a file from byte `position` on; raises StorageError."""
    try:
        if not is_compressed(path):
            file = store.open_input_file(path)
            file.seek(position)
            return file
        stream = store.open_input_stream(path, compression="gzip")
        left = position
        while left:
            skipped = len(stream.read(min(left, BLOCK_BYTES)))
            if not skipped:
                raise OSError(f"it ends before byte {position}")
            left -= skipped
        return stream
    except (OSError, pa.ArrowException) as error:
        raise storage_error(path, error) from error


def first_line(store: pafs.FileSystem, path: str) -> bytes:
    """Return the first line of a file with its line break; raises StorageError if it is too long."""
    line = b""
    try:
        with open_text(store, path, 0) as stream:
            while chunk := bytes(stream.read(BLOCK_BYTES)):
                line += chunk
                if found := line.find(b"\n") + 1:
                    return line[:found]
                if len(line) > RECORD_MAX_BYTES:
                    raise OSError(f"its first line is longer than {RECORD_MAX_BYTES:,} bytes")
    except (OSError, pa.ArrowException) as error:
        raise storage_error(path, error) from error
    return line


def line_start(store: pafs.FileSystem, path: str, position: int, size_bytes: int) -> int:
    """Return the first start of a line at or behind `position`, or the end of the file."""
    if position >= size_bytes:
        return size_bytes
    try:
        with open_text(store, path, position - 1) as stream:
            at = position - 1
            while chunk := bytes(stream.read(_SEEK_BYTES)):
                if found := chunk.find(b"\n") + 1:
                    return at + found
                at += len(chunk)
    except (OSError, pa.ArrowException) as error:
        raise storage_error(path, error) from error
    return size_bytes
