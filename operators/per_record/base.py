"""Shared parts of map, filter and flat_map: records in pieces, and errors that name the record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import pyarrow as pa

from ...errors import HeadgateError, UserCodeError
from ..elements import Batch, ColumnBatch, ObjectBatch, Positions, Timestamps
from ..functions.dead_letters import FAIL, OnError
from ..functions.user_code import bad_result, is_own_cancellation, user_error, user_failures
from ..origin import Origin
from ..rows import PER_RECORD_ROWS, RowMismatch, RowReader, to_columns

MAX_IN_FLIGHT: Final = 100
"""The default number of records of one subtask that a coroutine function processes concurrently."""
TIMEOUT: Final = "2s"
"""The default timeout of a record of `map_async`, all attempts included."""


@dataclass(frozen=True)
class UserFunction:
    """A user's function, the reader of its records, and its origin. Picklable."""

    function: Callable[[Any], Any]
    step: str
    origin: Origin
    reader: RowReader
    into: pa.Schema | None = None
    """The columns to make of the results; None: they stay Python objects."""
    max_in_flight: int = MAX_IN_FLIGHT
    """For coroutine functions only."""
    on_error: OnError = FAIL

    def apply(self, records: list[Any]) -> list[Any]:
        """Return the function's result for each record.

        Raises:
            UserCodeError: it raised; names the record.
        """
        results: list[Any] = []
        try:
            results.extend(map(self.function, records))
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self.step, self.origin, records[len(results)], error) from error
        if len(results) < len(records):  # `map` takes a StopIteration for the end of the records
            raise user_error(self.step, self.origin, records[len(results)], StopIteration())
        return results

    def attempt(self, records: list[Any]) -> tuple[list[Any], dict[int, BaseException]]:
        """Call the function under an error policy; return the errors by the place of the record.

        Raises:
            UserCodeError: the policy is to fail, and so did all attempts for a record; names it.
        """
        results: list[Any] = []
        failures: dict[int, BaseException] = {}
        left = iter(records)
        while True:
            error: BaseException = StopIteration()  # `map` takes it for the end of the records
            try:
                results.extend(map(self.function, left))
            except HeadgateError:
                raise
            except user_failures() as raised:
                error = raised
            if len(results) == len(records):
                return results, failures
            self._attempt_again(records[len(results)], error, results, failures)

    def _attempt_again(
        self,
        record: Any,
        error: BaseException,
        results: list[Any],
        failures: dict[int, BaseException],
    ) -> None:
        """Retry a record whose first attempt failed; store its result or its error."""
        for _ in range(self.on_error.retries):
            try:
                results.append(self.function(record))
                return
            except HeadgateError:
                raise
            except user_failures() as raised:
                error = raised
        self._fail(record, error, len(results), failures)
        results.append(None)

    def _fail(
        self, record: Any, error: BaseException, place: int, failures: dict[int, BaseException]
    ) -> None:
        if self.on_error.then == "fail":
            raise user_error(self.step, self.origin, record, error) from error
        failures[place] = error

    async def apply_async(
        self, records: list[Any], failures: dict[int, BaseException] | None = None
    ) -> list[Any]:
        """Call a coroutine function: results in order, `max_in_flight` at a time.

        Cancelling it cancels all calls in flight and leaves nothing behind.

        Args:
            records: the records to call it for.
            failures: filled with the errors, by the place of the record, if the policy allows it.
        """
        failures = {} if failures is None else failures
        results: list[Any] = [None] * len(records)
        left = iter(range(len(records)))

        async def work() -> None:
            for index in left:
                for number in count():
                    try:
                        results[index] = await self.function(records[index])
                        break
                    except HeadgateError:
                        raise
                    except user_failures() as error:
                        if is_own_cancellation(error):
                            raise
                        if number >= self.on_error.retries:
                            self._fail(records[index], error, index, failures)
                            break

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.max_in_flight, len(records))):
                    group.create_task(work())
        except BaseExceptionGroup as group_of_errors:
            first = _first(group_of_errors)
            raise first from first.__cause__
        return results

    def columns(
        self, results: list[Any], times: Timestamps | None, positions: Positions | None = None
    ) -> ColumnBatch:
        """Return the results as the columns of `into`. Raises RowMismatch if one does not fit."""
        assert self.into is not None
        return ColumnBatch(to_columns(results, self.into), times, positions)

    def batch(
        self,
        results: list[Any],
        times: Timestamps | None,
        records: list[Any],
        positions: Positions | None = None,
    ) -> Batch:
        """Return the results as a batch; `records` are their inputs, for errors (may be fewer)."""
        if self.into is None:
            return ObjectBatch(results, times, positions)
        try:
            return self.columns(results, times, positions)
        except RowMismatch as error:
            raise bad_result(
                self.step,
                self.origin,
                records[error.index] if len(records) == len(results) else results[error.index],
                str(error),
                fix=f"the columns given with into= are: {describe_columns(self.into)}",
            ) from error


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one of several concurrent errors: the one that the user has to fix first."""
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            return _first(failure)
        if isinstance(failure, UserCodeError):
            return failure
    return failures.exceptions[0]


def describe_columns(schema: pa.Schema) -> str:
    """Describe columns, such as `url: string, clicks: int64`."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def pieces(batch: Batch) -> Iterator[Batch]:
    """Yield the batch in pieces that suit per-record functions."""
    if len(batch) <= PER_RECORD_ROWS:
        yield batch
        return
    for start in range(0, len(batch), PER_RECORD_ROWS):
        yield batch.slice(start, PER_RECORD_ROWS)
