"""Tables of keyed state whose changes are noted, so that they can be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..undo import UndoLog
from .base import ABSENT, EntryTable, KeyedBackend, ValueTable


class UndoTables:
    """The tables of a backend; what is changed through them goes into a log."""

    def __init__(self, backend: KeyedBackend, log: UndoLog) -> None:
        self._backend, self._log = backend, log
        self.specs = backend.specs

    def value_table(self, name: str) -> ValueTable:
        """See `KeyedBackend`."""
        return UndoValueTable(self._backend.value_table(name), self._log)

    def entry_table(self, name: str) -> EntryTable:
        """See `KeyedBackend`."""
        in_order = self.specs[name].layout.kind == "list"
        return UndoEntryTable(self._backend.entry_table(name), self._log, in_order)


class UndoValueTable(ValueTable):
    """Notes the value there was before each change."""

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
    """The same for lists and maps, entry by entry.

    Single elements of a list go only when they have expired, and come back only with the whole list: put
    alone, one would come behind the others.
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
