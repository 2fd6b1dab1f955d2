"""Verification of Parquet files that another program wrote for headgate, before their rows are used.

Such files carry no checksum of ours. Once they are complete they are measured, and the checksums are kept
in a record. A split has those of the footer and of its row group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import xxhash

from ...errors import CorruptError
from ...state.checked_files import (
    ARROW_TAIL_BYTES,
    FOOTER_END_BYTES,
    Pieces,
    footer_length,
    row_group_extent,
)

_READ_BYTES: Final = 1 << 20

Checksums: TypeAlias = Sequence[str]
"""The xxh3-64, in hex, of the footer of a file, and then of each row group, or of the one that a split
reads.
"""


def measure_parquet(store: pafs.FileSystem, path: str) -> list[str]:
    """Return the checksums of the footer of a file and of each row group. Reads the whole file;
    blocking.
    """
    with store.open_input_file(path) as file:
        size = file.size()
        tail = _tail(file, path, size)
        metadata = _parsed(tail, size)
        extents = [row_group_extent(metadata, group) for group in range(metadata.num_row_groups)]
        return [_footer_checksum(tail), *(_checksum(file, *extent) for extent in extents)]


def verified_metadata(
    file: pa.NativeFile, path: str, size: int, checksums: Checksums
) -> tuple[pq.FileMetaData, bytes]:
    """Return the metadata of an open file, and the bytes at its end that contain them.

    Raises:
        CorruptError: the footer has changed since it was measured.
    """
    tail = _tail(file, path, size)
    if _footer_checksum(tail) != checksums[0]:
        _fail(path, "footer", checksums[0], _footer_checksum(tail))
    return _parsed(tail, size), tail


def open_row_group(
    store: pafs.FileSystem, path: str, size: int, group: int, checksums: Checksums
) -> pq.ParquetFile:
    """Return a file of which the row group `group` can be read. Reads that row group; blocking.

    A remote row group is held in memory, where reading would put it anyway, so that it is fetched only
    once. A local one may be large, and is read a second time, most likely from the system's cache.

    Raises:
        CorruptError: the bytes have changed since they were measured.
    """
    file = store.open_input_file(path)
    metadata, tail = verified_metadata(file, path, size, checksums)
    start, end = row_group_extent(metadata, group)
    if isinstance(store, pafs.LocalFileSystem):
        found = _checksum(file, start, end)
        source = file
    else:
        data = file.read_at(end - start, start)
        found = xxhash.xxh3_64_hexdigest(data)
        source = pa.PythonFile(_pieces(size, tail, (start, data)), mode="r")
    if found != checksums[1]:
        _fail(path, f"row group {group}", checksums[1], found)
    return pq.ParquetFile(source, metadata=metadata)


def _tail(file: pa.NativeFile, path: str, size: int) -> bytes:
    """Return the end of a file with all of its footer."""
    tail: bytes = file.read_at(min(size, ARROW_TAIL_BYTES), max(0, size - ARROW_TAIL_BYTES))
    length = footer_length(tail)
    if len(tail) < FOOTER_END_BYTES or length > size:
        raise _corrupt(path, f"its footer cannot have {length:,} bytes")
    if length > len(tail):
        tail = file.read_at(length, size - length)
    return tail


def _footer_checksum(tail: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(tail[-footer_length(tail) :])


def _parsed(tail: bytes, size: int) -> pq.FileMetaData:
    return pq.read_metadata(pa.PythonFile(_pieces(size, tail), mode="r"))


def _pieces(size: int, tail: bytes, *others: tuple[int, bytes]) -> Pieces:
    pieces = Pieces(size)
    for start, data in ((size - len(tail), tail), *others):
        pieces.add(start, data)
    return pieces


def _checksum(file: pa.NativeFile, start: int, end: int) -> str:
    digest = xxhash.xxh3_64()
    for position in range(start, end, _READ_BYTES):
        digest.update(file.read_at(min(_READ_BYTES, end - position), position))
    return digest.hexdigest()


def _fail(path: str, part: str, expected: str, found: str) -> NoReturn:
    raise _corrupt(path, f"{part}: expected_checksum=`{expected}` checksum=`{found}`")


def _corrupt(path: str, cause: str) -> CorruptError:
    return CorruptError(f"a Parquet file is damaged file=`{path}` cause=`{cause}`")
