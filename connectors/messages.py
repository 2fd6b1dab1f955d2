"""Messages in sources and sinks: columns of what a message holds, and columns of metadata about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self, TypeAlias

import pyarrow as pa

from ..errors import PlanError, UsageError
from ..operators.sink import stream_columns
from ..operators.source import Record_co, Source
from ..operators.suggestions import suggest
from .formats.format import Format, planning

MetadataTypes: TypeAlias = Mapping[str, pa.DataType]
"""The parts of a message beside its data, and the types of their columns."""


class MessageSource(Source[Record_co]):
    """A source whose columns are made of the data of messages and of metadata."""

    def __init__(
        self,
        values: pa.Schema,
        metadata: Mapping[str, str],
        types: MetadataTypes,
        row_type: type[Any] | None,
        nullable: frozenset[str] = frozenset(),
    ) -> None:
        """Make a source.

        Args:
            values: the columns made of the data of messages.
            metadata: the names of further columns, by what they hold.
            types: the types of metadata.
            row_type: the class of records.
            nullable: the metadata that a message may lack.
        """
        self.values = values
        self.row_type = row_type
        self._metadata = [
            pa.field(column, types[kind], nullable=kind in nullable)
            for kind, column in metadata.items()
        ]
        self._columns: tuple[str, ...] | None = None

    @property
    def schema(self) -> pa.Schema:  # type: ignore[override]  # read-only, as it follows from others
        """The columns of messages, then those of `metadata`; only the columns that are read."""
        return pa.schema(
            [
                field
                for field in [*self.values, *self._metadata]
                if self._columns is None or field.name in self._columns
            ]
        )

    def with_columns(self, columns: Sequence[str]) -> Self:
        """Return a source that reads only these columns. The format of a message is checked as a whole."""
        # At least one column stays: a batch without columns has no rows to count.
        wanted = tuple(name for name in self.schema.names if name in set(columns))
        narrow = copy.copy(self)
        narrow._columns = wanted or (self.schema.names[0],)
        narrow.row_type = self.row_type if len(wanted) == len(self.schema) else None
        return narrow


def check_metadata(
    metadata: Mapping[str, str] | None, known: Sequence[str], values: pa.Schema, messages: str
) -> dict[str, str]:
    """Check the columns of metadata, and return them.

    Args:
        metadata: the names of columns, by what they hold.
        known: the metadata that there is.
        values: the columns made of the data.
        messages: the name of messages, for errors.

    Raises:
        UsageError: there is no such metadata, or two columns have one name.
    """
    given = dict(metadata or {})
    for kind, column in given.items():
        if kind not in known:
            raise UsageError(
                f"{messages} have no such metadata metadata=`{kind}`",
                fix=suggest(kind, list(known), "metadata"),
            )
        if column in values.names or list(given.values()).count(column) > 1:
            raise UsageError(
                f"two columns have the same name column=`{column}`", fix="rename one of them"
            )
    return given


def check_message_columns(
    schema: pa.Schema | None,
    texts: Mapping[str, str],
    apart: Collection[str],
    format: Format,
    messages: str,
) -> None:
    """Check that messages can be made of a stream.

    Args:
        schema: of the stream; None: it is of Python objects.
        texts: columns of texts that messages need, by the arguments that name them.
        apart: the columns that are not a part of the data.
        format: of the data.
        messages: the name of messages, for errors.

    Raises:
        PlanError: they cannot.
    """
    schema = stream_columns(schema, messages)
    for argument, column in texts.items():
        if column not in schema.names:
            raise PlanError(
                f"there is no such column {argument}=`{column}`",
                fix=suggest(column, schema.names, "columns"),
            )
        if schema.field(column).type not in (pa.string(), pa.large_string()):
            raise PlanError(
                f"a column has the wrong type {argument}=`{column}`",
                fix="it must be a string; cast it with select",
            )
    with planning():
        format.check_output(pa.schema([field for field in schema if field.name not in apart]))


def with_metadata(
    values: pa.RecordBatch,
    schema: pa.Schema,
    metadata: Mapping[str, str],
    types: MetadataTypes,
    find: Mapping[str, Callable[[], Sequence[Any]]],
) -> pa.RecordBatch:
    """Return rows with the columns of metadata, and only those columns that are read.

    Args:
        values: the columns made of the data.
        schema: the columns that are read.
        metadata: the names of columns, by what they hold.
        types: the types of metadata.
        find: returns the values of a column of metadata, by what it holds.
    """
    made = {column: kind for kind, column in metadata.items()}
    columns = [
        pa.array(find[made[column.name]](), types[made[column.name]])
        if column.name in made
        else values.column(column.name)
        for column in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
