"""The event-time step in one subtask: gives records their times, and sends watermarks.

**Its progress at a checkpoint.** A barrier may overtake the last watermark, or the watermark may be due
only after the barrier. If no further record comes for a while, it would never be sent again, and windows
would stay open. So each subtask records the watermark it announced, and those of its splits. It is only a
hint: a step that has none, or cannot be sure that it is its own, waits for records as if it had just
begun, and a hint that no step wants is dropped. A step that follows the clock while its input is silent
also stores how far it had come, in order to continue from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

import msgspec
import numpy as np

from ...errors import PlanError
from ...state.snapshot import HINT, ItemsCut, RestoredState, StateInfo, StateSnapshot, state_info
from ..base import Operator, OperatorContext
from ..durations import parse_duration
from ..elements import WATERMARK_MAX, WATERMARK_MIN, Batch, ColumnBatch, ObjectBatch, Timestamps
from ..event_time import EventTimes
from ..functions.dead_letters import FAIL, DeadLetters, OnError
from ..origin import Origin
from ..splits import WHOLE, History
from .generators import guarded
from .split_watermarks import SplitWatermarks
from .strategy import WatermarkAlignmentGroup, WatermarkSettings

INTERVAL_OPTION: Final = "pipeline.auto-watermark-interval"
INTERVAL_DEFAULT_MS: Final = 200
ROWS_PER_WATERMARK: Final = 65_536
"""The most rows of a subtask between two watermarks.

