"""A sink that calls a function for each record."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ..errors import HeadgateError, UsageError
from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.functions.checks import check_takes, is_async
from ..operators.functions.life import check_life, has_life
from ..operators.functions.user_code import FAILURES, user_error
from ..operators.graph import Origin
from ..operators.origin import capture_origin
from ..operators.rows import to_rows
from ..operators.sink import Guarantee, GuaranteeLike, Sink, SinkWriter, parse_guarantee


class FunctionSink(Sink):
    """Calls `function(record)`."""

    def __init__(
        self, function: Callable[[Any], Any], guarantee: Guarantee, origin: Origin
    ) -> None:
        self.function = function
        self._origin = origin
        self.guarantee = guarantee

    def writer(self) -> SinkWriter:
        return FunctionWriter(self.function, self._origin)

    def describe(self) -> str:
        return f"function({getattr(self.function, '__name__', 'function')})"


class FunctionWriter(SinkWriter):
    """Calls the function in the subtask: a slow one slows the job down, and that is the backpressure."""

    def __init__(self, function: Callable[[Any], Any], origin: Origin) -> None:
        self._origin = origin
        self._has_life = has_life(function)
        self._function: Any = copy.deepcopy(function) if self._has_life else function

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._has_life and hasattr(self._function, "open"):
            self._function.open(context)

    def finish(self) -> None:
        if self._has_life and hasattr(self._function, "finish"):
            self._function.finish()

    def close(self) -> None:
        if self._has_life and hasattr(self._function, "close"):
            self._function.close()

    def write(self, batch: Batch) -> None:
        records = to_rows(batch.data) if isinstance(batch, ColumnBatch) else batch.records
        function = self._function
        done = 0
        try:
            for record in records:
                function(record)
                done += 1
        except HeadgateError:
            raise
        except FAILURES as error:
            step = self.context.operator_name
            raise user_error(step, self._origin, records[done], error) from error


def function_sink(
    function: Callable[[Any], Any], *, guarantee: GuaranteeLike = "at_least_once"
) -> FunctionSink:
    """Call `function(record)` for each record: with the object, or with a row that has the columns as
    attributes.

    The call should be idempotent: after a failure records since the last checkpoint come again. A function
    object may have `open(ctx)`, `finish()`, called at the end of the input, and `close()`; each subtask
    calls those of its own copy.

    Raises:
        UsageError: a coroutine function; its calls would never run. Or an `open` or `close` that cannot be
            called, or that is one.
    """
    if not callable(function):
        raise UsageError(f"function_sink takes a function, got `{type(function).__name__}`")
    if is_async(function):
        raise UsageError(
            "function_sink takes a plain function, not a coroutine function",
            fix="do the awaiting in an async map before the sink",
        )
    origin = capture_origin()
    check_takes(function, ("the record",), "function_sink", origin)
    if has_life(function):
        check_life(function, origin, may_await=False)
        told = [
            n for n in ("on_checkpoint_complete", "on_checkpoint_aborted") if hasattr(function, n)
        ]
        if told:
            raise UsageError(
                f"`{told[0]}` of a function_sink would never be called",
                fix="put a process function before the sink, or write a connector",
            )
    return FunctionSink(function, parse_guarantee(guarantee), origin)
