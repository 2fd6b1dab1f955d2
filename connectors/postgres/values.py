"""Values of PostgreSQL in its text form become columns: those of a table, and those of its changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from ...errors import DataError, UsageError
from ...operators.lazy_modules import pl
from ...operators.suggestions import suggest
from .client import Connection
from .tables import Column, Table, is_nested, is_text, takes

_TYPES: Final = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "oid": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}
"""The types of columns whose schema is not given; all others become their text."""
_DECIMAL: Final = re.compile(r"numeric\((\d+),(\d+)\)")


def arrow_type(column: Column) -> pa.DataType:
    """Return the type in which a column is read, unless the user gives another one."""
    bounded = _DECIMAL.fullmatch(column.type)
    if bounded and int(bounded[1]) <= 38:
        return pa.decimal128(int(bounded[1]), int(bounded[2]))
    return _TYPES.get(column.base, pa.string())


def schema_of(table: Table, given: pa.Schema | None) -> pa.Schema:
    """Return the columns to read, all of which may be null.

    Raises:
        UsageError: one that is given does not exist, or has values that do not fit.
    """
    if given is None:
        return pa.schema([pa.field(each.name, arrow_type(each)) for each in table.columns])
    for field in given:
        column = table.column(field.name)
        if column is None:
            raise UsageError(
                f"the table has no such column column=`{field.name}` table=`{table.full_name}`",
                fix=suggest(field.name, [each.name for each in table.columns], "columns"),
            )
        if not is_text(field.type) and not takes(column, field.type):
            raise UsageError(
                f"a column cannot be read as this type column=`{field.name}` "
                f"table=`{table.full_name}` has=`{column.type}` schema=`{field.type}`",
                fix=f"read it as {arrow_type(column)}, or as string",
            )
    return given


def from_texts(name: str, values: Sequence[bytes | None] | pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column of values that came as text.

    Raises:
        DataError: a value does not fit the type.
    """
    texts = values if isinstance(values, pa.Array) else pa.array(values, pa.string())
    if texts.type == kind:
        return texts
    try:
        return _converter(kind)(texts, kind)
    except (pa.ArrowInvalid, pl.exceptions.ComputeError, msgspec.DecodeError) as error:
        raise DataError(
            f"a value of PostgreSQL does not fit the type of its column column=`{name}` "
            f"type=`{kind}`: {error}",
            fix="read the column as string: it then has the text of the value, such as `infinity`",
        ) from None


def _converter(kind: pa.DataType) -> Callable[[pa.Array, pa.DataType], pa.Array]:
    if pa.types.is_boolean(kind):
        return lambda texts, _: pc.equal(texts, "t")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _from_hex
    if is_nested(kind):
        return _from_json
    if pa.types.is_time(kind):
        return _from_time
    return lambda texts, to: texts.cast(to)


def _from_hex(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    series: Any = pl.from_arrow(pc.utf8_slice_codeunits(texts, 2))
    return series.str.decode("hex").to_arrow().cast(kind)


def _from_time(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    first_day, wide = pa.scalar("1970-01-01 ", pa.string()), pa.timestamp("us")
    times = pc.binary_join_element_wise(first_day, texts, "").cast(wide)
    return times.cast(pa.time64("us")).cast(kind)


def _from_json(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    values = [None if text is None else msgspec.json.decode(text) for text in texts.to_pylist()]
    return pa.array(values, kind)


def copied_lines(
    connection: Connection, statement: Any, rows_max: int, bytes_max: int
) -> Iterator[list[bytes]]:
    """Return the rows that a statement `COPY ... TO STDOUT` sends as CSV, in blocks of one line each."""
    lines: list[bytes] = []
    size = 0
    with connection.cursor().copy(statement) as copy:
        for line in copy:
            lines.append(bytes(line))
            size += len(line)
            if len(lines) >= rows_max or size >= bytes_max:
                yield lines
                lines, size = [], 0
    if lines:
        yield lines


def parse_rows(lines: Sequence[bytes], names: Sequence[str]) -> pa.RecordBatch:
    """Return rows that came by COPY in CSV, as columns of texts.

    Args:
        lines: of one row each.
        names: of the columns.
    """
    table = pa_csv.read_csv(
        pa.BufferReader(b"".join(lines)),
        read_options=pa_csv.ReadOptions(
            column_names=list(names), use_threads=False, block_size=1 << 30
        ),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    return table.combine_chunks().to_batches()[0]
