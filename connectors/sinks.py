"""Sinks with no system behind them: one drops records, one prints them, one calls a function for each."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, TextIO

from ..errors import HeadgateError, UsageError
from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.functions.checks import check_takes, is_async
from ..operators.functions.life import check_life, has_life
from ..operators.functions.user_code import FAILURES, user_error
from ..operators.origin import Origin, capture_origin
from ..operators.rows import to_rows
from ..operators.sink import Guarantee, GuaranteeLike, Sink, SinkWriter, parse_guarantee


class BlackholeSink(Sink):
    """Takes records and drops them. A record that never appears cannot appear twice, so any guarantee
    holds.
    """

    guarantees = frozenset(Guarantee)

    def __init__(self, guarantee: Guarantee) -> None:
        self.guarantee = guarantee

    def writer(self) -> SinkWriter:
        return BlackholeWriter()

    def describe(self) -> str:
        return "blackhole()"


class BlackholeWriter(SinkWriter):
    """Writes nothing."""

    def write(self, batch: Batch) -> None:
        return None


def blackhole(*, guarantee: GuaranteeLike = "none") -> BlackholeSink:
    """Return a sink that drops all records. The operator's metrics still count them."""
    return BlackholeSink(parse_guarantee(guarantee))


_ELLIPSIS = "..."


class PrintSink(Sink):
    """Prints one line per record to standard output."""

    def __init__(self, width: int, guarantee: Guarantee) -> None:
        self.width = width
        self.guarantee = guarantee

    def writer(self) -> SinkWriter:
        return PrintWriter(self.width)

    def describe(self) -> str:
        return "print()"


class PrintWriter(SinkWriter):
    """Prints the records of one subtask."""

    def __init__(self, width: int, stream: TextIO | None = None) -> None:
        self._width = width
        self._stream = stream

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        # Lines name the subtask only if there are several, as in Flink: `2> ...`.
        self._prefix = f"{context.subtask_index + 1}> " if context.parallelism > 1 else ""

    def write(self, batch: Batch) -> None:
        lines = (self._line(text) for text in _texts(batch))
        # Looked up only now, as programs that capture output replace sys.stdout.
        stream = self._stream or sys.stdout
        stream.write("".join(lines))
        stream.flush()

    def _line(self, text: str) -> str:
        line = f"{self._prefix}{text}"
        if len(line) > self._width:
            line = f"{line[: self._width - len(_ELLIPSIS)]}{_ELLIPSIS}"
        return f"{line}\n"


def _texts(batch: Batch) -> list[str]:
    if not isinstance(batch, ColumnBatch):
        return [str(record) for record in batch.records]
    return [", ".join(_fields(row)) for row in batch.data.to_pylist()]


def _fields(row: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in row.items()]


def print_sink(*, width: int = 160, guarantee: GuaranteeLike = "none") -> PrintSink:
    """Return a sink that prints each record on a line of at most `width` characters.

    With parallelism above 1 a line begins with the number of the subtask: `2> a=1, b=x`.
    """
    if width < 20:
        raise UsageError(f"must be at least 20 width=`{width}`")
    return PrintSink(width, parse_guarantee(guarantee))


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
    """Calls the function in the subtask. A slow function slows the job down, which is the backpressure."""

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
    """Return a sink that calls `function(record)` with each object, or with each row, which has its
    columns as attributes.

    The call should be idempotent: after a failure records since the last checkpoint come again. A
    function object may have `open(ctx)`, `finish()`, which is called at the end of the input, and
    `close()`. Each subtask calls those of its own copy.

    Raises:
        UsageError: the function is a coroutine function, whose calls would never run; or its `open` or
            `close` is one, or cannot be called.
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
