"""One file of a run: an Arrow IPC file of one record batch, memory-mapped to be read.

Columns: `hash` (uint64, ascending), `row` (fixed-size binary, see `layout`), then those of variable
width. The metadata of its schema says the format's version, the rows, the first and last hash, the
schema of a row, whether records have a check lane, and the xxh3-64 of the data. Files are written once,
by a thread, and never changed.
"""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path
from threading import RLock
from weakref import finalize

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ...errors import CorruptError, StateError, StorageError
from .layout import PackedRows, Records, RowLayout


class FilePool:
    """Run files that are no longer needed, kept to be overwritten: up to `bytes_max` in a directory.

    The system has to provide the pages of a new file first; those of a file that was read or written lately
    are there already. Overwriting is some twenty times faster on virtual machines whose memory comes late.
    Files below `file_bytes_min` are not worth it.

    Thread-safe. `RunFile` offers a file once it is certain that it can no longer be read.
    """

    def __init__(self, directory: Path, bytes_max: int, file_bytes_min: int) -> None:
        self._directory = directory
        self._bytes_max, self._file_bytes_min = bytes_max, file_bytes_min
        self._names = itertools.count()
        self._free: list[tuple[Path, int]] = []  # the last one is most likely to be in memory
        self._waiting: set[Path] = set()
        self._closed = False
        self._lock = (
            RLock()
        )  # reentrant, as a garbage collection may offer another file while it is held

    @property
    def nbytes(self) -> int:
        """The total size of the files that wait here."""
        with self._lock:
            return sum(size for _, size in self._free)

    def expect(self, path: Path) -> None:
        """Note a file that will be offered once its last mapping ends."""
        with self._lock:
            if not self._closed:
                self._waiting.add(path)
                return
        path.unlink(missing_ok=True)

    def offer(self, path: Path) -> None:
        """Keep the file for later, or delete it. A file with a second name is not kept."""
        with self._lock:
            self._waiting.discard(path)
        try:
            found = os.stat(path)
        except FileNotFoundError:  # `close` came first
            return
        if found.st_nlink == 1 and found.st_size >= self._file_bytes_min:
            with self._lock:
                if not self._closed and self.nbytes + found.st_size <= self._bytes_max:
                    kept = self._directory / f"{next(self._names)}.free"
                    os.rename(path, kept)
                    self._free.append((kept, found.st_size))
                    return
        path.unlink(missing_ok=True)

    def take(self, path: Path) -> bool:
        """Give an unused file, whose content means nothing, this name; return False if there is none."""
        with self._lock:
            if not self._free:
                return False
            kept, _ = self._free.pop()
        os.rename(kept, path)
        return True

    def close(self) -> None:
        """Delete all files, even those still mapped. Files that are offered later are deleted at once."""
        with self._lock:
            unused = [*(path for path, _ in self._free), *self._waiting]
            self._free, self._waiting, self._closed = [], set(), True
        for path in unused:
            path.unlink(missing_ok=True)


FORMAT_VERSION = 1
_METADATA_KEY = b"headgate.run"
_SCHEMA_KEY = b"headgate.run.schema"
_CHUNK_BYTES = 16 << 20
_FIX = "restore from another checkpoint or savepoint"


class FileMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a run file in its own metadata."""

    version: int
    rows: int
    first_hash: int
    last_hash: int
    wide: bool
    checksum: str


class RunFile:
    """An immutable file with counts of its users. Without users it is deleted, or given to the pool.

    `id` names the content for ever. The file may be overwritten only when it has no pins and is mapped
    nowhere. A mapping lives as long as anything refers to its pages, so its end proves that they can no
    longer be read. Thread-safe.
    """

    def __init__(self, id_: str, path: Path, pool: FilePool | None = None) -> None:
        self.id, self.path = id_, path
        self._pool = pool
        self._pins = self._maps = 0
        self._given_up = False
        self._lock = (
            RLock()
        )  # reentrant, as a garbage collection may end a mapping while it is held

    def pin(self) -> None:
        """Keep the file until `unpin`."""
        with self._lock:
            self._pins += 1

    def unpin(self) -> None:
        """Undo one `pin`; the last one gives the file up. Existing mappings can still be read."""
        self._let_go(pins=1, maps=0)

    def mapped(self, mapping: mmap.mmap) -> None:
        """Note a mapping of the file, which must be pinned. The end of the mapping is noted
        automatically.
        """
        if self._pool is not None:  # without a pool mappings do not matter
            with self._lock:
                self._maps += 1
            finalize(mapping, self._let_go, pins=0, maps=1).atexit = False

    def _let_go(self, *, pins: int, maps: int) -> None:
        with self._lock:
            self._pins -= pins
            self._maps -= maps
            if self._pins or self._given_up:
                return
            still_mapped = self._maps > 0
            self._given_up = not still_mapped
        if self._pool is None:
            self.path.unlink(missing_ok=True)
        elif still_mapped:
            self._pool.expect(self.path)
        else:
            self._pool.offer(self.path)


def write_run_file(
    path: Path, layout: RowLayout, rows: PackedRows, *, overwrite: bool = False
) -> None:
    """Write at least one row, sorted by hash, to a new file, or over one whose content means nothing.

    Raises:
        StorageError: the disk failed.
    """
    # A slice keeps all of its buffers, but the checksum must be that of the data as it will be read.
    rows = PackedRows(rows.hashes, rows.records, [pa.concat_arrays([c]) for c in rows.variable])
    arrays = [
        pa.Array.from_buffers(pa.uint64(), len(rows), [None, pa.py_buffer(rows.hashes)]),
        pa.Array.from_buffers(
            pa.binary(layout.dtype.itemsize),
            len(rows),
            [None, pa.py_buffer(_as_bytes(rows.records))],
        ),
        *rows.variable,
    ]
    metadata = FileMetadata(
        version=FORMAT_VERSION,
        rows=len(rows),
        first_hash=int(rows.hashes[0]),
        last_hash=int(rows.hashes[-1]),
        wide=layout.wide,
        checksum=_checksum(rows),
    )
    schema = _file_schema(layout).with_metadata(
        {
            _METADATA_KEY: msgspec.json.encode(metadata),
            _SCHEMA_KEY: layout.schema.serialize().to_pybytes(),
        }
    )
    try:
        with path.open("r+b" if overwrite else "wb") as sink:
            with pa.ipc.new_file(sink, schema) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            sink.truncate()
    except OSError as error:
        raise StorageError(
            f"cannot write a run file file=`{path}` reason=`{error}`",
            fix="make room, or name another disk in io.tmp.dirs",
        ) from error


class MappedFile:
    """A run file, open for reading.

    Attributes:
        rows: all rows, as views of the mapped pages.
        records_at: the offset of the first record in the file.
        size_bytes: the size of the file.

    Raises:
        StateError: the file is missing or damaged, is of another format, or has other columns.
        StorageError: the file cannot be opened or mapped.
    """

    def __init__(self, file: RunFile, layout: RowLayout, *, verify: bool) -> None:
        self.file = file
        try:
            with file.path.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
                file.mapped(self._map)
        except OSError as error:
            raise unreadable(file.path, error) from error
        except ValueError as error:  # it is empty
            raise damaged(file.path, str(error)) from error
        buffer = pa.py_buffer(self._map)
        try:
            reader = pa.ipc.open_file(buffer)
            batch = reader.get_batch(0)
            metadata = _metadata_of(reader.schema, file.path)
        except (pa.ArrowException, OSError, msgspec.MsgspecError) as error:
            raise damaged(file.path, str(error)) from error
        _check_layout(file.path, reader.schema, metadata, layout)
        records_buffer = batch.column(1).buffers()[1]
        self.size_bytes = len(self._map)
        self.records_at = int(records_buffer.address - buffer.address)
        self.rows = PackedRows(
            np.frombuffer(batch.column(0).buffers()[1], np.uint64)[: metadata.rows],
            np.frombuffer(records_buffer, layout.dtype)[: metadata.rows],
            [batch.column(index) for index in range(2, batch.num_columns)],
        )
        if batch.num_rows != metadata.rows or len(self.rows.records) != metadata.rows:
            raise damaged(file.path, f"rows=`{batch.num_rows}` expected=`{metadata.rows}`")
        if verify:
            found = _checksum(self.rows)
            if found != metadata.checksum:
                raise damaged(file.path, f"checksum=`{found}` expected=`{metadata.checksum}`")

    def forget(self) -> None:
        """Give the mapped pages back to the page cache. They are mapped again when they are read."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def prefetch(self, start: int, stop: int) -> None:
        """Ask for the pages of bytes start to stop, without waiting for them."""
        start -= start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, start, min(stop, self.size_bytes) - start)


