"""The window operator that takes one record at a time, with Flink's rules.

For each record the assigner gives its windows. Expired windows are skipped, and a record whose
windows have all expired is late. In each other window the record is stored or combined, and the
trigger is asked. Windows that merge do so before that: the trigger is told, their contents are
combined, and timers and trigger memory of the old windows are dropped. When the watermark has
passed the end of a window by the allowed lateness, everything about the window is cleared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import HeadgateError, PlanError, StateError
from ....state.evolution import meaning
from ....state.snapshot import StateInfo
from ....state.values import Index
from ...base import OperatorContext
from ...elements import WATERMARK_MAX, Batch
from ...functions.user_code import user_error, user_failures
from ...per_record.base import pieces
from ...process.context import Context, Timer
from ...process.operator import ProcessOperator, ProcessStep
from ...time_range import EVENT_TIME_MAX_MS
from ..late import LateOutput
from .assigners import WindowAssigner, checked_windows
from .evictors import Evictor
from .functions import AggregateFunction, WindowContext, WindowProcess
from .store import (
    WATERMARK,
    Accumulators,
    Contents,
    WindowStates,
    WindowStore,
    parsed_tag,
)
from .triggers import EventTime, Trigger, TriggerContext, TriggerResult
from .window import Window


@dataclass(frozen=True)
class Windowing:
    """The settings of a window step. Picklable; each subtask works with a copy.

    Attributes:
        assigner: assigns records to windows.
        trigger: decides when windows fire.
        evictor: leaves records out when they fire.
        lateness_ms: the allowed lateness.
        combined: combines records into one result; None: the function sees all of them.
    """

    assigner: WindowAssigner[Any]
    trigger: Trigger[Any]
    evictor: Evictor[Any] | None
    lateness_ms: int
    combined: AggregateFunction[Any, Any, Any] | None


class EmitResult(WindowProcess[Any, Any, Any]):
    """The window function that passes results on unchanged."""

    def on_window(
        self, key: Any, window: Window, records: list[Any], ctx: WindowContext[Any]
    ) -> Iterable[Any]:
        return records


def _bounds(windows: Sequence[Window]) -> tuple[Index, Index]:
    """Return the starts and the ends of windows."""
    bounds = np.array([(window.start, window.end) for window in windows], np.int64)
    return bounds[:, 0], bounds[:, 1]


class WindowOperator(ProcessOperator):
    """Runs a `WindowProcess` over windows.

    Args:
        step: the function and the records it takes; its `declared` are `WindowStates`.
        windowing: the settings of the windows.
    """

    _function: WindowProcess[Any, Any, Any]

    def __init__(self, step: ProcessStep, windowing: Windowing) -> None:
        super().__init__(step)
        windowing = copy.deepcopy(windowing)
        self._assigner, self._trigger = windowing.assigner, windowing.trigger
        self._evictor, self._combined = windowing.evictor, windowing.combined
        self._lateness_ms = windowing.lateness_ms
        self._event = self._assigner.time == "event"

    def states(self) -> Sequence[StateInfo]:
        windows = {"the window": self._assigner.identity}
        return [meaning(info, windows) for info in super().states()]

    @property
    def minds_order(self) -> bool:
        """True if results depend on when timers fire between records.

        They do if windows fire before their end, or share state with other windows of the key.
        """
        return type(self._trigger) is not EventTime or bool(self._step.declared.keyed)

    @property
    def _states_of_windows(self) -> WindowStates:
        declared = self._step.declared
        assert isinstance(declared, WindowStates)
        return declared

    @property
    def _watermark_table(self) -> str:
        return WATERMARK

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        assert self._timers is not None
        self._store = WindowStore(self._backend, self._timers, self._context, context.clock)
        refusal = StateError("a WindowProcess has no timers: its trigger has")
        self._give_timers(self._context, None, refusal)
        self._at_trigger = TriggerContext(self._store, not self._event)
        self._contents: Contents | Accumulators
        if self._states_of_windows.incremental:
            assert self._combined is not None
            self._contents = Accumulators(self._backend, self._store, self._combined)
        else:
            self._contents = Contents(self._backend, self._store)
        self._per_window = [
            getattr(self._function, descriptor.attribute)
            for descriptor in self._states_of_windows.per_window
        ]
        self._late_output = LateOutput(context, self.output)

    def _new_context(self) -> Context[Any]:
        self._at_window: WindowContext[Any] = WindowContext(self._emitter)
        return self._at_window

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if self._event and batch.timestamps is None and len(batch):
            raise PlanError(
                f"`{self._user.step}` needs event time, but its input has none",
                fix='add .event_time(..., max_out_of_order="10s") before the window',
            )
        self._open_function()
        given = self._step.inputs[0]
        for piece in pieces(batch):
            records = given.reader(piece)
            self._take_all(self._keys_of(piece, records, given.key), records, piece)
        self._flush()

    def _take_all(self, keys: list[Any], records: list[Any], batch: Batch) -> None:
        progress, context, store = self._progress, self._at_window, self._store
        groups = progress.groups_of(keys)
        enter = progress.enter if progress.differs else self._backend.set_key
        late: list[int] = []
        last: list[Window] = []
        times = self._times_of(batch)
        try:
            for row, (key, group, time, record) in enumerate(
                zip(keys, groups, times, records, strict=True)
            ):
                enter(key, group)
                context.key = store.key = key
                context.timestamp = self._emitter.time = time
                try:
                    gone = self._take(record, time)
                except HeadgateError:
                    raise
                except user_failures() as error:
                    raise user_error(self._user.step, self._user.origin, record, error) from error
                if gone is not None:
                    late.append(row)
                    last.append(gone)
        finally:
            self._no_key()
        if late:
            now = progress.of_keys([keys[row] for row in late])
            self._late_output.send(batch.take(np.array(late)), now, lambda _: _bounds(last))

    def _take(self, record: Any, time: int | None) -> Window | None:
        """Put a record into its windows; return the last of them if all have expired."""
        at = time if self._event else self._store.now()
        assert at is not None
        seen = (
            at if time is None else time
        )  # a trigger by event time works in windows of processing time too
        assigned = self._assigner.assign(record, at)
        windows = checked_windows(assigned, self._assigner, self._user.step, record)
        taken = not windows  # the assigner may give no window: such a record is not late
        for window in windows:
            actual = self._merged(window) if self._assigner.merging else window
            if actual is None or self._has_expired(actual):
                continue
            taken = True
            home = self._store.home(actual)
            assert home is not None
            self._contents.add(home, record, time)
            self._store.window = actual
            result = self._trigger.on_element(record, seen, actual, self._at_trigger)
            self._follow(result, actual, home, time)
            self._store.window = actual
            self._set_cleanup(actual)
        return None if taken else max(windows, key=lambda window: window.end)

    def _has_expired(self, window: Window) -> bool:
        return self._event and window.last + self._lateness_ms <= self._context.watermark

    def _set_cleanup(self, window: Window) -> None:
        time = window.last + (self._lateness_ms if self._event else 0)
        if not window.is_global and time < WATERMARK_MAX:
            self._store.set_cleanup("event" if self._event else "processing", time)

    # --- windows that merge --------------------------------------------------------------------

    def _merged(self, window: Window) -> Window | None:
        """Merge a new window into those of the key; return the merged window, or None if it has expired."""
        store, homes = self._store, self._store.homes()
        actual, met = window, sorted(other for other in homes if window.meets(other))
        for other in met:
            actual = actual.cover(other)
        if self._has_expired(actual):
            return None
        if met == [actual]:
            return actual
        if not met:
            store.set_home(window, window)
            return window
        home = homes[met[0]]
        for other in met:
            store.set_home(other, None)
        store.set_home(actual, home)
        grown = [other for other in met if other != actual]
        store.window, store.merged = actual, met
        self._trigger.on_merge(actual, self._at_trigger)
        store.merged = ()
        for other in grown:
            store.window = other
            self._trigger.clear(other, self._at_trigger)
            store.drop()
        self._contents.merge(home, [homes[other] for other in met[1:]])
        return actual

    # --- results -------------------------------------------------------------------------------

    def _follow(
        self, result: TriggerResult, window: Window, home: Window, time: int | None
    ) -> None:
        """Do what the trigger returned. `time` is the event time of results of the global window."""
        if not isinstance(result, TriggerResult):
            raise TypeError(f"a trigger returned {result!r}, which is no hg.TriggerResult")
        if result.fires:
            self._emit(window, home, time)
        if result.purges:
            self._contents.clear(home)

    def _emit(self, window: Window, home: Window, time: int | None) -> None:
        contents, evictor = self._contents, self._evictor
        if isinstance(contents, Accumulators):
            records = contents.result(home)
            if records:
                self._call(window, records, time)
            return
        held = contents.records(home)
        if not held:
            return
        if evictor is None:
            self._call(window, self._result([timed.record for timed in held]), time)
            return
        kept = list(evictor.evict_before(held, window, self._context.watermark))
        self._call(window, self._result([timed.record for timed in kept]), time)
        contents.replace(home, list(evictor.evict_after(kept, window, self._context.watermark)))

    def _result(self, records: list[Any]) -> list[Any]:
        """Return the records to pass to the function: all of them, or their combined result."""
        combined = self._combined
        if combined is None or not records:
            return records
        accumulator = combined.create()
        for record in records:
            accumulator = combined.add(accumulator, record)
        return [combined.result(accumulator)]

    def _call(self, window: Window, records: list[Any], time: int | None) -> None:
        context, emitter = self._at_window, self._emitter
        context.window = window
        self._store.enter(window)
        before = emitter.time
        emitter.time = window.last
        if window.is_global:  # a trigger may fire at the end of time, which is no valid event time
            emitter.time = None if time is None else min(time, EVENT_TIME_MAX_MS)
        made = self._function.on_window(context.key, window, records, context)
        if made is not None:
            emitter.add((context.key, window), made)
        emitter.time = before

    # --- time ----------------------------------------------------------------------------------

    def _call_on_timer(self, key: Any, timer: Timer) -> None:
        is_cleanup, window = parsed_tag(timer.tag)
        store = self._store
        store.key = key
        store.window = window
        home = store.home(window)
        if home is None:
            return
        try:
            if is_cleanup:
                self._clear(window, home)
            else:
                self._fire_trigger(timer, window, home)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, (key, window), error) from error

    def _fire_trigger(self, timer: Timer, window: Window, home: Window) -> None:
        trigger = self._trigger
        call = trigger.on_event_time if timer.clock == "event" else trigger.on_processing_time
        self._follow(call(timer.timestamp, window, self._at_trigger), window, home, timer.timestamp)

    def _clear(self, window: Window, home: Window) -> None:
        """Clear all state of a window that has expired."""
        self._contents.clear(home)
        self._trigger.clear(window, self._at_trigger)
        self._store.window = window
        self._store.drop()
        self._at_window.window = window
        self._store.enter(window)
        self._function.clear(self._at_window.key, window, self._at_window)
        for state in self._per_window:
            self._store.enter(window)
            state.clear()
        self._store.set_home(window, None)
