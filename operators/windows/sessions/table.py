"""The open sessions of one subtask: by key, with their bounds and their aggregates.

Every session has a slot. Slots are given out in order and never reused; those of sessions that
expired, or were merged into others, are dropped together once they are the majority. The sessions
of a key are a chain from the latest to the earliest, and a batch reads only as much of it as its
records can reach.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....state.aggregates.state import AggregateState
from ....state.slots.arrays import SlotArray
from ....state.slots.epochs import RESTORED_EPOCH, ChangedSlots, Field, TableEpoch
from ....state.slots.key_index import BatchKeys, KeyHasher, KeyIndex
from ....state.values import Array, Values
from ...aggregation.aggregates import AggregatePlan
from .deadlines import Deadlines
from .intervals import Index, Mask, Merged, Times, accepted, merge_intervals

_DEAD_MIN = 1_024
_INT64_MIN, _INT64_MAX = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class SessionTable:
    """Sessions of the keys of one subtask.

    Args:
        plan: keys and aggregates.
        hasher: of the keys.
        epoch: of the table.
        width_ms: the width of a bucket of deadlines.
        limit: sessions that end here (ms) or before have expired.

    Attributes:
        size: the number of slots given out.
        starts, ends: by slot, ms; a session that was merged into another ends at the least int64.
        key_of: by slot: the slot of its key in `keys`.
    """

    def __init__(
        self, plan: AggregatePlan, hasher: KeyHasher, epoch: TableEpoch, width_ms: int, limit: int
    ) -> None:
        self._plan, self._hasher, self._epoch, self._width = plan, hasher, epoch, width_ms
        self.limit = limit
        self.keys = KeyIndex(hasher)
        self.state: AggregateState = plan.new_state(epoch)
        self.starts, self.ends = SlotArray(np.int64), SlotArray(np.int64, _INT64_MIN)
        self.key_of = SlotArray(np.int32)
        self.size = 0
        self._alive = 0
        self._next = SlotArray(np.int32)  # by slot: the session before it, + 1
        self._head = SlotArray(np.int32)  # by key: its latest session, + 1
        self._seen = SlotArray(np.int32)  # by key: scratch
        self.changed = ChangedSlots(epoch, self._bounds)
        self._deadlines = Deadlines(width_ms)

    def _bounds(self) -> list[Field]:
        return [self.starts, self.ends]

    # --- records -------------------------------------------------------------------------------

    def key_slots(self, keys: BatchKeys | None, rows: int) -> Index:
        """Return the key of each row of a batch, by number; 0 where records have none."""
        if keys is None:
            slots = np.zeros(rows, np.intp)
        else:
            slots = self.keys.lookup(keys).astype(np.intp)
        size = max(1, self.keys.size)
        self._head.reserve(size)
        self._seen.reserve(size)
        return slots

    def add(
        self,
        key_slots: Index,
        starts: Times,
        ends: Times,
        values: Mapping[str, Values],
        limit: int | Index,
    ) -> tuple[Mask | None, Index]:
        """Add rows; return which of them were taken (None: all), and the sessions that changed.

        `limit` decides which are late: that of the table, or for each row a later one.
        """
        unique, rank = self._numbered(key_slots)
        lowest = np.full(len(unique), _INT64_MAX)
        np.minimum.at(lowest, rank, starts)
        found, owner, rest = self._reachable(unique, lowest)
        taken: Mask | None = None
        if (ends <= limit).any():
            least = np.full(len(unique), _INT64_MAX)
            np.minimum.at(least, owner, self.starts.data[found])
            taken = accepted(rank, starts, ends, least, limit)
            if taken.all():
                taken = None
            else:
                rank, starts, ends = rank[taken], starts[taken], ends[taken]
                values = {
                    name: column.pick(np.flatnonzero(taken)) for name, column in values.items()
                }
        if not len(rank):
            return taken, np.zeros(0, np.intp)
        merged = None
        if taken is None:
            merged = self._one_per_key(rank, starts, ends, lowest, found, owner)
        if merged is None:
            merged = merge_intervals(
                np.concatenate([owner, rank]),
                np.concatenate([self.starts.data[found], starts]),
                np.concatenate([self.ends.data[found], ends]),
            )
        touched = self._take_over(merged, unique, found, rest, values)
        return taken, touched

    def _one_per_key(
        self, rank: Index, starts: Times, ends: Times, lowest: Times, found: Index, owner: Index
    ) -> Merged | None:
        """Return what `merge_intervals` gives if all rows of a key are in one session, without sorting.

        Return None where a quick check cannot tell. `lowest` is the least start of each key's rows.
        """
        if int(starts.max()) - int(starts.min()) > int((ends - starts).min()):
            return None
        highest = np.full(len(lowest), _INT64_MIN)
        np.maximum.at(highest, rank, ends)
        if found.size:
            at = self.starts.data[found]
            if (at > highest[owner]).any() or np.bincount(owner).max() > 1:
                return None
            lowest[owner] = np.minimum(lowest[owner], at)
            highest[owner] = np.maximum(highest[owner], self.ends.data[found])
        keys = np.arange(len(lowest))
        return Merged(np.concatenate([owner, rank]), keys, lowest, highest)

    def _numbered(self, key_slots: Index) -> tuple[Index, Index]:
        """Return the keys of a batch, each once, and for each row the number of its key among them."""
        seen = self._seen.data
        seen[key_slots] = np.arange(len(key_slots), dtype=np.int32)
        unique = key_slots[seen[key_slots] == np.arange(len(key_slots))]
        seen[unique] = np.arange(len(unique), dtype=np.int32)
        return unique, seen[key_slots].astype(np.intp)

    def _reachable(self, keys: Index, lowest: Times) -> tuple[Index, Index, npt.NDArray[np.int32]]:
        """Return the sessions that rows of these keys from `lowest` on may meet, and others between them.

        The result has their slots, the number of the key of each, and for each key the rest of its
        chain after them, as in `_next`.
        """
        rest = self._head.data[keys]
        found: list[Index] = []
        owners: list[Index] = []
        at = np.flatnonzero(rest)
        while at.size:
            slots = rest[at].astype(np.intp) - 1
            ends = self.ends.data[slots]
            gone = ends <= self.limit
            rest[at[gone]] = 0
            meets = ~gone & (ends >= lowest[at])
            slots, at = slots[meets], at[meets]
            found.append(slots)
            owners.append(at)
            rest[at] = self._next.data[slots]
            at = at[rest[at] > 0]
        if not found:
            nothing = np.zeros(0, np.intp)
            return nothing, nothing, rest
        return np.concatenate(found), np.concatenate(owners), rest

    def _take_over(
        self,
        merged: Merged,
        keys: Index,
        found: Index,
        rest: npt.NDArray[np.int32],
        values: Mapping[str, Values],
    ) -> Index:
        """Make the sessions of a key what `merged` says; return those that got rows."""
        count = len(merged.keys)
        old, rows = merged.component[: len(found)], merged.component[len(found) :]
        slots = np.full(count, -1, np.intp)
        slots[old] = found
        if (slots[old] != found).any():
            # of sessions that are merged, the one with the least start continues
            order = np.argsort(self.starts.data[found], kind="stable")[::-1]
            slots[old[order]] = found[order]
        lost = slots[old] != found
        gone, into = found[lost], slots[old[lost]]
        new = np.flatnonzero(slots < 0)
        slots[new] = np.arange(self.size, self.size + len(new))
        self._reserve(self.size + len(new))
        has_rows = np.zeros(count, np.bool_)
        has_rows[rows] = True
        touched = slots[has_rows]
        self.key_of.data[slots[new]] = keys[merged.keys[new]]
        # `state` has its own count of slots; a cut must see the same slots of both
        self.changed.touch(np.concatenate([touched, gone]), self.size)
        self.starts.data[touched] = merged.starts[has_rows]
        self.ends.data[touched] = merged.ends[has_rows]
        if gone.size:
            order = np.argsort(self.starts.data[gone], kind="stable")
            self.state.merge(into[order], gone[order])
            self.ends.data[gone] = _INT64_MIN
        self._alive += len(new) - len(gone)
        self.state.add(slots[rows], values, self.size)
        self._link(merged.keys, slots, keys, rest)
        return touched

    def _reserve(self, size: int) -> None:
        for array in (self.starts, self.ends, self.key_of, self._next):
            array.reserve(size)
        self.size = size

    def _link(self, ranks: Index, slots: Index, keys: Index, rest: npt.NDArray[np.int32]) -> None:
        """Chain these sessions, which are sorted by key and start, in front of `rest`."""
        first = np.append(True, ranks[1:] != ranks[:-1])
        before = np.append(0, slots[:-1] + 1)
        self._next.data[slots] = np.where(first, rest[ranks], before)
        last = np.append(first[1:], True)
        self._head.data[keys[ranks[last]]] = slots[last] + 1

    # --- time ----------------------------------------------------------------------------------

    def watch(self, slots: Index, watermark: int, lateness_ms: int) -> None:
        """Schedule sessions for when they are due, or, if they have fired, for when they expire."""
        last = self.ends.data[slots] - 1
        self._deadlines.add(slots, np.where(last > watermark, last, last + lateness_ms))

    def advance(self, before: int, watermark: int, lateness_ms: int, limit: int) -> Index:
        """Expire the sessions that end at `limit` or before.

        Return those that fire between the two watermarks, in order of their ends; their state stays
        until the table is compacted.
        """
        slots = self._deadlines.pop(watermark)
        slots = slots[self.ends.data[slots] > self.limit]
        ends = self.ends.data[slots]
        due = (ends - 1 > before) & (ends - 1 <= watermark)
        fired: Index = slots[due][np.argsort(ends[due], kind="stable")]
        kept = slots[ends > limit]
        self._alive -= len(slots) - len(kept)
        self.limit = limit
        self.watch(kept, watermark, lateness_ms)
        return fired

    def is_worth_compacting(self) -> bool:
        """Return True if most slots are of expired sessions."""
        return self.size - self._alive > max(_DEAD_MIN, self.size // 2)

    def compacted(self, watermark: int, lateness_ms: int) -> SessionTable:
        """Return a table of the open sessions; each row keeps the epoch of its last change."""
        alive = np.flatnonzero(self.ends.data[: self.size] > self.limit)
        fresh = SessionTable(self._plan, self._hasher, self._epoch, self._width, self.limit)
        if alive.size:
            names = [field.name for field in self._plan.state_schema]
            names = names[1 + len(self._plan.keys) + len(self._plan.added) :]
            state = pa.Table.from_arrays(self.state.columns(alive), names=names)
            keys = (
                self.keys.take(self.key_of.data[alive].astype(np.intp)) if self._plan.keys else []
            )
            bounds = self.starts.data[alive], self.ends.data[alive]
            fresh.load(keys, *bounds, state, self.state.epochs_of(alive))
            fresh.watch(np.arange(fresh.size), watermark, lateness_ms)
        return fresh

    def load(
        self,
        keys: list[pa.Array],
        starts: Times,
        ends: Times,
        state: pa.Table,
        epochs: Array | int = RESTORED_EPOCH,
    ) -> None:
        """Restore sessions; only into an empty table. `watch` them afterwards."""
        rows = len(starts)
        if not rows:
            return
        batch = BatchKeys(self._hasher, keys) if keys else None
        key_slots = self.key_slots(batch, rows)
        slots = np.arange(rows)
        self._reserve(rows)
        self._alive = rows
        self.changed.mark(slots, rows, epochs)
        self.starts.data[:rows], self.ends.data[:rows] = starts, ends
        self.key_of.data[:rows] = key_slots
        self.state.load(slots, state, rows, epochs)
        order = np.lexsort((starts, key_slots))
        unique, ranks = np.unique(key_slots[order], return_inverse=True)
        self._link(ranks, slots[order], unique, np.zeros(len(unique), np.int32))
