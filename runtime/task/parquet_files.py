"""Tables of state as Parquet: written piece by piece, read whole or only the own key groups.

Rows are sorted by key group, so the statistics of that column say which row groups a range of key
groups needs. Partial reads are verified too: the checksum of the footer is in the handle, and the
footer has one of each row group. (The checksums that Parquet has for pages do not cover the headers
of the pages, and a flipped bit there can change values.) No dictionaries: keys and aggregates
repeat little, and trying doubles the time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from ...errors import check
from ...operators.lazy_modules import pq
from ...state.checked_files import Pieces, footer_of, row_group_extent
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import KEY_GROUP_COLUMN

ROW_GROUP_ROWS: Final = 65_536
ROW_GROUP_BYTES: Final = 16 << 20
"""A row group has at most about this much in memory, and at least one row."""
SPILL_BYTES: Final = 8 << 20
"""The size in bytes from which a table is written to a local file instead of memory."""
ROW_GROUP_CHECKSUMS: Final = b"headgate.row-groups"
"""The key in the footer's metadata: xxh3-64 of the bytes of each row group, in hex, comma-separated."""


class EncodedTable(msgspec.Struct, frozen=True):
    """A Parquet file in memory, or at a local path that the caller removes."""

    data: bytes | Path
    size_bytes: int
    checksum: str
    rows: int
    first_key_group: int
    last_key_group: int
    footer: tuple[int, str]


class _Spill(io.RawIOBase):
    """A sink in memory until it gets large, then in a file; computes the checksum of the data."""

    def __init__(self, path_for_large: Callable[[], Path]) -> None:
        self._path_for_large = path_for_large
        self._memory = io.BytesIO()
        self._file: Any = None
        self._path: Path | None = None
        self._hash = xxhash.xxh3_64()
        self._piece = xxhash.xxh3_64()
        self._given_up = False
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._given_up:
            return view.nbytes
        self._hash.update(view)
        self._piece.update(view)
        self.size += view.nbytes
        if self._file is None and self.size > SPILL_BYTES:
            self._path = self._path_for_large()
            self._file = self._path.open("wb")
            self._file.write(self._memory.getbuffer())
            self._memory = io.BytesIO()
        (self._file or self._memory).write(view)
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def end_piece(self) -> str:
        """Return the checksum of the data written since the last call."""
        piece, self._piece = self._piece, xxhash.xxh3_64()
        return piece.hexdigest()

    def finish(self) -> tuple[bytes | Path, str]:
        """Return the bytes, or the path of the file, and their checksum."""
        if self._file is not None:
            self._file.close()
        return self._path or self._memory.getvalue(), self._hash.hexdigest()

    def give_up(self) -> None:
        """Remove what was written. The Parquet writer still writes its footer, which is discarded."""
        self._given_up = True
        if self._path is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)


def encode_tables(
    tables: Iterable[pa.Table], path_for_large: Callable[[], Path]
) -> EncodedTable | None:
    """Encode tables of one schema, sorted by key group across all of them, as one file; None: no rows.

    Blocking: call it in a thread. At most one of `tables` is held at a time.
    """
    sink = _Spill(path_for_large)
    try:
        return _encode(tables, sink)
    except BaseException:
        sink.give_up()
        raise


