"""When did it happen: event times of records, from a column or by a function (features.md TIM-01)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import BadRecordError, PlanError
from .elements import Batch, ColumnBatch, Timestamps
from .graph import Origin
from .per_record import UserFunction
from .rows import to_rows
from .user_code import bad_result, describe_record

_MS_PER_DAY: Final = 86_400_000
_NS_PER_UNIT: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def check_time_column(column: str, kind: pa.DataType, where: str) -> None:
    """Raise PlanError unless event times can be read from a column of this type."""
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind) or kind == pa.int64()):
        raise PlanError(
            f"column `{column}` has no event times type=`{kind}`",
            where=where,
            fix="event times are timestamps, dates, or int64 milliseconds since 1970 UTC; "
            "convert with select, or give a function of the record",
        )


class ColumnTimes:
    """Reads event times from a column. Timestamps without a zone are taken as UTC."""

    def __init__(self, column: str, origin: Origin) -> None:
        self.column = column
        self._origin = origin

    def __call__(self, batch: Batch) -> Timestamps:
        """Milliseconds of each record.

        Raises:
            BadRecordError: a record has none.
        """
        if not isinstance(batch, ColumnBatch):
            raise BadRecordError(
                "event time by column needs columns, but got Python objects",
                where=str(self._origin),
            )
        values = batch.data.column(self.column)
        if values.null_count:
            self._refuse(batch, values)
        return milliseconds(values)

    def _refuse(self, batch: ColumnBatch, values: pa.Array) -> None:
        index = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        (record,) = to_rows(batch.data.slice(index, 1))
        raise BadRecordError(
            f"event time is null column=`{self.column}` record=`{describe_record(record)}`",
            where=str(self._origin),
            fix=f'drop such records before: .filter("{self.column} IS NOT NULL")',
        )


def latest_of(values: pa.Array) -> int | None:
    """The highest of a timestamp, date or int64 column in ms since 1970 UTC, rounded down."""
    latest = pc.max(values)
    if not latest.is_valid:
        return None
    return int(milliseconds(pa.array([latest], values.type))[0])


def milliseconds(values: pa.Array) -> Timestamps:
    """A timestamp, date or int64 column as milliseconds since 1970 UTC, rounded down; without nulls."""
    kind = values.type
    if pa.types.is_date32(kind):
        days = pc.cast(values, pa.int32()).to_numpy(zero_copy_only=False)
        return np.asarray(days, np.int64) * _MS_PER_DAY
    if not pa.types.is_timestamp(kind):
        values = pc.cast(values, pa.int64())
    # a view: Arrow's cast would check and copy every value
    raw: Timestamps = values.view(pa.int64()).to_numpy(zero_copy_only=False)
    if not pa.types.is_timestamp(kind) or kind.unit == "ms":
        return raw
    if kind.unit == "s":
        return raw * 1_000
    return raw // (_NS_PER_UNIT["ms"] // _NS_PER_UNIT[kind.unit])


class FunctionTimes:
    """Asks a function of the record: milliseconds, or an aware datetime."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def __call__(self, batch: Batch) -> Timestamps:
        """Milliseconds of each record.

        Raises:
            UserCodeError: the function raised, or returned no time.
        """
        records = self._user.reader(batch)
        results = self._user.apply(records)
        try:
            if all(type(result) is int for result in results):
                return np.array(results, np.int64)
        except OverflowError:
            pass  # said below, with the record
        times = [self._one(r, record) for r, record in zip(results, records, strict=True)]
        return np.array(times, np.int64)

    def _one(self, result: Any, record: Any) -> int:
        if type(result) is int and -(2**63) <= result < 2**63:
            return result
        if isinstance(result, datetime) and result.tzinfo is not None:
            return round(result.timestamp() * 1_000_000) // 1_000
        shown = "a datetime without a time zone" if isinstance(result, datetime) else f"{result!r}"
        raise bad_result(
            self._user.step,
            self._user.origin,
            record,
            f"returned {shown}, which is not an event time",
            fix="return int milliseconds since 1970 UTC, or a datetime with tzinfo",
        )
