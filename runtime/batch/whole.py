"""Event time when all records exist: nothing is late, since watermarks are not heuristic."""

from __future__ import annotations

from dataclasses import dataclass

from ...operators.base import Output
from ...operators.elements import WATERMARK_MAX, Batch


@dataclass(slots=True)
class OnlyTheEnd(Output):
    """The output of an event-time step, of whose watermarks only the last one counts.

    Where event time matters, records have been sorted by it, and the watermarks are derived from
    that order.
    """

    output: Output

    def emit(self, batch: Batch) -> None:
        self.output.emit(batch)

    def emit_side(self, tag: str, batch: Batch) -> None:
        self.output.emit_side(tag, batch)

    def emit_watermark(self, timestamp: int) -> None:
        if timestamp == WATERMARK_MAX:
            self.output.emit_watermark(timestamp)

    def emit_idle(self, idle: bool) -> None:
        """Ignore idleness: a source that is read to its end is never idle."""
