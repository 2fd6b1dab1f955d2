"""Rows in the binary form of `COPY`, which costs the client and the server less than CSV.

The server takes a binary value only if it has exactly the type of the column, and CSV in each form that
the type can be written in. So rows travel as binary if every column of the stream has a counterpart in the
table whose binary form is known to be the same, and else as CSV.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from importlib.util import find_spec
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ...errors import check
from .tables import Column, check_text, is_text

_TEXT: Final = (pa.string(), pa.large_string())
_SAME: Final[dict[str, tuple[pa.DataType, ...]]] = {
    "bool": (pa.bool_(),),
    "int2": (pa.int8(), pa.uint8(), pa.int16()),
    "int4": (pa.uint16(), pa.int32()),
    "int8": (pa.uint32(), pa.int64()),
    "float4": (pa.float32(),),
    "float8": (pa.float64(),),
    "text": _TEXT,
    "varchar": _TEXT,
    "bpchar": _TEXT,
    "bytea": (pa.binary(), pa.large_binary()),
    "date": (pa.date32(),),
    "timestamp": (pa.timestamp("us"),),
}
"""The types of a stream whose binary form is that of a type of the server."""
_FIRST: Final = datetime(1, 1, 1)
_LAST: Final = datetime(9999, 12, 31, 23, 59, 59, 999999)
HEADER: Final = b"PGCOPY\n\xff\r\n\x00\x00\x00\x00\x00\x00\x00\x00\x00"
TRAILER: Final = b"\xff\xff"


class BinaryRows:
    """Encodes the rows of one stream."""

    def __init__(self, schema: pa.Schema) -> None:
        """Begin.

        Args:
            schema: all columns that are sent, by the types of the stream.
        """
        self._schema = schema

    def encode(self, columns: Sequence[pa.Array]) -> bytes | None:
        """Return rows, without the header and the trailer of a `COPY`.

        Returns:
            None if one has a value that only the text form can be trusted with: a time that is far away.

        Raises:
            DataError: a text has a character that PostgreSQL cannot store.
        """
        for column in columns:
            if is_text(column.type):
                check_text(column)
            elif pa.types.is_temporal(column.type) and not _near(column):
                return None
        from pgpq import ArrowToPostgresBinaryEncoder

        # An encoder keeps a part of what it has encoded until it is finished, so each batch has its own.
        encoder = ArrowToPostgresBinaryEncoder(self._schema)
        rows = pa.RecordBatch.from_arrays(list(columns), schema=self._schema)
        made = b"".join((encoder.write_header(), encoder.write_batch(rows), encoder.finish()))
        framed = made.startswith(HEADER) and made.endswith(TRAILER)
        check(framed, "binary rows without their frame", bytes=len(made))
        return made[len(HEADER) : -len(TRAILER)]


def _near(column: pa.Array) -> bool:
    """Return True if all times are in the years 1 to 9999."""
    found = pc.min_max(column)
    low, high = found["min"], found["max"]
    if not low.is_valid:
        return True
    first: Any = date(1, 1, 1) if pa.types.is_date(column.type) else _FIRST
    last: Any = date(9999, 12, 31) if pa.types.is_date(column.type) else _LAST
    plain = column.type if pa.types.is_date(column.type) else pa.timestamp("us")
    number = pa.int32() if pa.types.is_date(column.type) else pa.int64()
    bounds = [pa.scalar(each, plain).cast(number).as_py() for each in (first, last)]
    return bool(bounds[0] <= low.cast(number).as_py() and high.cast(number).as_py() <= bounds[1])


def binary_rows(
    own: Sequence[pa.Field], stream: pa.Schema, there: Sequence[Column]
) -> BinaryRows | None:
    """Return the encoder for rows of a stream; None: they travel as CSV.

    Args:
        own: columns of headgate's that go before those of the stream, whose types fit.
        stream: the columns of the stream.
        there: the columns of the table, in the same order.
    """
    if find_spec("pgpq") is None:
        return None
    if all(_same(column.base, field.type) for column, field in zip(there, stream, strict=True)):
        return BinaryRows(pa.schema([*own, *(field.with_nullable(True) for field in stream)]))
    return None


def _same(base: str, kind: pa.DataType) -> bool:
    if base == "timestamptz":
        return bool(pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz is not None)
    return kind in _SAME.get(base, ())
