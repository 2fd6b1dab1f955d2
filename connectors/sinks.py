"""Sinks with no system behind them: one drops records, the other prints them."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from ..errors import UsageError
from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
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
