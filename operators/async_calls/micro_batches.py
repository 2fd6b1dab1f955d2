"""map_batches with `rows=` and a coroutine function: several batches in flight, while barriers pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from ...errors import HeadgateError
from ..base import OperatorContext
from ..elements import Batch, ColumnBatch
from ..functions.dead_letters import DeadLetters
from ..per_record.map_batches import BatchFunction, Division, divide_async
from ..per_record.micro_batches import RowBuffer
from ..rows import column_batch
from .call import Call
from .in_flight import CallSettings, InFlight
from .retry import ONCE
from .stored import InFlightState


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