For data at rest it is exact: a watermark follows this many rows, wherever a batch ends, and the end
of a split, and is sent nowhere else.
"""
LOOKS_PER_INTERVAL: Final = 10
"""How often in an interval it is looked, at most, whether a window behind the step is due."""
BEHIND_CLOCK: Final = "records_behind_clock"
ANNOUNCED: Final = "reached"
"""The state with the records of `Announced`."""
CLOCK: Final = "watermark"
"""The state of steps that follow the clock."""


@final
class EventTimeStatus(NamedTuple):
    """The progress of a step in one subtask, for monitoring.

    Attributes:
        watermark: the last one sent.
        idle: the subtask is idle.
        held_ms: for how long the watermark has not moved.
        split: the split that holds it back; empty if the reader does not report splits, or none
            does.
        queued: that split is in the queue of the reader.
        splits: the number of splits, including the next three.
        idle_splits: the number of idle ones.
        queued_splits: the number of those that the reader has not reached.
        paused_splits: the number of those that wait for their alignment group.
    """

    watermark: int
    idle: bool
    held_ms: int
    split: str
    queued: bool
    splits: int
    idle_splits: int
    queued_splits: int
    paused_splits: int


class EventTimeOperator(Operator):
    """Sets event times and sends watermarks: the least of those of the subtask's splits.

    What generators saw is not state: after a restore they start afresh, which only makes the
    watermark late, never wrong. The progress of splits and subtask is recorded, and announced
    again, as the text above says. A step that follows the clock restores its progress to continue from
    there without records. Watermarks from upstream are swallowed, except the last one.
    """

    def __init__(
        self,
        times: EventTimes,
        settings: WatermarkSettings,
        origin: Origin = Origin("<unknown>"),
        of: str = "",
        on_error: OnError = FAIL,
    ) -> None:
        """Create the operator; `of` is the input of the step, where its name alone does not identify it."""
        self._times = times
        self._on_error = on_error
        self._of = of
        self._floor = Floor()
        self._settings = settings
        self._origin = origin
        self._idle_after_s = _seconds(settings.idle_after_ms)
        self._close_after_s = _seconds(settings.close_after_ms)
        self._sent = WATERMARK_MIN
        self._earned = WATERMARK_MIN
        """The highest watermark that followed from records, not from the clock."""
        self._restored = ClockState()
        self._limit = WATERMARK_MAX
        self._rows = 0
        self._looked_s = -math.inf
        """When it was last looked whether a window is due."""
        self._busy_s = 0.0
        self._idle = False
        self._ended = False
        self._cancels: dict[str, Callable[[], None]] = {}

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        given = context.options.get(INTERVAL_OPTION)
        self._interval_ms = (
            INTERVAL_DEFAULT_MS if given is None else parse_duration(given, INTERVAL_OPTION)
        )
        self._active_at = self._risen_at = self._awake_s()
        make = guarded(self._settings.strategy.make, context.operator_name, self._origin)
        self._split_watermarks = SplitWatermarks(
            make, self._active_at, self._settings.wait_for_queued
        )
        self._lag_ms = math.nan
        context.metrics.gauge("emit_event_time_lag_seconds", lambda: self._lag_ms / 1_000)
        context.metrics.gauge("watermark_lag_seconds", lambda: self._watermark_lag() / 1_000)
        context.metrics.gauge("watermark_held_seconds", lambda: self._held_ms() / 1_000)
        self._behind_clock = context.metrics.counter(BEHIND_CLOCK)
        if self._on_error.then != "fail":
            self._letters = DeadLetters(context.operator_name, self._origin, self._on_error)
            self._letters.open(context, self.output)
        context.splits.listen(self)
        self._arm()
        self._by_rows = self._interval_ms > 0 and context.splits.at_rest
        self._by_rows = self._by_rows and self._settings.alignment is None
        self._window_ends_ms = 0 if self._by_rows else context.window_ends_ms
        if self._settings.wait_for_queued and not self._settings.waits_by_default:
            self._check_source("it cannot wait for queued splits")
        if (alignment := self._settings.alignment) is not None:
            self._check_source(f"it cannot be aligned group=`{alignment.group}`")
            self._report(alignment)

    def _check_source(self, what_fails: str) -> None:
        if not self.context.splits.behind_source:
            raise PlanError(
                f"`{self.context.operator_name}` does not run with a source: {what_fails}",
                where=str(self._origin),
                fix="put event_time after the source, at its parallelism, without key_by or "
                "rebalance, disable_chaining or start_new_chain between them",
            )

    # -- splits -------------------------------------------------------------------------------------

    def split_opened(self, split: str, queued: bool) -> None:
        """Add a split of the reader."""
        if self._settings.per_split:
            self._split_watermarks.open(split, queued, self._awake_s())

    def split_ended(self, split: str) -> None:
        """End a split, which may have been the slowest."""
        if self._settings.per_split:
            self._split_watermarks.end(split)
            self._pause_splits()
            if self._by_rows:
                self._send_reached()
                if (
                    self._split_watermarks.none_is_read
                ):  # so that the next one does not depend on its neighbours
                    self._rows = 0

    # -- records ------------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if not self._by_rows:
            self._take(batch)
            return
        offset = 0
        while offset < len(batch):
            room = ROWS_PER_WATERMARK - self._rows
            fits = offset == 0 and len(batch) <= room
            self._take(batch if fits else batch.slice(offset, room))
            offset += room

    def _take(self, batch: Batch) -> None:
        if not len(batch):
            return
        batch, times = self._timed(batch)
        began_s = self.context.clock.monotonic()
        self._set_idle(False)
        if not len(batch):
            self._active_at = self._awake_s()
            return
        split = self.context.splits.current if self._settings.per_split else WHOLE
        latest = int(times.max())
        at_once = self._split_watermarks.observe(split, times, latest)
        self._lag_ms = self.context.clock.now_ms() - latest
        if self._sent > self._earned:
            behind = (times <= self._sent) & (times > self._earned)
            self._behind_clock.inc(int(np.count_nonzero(behind)))
        if isinstance(batch, ColumnBatch):
            self.output.emit(ColumnBatch(batch.data, times, batch.positions))
        else:
            self.output.emit(ObjectBatch(batch.records, times, batch.positions))
        # Splits that wait while the rest of the chain works are not silent.
        self._busy_s += self.context.clock.monotonic() - began_s
        self._active_at = self._awake_s()
        self._split_watermarks.mark_active(split, self._active_at)
        self._rows += len(batch)
        if self._interval_ms == 0 or self._rows >= ROWS_PER_WATERMARK:
            self._send_watermark()
        elif at_once:
            self._send_reached()
        elif self._window_ends_ms and self._is_window_due(latest, began_s):
            self._send_watermark()

    def _is_window_due(self, latest: int, now_s: float) -> bool:
        """Return True if the watermark that a batch allows would fire windows, which need not wait then.

        Args:
            latest: the greatest event time of the batch, which no watermark exceeds.
            now_s: the time of the clock.
        """
        last_end = self._sent + 1 - (self._sent + 1) % self._window_ends_ms
        if latest + 1 < last_end + self._window_ends_ms:
            return False
        if now_s - self._looked_s < self._interval_ms / 1_000 / LOOKS_PER_INTERVAL:
            return False
        self._looked_s = now_s
        self._split_watermarks.advance()
        return self._split_watermarks.reached + 1 >= last_end + self._window_ends_ms

    def _timed(self, batch: Batch) -> tuple[Batch, Timestamps]:
        """Return the records that have an event time, with their times; the policy handles others."""
        if self._on_error.then == "fail":
            return batch, self._times(batch)
        times, failures = self._times.read(batch, len(batch))
        if not failures:
            return batch, times
        self._letters.take(batch.take(np.array(list(failures))), list(failures.values()))
        kept = np.setdiff1d(np.arange(len(batch)), np.array(list(failures)))
        return batch.take(kept), times[kept]

    def on_watermark(self, timestamp: int) -> None:
        """Swallow watermarks from upstream, except the last one."""
        if timestamp == WATERMARK_MAX:
            self._stop()
            self._emit_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        """Go idle at once when upstream has no active input, as it cannot bring records."""
        self._active_at = self._awake_s()
        self._set_idle(idle)

    def close(self) -> None:
        self._stop()

    # -- the clock ----------------------------------------------------------------------------------

    def _arm(self) -> None:
        # Without an interval watermarks need no timer, but idleness still does.
        silences = (self._settings.idle_after_ms, self._settings.close_after_ms)
        shortest_ms = min((max(1, ms) for ms in silences if ms is not None), default=0)
        delay_ms = self._interval_ms or shortest_ms
        if delay_ms and not self._ended:
            self._cancels["tick"] = self.context.timers.call_later(delay_ms, self._tick)

    def _tick(self) -> None:
        if not self._by_rows:
            self._send_watermark()
        splits, now_s = self.context.splits, self._awake_s()
        in_backlog = splits.history is History.BEING_READ
        if splits.paused or in_backlog:
            self._active_at = now_s  # a split that must wait, or is slow to read, is not silent
        silent_s = now_s - self._active_at
        # Data at rest is complete: a slow read is not silence.
        if self._idle_after_s is not None and not in_backlog and not self._by_rows:
            self._split_watermarks.mark_idle(now_s, self._idle_after_s, splits.paused)
            self._send_reached()
            if silent_s >= self._idle_after_s:
                self._set_idle(True)
        if self._close_after_s is not None and silent_s >= self._close_after_s:
            self._follow_clock(silent_s)
        self._arm()

    def _follow_clock(self, silent_s: float) -> None:
        """Advance the watermark without records: as if one had come with the time it would have now."""
        reached = max(self._split_watermarks.reached, self._restored.sent)
        if reached == WATERMARK_MIN:
            return
        watermark = min(reached + round(1_000 * silent_s), WATERMARK_MAX - 1)
        if watermark <= self._sent:
            return
        if self._idle:  # watermarks of an idle subtask are ignored
            self.output.emit_idle(False)
        self._emit_watermark(watermark)
        if self._idle:
            self.output.emit_idle(True)

    def restore(self, state: RestoredState) -> None:
        """Restore the step's progress; the watermark it had sent is sent again at once."""
        context = self.context
        self._floor = restored_floor(state, self._of, context.subtask_index, context.parallelism)
        self._split_watermarks.restore(self._floor.splits, self._floor.due)
        self._rows = self._floor.rows if self._by_rows else 0
        if self._close_after_s is not None:
            self._restored = restored_clock(state)
            self._earned = self._restored.earned
        if self._floor.watermark > WATERMARK_MIN:
            self._cancels["floor"] = context.timers.call_later(0, self._send_reached)

    def snapshot(self, checkpoint_id: int) -> StateSnapshot | None:
        context = self.context
        if not self._by_rows:
            self._split_watermarks.advance()  # due watermarks count: perhaps no other record comes
        sent = max(self._sent, self._floor.watermark, self._split_watermarks.reached)
        note = Announced(
            of=self._of,
            subtask=context.subtask_index,
            parallelism=context.parallelism,
            sent=sent,
            idle=self._idle,
            splits=self._split_watermarks.watermarks,
            due=self._split_watermarks.due if self._by_rows else {},
            rows=self._rows if self._by_rows else 0,
        )
        items = {ANNOUNCED: note.cut()}
        if self._close_after_s is not None:
            sent = max(self._sent, self._restored.sent)
            items[CLOCK] = ClockState(sent, self._earned, self._idle).cut()
        return StateSnapshot(items=items)

    def states(self) -> Sequence[StateInfo]:
        announced = announced_info()
        return (announced,) if self._close_after_s is None else (announced, clock_info())

    def _awake_s(self) -> float:
        """Return seconds on a clock that stops while records may wait for this subtask: that is no
        silence."""
        return self.context.clock.monotonic() - self.context.held_s() - self._busy_s

    # -- watermarks ---------------------------------------------------------------------------------

    def _send_watermark(self) -> None:
        self._rows = 0
        self._split_watermarks.advance()
        self._pause_splits()
        self._send_reached()

    def _send_reached(self) -> None:
        earned = self._split_watermarks.reached
        self._earned = max(self._earned, earned)
        watermark = max(earned, self._floor.watermark)
        if watermark > self._sent and not self._idle and not self._ended:
            self._emit_watermark(watermark)

    def _emit_watermark(self, timestamp: int) -> None:
        self._sent = timestamp
        self._risen_at = self.context.clock.monotonic()
        self.output.emit_watermark(timestamp)

    def _set_idle(self, idle: bool) -> None:
        if idle != self._idle:
            if idle:
                self._send_watermark()
            self._idle = idle
            self.output.emit_idle(idle)

    def _stop(self) -> None:
        self._ended = True
        for cancel in self._cancels.values():
            cancel()
        self._cancels.clear()

    # -- alignment ----------------------------------------------------------------------------------

    def _report(self, alignment: WatermarkAlignmentGroup) -> None:
        """Report this subtask's progress.

        Splits that the reader has not reached are no reason to wait.
        """
        name, active = self.context.operator_name, self._split_watermarks.being_read
        if self._idle or active is None:
            self.context.splits.report(name, alignment.group, None)
        elif (watermark := max(active, self._sent)) > WATERMARK_MIN:
            self.context.splits.report(name, alignment.group, watermark)
        if not self._ended:
            self._cancels["report"] = self.context.timers.call_later(
                alignment.every_ms, lambda: self._report(alignment)
            )

    def limit_announced(self, group: str, limit: int) -> None:
        """Pause splits above `limit`."""
        alignment = self._settings.alignment
        if alignment is not None and alignment.group == group:
            self._limit = limit
            self._pause_splits()

    def _pause_splits(self) -> None:
        if self._settings.alignment is not None:
            above = self._split_watermarks.above(self._limit)
            self.context.splits.pause(self.context.operator_name, above)

    # -- what others see ----------------------------------------------------------------------------

    def status(self) -> EventTimeStatus:
        """Return this subtask's progress, and what holds it back."""
        slowest = self._split_watermarks.slowest
        read, idle, queued = self._split_watermarks.counts()
        return EventTimeStatus(
            self._sent,
            self._idle,
            round(self._held_ms()),
            WHOLE if slowest is None else slowest.split,
            slowest is not None and slowest.queued,
            read + queued,
            idle,
            queued,
            len(self.context.splits.paused),
        )

    def _held_ms(self) -> float:
        return 1_000 * (self.context.clock.monotonic() - self._risen_at)

    def _watermark_lag(self) -> float:
        if self._sent in (WATERMARK_MIN, WATERMARK_MAX):
            return math.nan
        return self.context.clock.now_ms() - self._sent


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1_000


