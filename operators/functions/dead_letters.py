"""Dead letters: what becomes of records whose function raised, when the job is not to fail of them.

An operator collects the failures of a batch and gives them to `DeadLetters.take`: they are counted, and
with `side_output` sent to the side output `failed`, inside of the same checkpoint as everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
import pyarrow as pa

from ...errors import PlanError
from ..base import OperatorContext, Output
from ..drops import DropKind
from ..elements import Batch, ColumnBatch, ObjectBatch, Positions
from ..origin import Origin
from ..whole_numbers import check_whole_number
from .user_code import TEXT_MAX, text_of

FAILED: Final = "failed"
"""The side output of records whose function raised."""
FAILED_COUNTER: Final = "failed_records"
DROPPED_COUNTER: Final = "failed_records_dropped"
Action: TypeAlias = Literal["fail", "drop", "side_output"]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class OnError(msgspec.Struct, frozen=True):
    """The policy for records for which a function raises.

    Attributes:
        then: `fail` fails the job, `drop` counts the record and goes on, `side_output` sends it to the
            stream `.failed` as well.
        retries: the number of times that the function is called again at once before.
    """

    then: Action = "fail"
    retries: int = 0


OnErrorLike: TypeAlias = OnError | Action
FAIL: Final = OnError()


class FailedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record of a stream of Python objects whose function raised.

    Of a stream of columns the same are columns, and `record` is a struct of the record's columns.
    """

    record: Any
    error_type: str
    """The class of the exception, with its module unless it is built in."""
    error: str
    """The text of the exception, at most `TEXT_MAX` characters."""
    operator: str
    """The name of the step."""
    origin: str
    """Where the step was written: `file:line`."""
    event_time: datetime | None
    """The event time of the record, if the stream has one; None beyond the years 1 to 9999."""
    key: Any = None
    """The key of the record or timer of a process function."""
    source: str | None = None
    """The source that the record was read from; None where that is not known any more."""
    split: str | None = None
    """The part of it, such as the path of a file."""
    offset: int | None = None
    """Where the record stood in the split, in the unit of the source: a byte, a row or an item."""


def checked_on_error(given: object, origin: Origin) -> OnError:
    """The values that a user may give as `on_error=`.

    Raises:
        PlanError: it is nothing of the kind.
    """
    policy = OnError(given) if isinstance(given, str) else given  # type: ignore[arg-type]
    if not isinstance(policy, OnError) or policy.then not in get_args(Action):
        shown = policy.then if isinstance(policy, OnError) else type(policy).__name__
        raise PlanError(
            f"not a policy for errors on_error=`{shown}`",
            where=str(origin),
            fix='it can be: "fail", "drop", "side_output", or such as '
            'hg.OnError("side_output", retries=2)',
        )
    check_whole_number("retries of an OnError", policy.retries, origin, least=0)
    return policy


def failed_sides(policy: OnError, schema: pa.Schema | None) -> dict[str, pa.Schema | None]:
    """The side output that a step with this policy has, for `Node.sides`.

    Args:
        policy: of the step.
        schema: the columns of the records that come in; None: Python objects.
    """
    if policy.then != "side_output":
        return {}
    return {FAILED: None if schema is None else failed_schema(schema)}


def failed_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of dead letters of a stream with the columns of `schema`."""
    return pa.schema(
        [
            pa.field("record", pa.struct(list(schema)), False),
            pa.field("error_type", pa.string(), False),
            pa.field("error", pa.string(), False),
            pa.field("operator", pa.string(), False),
            pa.field("origin", pa.string(), False),
            pa.field("event_time", pa.timestamp("ms", tz="UTC")),
            pa.field("source", pa.string()),
            pa.field("split", pa.string()),
            pa.field("offset", pa.int64()),
        ]
    )


class DeadLetters:
    """The failed records of one operator subtask. `policy` says what becomes of them; not for `fail`."""

    def __init__(self, step: str, origin: Origin, policy: OnError) -> None:
        self._step = step
        self._origin = origin.location
        self._policy = policy

    def open(self, context: OperatorContext, output: Output) -> None:
        """Call in the operator's `open`."""
        self._output = output
        self._failed = context.metrics.counter(FAILED_COUNTER)
        self._dropped = context.metrics.counter(DROPPED_COUNTER)
        self._drops = context.drops

    def take(
        self,
        records: Batch,
        errors: Sequence[BaseException],
        keys: Sequence[Any] | None = None,
    ) -> None:
        """Handle records as they came to the operator, and what was raised for each.

        Args:
            records: with columns if `.failed` has columns.
            errors: one for each.
            keys: likewise, of Python objects.
        """
        self._failed.inc(len(errors))
        if self._policy.then == "drop":
            self._dropped.inc(len(errors))
            self._drops.add(DropKind.FAILED, len(errors))
            if self._drops.samples is not None:
                self._drops.samples.add_rows(DropKind.FAILED, records, errors)
        elif isinstance(records, ColumnBatch):
            self._output.emit_side(FAILED, self._columns(records, errors))
        else:
            self._output.emit_side(FAILED, self._objects(records, errors, keys))

    def _columns(self, records: ColumnBatch, errors: Sequence[BaseException]) -> ColumnBatch:
        data, times = records.data, records.timestamps
        schema = failed_schema(data.schema)
        count = len(errors)
        columns = [
            pa.StructArray.from_arrays(data.columns, fields=list(data.schema)),
            pa.array(map(_type_of, errors), pa.string()),
            pa.array([text_of(error, TEXT_MAX) for error in errors], pa.string()),
            pa.array([self._step] * count, pa.string()),
            pa.array([self._origin] * count, pa.string()),
            pa.nulls(count, pa.int64()) if times is None else pa.array(times, pa.int64()),
            *_position_columns(records.positions, count),
        ]
        event_time = schema.get_field_index("event_time")
        columns[event_time] = columns[event_time].cast(schema.field(event_time).type)
        return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=schema), times)

    def _objects(
        self, records: ObjectBatch, errors: Sequence[BaseException], keys: Sequence[Any] | None
    ) -> ObjectBatch:
        times = records.timestamps
        moments: list[datetime | None] = [None] * len(errors)
        if times is not None:
            moments = [_moment(time) for time in times.tolist()]
        positions = records.positions
        source, split = (None, None) if positions is None else (positions.source, positions.split)
        offsets = [None] * len(errors) if positions is None else positions.offsets.tolist()
        letters = [
            FailedRecord(
                record=record,
                error_type=_type_of(error),
                error=text_of(error, TEXT_MAX),
                operator=self._step,
                origin=self._origin,
                event_time=moment,
                key=key,
                source=source,
                split=split,
                offset=offset,
            )
            for record, error, moment, key, offset in zip(
                records.records, errors, moments, keys or [None] * len(errors), offsets, strict=True
            )
        ]
        return ObjectBatch(letters, times)


def _position_columns(positions: Positions | None, count: int) -> list[pa.Array]:
    """Return source, split and offset of records; null where they are not known."""
    if positions is None:
        return [pa.nulls(count, kind) for kind in (pa.string(), pa.string(), pa.int64())]
    source, split = pa.array([positions.source] * count), pa.array([positions.split] * count)
    return [source, split, pa.array(positions.offsets, pa.int64())]


def _moment(time: int) -> datetime | None:
    """An event time; None beyond the years that a datetime can hold."""
    try:
        return _EPOCH + timedelta(milliseconds=time)
    except OverflowError:
        return None


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
