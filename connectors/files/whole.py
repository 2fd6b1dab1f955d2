"""All records of a file source at once, for static tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from ...errors import BadRecordError, StateError, StorageError
from .blocks import FileSplit
from .decode import excerpt

if TYPE_CHECKING:
    from .source import FileSource


def read_whole(source: FileSource, options: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The records of all files, which are in the order of their paths; blocks. `options` are the job's.

    Raises:
        UsageError: nothing is there, or a column is missing.
        BadRecordError: a record cannot be read, or does not fit the schema.
        StorageError: the storage refused, or a file changed while it was read.
    """
    for encoded in source.configure(options).splits(1):
        split = msgspec.msgpack.decode(encoded, type=FileSplit)
        try:
            yield from _records(source, split, options)
        except StateError as error:
            # For a source that is the end; a table has no position, and is read again.
            raise StorageError(
                f"a file of a static table changed while it was read file=`{split.path}`",
                fix="put a new file in its place with a rename, which is done at once",
            ) from error


def _records(
    source: FileSource, split: FileSplit, options: Mapping[str, str]
) -> Iterator[pa.RecordBatch]:
    blocks = source.open_split(split, options)
    try:
        last = False
        while not last:
            for piece in blocks.next_block():
                for bad in piece.bad:
                    raise BadRecordError(
                        f"a record of a static table could not be read: {bad.reason} "
                        f"record=`{excerpt(bad.record)}`",
                        where=f"{split.path} {source.position_unit} {bad.offset}",
                        fix="correct the file, or the schema of its source",
                    )
                if piece.batch is not None:
                    yield piece.batch
                last = piece.last
    finally:
        blocks.close()
