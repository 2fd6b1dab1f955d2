"""Early results: windows emit at an interval, or after a number of rows, before they close."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....state.slots.arrays import SlotArray
from ....state.values import Index
from ...base import OperatorContext
from ..kinds import Early


class EarlyResults:
    """Tracks the cells that changed since results were last emitted, and calls `show` with them in time.

    Changes before a restore are not known any more: those results are emitted at the next change,
    and at the end.
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
        """Note that rows were added to these cells; may emit results."""
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
        """Renumber the cells: cell i is what was cell `cells[i]`."""
        if not self._early:
            return
        self._changed.reserve(int(cells.max()) + 1 if cells.size else 0)
        changed = self._changed.data.take(cells)
        self._changed.reset(self._size)
        self._changed.reserve(len(cells))
        self._changed.data[: len(cells)] = changed
        self._size = len(cells)

    def stop(self) -> None:
        """Emit no more early results."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
