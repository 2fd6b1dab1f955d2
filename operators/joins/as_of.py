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

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.slots.arrays import SlotArray
from ...state.snapshot import RestoredState, StateInfo, StateSnapshot
from ...state.values import Index
from ..aggregation.keyed_aggregate import columns_of
from ..ahead import Ahead
from ..base import OperatorContext
from ..elements import WATERMARK_MAX, WATERMARK_MIN, Batch
from ..windows.window_aggregate import EMIT_ROWS_MAX
from .columns import LEFT, RIGHT
from .keys import SharedKeys
from .ranges import sorted_order
from .side import Alive, Side, not_before
from .step import JoinOperator, JoinStep
from .tables import (
    SIDES,
    TIME,
    RestoredTimes,
    clamped,
    join_infos,
    restored_rows,
    rows_cut,
    time_cut,
)

_UNMARKED = (False, False)
SWEEPS: Final = 8
"""A sweep for expired versions happens this many times within the validity of a version."""


class AsOfJoin(JoinOperator):
    """Temporal join; input 0 has the rows, input 1 the versions."""

    kind = "as-of join"
    """The kind of the state."""

    def __init__(self, step: JoinStep, valid_for_ms: int | None = None) -> None:
        """Create the operator. `valid_for_ms` limits the validity of a version; None: until the
        next one."""
        super().__init__(step)
        self._valid_for_ms = valid_for_ms
        self._gone_before = WATERMARK_MIN
        """Versions before this time have expired, both for rows that wait and for rows to come."""
        self._swept_before = WATERMARK_MIN
        self._waits, self._versions = self._sides = [
            Side(step.columns.sides[side], marks=False) for side in (LEFT, RIGHT)
        ]
        self._current = SlotArray(np.int64, -1)
        """The newest version that the watermark has passed, by key; -1 for none."""
        self._ahead: Ahead | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._keys = SharedKeys(self._hasher(), self._sides)

    def _waiting(self, side: int) -> int:
        return self._sides[side].live

    @property
    def _behind(self) -> int:
        """Return the first time that the watermark has not reached."""
        return clamped(self._watermark + 1)

    def _behind_for(self, ahead: Ahead, groups: Index) -> Index:
        """Return the same for key groups, some of which are ahead."""
        return np.minimum(ahead.now(groups, self._watermark), WATERMARK_MAX - 1) + 1

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if input_index == RIGHT:
            self._add_versions(batch)
            return
        behind: int | Index = self._behind
        if self._ahead is not None:
            data = columns_of(batch, self._step.name)
            behind = self._behind_for(self._ahead, self._key_groups(LEFT, data))
        rows, times = self._timely(batch, LEFT, behind, self._now(LEFT, batch))
        if rows.num_rows:
            slots = self._keys.slots(self._columns.key_columns(LEFT, rows))
            self._waits.add(rows, times, slots, self._keys.size)

    def _add_versions(self, batch: Batch) -> None:
        rows, times = self._timely(batch, RIGHT, WATERMARK_MIN, WATERMARK_MIN)
        if not rows.num_rows:
            return
        slots = self._keys.slots(self._columns.key_columns(RIGHT, rows))
        self._current.reserve(self._keys.size)
        late = self._late_versions(rows, times, slots)
        if late.size:
            self._send_late(RIGHT, batch, late, self._now(RIGHT, batch))
            kept = np.delete(np.arange(len(times)), late)
            rows, times, slots = rows.take(pa.array(kept)), times[kept], slots[kept]
        self._versions.add(rows, times, slots, self._keys.size)
        self._settle()

    def _now(self, side: int, batch: Batch) -> int | Index:
        """Return how far event time is, for all rows or for each."""
        if self._ahead is None:
            return self._watermark
        groups = self._key_groups(side, columns_of(batch, self._step.name))
        return self._ahead.now(groups, self._watermark)

    def _late_versions(self, rows: pa.RecordBatch, times: Index, slots: Index) -> Index:
        """Return which versions are late: they change nothing any more."""
        ahead = self._ahead
        gone_before: int | Index = self._gone_before
        if ahead is None:
            late = np.flatnonzero(times < self._behind)
            current = self._current.data[slots[late]]
        else:
            groups = self._key_groups(RIGHT, rows)
            behind = self._behind_for(ahead, groups)
            late = np.flatnonzero(times < behind)
            # The newest version that event time had passed, where a key group was ahead.
            current = self._versions.chains.latest(slots[late], behind[late] - 1, self._keys.size)
            gone_before = ahead.gone_for(groups[late], self._gone_before)
        if not late.size:
            return late
        counts = self._counts_yet(slots[late], times[late], current)
        return late[~counts | (times[late] < gone_before)]

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
        before = clamped(self._behind - self._valid_for_ms + 1)
        self._gone_before = max(self._gone_before, before)
        if self._gone_before - self._swept_before < self._valid_for_ms // SWEEPS:
            return
        self._swept_before = self._gone_before
        self._current.reserve(self._keys.size)
        current = self._current.data[: self._keys.size]
        times = self._versions.chains.times_at(current)
        old = np.flatnonzero((current >= 0) & (times < self._gone_before))
        self._versions.release(current[old])
        current[old] = -1

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Emit the rows up to the watermark in order of time, then forward it."""
        if timestamp > self._watermark:
            self._watermark = timestamp
            due = self._waits.order.due(self._behind)
            for low in range(0, len(due), EMIT_ROWS_MAX):
                self._join(due[low : low + EMIT_ROWS_MAX])
            self._waits.release(due)
            self._settle()
            self._sweep()
            if self._keys.tidy():
                self._find_current()
            if self._ahead is not None and self._ahead.caught_up(timestamp, self._gone_before):
                self._ahead = None
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

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `left` (rows that wait), `right` (versions) and `time` (event time)."""
        own, ahead = self.context.key_groups, self._ahead
        watermark: int | Index = self._watermark
        gone_before: tuple[int | Index, int | Index] = (self._behind, self._gone_before)
        if ahead is not None:
            watermark, gone = ahead.cut(own, self._watermark, self._gone_before)
            gone_before = (self._behind_for(ahead, np.arange(own.first, own.last + 1)), gone)
        tables = {TIME: time_cut(own, watermark, gone_before)}
        alive = (not_before(self._behind), _not_dead(self._versions.dead()))
        for side, name in enumerate(SIDES):
            cut = self._sides[side].cut(alive[side])
            groups = self.context.max_parallelism
            tables[name] = rows_cut(cut, self._columns, side, groups, marks=False)
        return StateSnapshot(tables=tables)

    def states(self) -> Sequence[StateInfo]:
        """Tables `left`, `right` and `time`."""
        return join_infos(self._columns, _UNMARKED, self.kind)

    def restore(self, state: RestoredState) -> None:
        """Restore rows and versions; event time is the least of all own key groups."""
        restored = RestoredTimes(state, self.context.max_parallelism)
        self._ahead = restored.ahead(RIGHT)
        self._watermark = restored.watermark
        self._gone_before = restored.gone_before[RIGHT]
        for side, own in enumerate(self._sides):
            own.epoch.restored()
            found = restored_rows(state, side, own.schema, self._step.name, marks=False)
            if found is None:
                continue
            found = found.picked(restored.kept(side, found.groups, found.times))
            # In order of arrival: of equal times the version that came last wins.
            found = found.picked(np.argsort(found.ids, kind="stable"))
            slots = self._keys.slots(self._columns.key_columns(side, found.rows))
            own.load(found.rows, found.times, slots, self._keys.size, found.ids, None)
        self._current.reserve(self._keys.size)
        self._settle()


def _not_dead(dead: Mask) -> Alive:
    return lambda numbers, _: ~dead[numbers]
