"""Messages in sources and sinks: columns of what a message holds, and columns of metadata about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa

from ..errors import PlanError, SourceError, UsageError
from ..operators.schema import SchemaLike, record_class, to_schema
from ..operators.sink import stream_columns
from ..operators.source import Record_co, Source
from ..operators.suggestions import suggest
from .arguments import ON_LOST, OnLost, check_count, check_policy, parse_bytes
from .bad_records import BadRecordPolicy, OnBadRecord, parse_policy
from .files.decode import Decoded
from .formats.format import Format, UndecodableError, planning

M = TypeVar("M")
"""A message, in the form of its reader."""
Start = TypeVar("Start")
Stop = TypeVar("Stop")
P = TypeVar("P")
"""The data of a message, in the form that its format decodes."""


@dataclass(frozen=True)
class MessageColumns:
    """The columns that a source makes of messages.

    Attributes:
        format: of the data.
        values: the columns made of the data.
        metadata: the names of further columns, by what they hold.
        row_type: the class of records; None: there is none that has all columns.
    """

    format: Format
    values: pa.Schema
    metadata: Mapping[str, str]
    row_type: type[Any] | None

    @classmethod
    def of(
        cls,
        format: Format,
        schema: SchemaLike | None,
        metadata: Mapping[str, str] | None,
        known: pa.Schema,
        messages: str,
    ) -> MessageColumns:
        """Return the columns that a user wants.

        Args:
            format: of the data.
            schema: the columns of the data; None: those that follow from the format.
            metadata: the names of further columns, by what they hold.
            known: the metadata that there is.
            messages: the name of messages, for errors.

        Raises:
            UsageError: the format has no such columns, or there is no such metadata.
        """
        if schema is None:
            schema = format.columns()
        values = to_schema(schema)
        format.check_columns(values)
        wanted = check_metadata(metadata, known.names, values, messages)
        return cls(format, values, wanted, None if wanted else record_class(schema))

    def decoder(
        self, values: pa.Schema, schema: pa.Schema, known: pa.Schema
    ) -> MessageDecoder[Any]:
        """Return a decoder of messages.

        Args:
            values: the columns made of the data.
            schema: the columns that are read.
            known: the metadata that there is, with the types.
        """
        return MessageDecoder(self.format.decoder(values), schema, self.metadata, known)


@dataclass(frozen=True)
class Reading(Generic[Start, Stop]):
    """The reading of streams that keep their messages, as the user wants it.

    Attributes:
        columns: those made of messages.
        start: where a run without state begins.
        stop: where reading ends; None: never.
        on_bad_record: the treatment of unreadable messages.
        on_lost: what happens if messages have been deleted before they were read.
        batch_rows: most rows per batch.
        buffer_bytes: about the most bytes of a subtask that wait to be processed.
    """

    columns: MessageColumns
    start: Start
    stop: Stop | None
    on_bad_record: OnBadRecord
    on_lost: OnLost
    batch_rows: int
    buffer_bytes: int

    @classmethod
    def of(
        cls,
        columns: MessageColumns,
        start: Start,
        stop: Stop | None,
        on_bad_record: BadRecordPolicy,
        on_lost: OnLost,
        batch_rows: int,
        buffer: str | int,
    ) -> Reading[Start, Stop]:
        """Return what the arguments of a source say, of which `start` and `stop` are checked already.

        Raises:
            UsageError: an argument is wrong.
        """
        check_policy("on_lost", on_lost, ON_LOST)
        check_count("batch_rows", batch_rows, 1)
        buffer_bytes = parse_bytes("buffer", buffer)
        policy = parse_policy(on_bad_record)
        return cls(columns, start, stop, policy, on_lost, batch_rows, buffer_bytes)


class MessageSource(Source[Record_co]):
    """A source whose columns are made of the data of messages and of metadata."""

    def __init__(self, extra: str, columns: MessageColumns, known: pa.Schema) -> None:
        """Make a source.

        Args:
            extra: the extra of headgate's installation that it needs.
            columns: those of all messages.
            known: the metadata that there is, with the types and whether a message may lack it.
        """
        self.extras = (extra, *columns.format.extras)
        self.values = columns.values
        self.row_type = columns.row_type
        self._metadata = [
            known.field(kind).with_name(column) for kind, column in columns.metadata.items()
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


def check_written(
    metadata: Mapping[str, str] | None, known: Sequence[str], messages: str
) -> dict[str, str]:
    """Check which parts of messages have columns of their own in a sink, and return them.

    Args:
        metadata: the names of columns, by the parts.
        known: the parts that a column may have.
        messages: the name of messages, for errors.

    Raises:
        UsageError: no column can have such a part.
    """
    given = dict(metadata or {})
    for kind, column in given.items():
        if kind not in known:
            raise UsageError(
                f"{messages} are not given such metadata metadata=`{kind}: {column}`",
                fix=suggest(kind, known, "metadata"),
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


@dataclass(frozen=True, slots=True)
class DecodedMessages(Generic[M]):
    """The result of decoding some messages.

    Attributes:
        batch: the columns of the good ones; None: there are none.
        good: the good ones, in order.
        bad: the others, with the reasons.
    """

    batch: pa.RecordBatch | None
    good: Sequence[M]
    bad: list[tuple[M, str]]


class MessageDecoder(Generic[P]):
    """Makes the columns that are read of messages."""

    def __init__(
        self,
        decode: Callable[[Sequence[P]], Decoded],
        schema: pa.Schema,
        metadata: Mapping[str, str],
        known: pa.Schema,
    ) -> None:
        """Make a decoder.

        Args:
            decode: makes columns of the data.
            schema: the columns that are read.
            metadata: the names of columns of metadata, by what they hold.
            known: the metadata that there is, with the types.
        """
        self._decode = decode
        self._schema = schema
        self._kinds = {column: kind for kind, column in metadata.items()}
        self._known = known

    def decode(
        self,
        messages: Sequence[M],
        data: Sequence[P],
        place_of: Callable[[M], str],
        metadata_of: Mapping[str, Callable[[M], Any]],
    ) -> DecodedMessages[M]:
        """Decode messages.

        Args:
            messages: some messages.
            data: theirs.
            place_of: returns where a message is, for an error.
            metadata_of: returns a part of a message beside its data, by the name of that metadata.

        Raises:
            SourceError: no message can be decoded, for a reason that lies outside of them.
        """
        try:
            found = self._decode(data)
        except UndecodableError as error:
            where = place_of(messages[error.index])
            raise SourceError(error.message, where=where, fix=error.fix) from error
        bad = [(messages[index], reason) for index, reason in found.bad]
        if bad:
            places = {index for index, _ in found.bad}
            messages = [each for index, each in enumerate(messages) if index not in places]
        values = found.batch()
        if values is None:
            return DecodedMessages(None, messages, bad)
        columns = []
        for column in self._schema:
            kind = self._kinds.get(column.name)
            if kind is None:
                columns.append(values.column(column.name))
            else:
                parts = list(map(metadata_of[kind], messages))
                columns.append(pa.array(parts, self._known.field(kind).type))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return DecodedMessages(batch, messages, bad)
