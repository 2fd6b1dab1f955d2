"""Verification of the content of files: of a whole local file, or of single pieces of a Parquet file.

A reader of a part of a Parquet file verifies that part: the footer, which says where the row groups are,
and then each row group that it needs. Parquet's own checksums of pages cover neither the footer nor the
headers of the pages, and a flipped bit there can change values.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

if TYPE_CHECKING:  # its import takes a while, and most that use this module read no Parquet
    import pyarrow.parquet as pq

READ_CHUNK_BYTES: Final = 4 << 20


def measure_file(path: Path) -> tuple[int, str]:
    """Return the size and checksum of a local file. Blocking."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


ARROW_TAIL_BYTES: Final = 65_536
"""Arrow looks for the footer in this much of the end of a file."""
FOOTER_END_BYTES: Final = 8
"""A Parquet file ends with this many bytes: the length of its footer, and four letters."""


def footer_of(file: Any) -> tuple[int, str]:
    """Return the length and checksum of the footer of an open file."""
    file.seek(-FOOTER_END_BYTES, io.SEEK_END)
    length = footer_length(file.read(FOOTER_END_BYTES))
    file.seek(-length, io.SEEK_END)
    return length, xxhash.xxh3_64_hexdigest(file.read(length))


def footer_length(tail: bytes) -> int:
    """Return the length of the footer, including its end, of the file that ends with `tail`."""
    return int.from_bytes(tail[-FOOTER_END_BYTES:-4], "little") + FOOTER_END_BYTES


def tail_bytes(size: int, footer_bytes: int) -> int:
    """Return the number of bytes at the end of a file that Arrow needs to read its footer."""
    return min(size, max(footer_bytes, ARROW_TAIL_BYTES))


def row_group_extent(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """Return the positions in the file at which the bytes of a row group begin and end."""
    found = metadata.row_group(group)
    chunks = [found.column(column) for column in range(found.num_columns)]
    starts = [_start(chunk) for chunk in chunks]
    ends = [
        start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)
    ]
    return min(starts), max(ends)


def _start(chunk: pq.ColumnChunkMetaData) -> int:
    """Return the first byte of a column chunk: a dictionary lies in front of the pages that use it."""
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        return int(min(chunk.dictionary_page_offset, chunk.data_page_offset))
    return int(chunk.data_page_offset)


class SeekableFile(io.RawIOBase):
    """A file of `size` bytes that can be read from any position; subclasses implement `read`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position


class Pieces(SeekableFile):
    """A file of which some pieces are known; reading elsewhere is an error."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._pieces: list[tuple[int, bytes]] = []

    def add(self, start: int, data: bytes) -> None:
        """Add bytes that lie at `start` in the file."""
        self._pieces.append((start, data))

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._position + size, self._size)
        for start, data in self._pieces:
            if start <= self._position and end <= start + len(data):
                found = data[self._position - start : end - start]
                self._position = end
                return found
        raise OSError(f"bytes {self._position} to {end} of a Parquet file have not been fetched")
