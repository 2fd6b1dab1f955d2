"""The keyed state of windows: records or accumulators, trigger memory, timers and merges.

The namespace of all of it is the window. Windows that merge keep their contents under the window
that came first (their *home*), so that contents are not moved whenever a session grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from ....state.codecs import codec_of
from ....state.keyed.base import ABSENT, KeyedBackend
from ....state.keyed.canonical import Layout, TableSpec
from ....state.keyed.descriptors import KeyedState
from ....state.keyed.keys import entry_codec
from ....state.keyed.timers import TimerTable
from ...clock import Clock
from ...process.context import Context, RepeatsAfterEnd
from ...process.declared import DeclaredStates
from ...process.timers import FunctionTimers
from .evictors import TimedRecord
from .functions import AggregateFunction
from .window import Window

RECORDS: Final = "window_records"
ACCUMULATOR: Final = "window_accumulator"
TRIGGER: Final = "window_trigger"
HOMES: Final = "window_homes"
WATERMARK: Final = "window_watermark"
TABLES: Final = frozenset({RECORDS, ACCUMULATOR, TRIGGER, HOMES, WATERMARK})
"""The prefix of the windows' own states; no state of a function can have such a name."""
_TIMER: Final = "\0"
"""The prefix of entries in a trigger's memory that name its timers."""
_OF_TRIGGER, _CLEANUP = "t", "z"
"""Kinds of timers. At equal times those of triggers fire first."""
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class WindowStates(DeclaredStates):
    """The states of a window step: those of the user's function, and the windows' own.

    `incremental`: windows keep an accumulator instead of records. `merging`: windows merge.
    """

    incremental: bool = False
    merging: bool = False

    def specs(self) -> dict[str, TableSpec]:
        specs = super().specs()
        for name, descriptor in self.keyed.items():
            if descriptor.per_window:
                spec = specs[name]
                specs[name] = replace(spec, layout=replace(spec.layout, namespaced=True))
        for spec in self._own():
            specs[spec.name] = spec
        return specs

    def _own(self) -> Iterable[TableSpec]:
        anything, keys = codec_of(Any), self.keys
        if self.incremental:
            yield TableSpec(ACCUMULATOR, Layout(keys, "value", anything, namespaced=True))
        else:
            layout = Layout(keys, "list", anything, codec_of(int), namespaced=True)
            yield TableSpec(RECORDS, layout)
        yield TableSpec(TRIGGER, Layout(keys, "map", anything, codec_of(str), namespaced=True))
        if self.merging:
            yield TableSpec(HOMES, Layout(keys, "map", anything, entry_codec(tuple[int, int])))

    @property
    def per_window(self) -> list[KeyedState]:
        """Return the user's states that belong to a window."""
        return [descriptor for descriptor in self.keyed.values() if descriptor.per_window]


def window_states(declared: DeclaredStates, *, incremental: bool, merging: bool) -> WindowStates:
    """Return the states of a step whose function declares `declared`."""
    return WindowStates(
        declared.keyed,
        declared.lists,
        declared.broadcast,
        declared.ttl_ms,
        declared.keys,
        True,
        incremental=incremental,
        merging=merging,
    )


class WindowStore:
    """The windows of the current key; `window` is the one that the trigger is called for.

    Attributes:
        key: the current key.
        window: the current window.
        merged: during `on_merge`, the windows that the current one replaces.
    """

    def __init__(
        self, backend: KeyedBackend, timers: FunctionTimers, context: Context[Any], clock: Clock
    ) -> None:
        self._backend, self._timers, self._context = backend, timers, context
        self._clock = clock
        self._after_end = RepeatsAfterEnd()
        self._memory = backend.entry_table(TRIGGER)
        self._homes = backend.entry_table(HOMES) if HOMES in backend.specs else None
        self.key: Any = None
        self.window = Window(0, 1)
        self.merged: Sequence[Window] = ()

    @property
    def watermark(self) -> int:
        """Return the watermark, ms."""
        return self._context.watermark

    @property
    def input_ended(self) -> bool:
        """Return True once no more records can arrive."""
        return self._context.input_ended

    def now(self) -> int:
        """Return the time of the machine's clock, ms."""
        return self._clock.now_ms()

    def enter(self, window: Window) -> None:
        """Switch the namespace of state to this window."""
        self._backend.set_namespace((window.start, window.end))

    # --- memory of triggers --------------------------------------------------------------------

    def recall(self, name: str, default: Any) -> Any:
        """Return what the trigger stored under a name for the window."""
        self.enter(self.window)
        value = self._memory.get(name)
        return default if value is ABSENT else value

    def remember(self, name: str, value: Any) -> None:
        """Store a value under a name for the window."""
        self.enter(self.window)
        self._memory.put(name, value)

    def forget(self, name: str) -> None:
        """Remove the value stored under a name."""
        self.enter(self.window)
        self._memory.delete(name)

    def recall_merged(self, name: str) -> list[Any]:
        """Return what is stored for the windows that the current one replaces."""
        found = []
        for window in self.merged:
            self.enter(window)
            value = self._memory.get(name)
            if value is not ABSENT:
                found.append(value)
        return found

    # --- timers --------------------------------------------------------------------------------

    def _table(self, clock: str) -> TimerTable:
        return self._timers.event if clock == "event" else self._timers.processing

    def _tag(self, kind: str, tag: str) -> str:
        return f"{kind}:{self.window.start}:{self.window.end}:{tag}"

    def set_timer(self, clock: str, timestamp: int, tag: str) -> None:
        """Set a timer of the trigger for the window."""
        table, full = self._table(clock), self._tag(_OF_TRIGGER, tag)
        if clock == "event" and self.input_ended:
            self._after_end.count(self.key, full, f"window=`{self.window}` ")
        if table.get(self.key, full) is None:
            self.remember(f"{_TIMER}{clock}:{tag}", True)
        table.set(self.key, full, timestamp)
        if clock != "event":
            self._timers.arm()

    def cancel_timer(self, clock: str, tag: str) -> None:
        """Delete a timer of the trigger."""
        self._table(clock).cancel(self.key, self._tag(_OF_TRIGGER, tag))
        self.forget(f"{_TIMER}{clock}:{tag}")

    def set_cleanup(self, clock: str, timestamp: int) -> None:
        """Set the timer that clears the window."""
        self._table(clock).set(self.key, self._tag(_CLEANUP, ""), timestamp)
        if clock != "event":
            self._timers.arm()

    def drop(self) -> None:
        """Delete the timers of the window and the memory of its trigger."""
        self.enter(self.window)
        for name, _ in list(self._memory.entries()):
            if name.startswith(_TIMER):
                clock, tag = name[len(_TIMER) :].split(":", 1)
                self._table(clock).cancel(self.key, self._tag(_OF_TRIGGER, tag))
        for clock in ("event", "processing"):
            self._table(clock).cancel(self.key, self._tag(_CLEANUP, ""))
        self.enter(self.window)
        self._memory.clear()

    # --- windows that merge --------------------------------------------------------------------

    def homes(self) -> dict[Window, Window]:
        """Return the windows of the key with their homes; empty if windows do not merge."""
        assert self._homes is not None
        return {Window(*span): Window(*home) for span, home in self._homes.entries()}

    def home(self, window: Window) -> Window | None:
        """Return the home of a window; None if it has been cleared. Without merging: the window itself."""
        if self._homes is None:
            return window
        home = self._homes.get((window.start, window.end))
        return None if home is ABSENT else Window(*home)

    def set_home(self, window: Window, home: Window | None) -> None:
        """Set the home of a window; None removes it."""
        if self._homes is None:
            return
        span: Span = (window.start, window.end)
        if home is None:
            self._homes.delete(span)
        else:
            self._homes.put(span, (home.start, home.end))


