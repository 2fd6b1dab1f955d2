"""Converts the records of a test to batches of a source's schema, and batches of a sink to records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from ..errors import UsageError
from ..operators.elements import Batch, ColumnBatch, ObjectBatch, Timestamps
from ..operators.rows import RowMismatch, to_columns, to_list, to_rows
from ..operators.schema import difference, is_record_class
from ..operators.suggestions import suggest
from ..operators.time_range import INSTANT_TEXT, is_instant
from .world import SourceBox

Time: TypeAlias = datetime | int
"""A point in event time: a datetime (a naive one counts as UTC), or milliseconds since 1970 UTC."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_ms(when: Time) -> int:
    """Return milliseconds since 1970 UTC, rounded down.

    Raises:
        UsageError: the value is not a point in time.
    """
    if isinstance(when, datetime):
        aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        return (aware - _EPOCH) // timedelta(milliseconds=1)
    if isinstance(when, bool) or not isinstance(when, int):
        raise UsageError(
            f"not a point in time value=`{when!r}`",
            fix="give a datetime, or whole milliseconds since 1970 UTC",
        )
    if not is_instant(when):
        raise UsageError(f"a point in time lies in {INSTANT_TEXT} value=`{when}` ms since 1970 UTC")
    return when


def to_batches(source: SourceBox, pushed: Sequence[Any]) -> list[Batch]:
    """Return the arguments of `push` as batches: one per `pa.RecordBatch`, and one for all other records.

    Lists are lists of records. Their order is kept.

    Raises:
        UsageError: something does not fit the source's schema.
    """
    batches: list[Batch] = []
    records: list[Any] = []
    for each in pushed:
        if isinstance(each, pa.RecordBatch) and source.schema is not None:
            if records:
                batches.append(_batch_of(source, records))
                records = []
            batches.append(ColumnBatch(_fitting(source, source.schema, each)))
        elif isinstance(each, list):
            records.extend(each)
        else:
            records.append(each)
    if records:
        batches.append(_batch_of(source, records))
    return [batch for batch in batches if len(batch)]


def to_times(at: Time | Sequence[Time], rows: int) -> Timestamps:
    """Return the event times of `rows` records: one for all, or one each.

    Raises:
        UsageError: there are too many or too few, or they are not points in time.
    """
    if isinstance(at, datetime | int):
        return np.full(rows, to_ms(at), np.int64)
    if len(at) != rows:
        raise UsageError(f"there must be one time per record times=`{len(at)}` records=`{rows}`")
    return np.array([to_ms(when) for when in at], np.int64)


def with_times(batches: Sequence[Batch], times: Timestamps) -> list[Batch]:
    """Return the same batches, each record with its time."""
    timed: list[Batch] = []
    offset = 0
    for batch in batches:
        own = times[offset : offset + len(batch)]
        offset += len(batch)
        if isinstance(batch, ColumnBatch):
            timed.append(ColumnBatch(batch.data, own))
        else:
            timed.append(ObjectBatch(batch.records, own))
    return timed


def to_records(batches: Sequence[Batch], row_type: type[Any] | None) -> list[Any]:
    """Return the records of a sink: instances of the stream's class, dicts if it has none, or the
    objects.
    """
    records: list[Any] = []
    for batch in batches:
        if isinstance(batch, ObjectBatch):
            records.extend(batch.records)
        elif row_type is not None:
            records.extend(to_rows(batch.data, row_type))
        else:
            names = batch.data.schema.names
            columns = [to_list(column) for column in batch.data.columns]
            records.extend(dict(zip(names, values, strict=True)) for values in zip(*columns))  # noqa: B905
    return records


def _batch_of(source: SourceBox, records: list[Any]) -> Batch:
    if source.schema is None:
        return ObjectBatch(list(records))
    for index, record in enumerate(records):
        _check_record(source, source.schema, index, record)
    parts: list[pa.RecordBatch] = []
    done = 0
    for _, group in groupby(records, _kind):
        alike = list(group)
        try:
            parts.append(to_columns(alike, source.schema))
        except RowMismatch as error:
            problem = f"record {done + error.index} is {str(error).removeprefix('returned ')}"
            raise _misfit(source, problem, source.schema) from None
        done += len(alike)
    return ColumnBatch(pa.concat_batches(parts))


def _kind(record: Any) -> str:
    """Return the kind of a record. Records of one kind are converted together."""
    if isinstance(record, Mapping):
        return "mapping"
    return "tuple" if isinstance(record, tuple) else "instance"


def _check_record(source: SourceBox, schema: pa.Schema, index: int, record: Any) -> None:
    """Refuse what the conversion itself would accept: records of another kind, and fields without a
    column.
    """
    kind = type(record)
    if isinstance(record, Mapping):
        unknown = [name for name in record if name not in schema.names]
        if unknown:
            raise UsageError(
                f"record {index} has no place in source `{source.name}` field=`{unknown[0]}`",
                fix=suggest(str(unknown[0]), schema.names, "columns"),
            )
    elif source.row_type is not None and is_record_class(kind):
        if not isinstance(record, source.row_type):
            wanted = source.row_type.__name__
            raise _misfit(source, f"record {index} is a {kind.__name__}, not a {wanted}", schema)
    elif not (is_record_class(kind) or isinstance(record, tuple)):
        raise _misfit(source, f"record {index} is a {kind.__name__}", schema)


def _fitting(source: SourceBox, schema: pa.Schema, batch: pa.RecordBatch) -> pa.RecordBatch:
    problem = difference(schema, batch.schema)
    if problem:
        raise _misfit(source, problem, schema)
    for field in schema:
        if not field.nullable and batch.column(field.name).null_count:
            raise _misfit(source, f"nulls in column `{field.name}`, which is not optional", schema)
    columns = [batch.column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _misfit(source: SourceBox, problem: str, schema: pa.Schema) -> UsageError:
    columns = ", ".join(f"{field.name} {field.type}" for field in schema)
    return UsageError(
        f"this does not fit source `{source.name}`: {problem}", fix=f"its columns: {columns}"
    )
