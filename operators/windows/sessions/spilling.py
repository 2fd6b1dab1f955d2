"""Sessions that do not fit into memory: a `SessionTable` over sorted runs, with a row per session.

Sessions begin in a `SessionTable` in memory, and move here once that has used up its part of the
budget. From then on such a table is the delta over the runs. A batch first fetches all sessions of its
keys from the runs, and then goes on as in memory: sessions are found, extended and merged there.

**Superseded rows.** A row is identified by its key and the start of its session. When a session gets an
earlier start, or becomes part of another one, its old row stays in the runs. It lies within the row of
the session that it became part of, and open sessions of a key never touch. So whoever reads all rows of
a key knows which of them are superseded. Since sessions only grow, a superseded row expires no later
than the one that supersedes it, so merges can leave out what has expired without looking further.

**Whole hashes.** For this to work, sessions are fetched by the hash of their key, the first lane of
their identity, and the delta has all sessions of a hash or none of them. `SessionDelta.find` therefore
goes by that lane alone, and rows on disk whose hash is in the delta are never looked at.

**Sessions that fire.** The time at which a session on disk fires is not known without reading it, and
reading all of them at each watermark would take too long. `_Upcoming` has those that fire next, as pairs
of time and hash, 16 bytes each, up to a *horizon*. Sessions that are written to disk are added to it if
they fire before the horizon. When it has more pairs than its part of the memory allows, the horizon
comes nearer. When the watermark reaches the horizon, all rows are read once, and the horizon moves on.
Records extend sessions all the time, so a pair may be out of date: the rows of its hash are looked up
when its time has come, and only those that end at that time fire. They fire from the runs, without
becoming part of the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from ....state.hashing import Hashes
from ....state.runs.layout import RowLayout
from ....state.slots.key_index import BatchKeys, KeyHasher, plain_column
from ....state.slots.table import Slots, SlotTable
from ....state.snapshot import FilesCut, RestoredFiles
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.spilling_group import RESTORE_ROWS, ExpiryBound, SpillingSpace
from ...base import OperatorContext
from ...elements import WATERMARK_MIN
from ..kinds import WINDOW_FIELDS
from ..windowed_aggregate import EMIT_ROWS_MAX, Fired
from .intervals import Index, Mask, Times
from .table import SessionTable, superseded

_START, _END = (pa.field(field.name, pa.int64(), False) for field in WINDOW_FIELDS)
_HASH_BYTES: Final = 8 + 4 * 6
"""The bytes of a hash in a `SlotTable`."""
_PAIR_BYTES: Final = 8 + 8
_UPCOMING_PART: Final = 16
"""Pairs of sessions that fire soon may take one part in this many of the budget."""
_PAIRS_MIN: Final = 64
_FIRE_HASHES: Final = EMIT_ROWS_MAX // 4
"""The hashes whose sessions are looked up at a time when they fire."""
NewTable = Callable[[KeyHasher, int], SessionTable]
"""Returns an empty table; its arguments are the hasher of keys and the expiry bound."""
Pair = tuple[int, np.uint64]
Pairs = tuple[Times, Hashes]
"""Times at which sessions fire, and the hashes of their keys."""


class SessionDelta:
    """The sessions that are not in runs: for each hash of a key all of its sessions."""

    def __init__(self, space: SpillingSpace, new_sessions: Callable[[], SessionTable]) -> None:
        self._space, self._new_sessions = space, new_sessions
        self.sessions = new_sessions()
        self._hashes = SlotTable()

    @property
    def size(self) -> int:
        """The number of hashes."""
        return self._hashes.size

    @property
    def nbytes(self) -> int:
        """The bytes of the sessions and their keys."""
        return self._hashes.size * _HASH_BYTES + self.sessions.used_bytes if self.size else 0

    @property
    def held_bytes(self) -> int:
        """The bytes that are left after `clear`."""
        return self._hashes.nbytes

    def claim(self, hashes: Hashes) -> None:
        """Note that all sessions of these hashes are here from now on."""
        self._hashes.lookup(hashes)

    def find(self, hashes: Hashes, checks: Hashes | None) -> Slots:
        """Return a number that is not negative for each hash that is here."""
        return self._hashes.find(hashes)

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each open session."""
        sessions = self.sessions
        slots = sessions.open()
        starts = pa.array(sessions.starts.data[slots])
        return self._space.identify([*sessions.key_columns(slots), starts])

    def table(self, slots: Index) -> pa.Table:
        """Return some of the open sessions."""
        sessions, schema = self.sessions, self._space.shape.schema
        slots = sessions.open()[slots]
        edges = [pa.array(array.data[slots]) for array in (sessions.starts, sessions.ends)]
        columns = [*sessions.key_columns(slots), *edges, *sessions.state_table(slots).columns]
        return pa.Table.from_arrays(columns, schema=schema)

    def upcoming(self) -> Pairs:
        """Return when the open sessions fire, and their hashes."""
        sessions = self.sessions
        slots = sessions.open()
        hashes = sessions.keys.lanes()[0][sessions.key_of.data[slots]]
        return sessions.ends.data[slots] - 1, hashes

    def clear(self) -> None:
        """Forget all sessions."""
        self.sessions = self._new_sessions()
        self._hashes.clear()


