"""Coroutine functions with many calls in flight, each with a deadline.

`map_async` calls one for each record, and `map_batches` with `rows=` for each batch of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, UserCodeError
from ...state.keyed.keys import token
from ..base import OperatorContext
from ..durations import format_duration
from ..elements import Batch, ColumnBatch, ObjectBatch, Timestamps, concatenated
from ..functions.dead_letters import DeadLetters
from ..functions.user_code import describe_record, is_failure, user_error, user_failures
from ..per_record.base import UserFunction
from ..per_record.map_batches import BatchFunction, Division, divide_async
from ..per_record.micro_batches import RowBuffer
from ..rows import RowMismatch, RowReader, column_batch, to_list
from .call import ONCE, Call, Status
from .in_flight import CallSettings, InFlight
from .stored import InFlightState, pickled

TIMED_OUT: Final = "timed_out"
"""The side output of records whose call timed out."""
TIMED_OUT_COUNTER: Final = "async_records_timed_out"
OnTimeout: TypeAlias = Literal["fail", "side_output"] | Callable[[Any], Any]


class KeyOfRecords(msgspec.Struct, frozen=True):
    """The keys of a batch: key columns, or a function and the reader of its records."""

    columns: tuple[str, ...] = ()
    function: Callable[[Any], Hashable] | None = None
    reader: RowReader | None = None


class AsyncMapStep(msgspec.Struct, frozen=True):
    """The parts of a step. Picklable.

    Attributes:
        user: the function, and the columns of its results.
        calls: the settings of the calls.
        schema: the columns of the records; None: Python objects.
        on_timeout: the handling of a timed-out record; a function gives the result instead.
        key: None unless the stream is keyed.
    """

    user: UserFunction
    calls: CallSettings
    schema: pa.Schema | None
    on_timeout: OnTimeout
    key: KeyOfRecords | None


class MapAsync(InFlight):
    """Calls a coroutine function for each record; in a keyed stream, for one record of a key at a time."""

    def __init__(self, step: AsyncMapStep) -> None:
        user = step.user
        keyed = step.key is not None
        state = InFlightState(step.schema, keyed, user.step, user.origin)
        super().__init__(step.calls, state, user.step)
        self._map = step
        self._user = user
        self._letters = DeadLetters(user.step, user.origin, user.on_error)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._letters.open(context, self.output)
        self._timed_out = context.metrics.counter(TIMED_OUT_COUNTER)

    def _calls_of(self, batch: Batch) -> Iterator[Call]:
        records = self._user.reader(batch)
        keys = [None] * len(records) if self._map.key is None else self._keys_of(batch, records)
        objects = isinstance(batch, ObjectBatch)
        for row, (record, key) in enumerate(zip(records, keys, strict=True)):
            saved = pickled(record) if objects else None
            yield Call(record, batch, row, key=key, saved=saved)

    def _keys_of(self, batch: Batch, records: list[Any]) -> list[Any]:
        key = self._map.key
        assert key is not None
        if key.function is None:
            assert isinstance(batch, ColumnBatch)
            lists = [to_list(batch.data.column(name)) for name in key.columns]
            return list(map(token, lists[0] if len(lists) == 1 else zip(*lists, strict=True)))
        assert key.reader is not None
        wide = key.reader(batch)
        tokens: list[Any] = []
        try:
            tokens.extend(token(key.function(record)) for record in wide)
        except HeadgateError:
            raise
        except user_failures() as error:
            record = wide[len(tokens)]
            raise user_error(self._user.step, self._user.origin, record, error) from error
        return tokens

    # results

    def _send(self, calls: list[Call]) -> None:
        late = [call for call in calls if call.status is Status.TIMED_OUT]
        if late:
            self._take_late(late)
        failed = [call for call in calls if call.status is Status.FAILED]
        if failed:
            self._take_failed(failed)
        done = [call for call in calls if call.status is Status.DONE]
        if done:
            self._emit(done)

    def _take_late(self, calls: list[Call]) -> None:
        """Handle timed-out calls; those for which a function gives a result are done."""
        self._timed_out.inc(len(calls))
        on_timeout = self._map.on_timeout
        if on_timeout == "fail":
            raise self._too_late(calls[0])
        if on_timeout == "side_output":
            self.output.emit_side(TIMED_OUT, joined(calls))
            return
        assert callable(on_timeout)
        for call in calls:
            try:
                call.result, call.status = on_timeout(call.argument), Status.DONE
            except HeadgateError:
                raise
            except user_failures() as error:
                call.error, call.status = error, Status.FAILED

    def _take_failed(self, calls: list[Call]) -> None:
        errors: list[BaseException] = []
        for call in calls:
            error = call.error
            assert error is not None
            if isinstance(error, HeadgateError) or not is_failure(error):
                raise error
            if self._user.on_error.then == "fail":
                user = self._user
                raise user_error(user.step, user.origin, call.argument, error) from error
            errors.append(error)
        self._letters.take(joined(calls), errors)

    def _emit(self, calls: list[Call]) -> None:
        user = self._user
        if user.into is None or user.on_error.then == "fail":
            self.output.emit(self._batch(calls))
            return
        try:
            batch = user.columns([call.result for call in calls], times_of(calls))
        except RowMismatch:
            self._emit_fitting(calls)
        else:
            self.output.emit(batch)

    def _emit_fitting(self, calls: list[Call]) -> None:
        """Emit results one by one, to find those that do not fit the columns."""
        fitting: list[Call] = []
        for call in calls:
            try:
                self._user.columns([call.result], None)
            except RowMismatch as error:
                call.error, call.status = error, Status.FAILED
            else:
                fitting.append(call)
        self._take_failed([call for call in calls if call.status is Status.FAILED])
        if fitting:
            self.output.emit(self._batch(fitting))

    def _batch(self, calls: list[Call]) -> Batch:
        results = [call.result for call in calls]
        return self._user.batch(results, times_of(calls), [call.argument for call in calls])

    def _too_late(self, call: Call) -> UserCodeError:
        given = format_duration(self._settings.timeout_ms or 0)
        return UserCodeError(
            f"a call of the function of `{self._user.step}` timed out timeout=`{given}` "
            f"record=`{describe_record(call.argument)}`",
            where=str(self._user.origin),
            fix='give it more time with timeout=, or keep such records with on_timeout="side_output"',
        )


def joined(calls: list[Call]) -> Batch:
    """Return the records of calls as one batch."""
    columns = [part for call in calls if isinstance(part := call.records(), ColumnBatch)]
    if columns:
        return concatenated(columns)
    return ObjectBatch([call.argument for call in calls], times_of(calls))


def times_of(calls: list[Call]) -> Timestamps | None:
    """Return the event times of calls of single records."""
    if calls[0].batch.timestamps is None:
        return None
    return np.array([call.batch.timestamps[call.row] for call in calls], np.int64)  # type: ignore[index]


class AsyncMicroBatches(InFlight):
    """Calls a coroutine function for batches of a set number of rows; results keep the order of the
    records.

    Rows that wait for a full batch become one before a barrier, and so are state like all calls in
    flight.
    """

    def __init__(
        self,
        user: BatchFunction,
        schema: pa.Schema,
        rows: int,
        within_ms: int,
        max_in_flight: int,
    ) -> None:
        calls = CallSettings(partial(divide_async, user), max_in_flight, None, True, ONCE)
        state = InFlightState(schema, False, user.step, user.origin)
        super().__init__(calls, state, user.step)
        self._user = user
        self._letters = DeadLetters(user.step, user.origin, user.on_error)
        self._buffer = RowBuffer(rows, within_ms, self._call)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._user.on_error.then != "fail":
            self._letters.open(context, self.output)

    def process(self, batch: Batch, input_index: int) -> None:
        self._buffer.add(column_batch(batch), self.context)

    def _call(self, batch: ColumnBatch) -> None:
        super().process(batch, 0)

    def _calls_of(self, batch: Batch) -> Iterator[Call]:
        yield Call(batch, batch, 0, len(batch))

    def _send(self, calls: list[Call]) -> None:
        for call in calls:
            if call.error is not None:
                raise self._failure(call, call.error)
            division: Division = call.result
            division.send(self._letters, self.output)

    def _failure(self, call: Call, error: BaseException) -> BaseException:
        """Return the error that fails the job: our own as it is, any other with the name of the step."""
        if isinstance(error, HeadgateError):
            return error
        data: Any = call.argument.data
        return self._user.failure(data, error)

    def settled(self) -> bool:
        return super().settled() and not self._buffer.waits

    # no rows wait for a batch behind a mark

    def on_watermark(self, timestamp: int) -> None:
        self._buffer.flush()
        super().on_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        self._buffer.flush()
        super().on_idle(idle)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._buffer.flush()
        super().prepare_snapshot(checkpoint_id)
