"""Takes back the changes of state that a function made before it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .timers import TimerTable


class UndoLog:
    """The changes of one call, each with what takes it back. Belongs to one operator subtask.

    Attributes:
        open: changes are noted. Not between calls.
        final: what this call has changed cannot be taken back any more.

    Args:
        key: the current key.
        enter: makes a key the current one.
    """

    def __init__(self, key: Callable[[], Any], enter: Callable[[Any], None]) -> None:
        self.key, self.enter = key, enter
        self.open = False
        self.final = False
        self._undos: list[Callable[[], None]] = []

    def begin(self) -> None:
        """A call begins."""
        self.open, self.final = True, False
        self._undos.clear()

    def note(self, undo: Callable[[], None]) -> None:
        """A change is made that `undo` takes back, once those after it were taken back."""
        if self.open:
            self._undos.append(undo)

    def note_keyed(self, undo: Callable[[], None]) -> None:
        """The same, of a change that belongs to the current key."""
        if self.open:
            key = self.key()

            def entered() -> None:
                self.enter(key)
                undo()

            self._undos.append(entered)

    def keep(self) -> None:
        """The call has ended well."""
        self.open = False
        self._undos.clear()

    def keep_always(self) -> None:
        """What was changed up to here, and will be until the call ends, stays, however it ends."""
        self.keep()
        self.final = True

    def roll_back(self) -> None:
        """Take back all changes of the call, the last one first; the current key is any."""
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
