"""map_batches: a function of whole record batches, at Arrow's speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ..errors import HeadgateError
from .base import AsyncOperator, Operator
from .elements import Batch, ColumnBatch
from .graph import Origin
from .rows import column_batch
from .schema import difference
from .user_code import FAILURES, bad_result, is_own_cancellation, user_error


@dataclass(frozen=True)
class BatchFunction:
    """A user's function of record batches, and the schema its results must have."""

    function: Callable[[pa.RecordBatch], Any]
    step: str
    origin: Origin
    into: pa.Schema

    def failure(self, data: pa.RecordBatch, error: BaseException) -> Exception:
        """The error to raise when the function raised."""
        return user_error(self.step, self.origin, _shown(data), error)

    def checked(self, batch: ColumnBatch, result: Any) -> ColumnBatch | None:
        """The result as a batch of the declared schema; None if it has no rows.

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
                "correct the function, or say with into= which columns it makes",
            )
        if not result.num_rows:
            return None
        if batch.timestamps is not None and result.num_rows != len(batch):
            raise self._bad(
                batch,
                f"returned {result.num_rows} records for {len(batch)}, so their event times are unknown",
                "call .event_time(...) behind map_batches, or filter with .filter(...)",
            )
        columns = [result.column(name) for name in self.into.names]
        return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=self.into), batch.timestamps)

    def _bad(self, batch: ColumnBatch, problem: str, fix: str) -> Exception:
        return bad_result(self.step, self.origin, _shown(batch.data), problem, fix)


class MapBatchesOperator(Operator):
    """Calls a function for each batch. How records are cut into batches is chance: it must not matter.

    A function that returns as many rows as it got must keep their order: event times follow it.
    """

    def __init__(self, user: BatchFunction) -> None:
        self._user = user

    def process(self, batch: Batch, input_index: int) -> None:
        if not len(batch):
            return
        given = column_batch(batch)
        try:
            result = self._user.function(given.data)
        except HeadgateError:
            raise
        except FAILURES as error:
            raise self._user.failure(given.data, error) from error
        if (checked := self._user.checked(given, result)) is not None:
            self.output.emit(checked)


class AsyncMapBatchesOperator(AsyncOperator):
    """The same for a coroutine function: one batch at a time."""

    def __init__(self, user: BatchFunction) -> None:
        self._user = user

    async def process_async(self, batch: Batch, input_index: int) -> None:
        if not len(batch):
            return
        given = column_batch(batch)
        try:
            result = await self._user.function(given.data)
        except HeadgateError:
            raise
        except FAILURES as error:
            if is_own_cancellation(error):
                raise
            raise self._user.failure(given.data, error) from error
        if (checked := self._user.checked(given, result)) is not None:
            self.output.emit(checked)


def _shown(data: pa.RecordBatch) -> str:
    return f"a batch of {data.num_rows}: {', '.join(data.schema.names)}"
