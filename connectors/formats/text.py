"""Messages of JSON, of CSV, and of bytes that are taken as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ...errors import UsageError
from ..arguments import check_choice
from ..files.decode import (
    CsvDecoder,
    Decoded,
    Int64s,
    JsonDecoder,
    Lines,
    Unreadable,
    decode,
    line_ends,
    reason_of,
)
from ..files.formats import can_encode
from .format import NO_VALUE, Decode, Encode, Format, Values, check_not_empty
from .json_encode import encode_json
from .taken_values import TakenValues

FormatName: TypeAlias = Literal["json", "csv", "raw"]
FORMATS: Final = ("json", "csv", "raw")
OUTPUT_FORMATS: Final[tuple[FormatName, ...]] = ("json", "raw")


def to_format(format: FormatName | Format, delimiter: str | None = None) -> Format:
    """Return a format that is given by its name or as itself.

    Raises:
        UsageError: there is no such format.
    """
    if isinstance(format, Format):
        return format
    check_choice("format", format, FORMATS, "format of messages", "formats")
    if format == "csv":
        return CsvFormat("," if delimiter is None else delimiter)
    return JsonFormat() if format == "json" else RawFormat()


def to_output_format(format: FormatName | Format) -> Format:
    """Return a format that can be written, which is given by its name or as itself.

    Raises:
        UsageError: there is no such format.
    """
    if not isinstance(format, Format):
        check_choice("format", format, OUTPUT_FORMATS, "format of messages", "formats")
    return to_format(format)


class JsonFormat(Format):
    """An object each, of which other fields than those of the schema are skipped."""

    name = "json"
    columns_apart = True
    reads_lines = True

    def decoder(self, schema: pa.Schema) -> Decode:
        return _LinesDecoder(JsonDecoder(schema), line_breaks=True)

    def check_output(self, schema: pa.Schema) -> None:
        check_not_empty(schema)
        for field in schema:
            if not can_encode("json", field.type):
                raise UsageError(
                    f"json has no form for this type column=`{field.name}` type=`{field.type}`",
                    fix="select the column out, or cast it",
                )

    def encoder(self, schema: pa.Schema, topic: str) -> Encode:
        return encode_json


class CsvFormat(Format):
    """A line each, with the values in the order of the schema."""

    name = "csv"
    reads_lines = True

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter

    def decoder(self, schema: pa.Schema) -> Decode:
        decode = CsvDecoder(schema, schema.names, self._delimiter, ("",))
        return _LinesDecoder(decode, line_breaks=False)


class RawFormat(Format):
    """The value itself, which is the only column; null stands for no value."""

    name = "raw"

    def columns(self) -> pa.Schema:
        return pa.schema([("value", pa.binary())])

    def check_columns(self, schema: pa.Schema) -> None:
        if len(schema) != 1 or not _is_raw(schema.field(0).type):
            raise UsageError(
                f"raw messages make one column of type binary or string columns=`{_listed(schema)}`",
                fix='schema={"value": "binary"}, or format="json"',
            )

    def decoder(self, schema: pa.Schema) -> Decode:
        return _RawDecoder(schema)

    def check_output(self, schema: pa.Schema) -> None:
        if len(schema) != 1 or not _is_raw(schema.field(0).type):
            raise UsageError(
                f"a raw value is one column of type string or binary columns=`{_listed(schema)}`",
                fix='select one column beside those of metadata, or say format="json"',
            )

    def encoder(self, schema: pa.Schema, topic: str) -> Encode:
        kind = _binary_of(schema.field(0).type)
        return lambda batch: batch.column(0).cast(kind).to_pylist()


class _LinesDecoder:
    """Decodes payloads as the lines of one text, as long as each is one line.

    The converters compare the number of rows with that of lines, so payloads cannot run into each other.
    """

    def __init__(self, convert: Callable[[Lines], pa.RecordBatch], *, line_breaks: bool) -> None:
        self._convert = convert
        self._line_breaks = line_breaks
        """True if line breaks between the parts of a payload are white space, as they are in JSON."""

    def __call__(self, payloads: Values) -> Decoded:
        lines = self._lines(payloads)
        lengths = lines.ends - lines.starts - 1

        def convert(start: int, stop: int) -> pa.RecordBatch:
            if not lengths[start:stop].all():
                nothing = any(payload is None for payload in payloads[start:stop])
                raise Unreadable(NO_VALUE if nothing else "it is empty")
            return self._convert(lines.part(start, stop))

        return decode(len(payloads), convert)

    def _lines(self, payloads: Values) -> Lines:
        """Return a line for each payload, which is empty for one without a value."""
        joined = payloads.text() if isinstance(payloads, TakenValues) else None
        if joined is not None:
            ends = line_ends(joined)
            return Lines(joined, _starts_of(ends), ends)
        texts: Sequence[Any] = payloads
        try:
            data = b"\n".join([*texts, b""])
        except TypeError:
            texts = [payload or b"" for payload in payloads]
            data = b"\n".join([*texts, b""])
        ends = line_ends(data)
        if len(ends) != len(texts):  # there are line breaks within payloads
            if self._line_breaks:
                return self._lines([(text or b"").replace(b"\n", b" ") for text in texts])
            ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
        return Lines(data, _starts_of(ends), ends, texts)


def _starts_of(ends: Int64s) -> Int64s:
    """Return the starts of lines behind each other."""
    return np.concatenate([ends[:0], [0], ends[:-1]])[: len(ends)]


class _RawDecoder:
    """Takes payloads as they are; a payload that is no UTF-8 cannot become a string."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def __call__(self, payloads: Values) -> Decoded:
        field = self._schema.field(0)

        def convert(start: int, stop: int) -> pa.RecordBatch:
            values = pa.array(payloads[start:stop], _binary_of(field.type))
            if values.null_count and not field.nullable:
                raise Unreadable(NO_VALUE)
            try:
                return pa.RecordBatch.from_arrays([values.cast(field.type)], schema=self._schema)
            except pa.ArrowException as error:
                raise Unreadable(reason_of(error)) from error

        return decode(len(payloads), convert)


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _is_raw(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())


def _binary_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if kind in (pa.large_binary(), pa.large_string()) else pa.binary()
