"""The progress of a run: rates, lag and checkpoints from the coordinator's events, and lines about them.

`LineReporter` writes one line per event where there is no terminal, and one of progress now and then.
`live.py` has the table for terminals.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from ...operators.durations import format_duration
from ..control.job_client import WARNINGS, PublishedEvent
from ..observe.logs import FORMAT_VARIABLE
from .console import say

PROGRESS_EVERY_S = 5.0
WINDOW = 5
"""Rates are taken over this many announcements (seconds): single ones jitter."""
WATERMARK_BOUND = 2**62
"""Beyond it a watermark says that there was no event yet, or that there will be no more."""
LAG_MAX_MS = 86_400_000
"""Event time further behind the clock is that of historical data: how far it is says more than its lag."""
AHEAD_MAX_MS = 60_000
"""Event time may be so far ahead of this machine's clock, and still count as the present."""


class Reporter(Protocol):
    """Shows a run. Used as a context manager around it."""

    def __enter__(self) -> Reporter: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def progress(self) -> RunProgress:
        """The newest known state."""
        ...

    def event(self, event: PublishedEvent) -> None:
        """Show an event."""
        ...

    def note(self, text: str) -> None:
        """Show a line of the command itself."""
        ...


class LineReporter:
    """Lines with time stamps on stderr; JSON objects if HEADGATE_LOG_FORMAT says so."""

    def __init__(
        self,
        job: str,
        *,
        write: Callable[[str], None] = say,
        as_json: bool | None = None,
        every_s: float = PROGRESS_EVERY_S,
    ) -> None:
        self._every_s = every_s
        self.progress = RunProgress()
        self._job = job
        self._write = write
        wanted = os.environ.get(FORMAT_VARIABLE) == "json"
        self._json = wanted if as_json is None else as_json
        self._next_line = 0.0

    def __enter__(self) -> LineReporter:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, event: PublishedEvent) -> None:
        """Write the event; of progress only what is due."""
        body = json.loads(event.body)
        if event.kind == "ended":
            return
        if event.kind != "progress":
            self._line(event.kind, event.text, body)
            return
        now = time.monotonic()
        self.progress.update(body, _now_ms(), now)
        if self._next_line == 0.0:
            self._next_line = now + self._every_s
        elif now >= self._next_line and self.progress.status == "RUNNING":
            self._next_line = now + self._every_s
            self._line("progress", self.progress.line(_now_ms()), body)
            for sentence in self.progress.backpressure:
                self._line("backpressure", sentence, None)

    def note(self, text: str) -> None:
        """Write a line of the command's own."""
        self._line("note", text, None)

    def _line(self, kind: str, text: str, body: Any) -> None:
        if not self._json:
            self._write(f"{time.strftime('%H:%M:%S')} {text}")
            return
        line = {
            "time_ms": _now_ms(),
            "level": "WARNING" if kind in WARNINGS else "INFO",
            "logger": "headgate.cli",
            "message": text,
            "job": self._job,
            "event": kind,
        }
        self._write(json.dumps({**line, **({"body": body} if body else {})}))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class VertexView:
    """One row of the progress table. Times are ms per second."""

    name: str
    parallelism: int
    records_in: int
    records_out: int
    in_per_second: float
    out_per_second: float
    busy: int
    full: int
    idle: int
    backpressured: int
    lag_ms: int | None
    """The lag of event time behind the clock; None if it is not known, or not near the clock."""
    event_time_ms: int | None
    """The event time that was reached, ms since 1970; None if it is not known."""

    @property
    def time_text(self) -> str:
        """The lag if event time is near the clock, else the event time reached (UTC)."""
        if self.lag_ms is not None:
            return short(self.lag_ms)
        return "-" if self.event_time_ms is None else f"at {_minute(self.event_time_ms)}"


