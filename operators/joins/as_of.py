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

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

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
from .row_store import RowStore
from .side import Alive, Side
from .spilling import SpillingSide
from .step import JoinStep, WaitingRowsJoin
from .tables import SIDES

SWEEPS: Final = 8
"""A sweep for expired versions happens this many times within the validity of a version."""


class AsOfJoin(WaitingRowsJoin):
    """Temporal join; input 0 has the rows, input 1 the versions."""

    kind = "as-of join"
    """The kind of the state."""

    def __init__(self, step: JoinStep, valid_for_ms: int | None = None) -> None:
        """Create the operator. `valid_for_ms` limits the validity of a version; None: until the
        next one."""
        super().__init__(step, _behind, partial(_expired_before, valid_for_ms))
        self._valid_for_ms = valid_for_ms
        self._swept_before = self._settled_before = WATERMARK_MIN
        self._current = SlotArray(np.int64, -1)
        """The newest version that the watermark has passed, by key; -1 for none."""

    def _new_disk(self, side: int) -> SpillingSide:
        keys, schema = self._columns.keys[side], self._columns.sides[side]
        return SpillingSide(
            self.context, SIDES[side], schema, keys, sent=side == LEFT, newest=side == RIGHT
        )

    @property
    def _waits(self) -> Side:
        return self._sides[LEFT]

    @property
    def _versions(self) -> Side:
        return self._sides[RIGHT]

    @property
    def _behind(self) -> int:
        """Return the first time that the watermark has not reached."""
        return self._progress.bounds[LEFT]

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
            self._settle_disk()

    def _add_versions(self, batch: Batch) -> None:
        groups = self._groups_of(RIGHT, columns_of(batch, self._step.name))
        rows, times = self._timely(batch, RIGHT, WATERMARK_MIN, groups)
        if not rows.num_rows:
            return
        slots = self._keys.slots(self._columns.key_columns(RIGHT, rows))
        self._current.reserve(self._keys.size)
        late = self._late_versions(rows, times, slots, groups)
        if late.any():
            rows, times = self._without_late(batch, RIGHT, late, groups)
            slots = slots[~late]
        self._versions.add(rows, times, slots, self._keys.size)
        self._settle()
        self._settle_disk()

    def _late_versions(
        self, rows: pa.RecordBatch, times: Index, slots: Index, groups: Index | None
    ) -> Mask:
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
        newest = self._versions.chains.times_at(current)
        if self._disk:
            keys = self._columns.key_columns(RIGHT, rows.take(pa.array(which)))
            last = np.broadcast_to(np.asarray(behind) - 1, len(times))[which]
            if found := self._disk[RIGHT].latest(keys, last):
                newest = np.maximum(newest, found[0].chains.times_at(found[1]))
        counts = self._counts_yet(slots[which], times[which], newest)
        late[which] = ~counts | (times < expired)[which]
        return late

    @staticmethod
    def _counts_yet(slots: Index, times: Index, before: Index) -> Mask:
        """Return which of some versions behind the watermark are the newest of their key on arrival.

        `before` are the times of the newest ones so far, the least int64 for none.
        """
        newest: Mask = times >= before
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
        self._settled_before = self._behind
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
            self._join_due()
            self._settle()
            self._sweep()
            self._note_passed()
            if self._keys.tidy():
                self._find_current()
                self._dropped()
        self.output.emit_watermark(timestamp)

    def _join_due(self) -> None:
        """Emit the rows up to the watermark, in memory and on disk."""
        waits = self._waits
        due = waits.order.due(self._behind)
        if self._disk and self._disk[LEFT].active:
            held = pa.RecordBatch.from_arrays(waits.store.take(due), schema=waits.schema)
            waits.release(due)
            self._join_with_disk(held, waits.chains.times[due])
            return
        for low in range(0, len(due), EMIT_ROWS_MAX):
            rows = due[low : low + EMIT_ROWS_MAX]
            slots, times = waits.chains.slots[rows].astype(np.int64), waits.chains.times[rows]
            self._join(slots, times, partial(_of_store, waits.store, rows))
        waits.release(due)

    def _join_with_disk(self, held: pa.RecordBatch, times: Index) -> None:
        """Emit these rows, which are in order of time, and all on disk up to the watermark."""
        at = 0
        for columns, times_on_disk in self._disk[LEFT].release(self._behind):
            upto = int(np.searchsorted(times, times_on_disk[-1], "right"))
            both = zip(columns, held.slice(at, upto - at).columns, strict=True)
            together = np.append(times_on_disk, times[at:upto])
            order = np.argsort(together, kind="stable")
            arrays = [pa.concat_arrays(pair).take(pa.array(order)) for pair in both]
            rows = pa.RecordBatch.from_arrays(arrays, schema=held.schema)
            self._join_rows(rows, together[order])
            at = upto
        for low in range(at, len(times), EMIT_ROWS_MAX):
            self._join_rows(held.slice(low, EMIT_ROWS_MAX), times[low : low + EMIT_ROWS_MAX])

    def _join_rows(self, rows: pa.RecordBatch, times: Index) -> None:
        slots = self._keys.slots(self._columns.key_columns(LEFT, rows))
        self._join(slots, times, partial(_of_batch, rows))
        if self._keys.tidy():  # of many rows on disk, the keys need not fit into memory
            self._find_current()

    def _join(self, slots: Index, times: Index, take: Callable[[Index], list[pa.Array]]) -> None:
        """Emit rows with their versions.

        Args:
            slots: of their keys.
            times: their times.
            take: returns the columns of some of them.
        """
        versions = self._versions
        valid = versions.chains.latest(slots, times, self._keys.size)
        older, on_disk = None, np.full(len(times), -1, np.int64)
        if self._disk and self._disk[RIGHT].active:
            schema = self._columns.sides[LEFT]
            rows = pa.RecordBatch.from_arrays(take(np.arange(len(times))), schema=schema)
            if found := self._disk[RIGHT].latest(self._columns.key_columns(LEFT, rows), times):
                older, on_disk = found
                newer = older.chains.times_at(on_disk) > versions.chains.times_at(valid)
                valid[newer], on_disk[~newer] = -1, -1
        if self._valid_for_ms is not None:
            # This also covers dropped versions: the other versions of their key are older still.
            expired_at = times - self._valid_for_ms
            valid[versions.chains.times_at(valid) <= expired_at] = -1
            if older is not None:
                on_disk[older.chains.times_at(on_disk) <= expired_at] = -1
        which = np.arange(len(times))
        if not self._step.outer[LEFT]:
            which = np.flatnonzero(valid >= 0 if older is None else (valid >= 0) | (on_disk >= 0))
            times, valid, on_disk = times[which], valid[which], on_disk[which]
        if not which.size:
            return
        columns = versions.store.take(valid)
        if older is not None:
            both = zip(columns, older.store.take(on_disk), strict=True)
            places = pa.array(np.arange(len(which)) + len(which) * (on_disk >= 0))
            columns = [pa.concat_arrays(pair).take(places) for pair in both]
        self._send(LEFT, take(which), columns, times)

    def _find_current(self) -> None:
        """Find the current versions again after rows or slots were renumbered."""
        self._current = SlotArray(np.int64, -1)
        self._current.reserve(self._keys.size)
        chains = self._versions.chains
        rows = self._versions.alive()
        rows = rows[chains.times[rows] < self._settled_before]
        self._current.data[chains.slots[rows]] = rows

    # --- state ---------------------------------------------------------------------------------

    def _alive(self, side: int) -> Alive:
        return super()._alive(side) if side == LEFT else _not_dead(self._versions.dead())

    def _restore(self, state: RestoredState) -> None:
        super()._restore(state)
        self._note_passed(self._progress.further(LEFT))
        self._current.reserve(self._keys.size)
        self._settle()

    def _note_passed(self, further: Index | None = None) -> None:
        """Tell the versions on disk how far the watermark is."""
        if self._disk:
            versions = self._disk[RIGHT]
            versions.passed(self._behind, further)
            versions.released(self._progress.bounds[RIGHT])

    def _replaced(self) -> None:
        super()._replaced()
        self._find_current()


def _behind(watermark: int) -> int:
    """Return the first time that a watermark has not reached."""
    return clamped(watermark + 1)


def _expired_before(valid_for_ms: int | None, watermark: int) -> int:
    """Return the time before which versions have expired at a watermark.

    They have for rows that wait as well as for rows to come.
    """
    if valid_for_ms is None:
        return WATERMARK_MIN
    return clamped(_behind(watermark) - valid_for_ms + 1)


def _of_batch(rows: pa.RecordBatch, which: Index) -> list[pa.Array]:
    return list(rows.take(pa.array(which)).columns)


def _of_store(store: RowStore, rows: Index, which: Index) -> list[pa.Array]:
    return store.take(rows[which])


def _not_dead(dead: Mask) -> Alive:
    return lambda numbers, _: ~dead[numbers]
