"""The open sessions of one subtask: by key, with their bounds and their aggregates.

Every session has a slot. Slots are given out in order and never reused; those of sessions that
expired, or were merged into others, are dropped together once they are the majority. The sessions
of a key are a chain from the latest to the earliest, and a batch reads only as much of it as its
records can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....state.aggregates.state import AggregateState, StateCut
from ....state.slots.arrays import SlotArray
from ....state.slots.epochs import RESTORED_EPOCH, ChangedSlots, Field, SlotCut, TableEpoch
from ....state.slots.key_index import BatchKeys, KeyCut, KeyHasher, KeyIndex
from ....state.values import Array, Values
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import Rows
from .intervals import Index, Mask, Merged, Times, accepted, merge_intervals

_DEAD_MIN = 1_024
_SLOT_BYTES = 6 * 8 + 3 * 4
"""The bytes of a session beside its aggregates: bounds, deadlines, its key, its chain and its epoch."""
_INT64_MIN, _INT64_MAX = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Deadlines:
    """Slots in buckets of time, by the time at which they must be looked at.

    A slot is in the bucket of a former deadline. Records move deadlines all the time, which costs
    nothing here: only when event time reaches the bucket is the slot looked at, and put into the
    bucket of its current deadline. So a session that stays active is touched about once per gap.

    Buckets have few slots, so they are no objects: slots added together are one run, ordered by
    bucket. Each run is at least as long as the next one was, or else they are merged.

    Args:
        width_ms: the width of a bucket; the finer, the fewer slots are looked at in vain.
    """

    def __init__(self, width_ms: int) -> None:
        self._width = width_ms
        self._runs: list[tuple[Index, Times]] = []
        """The runs: slots and their buckets."""
        self._bucket_of = SlotArray(np.int64, _INT64_MAX)

    def add(self, slots: Index, times: Times) -> None:
        """Schedule each slot for `times` (ms); a slot with an earlier time keeps it."""
        if not slots.size:
            return
        self._bucket_of.reserve(int(slots.max()) + 1)
        buckets = times // self._width
        sooner = np.flatnonzero(buckets < self._bucket_of.data[slots])
        if not sooner.size:
            return
        slots, buckets = slots[sooner], buckets[sooner]
        self._bucket_of.data[slots] = buckets
        while self._runs and len(self._runs[-1][0]) < len(slots):
            before, its_buckets = self._runs.pop()
            kept = np.flatnonzero(self._bucket_of.data[before] == its_buckets)
            slots = np.concatenate([before[kept], slots])
            buckets = np.concatenate([its_buckets[kept], buckets])
        order = np.argsort(buckets, kind="stable")
        self._runs.append((slots[order], buckets[order]))

    def pop(self, until: int) -> Index:
        """Remove and return the slots that may be due at `until` (ms), each once, ascending."""
        last = until // self._width
        found: list[Index] = []
        for number, (slots, buckets) in enumerate(self._runs):
            due = int(np.searchsorted(buckets, last, "right"))
            if due:
                # others have moved to an earlier bucket since
                here = self._bucket_of.data[slots[:due]] == buckets[:due]
                found.append(slots[:due][here])
                self._runs[number] = slots[due:], buckets[due:]
        if not found:
            return np.zeros(0, np.intp)
        self._runs = [run for run in self._runs if len(run[0])]
        slots = np.unique(np.concatenate(found))
        self._bucket_of.data[slots] = _INT64_MAX
        return slots


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
        self._kept = SlotArray(np.uint32)  # by key: see `not_kept`
        self.changed = self._no_changes()
        self._deadlines = Deadlines(width_ms)

    def _no_changes(self) -> ChangedSlots:
        # Not a bound method: in a circle of references the arrays would wait for the garbage collector.
        bounds: list[Field] = [self.starts, self.ends]
        return ChangedSlots(self._epoch, lambda: bounds)

    @property
    def used_bytes(self) -> int:
        """The bytes that keys and sessions take, without room to grow."""
        return self.keys.used_bytes + self.size * _SLOT_BYTES + self.state.used_bytes

    def open(self) -> Index:
        """Return the slots of the open sessions."""
        return np.flatnonzero(self.ends.data[: self.size] > self.limit)

    def of_keys(self, keys: BatchKeys | None) -> tuple[Index, Index]:
        """Return the open sessions of some keys, and for each the place of its key; nothing changes.

        None is the one key of records without keys.
        """
        slots = np.zeros(min(1, self.size), np.intp)
        if keys is not None:
            slots = self.keys.find_keys(keys).astype(np.intp)
        places = np.flatnonzero(slots >= 0)
        lowest = np.full(len(places), _INT64_MIN)
        found, owners, _ = self._reachable(slots[places], lowest)
        return found, places[owners]

    def key_columns(self, slots: Index) -> list[pa.Array]:
        """Return the keys of these sessions."""
        return self.keys.take(self.key_of.data[slots].astype(np.intp)) if self._plan.keys else []

    def state_table(self, slots: Index) -> pa.Table:
        """Return the state columns of these sessions."""
        return self._plan.state_table(self.state.columns(slots))

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

    def not_kept(self, key_slots: Index, cut: int) -> Index:
        """Return the rows of keys for which this was not called yet since cut number `cut`."""
        self._kept.reserve(max(1, self.keys.size))
        rows = np.flatnonzero(self._kept.data.take(key_slots) != cut)
        self._kept.data[key_slots[rows]] = cut
        return rows

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

    def advance(
        self,
        before: int,
        watermark: int,
        lateness_ms: int,
        limit: int,
        keep: Callable[[Index], None] | None = None,
    ) -> Index:
        """Expire the sessions that end at `limit` or before; `keep` is called with them before.

        Return those that fire between the two watermarks, in order of their ends; their state stays
        until the table is compacted.
        """
        slots = self._deadlines.pop(watermark)
        slots = slots[self.ends.data[slots] > self.limit]
        ends = self.ends.data[slots]
        due = (ends - 1 > before) & (ends - 1 <= watermark)
        fired: Index = slots[due][np.argsort(ends[due], kind="stable")]
        kept = slots[ends > limit]
        if keep is not None and len(kept) < len(slots):
            keep(slots[ends <= limit])
        self._alive -= len(slots) - len(kept)
        self.limit = limit
        self.watch(kept, watermark, lateness_ms)
        return fired

    def is_worth_compacting(self) -> bool:
        """Return True if most slots are of expired sessions."""
        return self.size - self._alive > max(_DEAD_MIN, self.size // 2)

    def compacted(self, watermark: int, lateness_ms: int) -> SessionTable:
        """Return a table of the open sessions; each row keeps the epoch of its last change."""
        alive = self.open()
        fresh = SessionTable(self._plan, self._hasher, self._epoch, self._width, self.limit)
        if alive.size:
            bounds = self.starts.data[alive], self.ends.data[alive]
            state, epochs = self.state_table(alive), self.state.epochs_of(alive)
            slots = fresh.load(self.key_columns(alive), *bounds, state, epochs)
            fresh.watch(slots, watermark, lateness_ms)
        return fresh

    def load(
        self,
        keys: list[pa.Array],
        starts: Times,
        ends: Times,
        state: pa.Table,
        epochs: Array | int = RESTORED_EPOCH,
    ) -> Index:
        """Restore sessions of keys that have none here; `watch` them afterwards. Return their slots."""
        rows = len(starts)
        slots = np.arange(self.size, self.size + rows)
        if not rows:
            return slots
        batch = BatchKeys(self._hasher, keys) if keys else None
        key_slots = self.key_slots(batch, rows)
        self._reserve(self.size + rows)
        self._alive += rows
        self.changed.mark(slots, self.size, epochs)
        self.starts.data[slots], self.ends.data[slots] = starts, ends
        self.key_of.data[slots] = key_slots
        self.state.load(slots, state, self.size, epochs)
        self._chain(slots)
        return slots

    def _chain(self, slots: Index) -> None:
        """Chain sessions of keys that have none yet."""
        if not slots.size:
            return
        starts, key_slots = self.starts.data[slots], self.key_of.data[slots]
        order = np.lexsort((starts, key_slots))
        unique, ranks = np.unique(key_slots[order], return_inverse=True)
        self._link(ranks, slots[order], unique, np.zeros(len(unique), np.int32))

    # --- going back ----------------------------------------------------------------------------

    def keep(self, grew: Callable[[], None], current: Callable[[], SessionTable]) -> KeptSessions:
        """Open a cut to which the sessions can go back: that which the table has just counted.

        Args:
            grew: called now and then while old values come.
            current: returns the table that has taken the place of this one, or this one.
        """
        return KeptSessions(self, grew, current)

    def go_back(self, kept: KeptSessions) -> Index:
        """Take over the sessions of another table, as they were at a cut; only into an empty one.

        Return those that have not expired; `watch` them afterwards.
        """
        kept.keys.go_back(kept.keys_then)
        kept.bounds.go_back()
        kept.state.go_back(kept.aggregates, self._epoch)
        self.keys, self.state = kept.keys, kept.state
        self.starts, self.ends, self.key_of = kept.starts, kept.ends, kept.key_of
        self._reserve(kept.bounds.size)
        for by_key in (self._head, self._seen):
            by_key.reserve(max(1, self.keys.size))
        self.changed = self._no_changes()
        self.changed.mark(slice(0, self.size), self.size, RESTORED_EPOCH)
        alive = self.open()
        self._alive = len(alive)
        self._chain(alive)
        return alive


class KeptSessions:
    """A cut to which sessions can go back.

    Attributes:
        keys, state, starts, ends, key_of: of the table; what they have of the sessions at the cut changes
            only in ways that `bounds` and `aggregates` note. The chains of the sessions are made again.
        keys_then, bounds, aggregates: the keys, the bounds and the state at the cut.
    """

    def __init__(
        self, table: SessionTable, grew: Callable[[], None], current: Callable[[], SessionTable]
    ) -> None:
        self.keys, self.keys_then = table.keys, table.keys.cut()
        self.bounds = table.changed.keep(table.size, grew)
        self.state, self.aggregates = table.state, table.state.keep(grew)
        self.starts, self.ends, self.key_of = table.starts, table.ends, table.key_of
        self._table: SessionTable | None = table
        self._current: Callable[[], SessionTable] | None = current

    @property
    def nbytes(self) -> int:
        """Roughly the memory of the old values, and of all if the table has been compacted since."""
        size = self.bounds.nbytes + self.aggregates.slots.nbytes
        if self._table is not None and self._current is not None:
            size += self._table.used_bytes if self._current() is not self._table else 0
        return size

    def close(self) -> None:
        """Note no more old values."""
        self._table = self._current = None
        self.bounds.close()
        self.aggregates.slots.close()


class SessionCut:
    """The sessions at a cut; call `slots`, `edges` and `columns` in this order, in any one thread.

    A row is identified by its key and `window_start`. Deltas carry no marks of expired sessions: the
    expiry bound tells which these are, as with other windows. Nor do they mark sessions that were
    merged into others, or whose start moved back: such a row lies within that of the session it
    became part of, and open sessions of a key never touch. So a restore leaves out expired rows,
    and those within another row of their key.
    """

    def __init__(self, table: SessionTable, epoch: int) -> None:
        self._bounds: SlotCut = table.changed.cut(epoch, table.size)
        self._state: StateCut = table.state.cut(epoch)
        self._keys: KeyCut = table.keys.cut()
        self._key_of = table.key_of.data  # the key of a slot never changes
        self._limit = table.limit
        self._edges: list[Array] = []

    def slots(self, since: int | None) -> Index:
        """Return the sessions open at the cut that had changed after cut number `since`, ascending."""
        which = self._bounds.slots(since)
        starts, ends = self._bounds.values(which)
        alive = np.flatnonzero(ends > self._limit)
        self._edges = [starts[alive], ends[alive]]
        return alive if isinstance(which, slice) else which[alive]

    def edges(self, which: Rows) -> list[Array]:
        """Return start and end of the sessions that `slots` returned."""
        return self._edges

    def columns(self, which: Rows) -> tuple[list[pa.ChunkedArray], list[pa.Array]]:
        """Return key columns and state columns of these sessions, and close the cut."""
        state = self._state.columns(which)
        keys = self._key_of[which].astype(np.intp)
        order = np.argsort(keys, kind="stable")
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        taken = self._keys.take(keys[order])
        return [column.take(pa.array(back)) for column in taken], state

    def close(self) -> None:
        """Close the cut."""
        self._bounds.close()
        self._state.close()


def superseded(keys: Index, starts: Times, ends: Times) -> Mask:
    """Return True for rows that lie within another row of their key."""
    order = np.lexsort((-ends, starts, keys))
    mask = np.zeros(len(order), np.bool_)
    if not len(order):
        return mask
    # ends as ranks, with keys in the high part: a running maximum never mixes keys
    _, ranks = np.unique(ends, return_inverse=True)
    high = keys[order].astype(np.int64) * (int(ranks.max()) + 2)
    reach = np.maximum.accumulate(high + ranks[order])
    mask[order[1:]] = (high + ranks[order])[1:] <= reach[:-1]
    return mask