def layout_of(path: Path) -> RowLayout:
    """Return the layout that a file was written with.

    Raises:
        StateError: the file is not a run file, or is of a newer version.
    """
    with pa.memory_map(str(path)) as source:
        try:
            schema = pa.ipc.open_file(source).schema
        except pa.ArrowInvalid as error:
            raise damaged(path, str(error)) from error
    metadata = _metadata_of(schema, path)
    rows = pa.ipc.read_schema(pa.py_buffer(schema.metadata[_SCHEMA_KEY]))
    return RowLayout(rows, metadata.wide)


def _file_schema(layout: RowLayout) -> pa.Schema:
    return pa.schema(
        [
            pa.field("hash", pa.uint64(), False),
            pa.field("row", pa.binary(layout.dtype.itemsize), False),
            *layout.variable_fields,
        ]
    )


def _metadata_of(schema: pa.Schema, path: Path) -> FileMetadata:
    written = (schema.metadata or {}).get(_METADATA_KEY)
    if written is None:
        raise damaged(path, "it is an Arrow file, but not one of a run")
    version = msgspec.json.decode(written).get("version")
    if version != FORMAT_VERSION:
        raise StateError(
            f"a run file has a format this version does not know file=`{path}` "
            f"found=`{version}` expected=`{FORMAT_VERSION}`",
            fix="use the version of headgate that wrote it, or one that is newer",
        )
    return msgspec.json.decode(written, type=FileMetadata)


def _check_layout(path: Path, schema: pa.Schema, metadata: FileMetadata, layout: RowLayout) -> None:
    """Raise StateError unless the file holds rows of this layout."""
    rows = pa.ipc.read_schema(pa.py_buffer(schema.metadata[_SCHEMA_KEY]))
    if rows != layout.schema or metadata.wide != layout.wide:
        found = ", ".join(f"{field.name} {field.type}" for field in rows)
        expected = ", ".join(f"{field.name} {field.type}" for field in layout.schema)
        raise StateError(
            f"the state in a run file does not fit this job file=`{path}` found=`{found}` "
            f"expected=`{expected}`",
            fix="keep keys and aggregates as they were, or change them with a canonical savepoint",
        )


def _checksum(rows: PackedRows) -> str:
    """Return the xxh3-64 of hashes, records and variable columns, in hex."""
    digest = xxhash.xxh3_64()
    for data in (rows.hashes.view(np.uint8), _as_bytes(rows.records)):
        for start in range(0, len(data), _CHUNK_BYTES):
            digest.update(data[start : start + _CHUNK_BYTES].data)
    if rows.variable:
        names = [str(index) for index in range(len(rows.variable))]
        digest.update(pa.RecordBatch.from_arrays(rows.variable, names).serialize())
    return digest.hexdigest()


def _as_bytes(records: Records) -> npt.NDArray[np.uint8]:
    flat: npt.NDArray[np.uint8] = records.view(np.uint8)
    return flat


def unreadable(path: Path, error: OSError) -> CorruptError | StorageError:
    """Return the error for a run file that the system cannot read."""
    if isinstance(error, FileNotFoundError):
        return damaged(path, str(error))
    return StorageError(
        f"cannot read a run file file=`{path}` reason=`{error}`",
        fix="check the disk, and the limits of this process: open files (ulimit -n), "
        "memory mappings (vm.max_map_count)",
    )


def damaged(path: Path, reason: str) -> CorruptError:
    """Return the error for a run file whose content has changed."""
    return CorruptError(f"a run file is damaged file=`{path}` reason=`{reason}`", fix=_FIX)