@final
class Announced(msgspec.Struct, frozen=True):
    """The watermarks that one subtask had announced at a checkpoint.

    Attributes:
        of: the input of the step; a name not given by the user may mean another step after a
            change.
        subtask: its index.
        parallelism: of the step.
        sent: the last watermark, or the one that was due, ms.
        idle: the subtask was idle.
        splits: the watermark of each split being read, ms.
        due: the watermark of each split being read that its records allow and that was not
            announced, ms. Only for data at rest, where the next watermark has a fixed place.
        rows: the rows of data at rest read since the last such place.
    """

    of: str
    subtask: int
    parallelism: int
    sent: int
    idle: bool
    splits: dict[str, int]
    due: dict[str, int] = {}
    rows: int = 0

    def cut(self) -> ItemsCut:
        """Return it as state that every subtask gets back."""
        return ItemsCut([msgspec.msgpack.encode(self)], "union")


@final
class Floor(msgspec.Struct, frozen=True):
    """The starting point of a subtask after a restore.

    Attributes:
        watermark: no record to come can hold it further back.
        splits: the watermarks of splits that were being read.
        due: see `Announced`.
        rows: see `Announced`.
    """

    watermark: int = WATERMARK_MIN
    splits: Mapping[str, int] = {}
    due: Mapping[str, int] = {}
    rows: int = 0


