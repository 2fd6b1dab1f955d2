"""Sessions that do not fit into memory: a `SessionTable` over sorted runs, with a row per session.

Sessions begin in a `SessionTable` in memory, and move here once that has used up its part of the
budget. From then on such a table is the delta over the runs. A batch first fetches all sessions of its
keys from the runs, and then goes on as in memory: sessions are found, extended and merged there.

**Superseded rows.** A row is identified by its key and the start of its session. When a session gets an
earlier start, or becomes part of another one, its old row stays in the runs. It lies within the row of
the session that it became part of, and open sessions of a key never touch. So a lookup that
reads all rows of a key knows which of them are superseded. Since sessions only grow, a superseded row
expires no later than the one that supersedes it, so merges can leave out what has expired without
looking further.

**Whole hashes.** For this to work, sessions are fetched by the hash of their key, the first lane of
their identity, and the delta has all sessions of a hash or none of them. `SessionDelta.find` therefore
goes by that lane alone, and rows on disk whose hash is in the delta are never looked at.

**Sessions that fire.** `DueRows` knows the sessions on disk that fire next, by time and hash. Records
extend sessions all the time, so the rows of a hash are looked up when its time has come, and only those
that end at that time fire. They fire from the runs, without becoming part of the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from ....state.hashing import Hashes, distinct
from ....state.runs.layout import RowLayout
from ....state.slots.key_index import BatchKeys, KeyHasher, plain_column
from ....state.slots.table import Slots, SlotTable
from ....state.snapshot import FilesCut, RestoredFiles
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.spilling_group import AggregateSpace
from ...base import OperatorContext
from ...spilling_space import DueRows, ExpiryBound, Pairs, by_hash, is_in_portion
from ..kinds import WINDOW_FIELDS
from ..windowed_aggregate import Fired
from .intervals import Index, Times
from .table import SessionTable, superseded

_START, _END = (pa.field(field.name, pa.int64(), False) for field in WINDOW_FIELDS)
_HASH_BYTES: Final = 8 + 4 * 6
"""The bytes of a hash in a `SlotTable`."""
NewTable = Callable[[KeyHasher, int], SessionTable]
"""Returns an empty table; its arguments are the hasher of keys and the expiry bound."""


class SessionDelta:
    """The sessions that are not in runs: for each hash of a key all of its sessions."""

    def __init__(self, space: AggregateSpace, new_sessions: Callable[[], SessionTable]) -> None:
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
        self._watch = watch
        self._expiry = ExpiryBound(_END.name, context.max_parallelism)
        self._space = space = AggregateSpace(plan, context, name, _START, [_END], self._expiry)
        self._table = space.new_table(
            lambda: SessionDelta(space, lambda: new_table(space.key_hasher, self._expiry.limit))
        )
        self._due = DueRows(
            self._table,
            lambda records: RowLayout.numbers(records, _END.name) - 1,
            space.share,
        )

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
        for rows, hashes in by_hash(self._space.key_hasher.identify(keys)[0]):
            self._table.delta.claim(hashes)
            indices = pa.array(rows)
            part = [key.take(indices) for key in keys]
            self._load(part, starts[rows], ends[rows], state.take(indices))
            self.settle()

    def _load(self, keys: list[pa.Array], starts: Times, ends: Times, state: pa.Table) -> None:
        sessions = self.sessions
        self._watch(sessions, sessions.load(keys, starts, ends, state))

    def fetch(self, keys: BatchKeys | None) -> None:
        """Load the sessions of these keys; called before rows of theirs are added."""
        assert keys is not None
        hashes = keys.lanes(None)[0]
        hashes = distinct(hashes[self._table.delta.find(hashes, None) < 0])
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
            self._due.add(*delta.upcoming())

    # --- results -------------------------------------------------------------------------------

    def due(self, before: int, watermark: int) -> Iterator[Fired]:
        """Yield the results of sessions on disk that fire between two watermarks, in order of their ends.

        No rows may be added meanwhile.
        """
        for portion in self._due.due(before, watermark):
            yield from self._fired(portion)

    def _fired(self, portion: Pairs) -> Iterator[Fired]:
        # Sessions in memory fire there.
        asked = distinct(portion[1])
        asked = asked[self._table.delta.find(asked, None) < 0]
        rows = self._open_of(asked)
        if rows is None:
            return
        ends, hashes = (
            _numbers(rows, _END),
            self._space.key_hasher.identify(self._space.keys_of(rows))[0],
        )
        chosen = np.flatnonzero(is_in_portion(portion, ends - 1, hashes))
        if chosen.size:
            rows = rows.take(pa.array(chosen[np.argsort(ends[chosen], kind="stable")]))
            starts, ends = _numbers(rows, _START), _numbers(rows, _END)
            yield Fired(starts, ends, self._space.keys_of(rows), self._space.results(rows))

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
        self._due.forget()

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        self._table.close()
        self._space.close()


def _numbers(rows: pa.Table, field: pa.Field) -> Times:
    numbers: Times = plain_column(rows.column(field.name)).to_numpy()
    return numbers