def parsed_tag(tag: str) -> tuple[bool, Window]:
    """Return whether the timer with this tag clears its window, and the window."""
    kind, start, end, _ = tag.split(":", 3)
    return kind == _CLEANUP, Window(int(start), int(end))


class Contents:
    """The contents of windows that keep their records, in order of arrival."""

    def __init__(self, backend: KeyedBackend, store: WindowStore) -> None:
        self._table = backend.entry_table(RECORDS)
        self._store = store

    def add(self, home: Window, record: Any, timestamp: int | None) -> None:
        """Add a record."""
        self._store.enter(home)
        self._table.put(self._table.last() + 1, (record, timestamp))

    def records(self, home: Window) -> list[TimedRecord]:
        """Return all records."""
        self._store.enter(home)
        return [TimedRecord(*pair) for _, pair in self._table.entries()]

    def replace(self, home: Window, records: Sequence[TimedRecord]) -> None:
        """Replace the records."""
        self.clear(home)
        for position, (record, timestamp) in enumerate(records):
            self._table.put(position, (record, timestamp))

    def merge(self, home: Window, others: Iterable[Window]) -> None:
        """Move the records of other windows here."""
        for other in others:
            for record, timestamp in self.records(other):
                self.add(home, record, timestamp)
            self.clear(other)

    def clear(self, home: Window) -> None:
        """Remove all records."""
        self._store.enter(home)
        self._table.clear()


class Accumulators:
    """The contents of windows whose records are combined on arrival."""

    def __init__(
        self, backend: KeyedBackend, store: WindowStore, function: AggregateFunction[Any, Any, Any]
    ) -> None:
        self._table = backend.value_table(ACCUMULATOR)
        self._store = store
        self._function = function

    def add(self, home: Window, record: Any, timestamp: int | None) -> None:
        """Combine a record with the accumulator."""
        self._store.enter(home)
        held = self._table.get()
        if held is ABSENT:
            held = self._function.create()
        self._table.put(self._function.add(held, record))

    def result(self, home: Window) -> list[Any]:
        """Return the result, alone in a list; an empty list if there is none."""
        self._store.enter(home)
        held = self._table.get()
        return [] if held is ABSENT else [self._function.result(held)]

    def merge(self, home: Window, others: Iterable[Window]) -> None:
        """Merge the accumulators of other windows into this one, and remove them."""
        for other in others:
            self._store.enter(other)
            held = self._table.get()
            self._table.delete()
            if held is ABSENT:
                continue
            self._store.enter(home)
            mine = self._table.get()
            self._table.put(held if mine is ABSENT else self._function.merge(mine, held))

    def clear(self, home: Window) -> None:
        """Remove the accumulator."""
        self._store.enter(home)
        self._table.delete()


class Reduced(AggregateFunction[Any, Any, Any]):
    """A reduce function as an aggregate: its accumulator is a list of at most one value."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def create(self) -> list[Any]:
        return []

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        return [self._function(accumulator[0], value) if accumulator else value]

    def result(self, accumulator: list[Any]) -> Any:
        return accumulator[0]

    def merge(self, first: list[Any], second: list[Any]) -> list[Any]:
        return [self._function(first[0], second[0])]
