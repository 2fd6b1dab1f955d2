"""Process functions of whole batches: the rows of each key as one Arrow slice, with the key's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, Generic, TypeVar, final

import numpy as np
import pyarrow as pa

from ...errors import HeadgateError
from ...state.values import Index
from ..elements import Batch, ColumnBatch, Timestamps
from ..functions.user_code import Several, bad_result, user_error, user_failures
from ..rows import column_batch, to_list
from ..schema import difference
from .attempts import Attempts
from .context import Context, Timer
from .functions import ProcessFunction
from .operator import ProcessOperator, ProcessStep, whole_record

K = TypeVar("K")
In = TypeVar("In")
Out = TypeVar("Out")

EVENT_TIME_COLUMN: Final = "_event_time"
"""The column after those of the rows, if the stream has event time: timestamp(ms, UTC)."""
EVENT_TIME_TYPE: Final = pa.timestamp("ms", tz="UTC")
EMIT_ROWS: Final = 65_536
"""Slices of single keys are emitted together, this many rows at a time."""


@final
class Groups(Generic[K]):
    """The rows of one batch by key: iterating gives `(key, rows)` and makes that key current.

    Rows of a key are in order of arrival. Can be iterated once.
    """

    def __init__(
        self, keys: list[Any], rows: Callable[[int], pa.RecordBatch], enter: Callable[[int], None]
    ) -> None:
        self._keys = keys
        self._rows = rows
        self._enter = enter
        self._left = iter(range(len(keys)))

    def __len__(self) -> int:
        """Return how many keys the batch has."""
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[K, pa.RecordBatch]]:
        for index in self._left:
            self._enter(index)
            yield self._keys[index], self._rows(index)


class KeyedBatchProcess(ProcessFunction[K, pa.RecordBatch], Generic[K, In, Out]):
    """The columnar twin of `KeyedProcess`: Arrow batches in and out; state and timers are per key.

    In streams with event time, rows have it in the last column, `_event_time`, and results must
    have it too. Filtering rows or adding columns keeps it.
    """

    def on_batch(self, groups: Groups[K], ctx: Context[K]) -> Iterable[pa.RecordBatch] | None:
        """Handle a batch; return or yield record batches.

        Results must not depend on the batch boundaries.

        `ctx.timestamp` is the latest event time of the key's rows. Results of `on_timer` are record
        batches too; without the column `_event_time` they have the timer's time.
        """
        raise NotImplementedError


class KeyedBatchProcessOperator(ProcessOperator):
    """Runs a `KeyedBatchProcess`."""

    _function: KeyedBatchProcess[Any, Any, Any]

    def __init__(self, step: ProcessStep) -> None:
        super().__init__(step)
        assert step.user.into is not None
        self._into: pa.Schema = step.user.into
        self._made: list[pa.RecordBatch] = []
        self._times: list[Timestamps] = []
        self._rows = 0

    def process(self, batch: Batch, input_index: int) -> None:
        self._open_function()
        if not len(batch):
            return
        given = column_batch(batch)
        self._times_of(given)
        if self._attempts is not None:
            self._attempt_batch(self._attempts, given)
            return
        try:
            made = self._call_on_batch(given)
            for result in made if made is not None else ():
                self._collect(result, given, None)
        except HeadgateError:
            raise
        except user_failures() as error:
            shown = _shown(given.data)
            raise user_error(self._user.step, self._user.origin, shown, error) from error
        finally:
            self._no_key()
        self._flush()

    def _attempt_batch(self, attempts: Attempts, batch: ColumnBatch) -> None:
        """Handle a batch under an error policy: in ever smaller parts, until the failing rows are found."""
        left = [batch]
        try:
            while left:
                part = left.pop()
                results, error = attempts.call(partial(self._made_of, part), _shown(part.data))
                if error is None:
                    for result in results or ():
                        self._collect(result, part, None)
                elif len(part) == 1 or self._user.on_error.then == "fail":
                    self._give_up_row(attempts, part, error)
                else:
                    half = len(part) // 2
                    left += [part.slice(half, len(part) - half), part.slice(0, half)]
        finally:
            self._no_key()
        self._flush()

    def _made_of(self, part: ColumnBatch) -> list[Any]:
        made = self._call_on_batch(part)
        return [] if made is None else list(made)

    def _give_up_row(self, attempts: Attempts, part: ColumnBatch, error: BaseException) -> None:
        if len(part) > 1:
            shown = _shown(part.data)
            raise user_error(self._user.step, self._user.origin, shown, error) from error
        names = self._step.inputs[0].key
        assert isinstance(names, tuple)
        keys = self._keys_of(part, [], names)
        time = None if part.timestamps is None else int(part.timestamps[0])
        attempts.give_up(whole_record(part, 0), keys[0], time, error)

    def _call_on_batch(self, batch: ColumnBatch) -> Iterable[pa.RecordBatch] | None:
        names = self._step.inputs[0].key
        assert isinstance(names, tuple)
        columns = [batch.data.column(name) for name in names]
        order, starts = group_rows(columns)
        data, times = batch.data, batch.timestamps
        if times is not None:
            data = data.append_column(
                EVENT_TIME_COLUMN, pa.array(times, pa.int64()).cast(EVENT_TIME_TYPE)
            )
        firsts = pa.array(order[starts])
        lists = [to_list(column.take(firsts)) for column in columns]
        keys = lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))
        data = data.take(pa.array(order))
        latest = None if times is None else np.maximum.reduceat(times[order], starts).tolist()
        groups = self._progress.groups_of(keys)
        ends = [*starts.tolist()[1:], len(order)]

        def rows(index: int) -> pa.RecordBatch:
            start = int(starts[index])
            return data.slice(start, ends[index] - start)

        def enter(index: int) -> None:
            self._progress.enter(keys[index], groups[index])
            self._context.key = keys[index]
            time = None if latest is None else latest[index]
            self._context.timestamp = self._emitter.time = time

        return self._function.on_batch(Groups(keys, rows, enter), self._context)

    def _call_on_timer(self, key: Any, timer: Timer) -> None:
        try:
            made = self._function.on_timer(timer, self._context)
            for result in made if made is not None else ():
                self._collect(result, (key, timer), timer.timestamp)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, (key, timer), error) from error

    def _add_last_results(self, made: Iterable[Any] | None) -> None:
        for result in made if made is not None else ():
            self._collect(result, Several("the end of the input"), self._time_at_end())

    def _made_on_timer(self, attempts: Attempts, key: Any, timer: Timer) -> list[Any]:
        made = self._function.on_timer(timer, self._context)
        return [] if made is None else list(made)

    def _add_timer_results(self, key: Any, timer: Timer, results: list[Any]) -> None:
        for result in results:
            self._collect(result, (key, timer), timer.timestamp)

    def _collect(self, result: Any, cause: object, time: int | None) -> None:
        """Check one record batch and keep it for `_flush`.

        Args:
            result: the result of the function.
            cause: the batch or timer it was made of, for errors.
            time: the event time of rows that have none.
        """
        if not isinstance(result, pa.RecordBatch):
            problem = f"made a {type(result).__name__}, not a pyarrow.RecordBatch"
            raise self._bad(cause, problem, "return or yield record batches")
        times = self._times_in(result, cause, time) if self._emitter.timed else None
        if EVENT_TIME_COLUMN in result.schema.names:
            result = result.drop_columns([EVENT_TIME_COLUMN])
        if problem := difference(self._into, result.schema):
            raise self._bad(
                cause,
                f"made other columns than promised: {problem}",
                "correct the function, or declare its columns with into=",
            )
        if not result.num_rows:
            return
        columns = [result.column(name) for name in self._into.names]
        self._made.append(pa.RecordBatch.from_arrays(columns, schema=self._into))
        if times is not None:
            self._times.append(times)
        self._rows += result.num_rows
        if self._rows >= EMIT_ROWS:
            self._emit()

    def _times_in(self, result: pa.RecordBatch, cause: object, time: int | None) -> Timestamps:
        if EVENT_TIME_COLUMN in result.schema.names:
            column = result.column(EVENT_TIME_COLUMN)
            if column.type != EVENT_TIME_TYPE or column.null_count:
                problem = f"made a column `{EVENT_TIME_COLUMN}` of type {column.type} or with nulls"
                raise self._bad(cause, problem, f"it must be {EVENT_TIME_TYPE} without nulls")
            found: Timestamps = column.cast(pa.int64()).to_numpy()
            return found
        if time is None:
            raise self._bad(
                cause,
                f"made rows without the column `{EVENT_TIME_COLUMN}`: their event times are unknown",
                f"keep `{EVENT_TIME_COLUMN}` of the rows given, or add one ({EVENT_TIME_TYPE})",
            )
        return np.full(result.num_rows, time, np.int64)

    def _flush(self) -> None:
        super()._flush()
        self._emit()

    def _emit(self) -> None:
        if not self._made:
            return
        data = pa.Table.from_batches(self._made).combine_chunks().to_batches()[0]
        times = np.concatenate(self._times) if self._times else None
        self._made, self._times, self._rows = [], [], 0
        self.output.emit(ColumnBatch(data, times))

    def _bad(self, cause: object, problem: str, fix: str) -> Exception:
        shown = _shown(cause.data) if isinstance(cause, ColumnBatch) else cause
        return bad_result(self._user.step, self._user.origin, shown, problem, fix)


def group_rows(columns: list[pa.Array]) -> tuple[Index, Index]:
    """Group rows, at least one, by equal values in all columns; return `(order, starts)`.

    `order` has the rows group by group, in each in their order; group i begins at
    `order[starts[i]]`.
    """
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        encoded = plain.dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy()
        if len(columns) > 1:  # as small as possible, so that the next product fits
            codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    return order, np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))


def _shown(data: pa.RecordBatch) -> Several:
    return Several(f"a batch of {data.num_rows}: {', '.join(data.schema.names)}")
