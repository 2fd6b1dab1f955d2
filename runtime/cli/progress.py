"""How a run is shown where no terminal is: one line per event, and one of progress now and then."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..control.events import WARNINGS, Event
from ..observe.logs import FORMAT_VARIABLE
from .console import say
from .rates import Progress

PROGRESS_EVERY_S = 5.0


class Reporter(Protocol):
    """Shows a run. Used as a context manager around it."""

    def __enter__(self) -> Reporter: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def progress(self) -> Progress:
        """The newest known state."""
        ...

    def event(self, event: Event) -> None:
        """Something happened."""
        ...

    def note(self, text: str) -> None:
        """The command itself has something to say."""
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
        self.progress = Progress()
        self._job = job
        self._write = write
        wanted = os.environ.get(FORMAT_VARIABLE) == "json"
        self._json = wanted if as_json is None else as_json
        self._next_line = 0.0

    def __enter__(self) -> LineReporter:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, event: Event) -> None:
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


def make_reporter(job: str, progress_every_s: float | None = None) -> Reporter:
    """A live table on a terminal; lines otherwise, and those of progress in such intervals."""
    as_json = os.environ.get(FORMAT_VARIABLE) == "json"
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not as_json:
        from .live import LiveReporter

        return LiveReporter(job)
    return LineReporter(job, every_s=progress_every_s or PROGRESS_EVERY_S)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
