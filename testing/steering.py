"""Lets the test say how far event time has come, at the steps of the job that make watermarks.

The job's own operator stays as it is: its class gets a subclass in front, so that whatever else it does
goes on. Its own watermarks and those of the test become one rising sequence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from ..operators.base import Operator, OperatorContext, OperatorFactory, Output
from ..operators.elements import WATERMARK_MAX, WATERMARK_MIN, Batch
from .lazy_timers import LazyTimers
from .world import EventTimeStep, world_of


class _RisingOutput:
    """In front of an operator's output: passes a watermark on only if it is above all before."""

    def __init__(self, output: Output, active: Callable[[], None]) -> None:
        self._output = output
        self._active = active
        self._sent = WATERMARK_MIN
        self._idle = False

    def emit(self, batch: Batch) -> None:
        self._output.emit(batch)

    def emit_side(self, tag: str, batch: Batch) -> None:
        self._output.emit_side(tag, batch)

    def emit_watermark(self, timestamp: int) -> None:
        if timestamp > self._sent:
            self._sent = timestamp
            self._active()
            self._output.emit_watermark(timestamp)

    def emit_idle(self, idle: bool) -> None:
        self._idle = idle
        self._active()
        self._output.emit_idle(idle)

    def declare(self, timestamp: int) -> None:
        """Send the test's watermark; a step that is idle would not be listened to."""
        if timestamp <= self._sent:
            return
        if self._idle:
            self._output.emit_idle(False)
        self.emit_watermark(timestamp)
        if self._idle:
            self._output.emit_idle(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


class _Steered(Operator):
    """Goes in front of the class of an event-time operator."""

    _lazy: LazyTimers
    _steered_as: tuple[str, str]

    def open(self, context: OperatorContext) -> Awaitable[None] | None:
        token, step = self._steered_as
        timers = context.timers
        self._lazy = LazyTimers(timers, context.clock)
        self.output = rising = _RisingOutput(self.output, self._lazy.active)
        world = world_of(token)
        world.begin_attempt(context.attempt)

        def declare(timestamp: int) -> None:
            # A timer that is due runs in the mailbox, as everything of an operator must.
            timers.call_later(0, lambda: rising.declare(timestamp))

        steps = world.steps.setdefault(step, {})
        steps[context.subtask_index] = EventTimeStep(declare, self._lazy.catch_up)
        return super().open(replace(context, timers=self._lazy))

    def process(self, batch: Batch, input_index: int) -> None:
        self._lazy.active()
        super().process(batch, input_index)


@dataclass(frozen=True, slots=True)
class SteeredFactory:
    """Makes the operator of an event-time step, steered by the world with this token."""

    factory: OperatorFactory
    token: str
    step: str

    def __call__(self) -> Operator:
        operator = self.factory()
        kind = type(operator)
        operator.__class__ = type(kind.__name__, (_Steered, kind), {})
        operator._steered_as = (self.token, self.step)  # type: ignore[attr-defined]
        return operator


def is_declarable(timestamp: int) -> bool:
    """True for a time that a test may declare: the ends of time belong to the engine."""
    return WATERMARK_MIN < timestamp < WATERMARK_MAX
