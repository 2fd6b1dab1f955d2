"""Reads whole splits of files at once, outside of a job's readers: for static tables and for the end of a
history.

The highest event time of splits comes from the footers of Parquet files, or else from reading the column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from ...errors import BadRecordError, StateError, StorageError
from ...operators.event_time import latest_of
from . import locations
from .blocks import BlockReader, FilePiece, FileSplit, storage_error
from .decode import excerpt
from .verified import verified_metadata


class SplitFiles(Protocol):
    """A source of files whose splits can be opened."""

    schema: pa.Schema

    @property
    def position_unit(self) -> str:
        """The unit of the positions in its files: byte or row."""
        ...

    def open_split(self, split: FileSplit, options: Mapping[str, str]) -> BlockReader:
        """Return a reader of one split. `options` say how to reach the storage."""
        ...


def latest_in_files(
    narrow: SplitFiles, splits: Sequence[bytes], options: Mapping[str, str]
) -> int | None:
    """Return the highest event time (see `Source.latest`); `narrow` reads only its column."""
    by_file: dict[str, list[FileSplit]] = {}
    for encoded in splits:
        split = msgspec.msgpack.decode(encoded, type=FileSplit)
        by_file.setdefault(split.path, []).append(split)

    def of_file(parts: list[FileSplit]) -> int | None:
        told = None
        if parts[0].row_group is not None:
            told = _told(parts, narrow.schema.field(0), options)
        return _highest(_read(narrow, parts, options)) if told is None else latest_of(told)

    with ThreadPoolExecutor(locations.REQUESTS_MAX, "headgate-latest") as threads:
        return _highest(threads.map(of_file, by_file.values()))


def _told(
    parts: Sequence[FileSplit], field: pa.Field, options: Mapping[str, str]
) -> pa.Array | None:
    """Return the highest values of row groups of one file from its footer; None if it does not have them
    all.
    """
    path = parts[0].path
    # Local paths are absolute, and those of S3 begin with the bucket.
    store = locations.filesystem("file" if path.startswith("/") else "s3", options)
    try:
        metadata = _metadata(store, parts[0])
    except (OSError, pa.ArrowException) as error:
        raise storage_error(path, error) from error
    schema = metadata.schema.to_arrow_schema()
    index = schema.get_field_index(field.name)
    # Nested columns would shift the columns of the footer, and values of another type mean something
    # else.
    flat = metadata.num_columns == len(schema)
    if not flat or index < 0 or schema.field(index).type != field.type:
        return None
    if pa.types.is_timestamp(field.type) and field.type.unit not in ("ms", "us"):
        return None  # times of other units come as Python values that are less exact
    found: list[Any] = []
    for part in parts:
        statistics = metadata.row_group(part.row_group).column(index).statistics
        if statistics is None or not statistics.has_min_max:
            return None
        found.append(statistics.max)
    return pa.array(found, field.type)


def _metadata(store: pafs.FileSystem, split: FileSplit) -> pq.FileMetaData:
    """Return the metadata in the footer of a file, verified if the split has checksums."""
    with store.open_input_file(split.path) as file:
        if split.checksums:
            return verified_metadata(file, split.path, split.size_bytes, split.checksums)[0]
        return pq.read_metadata(file)


def _read(
    narrow: SplitFiles, parts: Sequence[FileSplit], options: Mapping[str, str]
) -> Iterator[int | None]:
    """Yield the highest value of each piece. Unreadable records are left to the job itself."""
    for part in parts:
        for piece in _pieces(narrow, part, options):
            if piece.batch is not None:
                yield latest_of(piece.batch.column(0))


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def read_whole(
    source: SplitFiles, splits: Sequence[bytes], options: Mapping[str, str]
) -> Iterator[pa.RecordBatch]:
    """Yield the records of all splits in their order; blocks. `options` are the job's.

    Raises:
        BadRecordError: a record cannot be read, or does not fit the schema.
        StorageError: the storage failed, or a file changed while it was read.
    """
    for encoded in splits:
        split = msgspec.msgpack.decode(encoded, type=FileSplit)
        try:
            yield from _records(source, split, options)
        except StateError as error:
            # A source would have to stop here, but a table has no position and can be read again.
            raise StorageError(
                f"a file of a static table changed while it was read file=`{split.path}`",
                fix="put a new file in its place with a rename, which is done at once",
            ) from error


def _records(
    source: SplitFiles, split: FileSplit, options: Mapping[str, str]
) -> Iterator[pa.RecordBatch]:
    for piece in _pieces(source, split, options):
        for bad in piece.bad:
            raise BadRecordError(
                f"a record of a static table could not be read: {bad.reason} "
                f"record=`{excerpt(bad.record)}`",
                where=f"{split.path} {source.position_unit} {bad.offset}",
                fix="correct the file, or the schema of its source",
            )
        if piece.batch is not None:
            yield piece.batch


def _pieces(
    source: SplitFiles, split: FileSplit, options: Mapping[str, str]
) -> Iterator[FilePiece]:
    """Yield all pieces of a split."""
    blocks, last = source.open_split(split, options), False
    try:
        while not last:
            for piece in blocks.next_block():
                yield piece
                last = piece.last
    finally:
        blocks.close()