def announced_info() -> StateInfo:
    """Return the declaration of the records of `Announced`."""
    return state_info(ANNOUNCED, HINT)


def restored_floor(state: RestoredState, of: str, subtask: int, parallelism: int) -> Floor:
    """Return the starting point of a restored subtask.

    At another parallelism splits may have moved: all subtasks start from the slowest active one,
    or, if all were idle, from the furthest, as in the valve. So did the steps downstream.
    """
    notes = [msgspec.msgpack.decode(i, type=Announced) for i in state.items.get(ANNOUNCED, ())]
    notes = [note for note in notes if note.of == of and note.sent != WATERMARK_MAX]
    own = [n for n in notes if (n.subtask, n.parallelism) == (subtask, parallelism)]
    if own:
        return Floor(own[0].sent, own[0].splits, own[0].due, own[0].rows)
    if not notes or any(note.parallelism == parallelism for note in notes):
        return Floor()  # this subtask had ended
    active = [note.sent for note in notes if not note.idle]
    watermark = min(active) if active else max(note.sent for note in notes)
    splits = _least(note.splits for note in notes)
    if WHOLE in splits:
        splits[WHOLE] = watermark
    due = _least(note.due for note in notes)
    due.pop(WHOLE, None)  # its records went to several subtasks
    return Floor(watermark, splits, due)


