"""Temporal join: each row with the version of its key that is valid at the row's event time.

A version is valid from its own event time until that of the next version of its key, or for a time
that the user limits. As in Flink's event-time temporal join, left rows wait for the watermark,
since a version for them may arrive until then. Of the versions before the watermark only the newest
of each key is kept, for as long as it is valid: for ever without a limit.

A version that arrives behind the watermark takes effect if it is the newest one there. Otherwise it
is late: the rows it was valid for have been emitted. Of versions with equal times the last to
arrive wins.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...state.aggregates.accumulators import Mask
from ...state.slots.arrays import SlotArray
from ...state.snapshot import RestoredState
from ...state.values import Index
from ..aggregation.keyed_aggregate import columns_of
from ..elements import WATERMARK_MIN, Batch
from ..time_progress import clamped
from ..windows.windowed_aggregate import EMIT_ROWS_MAX
from .columns import LEFT, RIGHT
from .matching import sorted_order
from .side import Alive
from .step import JoinStep, WaitingRowsJoin

SWEEPS: Final = 8
"""A sweep for expired versions happens this many times within the validity of a version."""


class AsOfJoin(WaitingRowsJoin):
    """Temporal join; input 0 has the rows, input 1 the versions."""

    kind = "as-of join"
    """The kind of the state."""

    def __init__(self, step: JoinStep, valid_for_ms: int | None = None) -> None:
        """Create the operator. `valid_for_ms` limits the validity of a version; None: until the
        next one."""
        super().__init__(step, _behind, self._expired_before, marks=(False, False))
        self._valid_for_ms = valid_for_ms
        self._swept_before = WATERMARK_MIN
        self._waits, self._versions = self._sides
        self._current = SlotArray(np.int64, -1)
        """The newest version that the watermark has passed, by key; -1 for none."""

    @property
    def _behind(self) -> int:
        """Return the first time that the watermark has not reached."""
        return self._progress.bounds[LEFT]

    def _expired_before(self, watermark: int) -> int:
        """Return the time before which versions have expired at a watermark.

        They have for rows that wait as well as for rows to come.
        """
        if self._valid_for_ms is None:
            return WATERMARK_MIN
        return clamped(_behind(watermark) - self._valid_for_ms + 1)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if input_index == RIGHT:
            self._add_versions(batch)
            return
        groups = self._groups_of(LEFT, columns_of(batch, self._step.name))
        behind = self._progress.expired(groups, LEFT)
        rows, times = self._timely(batch, LEFT, behind, groups)
        if rows.num_rows:
            slots = self._keys.slots(self._columns.key_columns(LEFT, rows))
            self._waits.add(rows, times, slots, self._keys.size)

    def _add_versions(self, batch: Batch) -> None:
        groups = self._groups_of(RIGHT, columns_of(batch, self._step.name))
        rows, times = self._timely(batch, RIGHT, WATERMARK_MIN, groups)
        if not rows.num_rows:
            return
        slots = self._keys.slots(self._columns.key_columns(RIGHT, rows))
        self._current.reserve(self._keys.size)
        late = self._late_versions(times, slots, groups)
        if late.any():
            rows, times = self._without_late(batch, RIGHT, late, groups)
            slots = slots[~late]
        self._versions.add(rows, times, slots, self._keys.size)
        self._settle()

    def _late_versions(self, times: Index, slots: Index, groups: Index | None) -> Mask:
        """Return which versions are late: they change nothing any more."""
        behind, expired = (self._progress.expired(groups, side) for side in (LEFT, RIGHT))
        late: Mask = times < behind
        which = np.flatnonzero(late)
        if not which.size:
            return late
        if isinstance(behind, int):
            current = self._current.data[slots[which]]
        else:
            # `_current` follows the watermark of the subtask, and this key group may be further.
            current = self._versions.chains.latest(slots[which], behind[which] - 1, self._keys.size)
        counts = self._counts_yet(slots[which], times[which], current)
        late[which] = ~counts | (times < expired)[which]
        return late

    def _counts_yet(self, slots: Index, times: Index, current: Index) -> Mask:
        """Return which of some versions behind the watermark are the newest of their key on arrival.

        `current` is the newest of the key so far, -1 for none.
        """
        newest = times >= self._versions.chains.times_at(current)
        order = sorted_order(slots)
        # The greatest time so far within each key: a running maximum over (key, rank of the time).
        ranks = np.unique(times, return_inverse=True)[1][order]
        begins = np.append(True, slots[order][1:] != slots[order][:-1])
        numbers = np.cumsum(begins) * len(slots) + ranks
        newest[order] &= np.maximum.accumulate(numbers) == numbers
        return newest

    def _settle(self) -> None:
        """Drop all versions behind the watermark but the newest of each key."""
        versions = self._versions
        due = versions.order.due(self._behind)
        if not due.size:
            return
        slots = versions.chains.slots[due]
        before = self._current.data[np.unique(slots)]
        self._current.data[slots] = due  # in order of time, so the last one of a key wins
        replaced = due[self._current.data[slots] != due]
        versions.release(np.append(replaced, before[before >= 0]))

    def _sweep(self) -> None:
        """Drop expired versions. Not done at each watermark, as it looks at all keys."""
        if self._valid_for_ms is None:
            return
        expired = self._progress.bounds[RIGHT]
        if expired - self._swept_before < self._valid_for_ms // SWEEPS:
            return
        self._swept_before = expired
        self._current.reserve(self._keys.size)
        current = self._current.data[: self._keys.size]
        times = self._versions.chains.times_at(current)
        old = np.flatnonzero((current >= 0) & (times < expired))
        self._versions.release(current[old])
        current[old] = -1

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Emit the rows up to the watermark in order of time, then forward it."""
        if self._progress.advance(timestamp):
            due = self._waits.order.due(self._behind)
            for low in range(0, len(due), EMIT_ROWS_MAX):
                self._join(due[low : low + EMIT_ROWS_MAX])
            self._waits.release(due)
            self._settle()
            self._sweep()
            if self._keys.tidy():
                self._find_current()
        self.output.emit_watermark(timestamp)

    def _join(self, rows: Index) -> None:
        waits, versions = self._waits, self._versions
        slots, times = waits.chains.slots[rows].astype(np.int64), waits.chains.times[rows]
        valid = versions.chains.latest(slots, times, self._keys.size)
        if self._valid_for_ms is not None:
            # This also covers dropped versions: the other versions of their key are older still.
            valid[versions.chains.times_at(valid) <= times - self._valid_for_ms] = -1
        if not self._step.outer[LEFT]:
            found = np.flatnonzero(valid >= 0)
            rows, times, valid = rows[found], times[found], valid[found]
        if rows.size:
            self._send(LEFT, waits.store.take(rows), versions.store.take(valid), times)

    def _find_current(self) -> None:
        """Find the current versions again after rows or slots were renumbered."""
        self._current = SlotArray(np.int64, -1)
        self._current.reserve(self._keys.size)
        chains = self._versions.chains
        rows = self._versions.alive()
        rows = rows[chains.times[rows] < self._behind]
        self._current.data[chains.slots[rows]] = rows

    # --- state ---------------------------------------------------------------------------------

    def _alive(self, side: int) -> Alive:
        return super()._alive(side) if side == LEFT else _not_dead(self._versions.dead())

    def restore(self, state: RestoredState) -> None:
        """Restore rows and versions, and the progress of event time."""
        super().restore(state)
        self._current.reserve(self._keys.size)
        self._settle()


def _behind(watermark: int) -> int:
    """Return the first time that a watermark has not reached."""
    return clamped(watermark + 1)


def _not_dead(dead: Mask) -> Alive:
    return lambda numbers, _: ~dead[numbers]
