"""Formats of single messages, as brokers carry them: payloads become rows of Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ..errors import UsageError
from ..operators.suggestions import suggest
from .files.decode import (
    CsvDecoder,
    Decoded,
    JsonDecoder,
    Lines,
    Unreadable,
    decode,
    reason_of,
)

PayloadFormat: TypeAlias = Literal["json", "csv", "raw"]
FORMATS: Final = ("json", "csv", "raw")
NO_VALUE: Final = "it has no value (a tombstone)"
Decode: TypeAlias = Callable[[Sequence[bytes | None]], Decoded]
"""Decodes payloads: the good rows in order, and the places and reasons of the others."""


def check_format(format: PayloadFormat, schema: pa.Schema) -> None:
    """Check that payloads of this format can have these columns.

    Raises:
        UsageError: there is no such format, or it cannot hold the columns.
    """
    if format not in FORMATS:
        raise UsageError(
            f"no such format of messages format=`{format}`", fix=suggest(format, FORMATS, "formats")
        )
    if format == "raw" and (len(schema) != 1 or not _is_raw(schema.field(0).type)):
        raise UsageError(
            "raw messages make one column of type binary or string "
            f"columns=`{', '.join(f'{field.name}: {field.type}' for field in schema)}`",
            fix='schema={"value": "binary"}, or format="json"',
        )


def decoder(format: PayloadFormat, schema: pa.Schema, delimiter: str = ",") -> Decode:
    """Return the decoder of a format that `check_format` has accepted.

    JSON payloads are objects, of which other fields than those of the schema are skipped; CSV payloads
    are one line each, with the values in the order of the schema; raw payloads are the value itself.
    """
    if format == "raw":
        return _RawDecoder(schema)
    if format == "json":
        return _LinesDecoder(JsonDecoder(schema), line_breaks=True)
    return _LinesDecoder(CsvDecoder(schema, schema.names, delimiter, ("",)), line_breaks=False)


class _LinesDecoder:
    """Decodes payloads as the lines of one text, as long as each is one line.

    The converters compare the number of rows with that of lines, so payloads cannot run into each other.
    """

    def __init__(self, convert: Callable[[Lines], pa.RecordBatch], *, line_breaks: bool) -> None:
        self._convert = convert
        self._line_breaks = line_breaks
        """True if line breaks between the parts of a payload are white space, as they are in JSON."""

    def __call__(self, payloads: Sequence[bytes | None]) -> Decoded:
        texts = [b"" if payload is None else payload for payload in payloads]
        data = b"\n".join(texts)
        if data.count(b"\n") != max(0, len(texts) - 1) and self._line_breaks:
            texts = [text.replace(b"\n", b" ") for text in texts]
            data = b"\n".join(texts)
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
        starts = np.concatenate([ends[:0], [0], ends[:-1]])[: len(ends)]
        lines = Lines(data + b"\n", starts, ends)

        def convert(start: int, stop: int) -> pa.RecordBatch:
            if any(payload is None for payload in payloads[start:stop]):
                raise Unreadable(NO_VALUE)
            if not all(texts[start:stop]):
                raise Unreadable("it is empty")
            return self._convert(lines.part(start, stop))

        return decode(len(payloads), convert)


class _RawDecoder:
    """Takes payloads as they are; a payload that is no UTF-8 cannot become a string."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def __call__(self, payloads: Sequence[bytes | None]) -> Decoded:
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


def _is_raw(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())


def _binary_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if kind in (pa.large_binary(), pa.large_string()) else pa.binary()