@dataclass(slots=True)
class RunProgress:
    """The known state of a run. Feed it with `update`."""

    status: str = "INITIALIZING"
    attempt: int = 0
    restarts: int = 0
    checkpoint: int = 0
    checkpoint_ms: int = 0
    checkpoint_at_ms: int = 0
    read: int = 0
    written: int = 0
    vertices: list[VertexView] = field(default_factory=list)
    backpressure: list[str] = field(default_factory=list)
    """A sentence per cause."""
    _samples: deque[tuple[float, list[Mapping[str, Any]]]] = field(
        default_factory=lambda: deque(maxlen=WINDOW + 1)
    )

    def update(self, body: Mapping[str, Any], now_ms: int, monotonic: float) -> None:
        """Take in the body of a `progress` event."""
        if body["attempt"] != self.attempt:
            self._samples.clear()  # counters start over
        self.attempt = body["attempt"]
        self.status = body["status"]
        self.restarts = body["restarts"]
        self.checkpoint = body["last_checkpoint"]
        self.checkpoint_ms = body["last_checkpoint_ms"]
        self.checkpoint_at_ms = body["last_checkpoint_at_ms"]
        self.backpressure = [each["sentence"] for each in body["backpressure"]]
        vertices = body["vertices"]
        self.read = sum(vertex["records_read"] for vertex in vertices)
        self.written = sum(vertex["records_written"] for vertex in vertices)
        self._samples.append((monotonic, vertices))
        before, then = self._samples[0]
        elapsed = monotonic - before
        self.vertices = [
            _view(vertex, old, elapsed, now_ms) for vertex, old in zip(vertices, then, strict=True)
        ]

    @property
    def read_per_second(self) -> float:
        """Records read per second, all sources together."""
        return self._rate("records_read")

    @property
    def written_per_second(self) -> float:
        """Records written per second, all sinks together."""
        return self._rate("records_written")

    def _rate(self, counter: str) -> float:
        if len(self._samples) < 2:
            return 0.0
        (before, then), (after, now) = self._samples[0], self._samples[-1]
        grown = sum(v[counter] for v in now) - sum(v[counter] for v in then)
        return grown / (after - before) if after > before else 0.0

    @property
    def lag_ms(self) -> int | None:
        """The largest lag of any vertex."""
        return max((v.lag_ms for v in self.vertices if v.lag_ms is not None), default=None)

    @property
    def slowest(self) -> VertexView | None:
        """The vertex whose event time is least; None if none is known."""
        known = [vertex for vertex in self.vertices if vertex.event_time_ms is not None]
        return min(known, key=lambda vertex: vertex.event_time_ms or 0, default=None)

    @property
    def busiest(self) -> VertexView | None:
        """The vertex with the least time to spare."""
        return max(self.vertices, key=lambda vertex: vertex.busy, default=None)

    def line(self, now_ms: int) -> str:
        """The state of the run in one line."""
        parts = [
            f"read {self.read:,} ({self.read_per_second:,.0f}/s)",
            f"wrote {self.written:,} ({self.written_per_second:,.0f}/s)",
        ]
        busiest = self.busiest
        if busiest is not None:
            parts.append(f"busy {busiest.busy / 10:.0f}% in {busiest.name}")
            full = max(self.vertices, key=lambda vertex: vertex.full)
            if full.full:
                parts.append(f"full {full.full / 10:.0f}% in {full.name}")
            pressed = max(self.vertices, key=lambda vertex: vertex.backpressured)
            if pressed.backpressured:
                parts.append(f"backpressured {pressed.backpressured / 10:.0f}% in {pressed.name}")
        slowest = self.slowest
        if slowest is not None:
            what = "event time" if slowest.lag_ms is None else "lag"
            parts.append(f"{what} {slowest.time_text}")
        if self.checkpoint:
            age = short(max(0, now_ms - self.checkpoint_at_ms))
            parts.append(f"checkpoint {self.checkpoint} ({self.checkpoint_ms} ms, {age} ago)")
        return ", ".join(parts)


def _view(
    vertex: Mapping[str, Any], old: Mapping[str, Any], elapsed: float, now_ms: int
) -> VertexView:
    def rate(*counters: str) -> float:
        grown = sum(vertex[counter] - old[counter] for counter in counters)
        return grown / elapsed if elapsed > 0 else 0.0

    watermark = vertex["watermark"]
    known = watermark is not None and abs(watermark) < WATERMARK_BOUND
    near = known and -AHEAD_MAX_MS <= now_ms - watermark <= LAG_MAX_MS
    return VertexView(
        name=vertex["name"],
        parallelism=vertex["parallelism"],
        records_in=vertex["records_in"],
        records_out=vertex["records_out"] + vertex["records_written"],
        in_per_second=rate("records_in"),
        out_per_second=rate("records_out", "records_written"),
        busy=vertex["busy"],
        full=vertex["full"],
        idle=vertex["idle"],
        backpressured=vertex["backpressured"],
        lag_ms=max(0, now_ms - watermark) if near else None,
        event_time_ms=watermark if known else None,
    )


def _minute(ms: int) -> str:
    """A point in event time, in UTC, to the minute."""
    try:
        moment = datetime(1970, 1, 1) + timedelta(milliseconds=ms)
    except OverflowError:
        return f"{ms} ms"
    return moment.isoformat(sep=" ", timespec="minutes")


def attempt_of(number: int) -> int:
    """Return an attempt as people count it: the upper part of its number is the coordinator's generation.

    `operators/base.py` has the same bound, but loads Arrow, which a command does not need.
    """
    return number % 65_536


def short(milliseconds: int) -> str:
    """A duration to glance at: its two largest units, and no milliseconds from a second on."""
    rounded = milliseconds if milliseconds < 1000 else milliseconds // 1000 * 1000
    return " ".join(format_duration(rounded).split()[:2])