def _least(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the least watermark by split; several subtasks may have one of the same name."""
    found: dict[str, int] = {}
    for splits in maps:
        for split, watermark in splits.items():
            found[split] = min(watermark, found.get(split, watermark))
    return found


@final
class ClockState(msgspec.Struct, frozen=True):
    """The progress of one subtask that follows the clock, at a checkpoint.

    Attributes:
        sent: the last watermark, ms.
        earned: the watermark from records alone, without the clock, ms.
        idle: the subtask was idle.
    """

    sent: int = WATERMARK_MIN
    earned: int = WATERMARK_MIN
    idle: bool = False

    def cut(self) -> ItemsCut:
        """Return it as state that every subtask gets back."""
        return ItemsCut([msgspec.msgpack.encode(self)], "union")


def clock_info() -> StateInfo:
    """Return the declaration of the states of `ClockState`."""
    return state_info(CLOCK, "union")


def restored_clock(state: RestoredState) -> ClockState:
    """Merge what all subtasks had reached: the assignment of splits may have changed.

    As in the valve, the slowest active subtask decides; if all were idle, the furthest.
    """
    items = [msgspec.msgpack.decode(i, type=ClockState) for i in state.items.get(CLOCK, ())]
    unended = [each for each in items if each.sent != WATERMARK_MAX]
    active = [each for each in unended if not each.idle]
    if active:
        return min(active, key=lambda each: each.sent)
    return max(unended, key=lambda each: each.sent, default=ClockState())
