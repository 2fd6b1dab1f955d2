"""The operator of `map_batches`: a function of whole record batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa

from ...errors import HeadgateError
from ..base import AsyncOperator, Operator, OperatorContext, Output
from ..elements import Batch, ColumnBatch, concatenated
from ..functions.dead_letters import FAIL, DeadLetters, OnError
from ..functions.user_code import (
    Several,
    bad_result,
    is_own_cancellation,
    user_error,
    user_failures,
)
from ..origin import Origin
from ..rows import column_batch
from ..schema import difference


class BatchFunction(msgspec.Struct, frozen=True):
    """A user's function of record batches, and the schema its results must have."""

    function: Callable[[pa.RecordBatch], Any]
    step: str
    origin: Origin
    into: pa.Schema
    on_error: OnError = FAIL

    def failure(self, data: pa.RecordBatch, error: BaseException) -> Exception:
        """Return the error to raise when the function raised."""
        return user_error(self.step, self.origin, _shown(data), error)

    def checked(self, batch: ColumnBatch, result: Any) -> ColumnBatch | None:
        """Return the result as a batch of the declared schema; None if it has no rows.

        Raises:
            UserCodeError: not a record batch, other columns, or records without their event times.
        """
        if not isinstance(result, pa.RecordBatch):
            raise self._bad(
                batch,
                f"returned a {type(result).__name__}, not a pyarrow.RecordBatch",
                "a Table becomes one with table.combine_chunks().to_batches()[0]",
            )
        if problem := difference(self.into, result.schema):
            raise self._bad(
                batch,
                f"returned other columns than promised: {problem}",
                "correct the function, or declare its columns with into=",
            )
        if not result.num_rows:
            return None
        if batch.timestamps is not None and result.num_rows != len(batch):
            raise self._bad(
                batch,
                f"returned {result.num_rows} records for {len(batch)}, so their event times are unknown",
                "call .event_time(...) after map_batches, or filter with .filter(...)",
            )
        columns = [result.column(name) for name in self.into.names]
        data = pa.RecordBatch.from_arrays(columns, schema=self.into)
        # A result with as many rows must keep their order, which event times require, too.
        positions = batch.positions if result.num_rows == len(batch) else None
        return ColumnBatch(data, batch.timestamps, positions)

    def _bad(self, batch: ColumnBatch, problem: str, fix: str) -> Exception:
        return bad_result(self.step, self.origin, _shown(batch.data), problem, fix)


class Division:
    """A batch for which to call the function: as a whole, and, under an error policy, in halves.

    Halves are divided further, until the failing records are found. Take a part with `next`, and
    answer it with `made` or `failed`; the results are in the order of the records.
    """

    def __init__(self, user: BatchFunction, batch: ColumnBatch) -> None:
        self._user = user
        self._left = [batch]
        self._attempts = 0
        self.results: list[ColumnBatch] = []
        self.lost: list[ColumnBatch] = []
        self.errors: list[BaseException] = []

    def next(self) -> ColumnBatch | None:
        """Return the records of the next call, None if there are none left."""
        return self._left[-1] if self._left else None

    def made(self, result: Any) -> None:
        """Note that the function returned `result`.

        Raises:
            UserCodeError: the result does not fit the declaration, whatever the policy is.
        """
        checked = self._user.checked(self._left.pop(), result)
        self._attempts = 0
        if checked is not None:
            self.results.append(checked)

    def failed(self, error: BaseException) -> None:
        """Note that the function raised.

        Raises:
            UserCodeError: the policy is to fail, and so did all attempts.
        """
        self._attempts += 1
        if self._attempts <= self._user.on_error.retries:
            return
        self._attempts = 0
        part = self._left.pop()
        if self._user.on_error.then == "fail":
            raise self._user.failure(part.data, error) from error
        if len(part) == 1:
            self.lost.append(part)
            self.errors.append(error)
            return
        half = len(part) // 2
        self._left += [part.slice(half, len(part) - half), part.slice(0, half)]

    def send(self, letters: DeadLetters, output: Output) -> None:
        """Emit the results, and the dead letters."""
        if self.lost:
            letters.take(concatenated(self.lost), self.errors)
        for result in self.results:
            output.emit(result)


def divide(user: BatchFunction, batch: ColumnBatch) -> Division:
    """Call a plain function for a batch."""
    division = Division(user, batch)
    while (part := division.next()) is not None:
        try:
            result = user.function(part.data)
        except HeadgateError:
            raise
        except user_failures() as error:
            division.failed(error)
        else:
            division.made(result)
    return division


async def divide_async(user: BatchFunction, batch: ColumnBatch) -> Division:
    """Call a coroutine function for a batch."""
    division = Division(user, batch)
    while (part := division.next()) is not None:
        try:
            result = await user.function(part.data)
        except HeadgateError:
            raise
        except user_failures() as error:
            if is_own_cancellation(error):
                raise
            division.failed(error)
        else:
            division.made(result)
    return division


class BatchCalls(Operator):
    """An operator that calls a user's function of batches under the error policy of its step."""

    def __init__(self, user: BatchFunction) -> None:
        self._user = user
        self._letters = DeadLetters(user.step, user.origin, user.on_error)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._user.on_error.then != "fail":
            self._letters.open(context, self.output)


class MapBatchesOperator(BatchCalls):
    """Calls a function for each batch. Results must not depend on the batch boundaries.

    A function that returns as many rows as it got must keep their order, because event times follow
    it.
    """

    def process(self, batch: Batch, input_index: int) -> None:
        if len(batch):
            divide(self._user, column_batch(batch)).send(self._letters, self.output)


class AsyncMapBatchesOperator(BatchCalls, AsyncOperator):
    """The same for a coroutine function: one batch at a time."""

    async def process_async(self, batch: Batch, input_index: int) -> None:
        if len(batch):
            division = await divide_async(self._user, column_batch(batch))
            division.send(self._letters, self.output)


def _shown(data: pa.RecordBatch) -> Several:
    return Several(f"a batch of {data.num_rows}: {', '.join(data.schema.names)}")