class SpillingSessions:
    """The sessions of one subtask. All methods run in its mailbox, or in a thread that it waits for.

    Args:
        new_table: makes the tables of sessions in memory.
        watch: schedules sessions of such a table for when they fire or expire.

    Attributes:
        active: the sessions are here, and no longer in a table in memory.
    """

    def __init__(
        self,
        plan: AggregatePlan,
        context: OperatorContext,
        name: str,
        new_table: NewTable,
        watch: Callable[[SessionTable, Index], None],
    ) -> None:
        self.active = False
        self._plan, self._watch = plan, watch
        self._expiry = ExpiryBound(_END.name, context.max_parallelism)
        self._space = space = SpillingSpace(plan, context, name, _START, [_END], self._expiry)
        self._table = space.new_table(
            lambda: SessionDelta(space, lambda: new_table(space.key_hasher, self._expiry.limit))
        )
        self._upcoming = _Upcoming(lambda: space.share() // _UPCOMING_PART // _PAIR_BYTES)
        self._fired_through = WATERMARK_MIN

    def expire(self, limit: int, further: Index | None = None) -> None:
        """Drop the sessions that end at `limit` or before; see `ExpiryBound.move`."""
        self._expiry.move(limit, further)

    # --- records -------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """The bytes that sessions in memory may take."""
        return self._space.room

    @property
    def sessions(self) -> SessionTable:
        """The table to which rows are added now, until `settle`."""
        return self._table.delta.sessions

    @sessions.setter
    def sessions(self, table: SessionTable) -> None:
        self._table.delta.sessions = table

    def take_over(self, table: SessionTable) -> None:
        """Move the sessions from memory to here."""
        self.active = True
        self.expire(table.limit)
        slots = table.open()
        bounds = table.starts.data[slots], table.ends.data[slots]
        self.load(table.key_columns(slots), *bounds, table.state_table(slots))

    def load(self, keys: list[pa.Array], starts: Times, ends: Times, state: pa.Table) -> None:
        """Restore sessions of keys that have none here."""
        hashes = self._space.key_hasher.identify(keys)[0]
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        low = 0
        while low < len(order):
            last = hashes[min(low + RESTORE_ROWS, len(order)) - 1]
            high = int(np.searchsorted(hashes, last, "right"))
            rows = order[low:high]
            self._table.delta.claim(hashes[low:high])
            indices = pa.array(rows)
            part = [key.take(indices) for key in keys]
            self._load(part, starts[rows], ends[rows], state.take(indices))
            self.settle()
            low = high

    def _load(self, keys: list[pa.Array], starts: Times, ends: Times, state: pa.Table) -> None:
        sessions = self.sessions
        self._watch(sessions, sessions.load(keys, starts, ends, state))

    def fetch(self, keys: BatchKeys | None) -> None:
        """Load the sessions of these keys; called before rows of theirs are added."""
        assert keys is not None
        hashes = keys.lanes(None)[0]
        hashes = np.unique(hashes[self._table.delta.find(hashes, None) < 0])
        rows = self._open_of(hashes)
        self._table.delta.claim(hashes)
        if rows is not None:
            self._load(
                self._space.keys_of(rows), _numbers(rows, _START), _numbers(rows, _END), rows
            )

    def _open_of(self, hashes: Hashes) -> pa.Table | None:
        """Return the open sessions on disk of keys with these hashes, each once; None if there are none."""
        found = self._table.lookup_all(hashes)
        if found is None:
            return None
        rows = found.table
        expired = self._expiry.has_expired(hashes[found.positions], _numbers(rows, _END))
        if expired.any():
            rows = rows.take(pa.array(np.flatnonzero(~expired)))
        return self._current(rows)

    def _current(self, rows: pa.Table) -> pa.Table:
        """Return the rows that are not superseded; for each hash there are all rows or none."""
        numbers = self._space.key_index(self._space.keys_of(rows))[1]
        old = superseded(numbers, _numbers(rows, _START), _numbers(rows, _END))
        return rows.take(pa.array(np.flatnonzero(~old))) if old.any() else rows

    def settle(self) -> None:
        """Enforce the memory budget; called after each batch.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        delta = self._table.delta
        self._table.settle()
        self._note_written(delta)

    def _note_written(self, delta: SessionDelta) -> None:
        """Note when the sessions of a delta fire, if it is being written."""
        if self._table.delta is not delta:
            times, hashes = delta.upcoming()
            waiting = np.flatnonzero(times > self._fired_through)
            self._upcoming.add(times[waiting], hashes[waiting])

    # --- results -------------------------------------------------------------------------------

    def due(self, before: int, watermark: int) -> Iterator[Fired]:
        """Yield the results of sessions on disk that fire between two watermarks, in order of their ends.

        No rows may be added meanwhile.
        """
        while self._table.spilled:
            times, hashes = self._upcoming.pop(watermark)
            kept = np.flatnonzero(times > before)
            for low in range(0, len(kept), _FIRE_HASHES):
                part = kept[low : low + _FIRE_HASHES]
                yield from self._fired(times[part], hashes[part])
            if self._upcoming.reaches(watermark):
                break
            self._look_ahead(before)
        self._fired_through = watermark

    def _fired(self, times: Times, hashes: Hashes) -> Iterator[Fired]:
        """Yield the results of sessions from the first to the last of these pairs."""
        # Sessions in memory fire there.
        asked = np.unique(hashes)
        asked = asked[self._table.delta.find(asked, None) < 0]
        rows = self._open_of(asked)
        if rows is None:
            return
        keys = self._space.keys_of(rows)
        ends = _numbers(rows, _END)
        own = self._space.key_hasher.identify(keys)[0]
        last = ends - 1
        due = ~_is_before(last, own, times[0], hashes[0])
        due &= ~_is_before(times[-1], hashes[-1], last, own)
        chosen = np.flatnonzero(due)
        if not chosen.size:
            return
        chosen = chosen[np.argsort(ends[chosen], kind="stable")]
        rows = rows.take(pa.array(chosen))
        starts, ends = _numbers(rows, _START), _numbers(rows, _END)
        yield Fired(starts, ends, self._space.keys_of(rows), self._space.results(rows))

    def _look_ahead(self, before: int) -> None:
        """Read all rows on disk, and note those that fire next."""
        known = self._upcoming.horizon
        assert known is not None
        self._upcoming.horizon = None
        for rows in self._table.packed_on_disk():
            times = RowLayout.numbers(rows.records, _END.name) - 1
            waiting = (times > before) & _is_before(*known, times, rows.hashes)
            self._upcoming.add(times[waiting], rows.hashes[waiting])

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self) -> FilesCut:
        """Return a cut of all sessions."""
        delta = self._table.delta
        cut = self._table.snapshot(expired=self._expiry.now())
        self._note_written(delta)

        def tables() -> Iterator[pa.Table]:
            for rows in cut.tables():
                rows = self._current(rows)
                edges = [_numbers(rows, field) for field in (_START, _END)]
                yield self._space.canonical(rows, edges)

        return replace(cut, tables=tables)

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        """Restore runs, before anything else.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        self.active = True
        self._table.restore_files(restored)
        self._upcoming.forget()

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        self._table.close()
        self._space.close()


class _Upcoming:
    """The sessions on disk that fire up to a horizon, as pairs of time and hash.

    Pairs are ordered by time and then by hash, so that the horizon can lie between sessions that fire
    at the same time. Pairs that are added together are one run, in order. Each run is at least as long
    as the next one was, or else they are merged.

    Args:
        room: returns how many pairs it may have.

    Attributes:
        horizon: the last pair that would be known here; None: all sessions on disk are known.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self._runs: list[Pairs] = []
        self.horizon: Pair | None = None

    def reaches(self, time: int) -> bool:
        """Return True if all sessions that fire at this time or before are known."""
        return self.horizon is None or time < self.horizon[0]

    def forget(self) -> None:
        """Forget all pairs: no session is known."""
        self._runs, self.horizon = [], (WATERMARK_MIN, np.uint64(0))

    def add(self, times: Times, hashes: Hashes) -> None:
        """Add the pairs that are not beyond the horizon, which comes nearer if they are too many."""
        if self.horizon is not None:
            known = np.flatnonzero(~_is_before(*self.horizon, times, hashes))
            times, hashes = times[known], hashes[known]
        if not len(times):
            return
        while self._runs and len(self._runs[-1][0]) < len(times):
            before = self._runs.pop()
            times, hashes = np.concatenate([before[0], times]), np.concatenate([before[1], hashes])
        self._runs.append(_ordered(times, hashes))
        room = max(_PAIRS_MIN, self._room())
        if sum(len(run[0]) for run in self._runs) > room:
            times, hashes = _ordered(*map(np.concatenate, zip(*self._runs, strict=True)))
            if len(times) > room:
                times, hashes = times[: room // 2], hashes[: room // 2]
                self.horizon = int(times[-1]), hashes[-1]
            self._runs = [(times, hashes)]

    def pop(self, until: int) -> Pairs:
        """Remove and return the pairs up to a time, in order, each once."""
        due: list[Pairs] = [(np.zeros(0, np.int64), np.zeros(0, np.uint64))]
        for number, (times, hashes) in enumerate(self._runs):
            at = int(np.searchsorted(times, until, "right"))
            due.append((times[:at], hashes[:at]))
            self._runs[number] = times[at:], hashes[at:]
        self._runs = [run for run in self._runs if len(run[0])]
        return _ordered(*map(np.concatenate, zip(*due, strict=True)))


def _ordered(times: Times, hashes: Hashes) -> Pairs:
    """Return pairs in order, each once."""
    order = np.lexsort((hashes, times))
    times, hashes = times[order], hashes[order]
    again = (times[1:] == times[:-1]) & (hashes[1:] == hashes[:-1])
    if again.any():
        kept = np.flatnonzero(np.append(True, ~again))
        times, hashes = times[kept], hashes[kept]
    return times, hashes


def _is_before(
    time: int | Times, hash_: np.uint64 | Hashes, times: int | Times, hashes: np.uint64 | Hashes
) -> Mask:
    """Return for which pairs the first one is before the second one."""
    before: Mask = (time < times) | ((time == times) & (hash_ < hashes))
    return before


def _numbers(rows: pa.Table, field: pa.Field) -> Times:
    numbers: Times = plain_column(rows.column(field.name)).to_numpy()
    return numbers
