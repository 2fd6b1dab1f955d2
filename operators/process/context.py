"""The context of a process function: key, times, timers, side outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from ...errors import StateError
from ...state.keyed.timers import TimerTable
from ...state.keyed.undo import UndoTimers
from ..clock import Clock
from ..durations import Duration, parse_duration
from ..elements import WATERMARK_MAX, WATERMARK_MIN
from ..time_range import INSTANT_TEXT, is_instant
from .emitter import Emitter, SideOutput

K = TypeVar("K")
U = TypeVar("U")
State = TypeVar("State")

TimerClock: TypeAlias = Literal["event", "processing"]
Timers: TypeAlias = TimerTable | UndoTimers
END_REPEATS_MAX: Final = 10_000
"""How often one timer may set itself again after the end of the input."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that is due.

    Attributes:
        tag: as given when it was set; empty if none was.
        timestamp: when it was to fire, ms since 1970 UTC.
        clock: `event` or `processing`.
    """

    tag: str
    timestamp: int
    clock: TimerClock


class _Timers:
    """One clock of a context: one timer per key and tag. Without a table, timers raise `refusal`."""

    def __init__(self, context: Context[Any], table: Timers | None, refusal: StateError) -> None:
        self._context = context
        self._table = table
        self._refusal = refusal

    def at(self, when: datetime | int, *, tag: str = "") -> None:
        """Call `on_timer` with this key at a point in time; a pending timer of this tag is moved.

        Args:
            when: an aware datetime, or ms since 1970 UTC. A time in the past is due at once on the
                machine's clock, and with the next watermark in event time.
            tag: tells the timers of one key apart.
        """
        table = self._table_for_key()
        if type(tag) is not str:
            raise TypeError(f"the tag of a timer is a str, not {type(tag).__name__}")
        self._set(table, instant_ms(when), tag)

    def cancel(self, tag: str = "") -> bool:
        """Delete the timer of this key and tag; return False if there is none."""
        return self._table_for_key().cancel(self._context.key, tag)

    def _set(self, table: Timers, timestamp: int, tag: str) -> None:
        table.set(self._context.key, tag, timestamp)

    def _table_for_key(self) -> Timers:
        if self._table is None:
            raise self._refusal.with_traceback(None)  # one error object, raised for many records
        return self._table


class RepeatsAfterEnd:
    """Counts how often each timer was set after the end of the input.

    A timer that sets itself again for ever would keep the job from ending.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[Any, str], int] = {}

    def count(self, key: Any, tag: str, owner: str = "") -> None:
        """Count a timer that is set after the end of the input.

        Args:
            key: the key of the timer.
            tag: its tag.
            owner: what set the timer, for the error, such as `trigger=...`; empty for a process function.

        Raises:
            StateError: the timer was set more than `END_REPEATS_MAX` times.
        """
        which = (key, tag)
        count = self._times[which] = self._times.get(which, 0) + 1
        if count > END_REPEATS_MAX:
            raise StateError(
                f"a timer repeats for ever after the end of the input key=`{key!r}` tag=`{tag}` "
                f"{owner}times=`{count}`",
                fix="do not set it again once ctx.input_ended is true",
            )


class EventTimers(_Timers):
    """`ctx.event_time`: timers that are due when the watermark reaches them, in order of time."""

    def __init__(self, context: Context[Any], table: Timers | None, refusal: StateError) -> None:
        super().__init__(context, table, refusal)
        self._after_end = RepeatsAfterEnd()

    def _set(self, table: Timers, timestamp: int, tag: str) -> None:
        if self._context.input_ended:
            self._after_end.count(self._context.key, tag)
        table.set(self._context.key, tag, timestamp)


class ProcessingTimers(_Timers):
    """`ctx.processing_time`: timers on the machine's clock."""

    def __init__(
        self,
        context: Context[Any],
        table: Timers | None,
        refusal: StateError,
        clock: Clock,
        arm: Callable[[], None],
    ) -> None:
        super().__init__(context, table, refusal)
        self._clock = clock
        self._arm = arm

    @property
    def now(self) -> int:
        """The machine's time, ms since 1970 UTC."""
        return self._clock.now_ms()

    def after(self, delay: Duration, *, tag: str = "") -> None:
        """Call `on_timer` with this key after a delay such as `"30s"`; otherwise as `at`."""
        self.at(self.now + parse_duration(delay, "delay of a timer"), tag=tag)

    def _set(self, table: Timers, timestamp: int, tag: str) -> None:
        super()._set(table, timestamp, tag)
        self._arm()


class Context(Generic[K]):
    """The context of the current record or timer.

    Attributes:
        key: the key of the record or timer.
        timestamp: the event time of the record or event-time timer, ms since 1970 UTC; None for
            timers on the machine's clock, and for records of a stream without event time.
        watermark: how far event time has come, ms; far in the past before the first watermark.
        event_time: timers in event time: `at`, `cancel`.
        processing_time: the machine's clock: `now`, and timers on it: `at`, `after`, `cancel`.
    """

    __slots__ = (
        "_emitter", "_passed", "event_time", "key", "processing_time", "timestamp", "watermark",
    )  # fmt: skip

    key: K
    event_time: EventTimers
    processing_time: ProcessingTimers

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self.timestamp: int | None = None
        self.watermark: int = WATERMARK_MIN
        self._passed: int = WATERMARK_MIN  # by all keys; the current one may be further

    @property
    def input_ended(self) -> bool:
        """True once no more records can arrive: repeating timers must stop then."""
        return self.watermark == WATERMARK_MAX

    def emit(self, side: SideOutput[U], record: U) -> None:
        """Emit a record to a side output of this function, with the current event time."""
        self._emitter.emit(side, record)

    def _forget(self) -> None:
        """Drop the timers, which refer to this context and to their tables."""
        for name in ("event_time", "processing_time"):
            if hasattr(self, name):
                delattr(self, name)


class BroadcastContext(Context[None], Generic[K]):
    """The context of `on_broadcast` and `finish`, which have no key.

    `timestamp` and `watermark` are as in `Context`; there are no timers.
    """

    __slots__ = ("_visit",)

    def __init__(
        self, emitter: Emitter, visit: Callable[[Any, Callable[[Any, Any], None]], None]
    ) -> None:
        super().__init__(emitter)
        self.key = None
        self._visit = visit

    def for_each_key(self, state: State, function: Callable[[K, State], None]) -> None:
        """Call `function(key, state)` for each key of this subtask that has an entry in a keyed state.

        The order is unspecified. The function may read and write that state, and the other keyed
        states, of the key; not broadcast state.

        Args:
            state: such as `self.total`.
            function: called with the key, and the state set to that key.
        """
        self._visit(state, function)


def instant_ms(when: object) -> int:
    """Return a point in time as whole ms since 1970 UTC, rounded down.

    Raises:
        TypeError: neither an aware datetime nor an int.
        ValueError: it is outside the years 1 to 9999.
    """
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise TypeError(f"a timer needs a datetime with a time zone, got {when!r}")
        return (when - _EPOCH) // _MILLISECOND
    if isinstance(when, bool) or not isinstance(when, int | np.integer):
        raise TypeError(
            f"a timer needs an aware datetime or an int of milliseconds, not {type(when).__name__}"
        )
    if not is_instant(int(when)):
        raise ValueError(f"the time of a timer lies in {INSTANT_TEXT}, got {when} ms since 1970")
    return int(when)
