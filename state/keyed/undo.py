"""Takes back the changes of state that a function made before it failed.

The changes of a call are noted in an `UndoLog` by wrappers around tables and timers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .base import ABSENT, EntryTable, Tables, ValueTable
from .timers import TimerTable


class UndoLog:
    """The changes of one call, each with a function that takes it back. It belongs to one operator subtask.

    Attributes:
        open: True during a call, while changes are noted.
        final: True once the changes of this call cannot be taken back any more.

    Args:
        key: returns the current key.
        enter: makes a key the current one.
    """

    def __init__(self, key: Callable[[], Any], enter: Callable[[Any], None]) -> None:
        self.key, self.enter = key, enter
        self.open = False
        self.final = False
        self._undos: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Begin a call."""
        self.open, self.final = True, False
        self._undos.clear()

    def note(self, undo: Callable[[], None]) -> None:
        """Note a change that `undo` takes back, once all later changes have been taken back."""
        if self.open:
            self._undos.append(undo)

    def note_keyed(self, undo: Callable[[], None]) -> None:
        """Note a change that belongs to the current key."""
        if self.open:
            key = self.key()

            def entered() -> None:
                self.enter(key)
                undo()

            self._undos.append(entered)

    def keep(self) -> None:
        """Keep all changes, as the call has succeeded."""
        self.open = False
        self._undos.clear()

    def keep_always(self) -> None:
        """Keep all changes of this call, also those still to come, however the call ends."""
        self.keep()
        self.final = True

    def roll_back(self) -> None:
        """Take back all changes of the call, the last one first. Afterwards any key may be the current
        one.
        """
        self.open = False
        while self._undos:
            self._undos.pop()()


class UndoTimers:
    """A table of timers whose changes are noted."""

    def __init__(self, inner: TimerTable, log: UndoLog) -> None:
        self._inner, self._log = inner, log

    def set(self, key: Any, tag: Any, timestamp: int) -> None:
        """See `TimerTable.set`."""
        before = self._inner.get(key, tag)
        self._inner.set(key, tag, timestamp)
        self._log.note(lambda: self._restore(key, tag, before))

    def cancel(self, key: Any, tag: Any) -> bool:
        """See `TimerTable.cancel`."""
        before = self._inner.get(key, tag)
        self._log.note(lambda: self._restore(key, tag, before))
        return self._inner.cancel(key, tag)

    def _restore(self, key: Any, tag: Any, before: int | None) -> None:
        if before is None:
            self._inner.cancel(key, tag)
        else:
            self._inner.set(key, tag, before)


class UndoTables:
    """The tables of a backend. Changes that are made through them are noted in a log."""

    def __init__(self, tables: Tables, log: UndoLog) -> None:
        self._tables, self._log = tables, log
        self.specs = tables.specs

    def value_table(self, name: str) -> ValueTable:
        """See `KeyedBackend`."""
        return UndoValueTable(self._tables.value_table(name), self._log)

    def entry_table(self, name: str) -> EntryTable:
        """See `KeyedBackend`."""
        in_order = self.specs[name].layout.kind == "list"
        return UndoEntryTable(self._tables.entry_table(name), self._log, in_order)


class UndoValueTable(ValueTable):
    """A table of values that notes the old value before each change."""

    def __init__(self, inner: ValueTable, log: UndoLog) -> None:
        self._inner, self._log = inner, log

    def get(self) -> Any:
        return self._inner.get()

    def put(self, value: Any) -> None:
        self._note()
        self._inner.put(value)

    def delete(self) -> None:
        self._note()
        self._inner.delete()

    def _note(self) -> None:
        before = self._inner.get()
        if before is ABSENT:
            self._log.note_keyed(self._inner.delete)
        else:
            self._log.note_keyed(lambda: self._inner.put(before))

    def sweep(self, limit: int, dead_until: int) -> int:
        return self._inner.sweep(limit, dead_until)


class UndoEntryTable(EntryTable):
    """A table of lists or maps that notes the old value of an entry before each change.

    Single elements of a list are removed only when they have expired, and come back only with the whole
    list: an element that is put alone would come behind the others.
    """

    def __init__(self, inner: EntryTable, log: UndoLog, in_order: bool) -> None:
        self._inner, self._log, self._in_order = inner, log, in_order

    def get(self, entry: Any) -> Any:
        return self._inner.get(entry)

    def put(self, entry: Any, value: Any) -> None:
        self._note(entry)
        self._inner.put(entry, value)

    def delete(self, entry: Any) -> None:
        if not self._in_order:
            self._note(entry)
        self._inner.delete(entry)

    def _note(self, entry: Any) -> None:
        before = self._inner.get(entry)
        self._log.note_keyed(lambda: self._restore(entry, before))

    def _restore(self, entry: Any, before: Any) -> None:
        if before is ABSENT:
            self._inner.delete(entry)
        elif not self._in_order or self._inner.get(entry) is not ABSENT:
            self._inner.put(entry, before)

    def clear(self) -> None:
        before = list(self._inner.entries())
        self._log.note_keyed(lambda: self._restore_all(before))
        self._inner.clear()

    def _restore_all(self, before: list[tuple[Any, Any]]) -> None:
        self._inner.clear()
        for entry, value in before:
            self._inner.put(entry, value)

    def entries(self) -> Iterator[tuple[Any, Any]]:
        return self._inner.entries()

    def last(self) -> int:
        return self._inner.last()

    def empty(self) -> bool:
        return self._inner.empty()

    def sweep(self, limit: int, dead_until: int) -> int:
        return self._inner.sweep(limit, dead_until)