def _encode(tables: Iterable[pa.Table], sink: _Spill) -> EncodedTable | None:
    writer: pq.ParquetWriter | None = None
    schema = pa.schema([])
    first = last = -1
    rows = 0
    checksums: list[str] = []
    for table in tables:
        if not table.num_rows:
            continue
        low, high = _key_groups(table)
        check(low >= last, "rows are not sorted by key group", after=last, key_group=low)
        first, last = (low if not rows else first), high
        rows += table.num_rows
        if writer is None:
            schema = storable_schema(table.schema)
            writer = _writer(sink, schema)
            sink.end_piece()  # the bytes before the first row group
        if table.schema != schema:
            table = table.cast(schema)
        row_bytes = max(1, table.nbytes // table.num_rows)
        group_rows = min(ROW_GROUP_ROWS, max(1, ROW_GROUP_BYTES // row_bytes))
        for start in range(0, table.num_rows, group_rows):
            writer.write_table(table.slice(start, group_rows), group_rows)
            checksums.append(sink.end_piece())
    if writer is None:
        return None
    writer.add_key_value_metadata({ROW_GROUP_CHECKSUMS: ",".join(checksums).encode()})
    writer.close()
    data, checksum = sink.finish()
    return EncodedTable(data, sink.size, checksum, rows, first, last, _footer(data))


def storable_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema in which a table can be written: fields of nullable structs become nullable.

    Arrow allows a nullable struct to have fields that are not, and Parquet does too, but Arrow's
    writer takes the nulls below a null struct for values and refuses them.
    """
    return pa.schema([_storable(field, field.nullable) for field in schema], schema.metadata)


def _storable(field: pa.Field, nullable: bool) -> pa.Field:
    return field.with_type(_storable_type(field.type, nullable)).with_nullable(nullable)


def _storable_type(kind: pa.DataType, nullable: bool) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_storable(field, nullable or field.nullable) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_storable(kind.value_field, kind.value_field.nullable))
    if pa.types.is_map(kind):
        item = kind.item_field
        return pa.map_(kind.key_field, _storable(item, item.nullable), kind.keys_sorted)
    return kind


def _writer(sink: _Spill, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=[KEY_GROUP_COLUMN],
        write_page_checksum=True,
    )


def _key_groups(table: pa.Table) -> tuple[int, int]:
    """Return the first and last key group; they must be in order."""
    groups = table.column(KEY_GROUP_COLUMN).to_numpy()
    check(bool(np.all(groups[1:] >= groups[:-1])), "rows are not sorted by key group")
    return int(groups[0]), int(groups[-1])


def _footer(data: bytes | Path) -> tuple[int, str]:
    if isinstance(data, bytes):
        return footer_of(io.BytesIO(data))
    with data.open("rb") as file:
        return footer_of(file)


def read_whole(data: bytes | Path, own: KeyGroupRange) -> pa.Table:
    """Return the rows of a file in `own`.

    Blocking. Raises OSError or ArrowInvalid if it is no such file.
    """
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    return own_rows(pq.read_table(source, use_threads=False), own)


class PartialFile:
    """A Parquet file of which only the end is read, and then the part that `own` needs."""

    def __init__(self, size: int, tail: bytes, own: KeyGroupRange) -> None:
        self._pieces = Pieces(size)
        self._pieces.add(size - len(tail), tail)
        self._own = own
        self._file = pq.ParquetFile(
            pa.PythonFile(self._pieces, mode="r"), page_checksum_verification=True
        )
        self._groups = self._overlapping()

    def _overlapping(self) -> list[int]:
        metadata = self._file.metadata
        column = metadata.schema.names.index(KEY_GROUP_COLUMN)
        found = []
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(column).statistics
            if KeyGroupRange(statistics.min, statistics.max).overlaps(self._own):
                found.append(group)
        return found

    def needed(self) -> tuple[int, int]:
        """Return start and length of the bytes to `add`; row groups are contiguous."""
        extents = [row_group_extent(self._file.metadata, group) for group in self._groups]
        if not extents:
            return 0, 0
        start = min(start for start, _ in extents)
        return start, max(end for _, end in extents) - start

    def read(self, start: int, data: bytes) -> pa.Table:
        """Return the own rows, given the bytes that are `needed`. Blocking.

        Raises:
            OSError: a row group is not the one that was written.
        """
        for group in self._groups:
            first, end = row_group_extent(self._file.metadata, group)
            verify_row_group(self._file.metadata, group, data[first - start : end - start])
        self._pieces.add(start, data)
        return own_rows(self._file.read_row_groups(self._groups, use_threads=False), self._own)


def verify_row_group(metadata: pq.FileMetaData, group: int, data: bytes | memoryview) -> None:
    """Compare the bytes of a row group with the checksum in the footer; older files have none.

    Raises:
        OSError: they are not the ones that were written.
    """
    written = (metadata.metadata or {}).get(ROW_GROUP_CHECKSUMS)
    if written is None:
        return
    expected = written.decode().split(",")[group]
    checksum = xxhash.xxh3_64_hexdigest(data)
    if checksum != expected:
        raise OSError(f"row group {group} expected_checksum=`{expected}` checksum=`{checksum}`")


def own_rows(table: pa.Table, own: KeyGroupRange) -> pa.Table:
    """Return the rows of `table`, which is sorted by key group, with a key group in `own`; not copied."""
    groups = table.column(KEY_GROUP_COLUMN).to_numpy()
    start, end = np.searchsorted(groups, [own.first, own.last + 1])
    return table.slice(start, end - start)
