"""When windows show results before they close: every so often, or after so many rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...state.reserved import SlotArray
from ...state.values import Index
from ..base import OperatorContext
from ..windows import Early


class EarlyResults:
    """Knows what changed since results were last shown, and calls `show` with it when it is time.

    What changed before a restore is not known any more: it is shown when it changes again, and at the end.
    """

    def __init__(
        self, early: Early, context: OperatorContext, show: Callable[[Index], None]
    ) -> None:
        self._early, self._context, self._show = early, context, show
        self._changed = SlotArray(np.bool_)  # by cell
        self._size = 0
        self._rows = 0
        self._cancel: Callable[[], None] | None = None

    def note(self, cells: Index, rows: int) -> None:
        """Rows were added to these cells; may show them."""
        if not self._early:
            return
        self._size = max(self._size, int(cells.max()) + 1)
        self._changed.reserve(self._size)
        self._changed.data[cells] = True
        self._rows += rows
        if self._early.rows and self._rows >= self._early.rows:
            self._now()
        elif self._early.every_ms and self._cancel is None:
            self._cancel = self._context.timers.call_later(self._early.every_ms, self._tick)

    def _tick(self) -> None:
        self._cancel = None
        self._now()

    def _now(self) -> None:
        cells = np.flatnonzero(self._changed.data[: self._size])
        self._changed.reset(self._size)
        self._rows = 0
        if cells.size:
            self._show(cells)

    def moved(self, cells: Index) -> None:
        """Cell i is now what was cell `cells[i]`."""
        if not self._early:
            return
        self._changed.reserve(int(cells.max()) + 1 if cells.size else 0)
        changed = self._changed.data.take(cells)
        self._changed.reset(self._size)
        self._changed.reserve(len(cells))
        self._changed.data[: len(cells)] = changed
        self._size = len(cells)

    def stop(self) -> None:
        """Show nothing any more."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
