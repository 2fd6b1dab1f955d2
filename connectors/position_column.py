"""The position of each record in its source, as a column: it then goes wherever the record goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ..errors import UsageError
from ..operators.elements import Batch, ColumnBatch
from ..operators.rows import column_batch
from ..operators.source import Source, SourceReader
from .forwarding import ForwardingReader, ForwardingSource

POSITION: Final = pa.struct(
    [pa.field("split", pa.string()), pa.field("offset", pa.int64(), nullable=False)]
)
"""The type of the column."""


def with_position(source: Source[Any], column: str = "position") -> Source[Any]:
    """Return `source` with one more column, in which each record has its position.

    Dead letters have positions only as far as the subtask of the source. This column goes through
    exchanges, windows and checkpoints like all others, at the cost of its bytes.

    Args:
        source: a source of columns, such as files.
        column: the name of the new column, a struct of `split`, such as the path of a file, and
            `offset`, in the unit of the source: a byte of a text file, a row of a Parquet row group, an
            offset of Kafka. It is null if the source does not know it.

    Raises:
        UsageError: the source is one of Python objects, or has a column of that name.
    """
    if not isinstance(source, Source):
        raise UsageError(f"with_position takes a source, got `{type(source).__name__}`")
    if source.schema is None:
        raise UsageError(
            f"with_position adds a column, and {source.describe()} makes Python objects",
            fix="give the source a schema",
        )
    if column in source.schema.names:
        raise UsageError(
            f"the source has a column of this name already column=`{column}`",
            fix='choose another one: with_position(source, "read_at")',
        )
    return _Positioned(source, column, [*source.schema.names, column])


class _Positioned(ForwardingSource):
    def __init__(self, source: Source, column: str, columns: Sequence[str]) -> None:
        """`columns` are those of the result, of which the source may have more."""
        super().__init__(source)
        self._column = column
        self._columns = tuple(columns)
        assert source.schema is not None
        self.schema = pa.schema(
            [
                pa.field(name, POSITION) if name == column else source.schema.field(name)
                for name in columns
            ]
        )
        self.row_type = None
        self.at_rest = source.at_rest

    def around(self, source: Source) -> Source:
        return _Positioned(source, self._column, self._columns)

    def with_columns(self, columns: Sequence[str]) -> Source:
        others = [name for name in columns if name != self._column]
        if len(others) == len(columns):
            return self._source.with_columns(columns)
        # A batch without any column of the source would have no rows.
        narrow = self._source.with_columns(others or self._source_columns()[:1])
        return _Positioned(narrow, self._column, columns)

    def _source_columns(self) -> list[str]:
        assert self._source.schema is not None
        return list(self._source.schema.names)

    def reader(self) -> SourceReader:
        return _PositionedReader(self._source.reader(), self._column, self._columns)

    def describe(self) -> str:
        return f"{self._source.describe()} with `{self._column}`"


class _PositionedReader(ForwardingReader):
    def __init__(self, reader: SourceReader, column: str, columns: Sequence[str]) -> None:
        super().__init__(reader)
        self._column = column
        self._columns = list(columns)

    def poll(self) -> Batch | None:
        batch = super().poll()
        return None if batch is None else self._positioned(column_batch(batch))

    def _positioned(self, batch: ColumnBatch) -> ColumnBatch:
        known = batch.positions
        if known is None:
            made = pa.nulls(len(batch), POSITION)
        else:
            splits = pa.repeat(pa.scalar(known.split, pa.string()), len(batch))
            offsets = pa.array(np.asarray(known.offsets, np.int64))
            made = pa.StructArray.from_arrays([splits, offsets], fields=list(POSITION))
        data = batch.data.append_column(pa.field(self._column, POSITION), made)
        return ColumnBatch(data.select(self._columns), batch.timestamps, known)
