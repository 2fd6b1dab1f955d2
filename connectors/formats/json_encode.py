"""Encodes rows as objects of JSON: a few rows by Python's own formatting, many by Polars.

Polars takes about a millisecond for any number of rows, and in each call it hands the work to another
thread, so beside a thread that decodes it takes five. Sinks of messages get batches of some hundred rows
whenever latency matters. Both ways make the same text.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring as quoted
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...operators.lazy_modules import pl
from ..files.formats import check_times

FEW_VALUES: Final = 2_500
"""Rows with no more values than this are formatted in Python, which is faster for them."""
_PLAIN_MIN, _PLAIN_MAX = 1e-3, 1e15
"""Absolute values between which floats have the same text in Python and in Polars."""
_FRACTION_DIGITS: Final = {"s": 0, "ms": 3, "us": 6}
Texts = Sequence[Any]
"""A value for each row of a column, which `%s` formats as the text of the row."""


def encode_json(batch: pa.RecordBatch) -> list[bytes]:
    """Return an object for each row. Times are written as ISO 8601, and NaN, which JSON lacks, as null.

    Raises:
        DataError: a time has no form in text.
    """
    check_times(batch)
    few = batch.num_rows * batch.num_columns <= FEW_VALUES
    encoded = encode_few(batch) if few else None
    return encode_many(batch) if encoded is None else encoded


def encode_many(batch: pa.RecordBatch) -> list[bytes]:
    """Return an object for each row, by Polars."""
    frame: Any = pl.from_arrow(batch)
    lines = io.BytesIO()
    frame.write_ndjson(lines)
    return lines.getvalue().split(b"\n")[:-1]  # line breaks in texts are escaped


def encode_few(batch: pa.RecordBatch) -> list[bytes] | None:
    """Return an object for each row; None: a column has values that only Polars writes."""
    columns: list[Texts] = []
    for column in batch.columns:
        make = _TEXTS.get(column.type.id)
        texts = None if make is None else make(column)
        if texts is None:
            return None
        columns.append(texts)
    if not columns or not batch.num_rows:
        return None
    fields = ",".join(f"{quoted(name)}:".replace("%", "%%") + "%s" for name in batch.schema.names)
    lines = map(f"{{{fields}}}".__mod__, zip(*columns, strict=True))
    return "\n".join(lines).encode().split(b"\n")


def _with_nulls(column: pa.Array, texts: Texts) -> Texts:
    """Return the texts of a column with that of null where a value is missing."""
    if not column.null_count:
        return texts
    there = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [text if valid else "null" for text, valid in zip(texts, there, strict=True)]


def _values(column: pa.Array, missing: Any) -> Any:
    """Return the values of a column as an array of numpy, in which `missing` stands for nulls."""
    filled = column.fill_null(missing) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False)


def _of_ints(column: pa.Array) -> Texts:
    return _with_nulls(column, _values(column, 0).tolist())


def _of_booleans(column: pa.Array) -> Texts:
    return _with_nulls(column, np.where(_values(column, False), "true", "false").tolist())


def _of_strings(column: pa.Array) -> Texts:
    return _with_nulls(column, list(map(quoted, _values(column, "").tolist())))


def _of_floats(column: pa.Array) -> Texts | None:
    values = _values(column, 0.0)
    size = np.abs(values)
    if not ((size == 0) | ((size >= _PLAIN_MIN) & (size < _PLAIN_MAX))).all():
        return None
    return _with_nulls(column, list(map(repr, values.tolist())))


def _of_times(column: pa.Array) -> Texts | None:
    kind = column.type
    digits = _FRACTION_DIGITS.get(kind.unit)
    if kind.tz not in (None, "UTC") or digits is None:
        return None
    ticks = _values(column.view(pa.int64()), 0)
    seconds, fractions = np.divmod(ticks, 10**digits)
    texts = np.datetime_as_string(seconds.view("M8[s]")).tolist()
    end = "+00:00" if kind.tz else ""
    if kind.tz is None:
        texts = [text.replace("T", " ") for text in texts]
    parts = zip(texts, fractions.tolist(), strict=True)
    return _with_nulls(column, [f'"{text}{_fraction(part, digits)}{end}"' for text, part in parts])


def _fraction(ticks: int, digits: int) -> str:
    """Return a fraction of a second with three digits, or six if it needs them; nothing for zero."""
    if not ticks:
        return ""
    if digits == 6 and ticks % 1_000 == 0:
        ticks, digits = ticks // 1_000, 3
    return f".{ticks:0{digits}}"


_TEXTS: Final[dict[int, Callable[[pa.Array], Texts | None]]] = {
    **{
        kind.id: _of_ints
        for kind in (
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
            *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        )
    },
    pa.bool_().id: _of_booleans,
    pa.string().id: _of_strings,
    pa.large_string().id: _of_strings,
    pa.float64().id: _of_floats,
    pa.timestamp("s").id: _of_times,
}
"""Functions that return the texts of a column, by the number of its type."""
