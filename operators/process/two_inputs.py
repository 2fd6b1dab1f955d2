"""Runs functions with two inputs: two keyed streams, or a keyed and a broadcast stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ...errors import HeadgateError
from ...state.snapshot import RestoredState
from ..elements import Batch
from ..functions.user_code import FAILURES, user_error
from ..per_record.base import pieces
from .attempts import Attempts
from .operator import ProcessOperator, whole_record


class CoProcessOperator(ProcessOperator):
    """Runs a `CoProcess`: each input has its method, all else is shared."""

    def process(self, batch: Batch, input_index: int) -> None:
        functions = (self._function.on_first, self._function.on_second)
        self._process_keyed(batch, self._step.inputs[input_index], functions[input_index])


class BroadcastProcessOperator(ProcessOperator):
    """Runs a `BroadcastProcess`: input 0 is keyed, input 1 is broadcast to all subtasks."""

    def process(self, batch: Batch, input_index: int) -> None:
        if input_index == 0:
            self._process_keyed(batch, self._step.inputs[0], self._function.on_record)
        else:
            self._process_broadcast(batch)

    def on_watermark(self, timestamp: int) -> None:
        self._subtask_context.watermark = max(self._progress.watermark, timestamp)
        super().on_watermark(timestamp)

    def restore(self, state: RestoredState) -> Awaitable[None]:
        waiting = super().restore(state)
        self._subtask_context.watermark = self._progress.watermark
        return waiting

    def _process_broadcast(self, batch: Batch) -> None:
        self._open_function()
        context, emitter, attempts = self._subtask_context, self._emitter, self._attempts
        for piece in pieces(batch):
            records = self._step.inputs[1].reader(piece)
            for place, (record, time) in enumerate(
                zip(records, self._times_of(piece), strict=True)
            ):
                context.timestamp = emitter.time = time
                if attempts is not None:
                    self._attempt_broadcast(attempts, piece, place, record, time)
                    continue
                made = self._call_on_broadcast(record)
                if made is not None:
                    emitter.add(record, made)
        self._flush()

    def _attempt_broadcast(
        self, attempts: Attempts, batch: Batch, place: int, record: Any, time: int | None
    ) -> None:
        """Handle a broadcast record under an error policy."""

        def call() -> list[Any]:
            self._writable = True
            try:
                made = self._function.on_broadcast(record, self._subtask_context)
                return attempts.check(self._emitter.listed(record, made))
            finally:
                self._writable = False

        results, error = attempts.call(call, record)
        if error is not None:
            attempts.give_up(whole_record(batch, place), None, time, error)
        elif results:
            self._emitter.add(record, results)

    def _call_on_broadcast(self, record: Any) -> Iterable[Any] | None:
        """Return the results for one record; a generator runs to its end here, so that it may write."""
        self._writable = True
        try:
            made = self._function.on_broadcast(record, self._subtask_context)
            return made if made is None or not hasattr(made, "__next__") else list(made)
        except HeadgateError:
            raise
        except FAILURES as error:
            raise user_error(self._user.step, self._user.origin, record, error) from error
        finally:
            self._writable = False

    def _for_each_key(self, state: Any, function: Callable[[Any, Any], None]) -> None:
        """Forbid changes of broadcast state, which must not depend on keys; see
        `BroadcastContext.for_each_key`."""
        if self._attempts is not None:
            # A failure in one subtask alone would let broadcast state differ between subtasks.
            self._attempts.undo.keep_always()
        before, self._writable = self._writable, False
        try:
            super()._for_each_key(state, function)
        finally:
            self._writable = before
