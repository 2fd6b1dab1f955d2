"""Limits of any source: a rate, for demos, replays and to protect downstream systems, and an end when no
records come any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import UsageError
from ..operators.base import OperatorContext
from ..operators.durations import Duration, format_duration, parse_duration
from ..operators.elements import Batch
from ..operators.source import Record, Source, SourceReader
from .arguments import check_count, check_rate
from .forwarding import ForwardingReader, ForwardingSource

_CATCH_UP_S = 1.0
"""After a delay a source may run ahead of its rate by this much, so that jitter costs no records."""


def throttle(source: Source[Record], rate: float) -> Source[Record]:
    """Return `source` slowed down to at most `rate` records/s over all its subtasks, including rejected
    records.

    Whole batches pass, so the rate holds on average and not within a batch. After a stall, at most the
    records of one second follow at once.

    Raises:
        UsageError: the rate is not a positive number.
    """
    if not isinstance(source, Source):
        raise UsageError(f"throttle takes a source, got `{type(source).__name__}`")
    check_rate(rate, fix="leave throttle out for no limit")
    return _Throttled(source, rate)


class _Throttled(ForwardingSource):
    def __init__(self, source: Source, rate: float) -> None:
        super().__init__(source)
        self._rate = rate

    def around(self, source: Source) -> Source:
        return _Throttled(source, self._rate)

    def reader(self) -> SourceReader:
        return _ThrottledReader(self._source.reader(), self._rate)

    def describe(self) -> str:
        return f"{self._source.describe()} at {self._rate:,.0f} records/s"


class _ThrottledReader(ForwardingReader):
    def __init__(self, reader: SourceReader, rate: float) -> None:
        super().__init__(reader)
        self._rate = rate
        self._next_s = 0.0
        """The time by the monotonic clock at which the next record may pass."""

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        self._rate /= context.parallelism
        self._next_s = context.clock.monotonic()

        def count_and_reject(batch: Batch) -> None:
            self._let_through(len(batch))
            reject(batch)

        super().open(context, count_and_reject)

    def _due_s(self) -> float:
        """Return the seconds until the next record may pass, which is now if they are not above 0."""
        return self._next_s - self.context.clock.monotonic()

    def _let_through(self, rows: int) -> None:
        earliest = self.context.clock.monotonic() - _CATCH_UP_S
        self._next_s = max(self._next_s, earliest) + rows / self._rate

    def poll(self) -> Batch | None:
        if self._due_s() > 0:
            self.held_back = True
            return None
        batch = super().poll()
        if batch is not None:
            self._let_through(len(batch))
        return batch

    async def wait(self) -> None:
        due_s = self._due_s()
        if due_s > 0:
            await asyncio.sleep(due_s)
        else:
            await super().wait()


def stop_after_idle(source: Source[Record], idle: Duration) -> Source[Record]:
    """Return `source` with an end: it ends when no record has come for `idle`, such as "5m".

    All subtasks of the source end together, as soon as each of them has had nothing to read for that
    long. The time counts from the start of the job, and again after a failure. It does not count while
    records are held back: by `throttle`, by back pressure, or because splits wait for others.

    Raises:
        UsageError: `idle` is not a duration above 0.
    """
    if not isinstance(source, Source):
        raise UsageError(f"stop_after_idle takes a source, got `{type(source).__name__}`")
    idle_ms = parse_duration(idle, "idle")
    check_count("idle", idle_ms, 1)
    return _StoppedAfterIdle(source, idle_ms)


class _StoppedAfterIdle(ForwardingSource):
    def __init__(self, source: Source, idle_ms: int) -> None:
        super().__init__(source)
        self.at_rest = source.at_rest
        self.stop_after_idle_ms = self._idle_ms = idle_ms

    def around(self, source: Source) -> Source:
        return _StoppedAfterIdle(source, self._idle_ms)

    def reader(self) -> SourceReader:
        return self._source.reader()

    def describe(self) -> str:
        return f"{self._source.describe()} until idle for {format_duration(self._idle_ms)}"
