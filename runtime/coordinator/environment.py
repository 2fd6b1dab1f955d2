"""The environment of a coordinator: what it works with from its start to its end, in every attempt."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import Any, final

from ...operators.clock import Clock
from ..control.job_client import WARNINGS, EventListener, PublishedEvent
from ..observe.spans import NoSpans, Spans
from ..options.registry import Options
from ..plan import JobSpec
from ..storage.base import AddressOpener, CheckpointStore
from ..storage.joblog_store import JobLog
from .events import JobEvent

_log = logging.getLogger("headgate.job")


@final
class SteadyClock:
    """A wall clock that nobody can set: the time at which it was made, plus the time since then.

    Checkpoints and restarts depend on durations. If the machine's clock were set back by an hour,
    the next checkpoint would otherwise come an hour late.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.now_ms() - 1000 * clock.monotonic()

    def now_ms(self) -> int:
        return round(self._began_ms + 1000 * self._clock.monotonic())

    def monotonic(self) -> float:
        return self._clock.monotonic()


@final
@dataclass(slots=True, kw_only=True)
class JobEnvironment:
    """The job as it was submitted, its log and storage, the clock, and the ways in and out."""

    spec: JobSpec
    """The job as it was submitted."""
    options: Options
    clock: Clock
    events: asyncio.Queue[JobEvent]
    """The queue of all that the states of the job handle."""
    open_at: AddressOpener
    """Opens the storage at any address, for savepoints."""
    log: JobLog | None = None
    """The job log; None: the job has no checkpoint storage."""
    store: CheckpointStore | None = None
    """The checkpoint storage, if the job has one."""
    checkpoint_directory: str = ""
    """The address of the checkpoints, without credentials; empty: the job keeps none."""
    metrics_url: str = ""
    """The Prometheus endpoint of this process, if it has one."""
    spans: Spans = field(default_factory=NoSpans)
    """Takes the spans of checkpoints, restores and starts."""
    listeners: list[EventListener] = field(default_factory=list)
    """They get each event that clients see."""
    attempt: int = 0
    """The number of the present attempt, which log records carry."""
    generation: int = field(init=False)
    """The generation that this coordinator leads; 0 without a job log."""
    steady_clock: SteadyClock = field(init=False)
    """Measures durations: it does not change when the machine's clock is set."""

    def __post_init__(self) -> None:
        self.generation = 0 if self.log is None else self.log.generation
        self.steady_clock = SteadyClock(self.clock)

    @property
    def keeps_checkpoints(self) -> bool:
        """False for a job without checkpoint storage: it can take savepoints only."""
        return self.log is not None

    def publish(self, kind: str, text: str, **body: Any) -> None:
        """Log an event and pass it to all listeners."""
        level = logging.WARNING if kind in WARNINGS else logging.INFO
        if kind != "progress":
            fields = {"job": self.spec.name, "attempt": self.attempt or None}
            _log.log(level, "%s", text, extra={**fields, "detail": body.get("detail", "")})
        event = PublishedEvent(kind=kind, text=text, body=json.dumps(body).encode())
        for listener in list(self.listeners):
            listener(event)
