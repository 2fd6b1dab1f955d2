"""Lets a test declare how far event time has come, at the steps of the job that make watermarks.

The job's own operator stays as it is: its class gets a subclass in front, so that everything else it does
goes on. Its own watermarks and those of the test become one rising sequence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ..operators.base import Operator, OperatorContext, OperatorFactory, Output, TimerService
from ..operators.clock import Clock
from ..operators.elements import WATERMARK_MAX, WATERMARK_MIN, Batch
from .world import EventTimeStep, world_of

_SHARE: Final = 0.05
_SLACK_S: Final = 1e-6
"""The tolerance for sums of floats: a timer that is due this soon counts as due."""


@dataclass(slots=True, eq=False)
class _Timer:
    callback: Callable[[], None]
    due_s: float
    """The time at which the timer was requested to fire."""
    cancel: Callable[[], None]


class LazyTimers:
    """A timer service for one operator, on top of that of its subtask, which fires seldom in quiet times.

    A step that makes watermarks looks at the clock every 200 ms: 432,000 times in a day that a test lets
    pass, nearly always for nothing. So the longer it has been quiet, the longer a timer takes, up to a
    twentieth of the silence. Timers that were due by then are run at the end of each move of the clock, and
    as soon as something happens timers are exact again.
    """

    def __init__(self, timers: TimerService, clock: Clock) -> None:
        self._timers = timers
        self._clock = clock
        self._active_s = clock.monotonic()
        self._waiting: dict[_Timer, None] = {}

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` once after `delay_ms`, or later; returns a function that cancels it."""
        now_s = self._clock.monotonic()
        quiet_ms = 1000 * (now_s - self._active_s)
        timer = _Timer(callback, now_s + delay_ms / 1000, _nothing)
        self._start(timer, max(delay_ms, int(_SHARE * quiet_ms)))
        return partial(self._cancel, timer)

    def active(self) -> None:
        """Make timers exact from now on, as something has happened."""
        now_s = self._clock.monotonic()
        if now_s == self._active_s:
            return
        self._active_s = now_s
        for timer in list(self._waiting):
            timer.cancel()
            self._start(timer, max(0, round(1000 * (timer.due_s - now_s))))

    def catch_up(self) -> None:
        """Run the timers that are due by now."""
        now_s = self._clock.monotonic()
        for timer in [timer for timer in self._waiting if timer.due_s <= now_s + _SLACK_S]:
            timer.cancel()
            self._timers.call_later(0, partial(self._fire, timer))

    def _start(self, timer: _Timer, delay_ms: int) -> None:
        self._waiting[timer] = None
        timer.cancel = self._timers.call_later(delay_ms, partial(self._fire, timer))

    def _fire(self, timer: _Timer) -> None:
        if timer in self._waiting:
            del self._waiting[timer]
            timer.callback()

    def _cancel(self, timer: _Timer) -> None:
        timer.cancel()
        self._waiting.pop(timer, None)


def _nothing() -> None:
    """Cancel a timer that has not begun."""


class _RisingOutput:
    """An output in front of that of an operator. It passes on a watermark only if it is above all earlier
    ones.
    """

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
        """Send the test's watermark. An idle step becomes active for it, as its watermarks would be
        ignored.
        """
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
    """The base that is put in front of the class of an event-time operator."""

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
            # A due timer runs in the mailbox, as all code of an operator must.
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
    """Return True for a time that a test may declare: the least and the greatest belong to the engine."""
    return WATERMARK_MIN < timestamp < WATERMARK_MAX
