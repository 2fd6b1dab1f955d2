"""Event times of records, read from a column or by a function."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ..errors import BadRecordError, PlanError, UserCodeError
from .elements import Batch, ColumnBatch, Timestamps
from .functions.user_code import bad_result, describe_record
from .lazy_modules import pc
from .origin import Origin
from .per_record.base import UserFunction
from .rows import text_of_value, to_rows
from .time_range import EVENT_TIME_MAX_MS, EVENT_TIME_MIN_MS, RANGE_TEXT, bad_times

_MS_PER_DAY: Final = 86_400_000
_SECONDS_MAX: Final = 2**53
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_KEEP_OR_DROP: Final = (
    'filter such records out before, or choose how to handle them: .event_time(..., on_error="drop") '
    'or "side_output"'
)
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


class EventTimes:
    """Reads the event times of the records of a batch."""

    def __call__(self, batch: Batch) -> Timestamps:
        """Return the event time of each record, ms.

        Raises:
            BadRecordError: a record has none, or one that is out of range.
            UserCodeError: the user's function raised, or returned no time.
        """
        times, failures = self.read(batch, 1)
        for error in failures.values():
            raise error
        return times

    def read(self, batch: Batch, most: int) -> tuple[Timestamps, dict[int, BaseException]]:
        """Return the event time of each record, ms, and the errors of those that have none.

        Args:
            batch: the records.
            most: the number of failures after which to stop.

        Returns:
            The times, and errors by the place of the record, in order; times at such places are
                undefined.
        """
        raise NotImplementedError


class ColumnTimes(EventTimes):
    """Reads event times from a column. Timestamps without a zone are taken as UTC."""

    def __init__(self, column: str, origin: Origin) -> None:
        self.column = column
        self._origin = origin

    def read(self, batch: Batch, most: int) -> tuple[Timestamps, dict[int, BaseException]]:
        """See `EventTimes.read`.

        Raises:
            BadRecordError: the records are Python objects.
        """
        if not isinstance(batch, ColumnBatch):
            raise BadRecordError(
                "event time by column needs columns, but got Python objects",
                where=str(self._origin),
            )
        values = batch.data.column(self.column)
        failures: dict[int, BaseException] = {}
        if values.null_count:
            nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
            failures = {place: self._null(batch, place) for place in nulls[:most].tolist()}
            values = pc.fill_null(values, pa.scalar(0, pa.int64()).cast(values.type, safe=False))
        times = milliseconds(values)
        bad = bad_times(times)
        if bad is not None:
            failures |= {place: self._far(batch, place) for place in bad[:most].tolist()}
        return times, dict(sorted(failures.items()))

    def _null(self, batch: ColumnBatch, place: int) -> BadRecordError:
        return BadRecordError(
            f"event time is null column=`{self.column}` record=`{_shown(batch, place)}`",
            where=str(self._origin),
            fix=f'drop such records before: .filter("{self.column} IS NOT NULL")',
        )

    def _far(self, batch: ColumnBatch, place: int) -> BadRecordError:
        value = batch.data.column(self.column)[place]
        return BadRecordError(
            f"event time is out of range column=`{self.column}` value=`{text_of_value(value)}`",
            where=str(self._origin),
            fix=f"{RANGE_TEXT}; {_KEEP_OR_DROP}",
        )


def _shown(batch: ColumnBatch, place: int) -> str:
    (record,) = to_rows(batch.data.slice(place, 1))
    return describe_record(record)


def latest_of(values: pa.Array) -> int | None:
    """Return the maximum of a timestamp, date or int64 column in ms since 1970 UTC, rounded down."""
    latest = pc.max(values)
    if not latest.is_valid:
        return None
    return int(milliseconds(pa.array([latest], values.type))[0])


def milliseconds(values: pa.Array) -> Timestamps:
    """Convert a timestamp, date or int64 column to milliseconds since 1970 UTC, rounded down; no nulls.

    Seconds that do not fit 64 bits in milliseconds become times that are far out of range.
    """
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
        return np.clip(raw, -_SECONDS_MAX, _SECONDS_MAX) * 1_000
    return raw // (_NS_PER_UNIT["ms"] // _NS_PER_UNIT[kind.unit])


class FunctionTimes(EventTimes):
    """Calls a function of the record, which returns milliseconds or an aware datetime."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def read(self, batch: Batch, most: int) -> tuple[Timestamps, dict[int, BaseException]]:
        """See `EventTimes.read`.

        Raises:
            UserCodeError: the function raised, and the policy is to fail.
        """
        records = self._user.reader(batch)
        results, failures = self._user.attempt(records)
        times = self._whole(results)
        if not failures and times is not None and bad_times(times) is None:
            return times, failures
        each = np.zeros(len(results), np.int64)
        for place, (result, record) in enumerate(zip(results, records, strict=True)):
            if place not in failures:
                found = self._one(result, record)
                if isinstance(found, int):
                    each[place] = found
                elif len(failures) < most:
                    failures[place] = found
        return each, dict(sorted(failures.items()))

    def _whole(self, results: list[Any]) -> Timestamps | None:
        """Return the times, if all results are 64-bit integers."""
        try:
            if all(type(result) is int for result in results):
                return np.array(results, np.int64)
        except OverflowError:
            pass  # reported with the record
        return None

    def _one(self, result: Any, record: Any) -> int | UserCodeError:
        """Return an event time, or the error."""
        if type(result) is int:
            time = result
        elif isinstance(result, datetime) and result.tzinfo is not None:
            time = (result - _EPOCH) // _MILLISECOND
        else:
            naive = isinstance(result, datetime)
            shown = "a datetime without a time zone" if naive else f"{result!r}"
            return self._refused(
                record,
                f"returned {shown}, which is not an event time",
                "return int milliseconds since 1970 UTC, or a datetime with tzinfo",
            )
        if EVENT_TIME_MIN_MS <= time <= EVENT_TIME_MAX_MS:
            return time
        return self._refused(
            record,
            f"returned {result}, which is out of range",
            f"{RANGE_TEXT}; {_KEEP_OR_DROP}",
        )

    def _refused(self, record: Any, problem: str, fix: str) -> UserCodeError:
        return bad_result(self._user.step, self._user.origin, record, problem, fix=fix)
