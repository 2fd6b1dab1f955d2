"""An event-time step by itself: splits, clock and timers are moved by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.operators.base import OperatorContext
from headgate.operators.elements import ObjectBatch
from headgate.operators.event_time import FunctionTimes
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.rows import RowReader
from headgate.operators.splits import SourceSplits
from headgate.operators.watermarks.operator import EventTimeOperator
from headgate.operators.watermarks.strategy import (
    WatermarkAlignmentGroup,
    WatermarkSettings,
    WatermarkStrategy,
    bounded_by,
)
from headgate.state.snapshot import RestoredState
from headgate.tests.support.operators import ManualClock, in_place, operator_context

ORIGIN = Origin("job.py:5")


class Step:
    """One event-time step in one subtask of a source; records are their own event times, in ms."""

    def __init__(
        self,
        strategy: WatermarkStrategy | None = None,
        options: dict[str, str] | None = None,
        of: str = "",
        subtask: tuple[int, int] = (0, 1),
        at_rest: bool = False,
        window_ends_ms: int = 0,
        **settings: Any,
    ) -> None:
        self._window_ends_ms = window_ends_ms
        self.subtask = subtask
        """Its index, and the parallelism."""
        self.clock = ManualClock()
        self.splits = SourceSplits()
        self.splits.behind_source = True
        self.splits.at_rest = at_rest
        self.splits.report = self._report
        self.events: list[tuple[str, Any]] = []
        self.reports: list[int | None] = []
        self.counts: dict[str, int] = {}
        self.held_s = 0.0
        user = UserFunction(lambda x: x, "event_time", ORIGIN, RowReader(None, None, lambda x: x))
        chosen = WatermarkSettings(strategy or bounded_by(0), **settings)
        self.operator = EventTimeOperator(FunctionTimes(user), chosen, ORIGIN, of)
        self.operator.output = self  # type: ignore[assignment]  # it has all four methods
        self.operator.open(self._context(options or {}))

    def _context(self, options: dict[str, str]) -> OperatorContext:
        return operator_context(
            *self.subtask,
            128,
            operator_name="times",
            clock=self.clock,
            timers=self.clock,
            metrics=self,
            run_in_thread=in_place,
            options=options,
            held_s=lambda: self.held_s,
            splits=self.splits,
            window_ends_ms=self._window_ends_ms,
        )

    # metrics

    def counter(self, name: str) -> Any:
        def inc(amount: int = 1) -> None:
            self.counts[name] = self.counts.get(name, 0) + amount

        return SimpleNamespace(inc=inc)

    def gauge(self, name: str, read: Callable[[], float], labels: Any = None) -> None:
        pass

    # output

    def emit(self, batch: ObjectBatch) -> None:
        self.events.append(("records", list(batch.records)))

    def emit_side(self, tag: str, batch: ObjectBatch) -> None:
        raise AssertionError("event_time has no side output")

    def emit_watermark(self, timestamp: int) -> None:
        self.events.append(("watermark", timestamp))

    def emit_idle(self, idle: bool) -> None:
        self.events.append(("idle", idle))

    def _report(self, step: str, group: str, watermark: int | None) -> None:
        self.reports.append(watermark)

    # the test's hands

    def read(self, split: str, *times: int, last: bool = False) -> Step:
        """A batch of a split, as a source's subtask handles it."""
        if split:
            self.splits.reading(split)
        if last:
            self.splits.ended(split)
        if times:
            self.operator.process(ObjectBatch(list(times)), 0)
        self.splits.batch_done()
        return self

    def restored_from(self, before: Step) -> Step:
        """Take over what another step had at a checkpoint of this moment."""
        items = before.operator.snapshot(1).items["reached"].items  # type: ignore[union-attr]
        self.operator.restore(RestoredState(items={"reached": items}))
        return self

    def wait(self, ms: int) -> Step:
        self.clock.advance(ms)
        return self

    @property
    def watermarks(self) -> list[int]:
        return [value for kind, value in self.events if kind == "watermark"]

    @property
    def signals(self) -> list[tuple[str, Any]]:
        return [event for event in self.events if event[0] != "records"]


@pytest.fixture(scope="session")
def step() -> type[Step]:
    return Step


@pytest.fixture(scope="session")
def aligned() -> Callable[..., Step]:
    """A step that belongs to group `g`."""

    def make(drift_ms: int = 100, **settings: Any) -> Step:
        return Step(
            idle_after_ms=5_000, alignment=WatermarkAlignmentGroup("g", drift_ms, 1_000), **settings
        )

    return make
