"""Encoders of record batches as files: Parquet, CSV, JSON lines and lines of text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from ...errors import DataError
from ...operators.event_time import milliseconds
from ...operators.lazy_modules import pl
from ...operators.rows import text_of_value
from ...operators.time_range import INSTANT_MAX_MS, INSTANT_MIN_MS, INSTANT_TEXT

FileFormat: TypeAlias = Literal["csv", "json", "parquet", "text"]

ROW_GROUP_ROWS = 65_536


class Encoder(Protocol):
    """Writes one file to a stream."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    @property
    def buffered_bytes(self) -> int:
        """The bytes that have been taken but not yet written to the stream."""
        ...

    def close(self) -> None:
        """Write the rest. The stream stays open."""
        ...


class ParquetEncoder:
    """Parquet with row groups of about 64 Ki rows, compressed by zstd."""

    def __init__(self, stream: io.RawIOBase, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(stream, schema, compression="zstd")
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= ROW_GROUP_ROWS:
            self._flush()

    @property
    def buffered_bytes(self) -> int:
        return self._bytes

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._batches:
            self._writer.write_table(
                pa.Table.from_batches(self._batches), row_group_size=2 * ROW_GROUP_ROWS
            )
        self._batches, self._rows, self._bytes = [], 0, 0


class CsvEncoder:
    """CSV with a header. Texts are quoted, nulls are empty."""

    buffered_bytes = 0

    def __init__(self, stream: io.RawIOBase, schema: pa.Schema) -> None:
        self._writer = pacsv.CSVWriter(stream, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        check_times(batch)
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


class JsonEncoder:
    """One JSON object per line. Times are written as ISO 8601, and NaN, which JSON lacks, as null."""

    buffered_bytes = 0

    def __init__(self, stream: io.RawIOBase, schema: pa.Schema) -> None:
        self._stream = stream

    def write(self, batch: pa.RecordBatch) -> None:
        check_times(batch)
        frame: Any = pl.from_arrow(batch)
        lines = io.BytesIO()
        frame.write_ndjson(lines)
        self._stream.write(lines.getbuffer())

    def close(self) -> None:
        return None


class TextEncoder:
    """A line for each record, which has one column of text."""

    buffered_bytes = 0

    def __init__(self, stream: io.RawIOBase, schema: pa.Schema) -> None:
        self._stream = stream

    def write(self, batch: pa.RecordBatch) -> None:
        """Write lines.

        Raises:
            DataError: a text is null or empty, or has line breaks, so it would not be read back.
        """
        column = batch.column(0)
        lines = column.to_pylist()
        for line in lines:
            if not line or "\n" in line or line.endswith("\r"):
                raise DataError(
                    f"a text is no line column=`{batch.schema.names[0]}` value=`{line!r:.200}`",
                    fix="a line is not null, not empty, and has no line break; filter or replace these "
                    "before, or write JSON",
                )
        if lines:
            self._stream.write("\n".join([*lines, ""]).encode())

    def close(self) -> None:
        return None


_DAY_MS: Final = 86_400_000


def check_times(batch: pa.RecordBatch) -> None:
    """Check that text can hold all timestamps and dates of a batch.

    Encoders write other times as nonsense, or panic.

    Raises:
        DataError: a time is outside the years 1 to 9999 (with a time zone, also the first and the last
            day).
    """
    for field, column in zip(batch.schema, batch.columns, strict=True):
        _check_column(field.name, column)


def _check_column(name: str, column: pa.Array) -> None:
    kind = column.type
    if pa.types.is_struct(kind):
        for inner, part in zip(kind, column.flatten(), strict=True):
            _check_column(f"{name}.{inner.name}", part)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_column(name, column.flatten())
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        margin = 0 if getattr(kind, "tz", None) in (None, "UTC") else _DAY_MS
        times = milliseconds(column.drop_null())
        bad = (times < INSTANT_MIN_MS + margin) | (times > INSTANT_MAX_MS - margin)
        if bad.any():
            value = column.drop_null()[int(bad.argmax())]
            raise DataError(
                f"a time has no form in text column=`{name}` value=`{text_of_value(value)}`",
                fix=f"text files hold times of {INSTANT_TEXT}: filter such records out before, or "
                "write Parquet",
            )


ENCODERS: dict[str, Callable[[io.RawIOBase, pa.Schema], Encoder]] = {
    "parquet": ParquetEncoder,
    "csv": CsvEncoder,
    "json": JsonEncoder,
    "text": TextEncoder,
}


def can_encode(format: str, type_: pa.DataType) -> bool:
    """Return True if the format has a form for columns of this type that can be read back."""
    kinds = pa.types
    if format == "text":
        return bool(kinds.is_string(type_) or kinds.is_large_string(type_))
    plain = (
        kinds.is_integer(type_)
        or kinds.is_floating(type_)
        or kinds.is_boolean(type_)
        or kinds.is_string(type_)
        or kinds.is_large_string(type_)
        or kinds.is_timestamp(type_)
        or kinds.is_date(type_)
        or kinds.is_null(type_)
    )
    if plain:
        return True
    if format == "csv":
        return bool(kinds.is_time(type_) or kinds.is_decimal(type_))
    nested = kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_struct(type_)
    if nested:
        return all(can_encode(format, type_.field(i).type) for i in range(type_.num_fields))
    return format == "parquet" and not kinds.is_union(type_)
