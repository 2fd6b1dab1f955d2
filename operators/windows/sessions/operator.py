"""Aggregates per key and session, a batch at a time.

Where fired sessions are merged or extended, the result is of the longer session, and the earlier
results are not retracted. A record is late if its own window has expired and meets no open session.
`windowed_aggregate.py` says what this has in common with other windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain

import msgspec
import numpy as np
import pyarrow as pa

from ....state.aggregates.accumulators import Mask
from ....state.hashing import Hashes, distinct
from ....state.runs.layout import RowLayout
from ....state.slots.key_index import BatchKeys, KeyHasher, KeyIndex, plain_column, taken_keys
from ....state.snapshot import (
    KEY_GROUP_COLUMN,
    FilesCut,
    RestoredFiles,
    RestoredState,
    StateInfo,
    StateSnapshot,
)
from ...aggregation.aggregate_tables import (
    CutPart,
    aggregate_info,
    files_of_another_backend,
    restored_rows,
    table_cut,
)
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows, columns_of
from ...aggregation.spilling_group import AggregateSpace, lies_on_disk
from ...base import OperatorContext
from ...elements import WATERMARK_MIN, Batch
from ...rollback import Rollback
from ...spilling_space import DueRows, ExpiryBound, Pairs, is_in_portion
from ...time_progress import WATERMARK_COLUMN, KeyGroupTable, clamped
from ..kinds import WINDOW_FIELDS
from ..spilling_cells import CellDelta, SpillingCells
from ..windowed_aggregate import EMIT_ROWS_MAX, Fired, WindowedAggregate
from .intervals import Index, Times
from .table import KeptSessions, SessionCut, SessionTable, superseded
from .window import ColumnGap, FixedGap

_SESSIONS = "sessions"
_START, _END = (pa.field(field.name, pa.int64(), False) for field in WINDOW_FIELDS)
_PROGRESS = KeyGroupTable.of_times("watermark", "window", WATERMARK_COLUMN, "gone_through")
"""`gone_through`: sessions that end at this time (ms) or before have expired."""
_BUCKETS_PER_GAP = 256
_WIDTH_MS = 1_000
"""The width of deadline buckets, where gaps are only known from records."""
NewTable = Callable[[KeyHasher, int], SessionTable]
"""Returns an empty table; its arguments are the hasher of keys and the expiry bound."""


def _expired_at(lateness_ms: int, watermark: int) -> int:
    """Return the time such that sessions that end there or before have expired at a watermark."""
    return clamped(watermark - lateness_ms + 1)


class SessionAggregate(WindowedAggregate):
    """Aggregates of sessions over columns, per key or without keys.

    Args:
        gap: of the sessions.
        lateness_ms: the allowed lateness.
        plan: keys and aggregates.
        step: its name, for errors.
        committed: clients read the sessions also as of checkpoints.
    """

    _cells = False

    def __init__(
        self,
        gap: FixedGap | ColumnGap,
        lateness_ms: int,
        plan: AggregatePlan,
        step: str,
        *,
        committed: bool = False,
    ) -> None:
        expired_at = partial(_expired_at, lateness_ms)
        super().__init__(plan, step, _PROGRESS, expired_at, committed=committed)
        self._gap, self._lateness_ms = gap, lateness_ms
        self._disk: SpillingSessions | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._in_memory = self._new_table(self._hasher, WATERMARK_MIN)
        if lies_on_disk(self._plan, context):
            self._disk = SpillingSessions(
                self._plan, context, _SESSIONS, self._new_table, self._watch
            )
            if self._committed:
                self._disk.find_expiring(self._lateness_ms)
        else:
            self._rollback = Rollback(context.options, _SESSIONS, self._open_kept)

    def _new_table(self, hasher: KeyHasher, limit: int) -> SessionTable:
        width = _WIDTH_MS
        if isinstance(self._gap, FixedGap):
            width = max(1, self._gap.ms // _BUCKETS_PER_GAP)
        return SessionTable(self._plan, hasher, self._epoch, width, limit)

    @property
    def _spilling(self) -> SpillingSessions | None:
        """The sessions on disk if they are there, instead of `_in_memory`."""
        disk = self._disk
        return disk if disk is not None and disk.active else None

    @property
    def _table(self) -> SessionTable:
        """The sessions to which rows are added now; it may change with each `_settle`."""
        return self._in_memory if self._spilling is None else self._spilling.cells

    def _watch(self, table: SessionTable, slots: Index) -> None:
        table.watch(slots, self._progress.watermark, self._lateness_ms)

    def _settle(self) -> None:
        """Enforce the memory budget; called after each batch."""
        self._compact()
        disk = self._disk
        if disk is None:
            return
        if disk.active:
            disk.settle()
        elif self._in_memory.used_bytes > disk.room:
            disk.take_over(self._in_memory)
            self._in_memory = self._new_table(self._hasher, WATERMARK_MIN)

    # --- records -------------------------------------------------------------------------------

    def _late(self, times: Index, groups: Index | None) -> Mask:
        """Return none: whether a row is late depends on the open sessions of its key."""
        return np.zeros(len(times), np.bool_)

    def _add(
        self, batch: Batch, rows: KeyedRows, times: Index, groups: Index | None, earliest: int
    ) -> None:
        if self._spilling is not None:
            self._spilling.fetch(rows.keys)
        table, progress = self._table, self._progress
        key_slots = table.key_slots(rows.keys, rows.size)
        if self._old is not None and self._old.keeps:
            # Most keys have been kept before, and need no look into the index.
            changing = table.not_kept(key_slots, self._old.cuts)
            if changing.size:
                self._keep(rows.keys_at(changing))
        ends = times + self._gap.of(columns_of(batch, self._step))
        taken, touched = table.add(key_slots, times, ends, rows.values, progress.expired(groups))
        if taken is not None:
            late = ~taken
            # The last window of a late record would have been a session of its own.
            self._late_output.split(
                batch, late, progress.now(groups), lambda times: (times, ends[late])
            )
        if touched.size:
            self._watch(table, touched)
            last = table.ends.data[touched] - 1
            again = np.flatnonzero(last <= progress.now(self._groups_of(touched)))
            self._emit(self._results(touched[again[np.argsort(last[again], kind="stable")]]))
        self._settle()

    def _keep(self, columns: list[pa.Array]) -> None:
        """Keep the sessions of these keys, which are about to change."""
        old = self._old
        if old is None or not old.keeps:
            return

        def read(places: Index) -> tuple[Index, list[pa.Array]]:
            taken = [taken_keys(column, places) for column in columns]
            found = Fired.together(list(self._windows_of(taken)))
            owners = found.keys
            assert not isinstance(owners, list)
            order = np.argsort(owners, kind="stable")
            found = found.take(order)
            return owners[order], [pa.array(found.starts), pa.array(found.ends), *found.values]

        old.keep(columns, None, read)

    def _groups_of(self, slots: Index) -> Index | None:
        """Return the key groups of these sessions; see `TimeProgress.groups_of`."""
        return self._progress.groups_of(lambda: self._key_columns(slots))

    def _key_columns(self, slots: Index) -> list[pa.Array]:
        return self._table.key_columns(slots)

    def _results(self, slots: Index) -> Iterator[Fired]:
        """Yield the results of these sessions, which are in order of their ends."""
        table = self._table
        for low in range(0, len(slots), EMIT_ROWS_MAX):
            part = slots[low : low + EMIT_ROWS_MAX]
            yield Fired(
                table.starts.data[part], table.ends.data[part], part, table.state.results(part)
            )

    # --- time ----------------------------------------------------------------------------------

    def _due(self, before: int, watermark: int) -> Iterator[Fired]:
        expired = self._progress.bounds[0]
        if self._spilling is not None and self._old is not None:
            for keys in self._spilling.expiring(before, watermark):
                self._keep(keys)
        slots = self._table.advance(
            before,
            watermark,
            self._lateness_ms,
            expired,
            None if self._old is None else lambda slots: self._keep(self._key_columns(slots)),
        )
        if self._spilling is None:
            return self._results(slots)
        return self._with_results_on_disk(slots, self._spilling.due(before, watermark))

    def _with_results_on_disk(self, slots: Index, on_disk: Iterator[Fired]) -> Iterator[Fired]:
        """Yield the results of sessions in memory and on disk; both are in order of their ends."""
        ends = self._table.ends.data[slots]
        at = 0
        for fired in on_disk:
            upto = int(np.searchsorted(ends, fired.ends[-1], "right"))
            yield Fired.by_end([*self._results_with_keys(slots[at:upto]), fired])
            at = upto
        yield from self._results_with_keys(slots[at:])

    def _results_with_keys(self, slots: Index) -> Iterator[Fired]:
        for fired in self._results(slots):
            yield replace(fired, keys=self._keys_of([fired]))

    def _drop_expired(self, watermark: int) -> None:
        if self._disk is not None:
            self._disk.expire(self._progress.bounds[0])
        self._compact()

    def _compact(self) -> None:
        if not self._table.is_worth_compacting():
            return
        compacted = self._table.compacted(self._progress.watermark, self._lateness_ms)
        if self._spilling is None:
            self._in_memory = compacted
            self._rollback.grew()  # the table that was compacted stays in kept cuts
        else:
            self._spilling.replace_cells(compacted)

    # --- queries -------------------------------------------------------------------------------

    def _windows_of(self, columns: list[pa.Array]) -> Iterator[Fired]:
        if self._spilling is not None:
            yield from self._spilling.sessions_of(columns)
            return
        yield _of_keys(self._in_memory, BatchKeys(self._hasher, columns) if columns else None)

    def _windows_as_of(self, columns: list[pa.Array], checkpoint_id: int) -> Iterator[Fired]:
        assert self._old is not None
        kept = self._old.find(columns, checkpoint_id)
        for places, (starts, ends, *values) in kept.rows:
            yield Fired(starts.to_numpy(), ends.to_numpy(), places, values)
        for fired in self._windows_of(columns):
            assert not isinstance(fired.keys, list)
            yield fired.take(np.flatnonzero(~kept.kept[0, fired.keys]))

    def _keys_now(self, ending: ExitStack) -> Iterator[list[pa.Array]]:
        if self._spilling is None:
            return self._in_memory.keys.cut().pieces()
        pieces, close = self._spilling.keys_now()
        ending.callback(close)
        return pieces

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `sessions` (one row per open session) and `watermark` (one per key group)."""
        self._note_cut(checkpoint_id)
        progress = {_PROGRESS.name: self._progress.cut()}
        if self._spilling is not None:
            return StateSnapshot(tables=progress, files={_SESSIONS: self._spilling.snapshot()})
        epoch = self._epoch.cut()
        cut = SessionCut(self._in_memory, epoch)
        part = CutPart(cut, cut.edges)
        sessions = table_cut(self._plan, epoch, [part], self.context.max_parallelism)
        sessions = msgspec.structs.replace(sessions, keys=self._identity)
        self._rollback.cut(checkpoint_id)
        return StateSnapshot(tables={_SESSIONS: sessions, **progress})

    def _open_kept(self) -> KeptSessions:
        """Open a cut to which the sessions can go back; see `Rollback`."""
        return self._in_memory.keep(self._rollback.grew, lambda: self._in_memory)

    @property
    def _identity(self) -> tuple[str, ...]:
        return (*self._plan.keys, _START.name)

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `sessions` and `watermark`."""
        sessions = aggregate_info(self._plan, _SESSIONS, "window")
        return [
            msgspec.structs.replace(sessions, keys=self._identity),
            _PROGRESS.info(),
        ]

    @property
    def _uses_disk(self) -> bool:
        return self._disk is not None

    def _restore(self, state: RestoredState) -> None:
        """Restore the progress of event time, and the open sessions."""
        self._epoch.restored()
        self._progress.restore(state)
        expired, files = self._progress.bounds[0], state.files.get(_SESSIONS)
        self._in_memory = self._new_table(self._hasher, expired)
        if self._disk is not None:
            self._disk.expire(expired, self._progress.further())
            if files:
                self._disk.restore_files(files)
        elif files:
            raise files_of_another_backend(_SESSIONS, self._step)
        kept = self._rollback.found(state)
        if kept is not None:
            self._watch(self._in_memory, self._in_memory.go_back(kept))
        table = state.tables.get(_SESSIONS)
        if table is not None and table.num_rows:
            self._load(table, state.states.get(_SESSIONS))
        self._note_restored()
        self._rollback.restored(self.context.restored_checkpoint)

    def _load(self, table: pa.Table, info: StateInfo | None) -> None:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        if info is not None:
            info = msgspec.structs.replace(info, keys=(*info.keys, _END.name))
        table = restored_rows(self._plan, table, info, self._step)
        ends = table.column(_END.name).cast(pa.int64()).to_numpy()
        open_ = np.flatnonzero(ends > self._progress.expired(groups))
        table, ends = table.take(pa.array(open_)), ends[open_]
        starts = table.column(_START.name).cast(pa.int64()).to_numpy()
        kept = np.flatnonzero(~superseded(self._numbered(table), starts, ends))
        rows = table.take(pa.array(kept))
        keys = [self._key(rows, key) for key in self._plan.keys]
        if self._disk is not None and rows.nbytes > self._disk.room:
            self._disk.active = True
        if self._spilling is not None:
            self._spilling.load(keys, starts[kept], ends[kept], rows)
        else:
            slots = self._in_memory.load(keys, starts[kept], ends[kept], rows)
            self._watch(self._in_memory, slots)

    def _numbered(self, table: pa.Table) -> Index:
        """Return the key of each row as a number."""
        keys = [self._key(table, key) for key in self._plan.keys]
        if not keys:
            return np.zeros(table.num_rows, np.intp)
        return KeyIndex(self._hasher).lookup(BatchKeys(self._hasher, keys)).astype(np.intp)

    @staticmethod
    def _key(table: pa.Table, name: str) -> pa.Array:
        return plain_column(table.column(name))

    def close(self) -> None:
        self._rollback.close()
        if self._disk is not None:
            self._disk.close()


class SessionDelta(CellDelta[SessionTable]):
    """The sessions that are not in runs."""

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each open session."""
        sessions = self.cells
        slots = sessions.open()
        starts = pa.array(sessions.starts.data[slots])
        return self._space.identify([*sessions.key_columns(slots), starts])

    def table(self, slots: Index) -> pa.Table:
        """Return some of the open sessions."""
        sessions, schema = self.cells, self._space.shape.schema
        slots = sessions.open()[slots]
        edges = [pa.array(array.data[slots]) for array in (sessions.starts, sessions.ends)]
        columns = [*sessions.key_columns(slots), *edges, *sessions.state_table(slots).columns]
        return pa.Table.from_arrays(columns, schema=schema)


class SpillingSessions(SpillingCells[SessionTable]):
    """The sessions of one subtask that do not fit into memory.

    **Superseded rows.** A row is identified by its key and the start of its session. When a session gets an
    earlier start, or becomes part of another one, its old row stays in the runs. It lies within the row of
    the session that it became part of, and open sessions of a key never touch. So a lookup that
    reads all rows of a key knows which of them are superseded. Since sessions only grow, a superseded row
    expires no later than the one that supersedes it, so merges can leave out what has expired without
    looking further.

    **Sessions that fire.** `DueRows` knows the sessions on disk that fire next, by time and hash. Records
    extend sessions all the time, so the rows of a hash are looked up when its time has come, and only those
    that end at that time fire. They fire from the runs, without becoming part of the delta.

    Args:
        new_table: makes the tables of sessions in memory.
        watch: schedules sessions of such a table for when they fire or expire.
    """

    def __init__(
        self,
        plan: AggregatePlan,
        context: OperatorContext,
        name: str,
        new_table: NewTable,
        watch: Callable[[SessionTable, Index], None],
    ) -> None:
        self._watch = watch
        self._expiry = ExpiryBound(_END.name, context.max_parallelism)
        space = AggregateSpace(plan, context, name, _START, [_END], self._expiry)
        super().__init__(
            space,
            lambda: SessionDelta(space, lambda: new_table(space.key_hasher, self._expiry.limit)),
        )
        self._due = DueRows(
            self._table,
            lambda records: RowLayout.numbers(records, _END.name) - 1,
            space.share,
        )
        self._expiring: DueRows | None = None
        self._lateness_ms = 0

    def find_expiring(self, lateness_ms: int) -> None:
        """Let `expiring` find sessions, which expire so long after they fire."""
        self._lateness_ms = lateness_ms
        self._expiring = DueRows(
            self._table,
            lambda records: RowLayout.numbers(records, _END.name) - 1 + lateness_ms,
            self._space.share,
        )

    def expiring(self, before: int, watermark: int) -> Iterator[list[pa.Array]]:
        """Yield the keys of sessions on disk that expire between two watermarks.

        No rows may be added meanwhile.
        """
        assert self._expiring is not None
        for portion in self._expiring.due(before, watermark):
            asked = distinct(portion[1])
            rows = self._stored(asked[self._table.delta.find(asked, None) < 0])
            if rows is not None and rows.num_rows:
                yield self._space.keys_of(rows)

    def expire(self, limit: int, further: Index | None = None) -> None:
        """Drop the sessions that end at `limit` or before; see `ExpiryBound.move`."""
        self._expiry.move(limit, further)

    # --- records -------------------------------------------------------------------------------

    def replace_cells(self, table: SessionTable) -> None:
        """Add rows to this table from now on, which has the same open sessions."""
        self._table.delta.cells = table

    def take_over(self, table: SessionTable) -> None:
        """Move the sessions from memory to here."""
        self.active = True
        self.expire(table.limit)
        slots = table.open()
        bounds = table.starts.data[slots], table.ends.data[slots]
        self.load(table.key_columns(slots), *bounds, table.state_table(slots))

    def load(self, keys: list[pa.Array], starts: Times, ends: Times, state: pa.Table) -> None:
        """Restore sessions of keys that have none here."""
        for rows, part in self._claimed(keys):
            self._load(part, starts[rows], ends[rows], state.take(pa.array(rows)))

    def _load(self, keys: list[pa.Array], starts: Times, ends: Times, state: pa.Table) -> None:
        sessions = self.cells
        self._watch(sessions, sessions.load(keys, starts, ends, state))

    def _load_stored(self, rows: pa.Table) -> None:
        self._load(self._space.keys_of(rows), _numbers(rows, _START), _numbers(rows, _END), rows)

    def _stored(self, hashes: Hashes) -> pa.Table | None:
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
        delta = self._table.delta
        super().settle()
        self._note_written(delta)

    def _note_written(self, delta: CellDelta[SessionTable]) -> None:
        """Note when the open sessions of a delta fire, and their hashes, if it is being written."""
        if self._table.delta is delta:
            return
        sessions = delta.cells
        slots = sessions.open()
        hashes = sessions.keys.lanes()[0][sessions.key_of.data[slots]]
        ends = sessions.ends.data[slots]
        self._due.add(ends - 1, hashes)
        if self._expiring is not None:
            self._expiring.add(ends - 1 + self._lateness_ms, hashes)

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
        rows = self._stored(asked)
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

    # --- queries -------------------------------------------------------------------------------

    def sessions_of(self, columns: list[pa.Array]) -> Iterator[Fired]:
        """Yield the open sessions of some keys; their keys are places in `columns`. Nothing changes."""
        keys = BatchKeys(self._space.key_hasher, columns)
        yield _of_keys(self.cells, keys)
        hashes = keys.lanes(None)[0]
        on_disk = self._table.delta.find(hashes, None) < 0
        rows = self._stored(distinct(hashes[on_disk]))
        if rows is None or not rows.num_rows:
            return
        index, which = self._space.key_index(columns)
        found = BatchKeys(self._space.key_hasher, self._space.keys_of(rows))
        slots = index.find_keys(found).astype(np.intp)
        # Several of the keys may be the same one.
        places, at = np.nonzero(which[:, np.newaxis] == slots)
        taken = rows.take(pa.array(at))
        starts, ends = _numbers(taken, _START), _numbers(taken, _END)
        yield Fired(starts, ends, places, self._space.results(taken))

    def keys_now(self) -> tuple[Iterator[list[pa.Array]], Callable[[], None]]:
        """Return the keys that there are now, in pieces, and a function that ends their reading.

        A key may come several times, and some have no session any more.
        """
        parts = [delta.cells.keys.cut().pieces() for delta in self._table.in_memory()]
        runs, close = self._table.runs_now(lambda hashes, _: np.ones(len(hashes), np.bool_))
        return chain(*parts, map(self._space.keys_of, runs)), close

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

        return msgspec.structs.replace(cut, tables=tables)

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        super().restore_files(restored)
        self._due.forget()
        if self._expiring is not None:
            self._expiring.forget()


def _of_keys(table: SessionTable, keys: BatchKeys | None) -> Fired:
    """Return the open sessions that some keys have in a table; their keys are places.

    None is the one key of windows without keys.
    """
    slots, places = table.of_keys(keys)
    return Fired(
        table.starts.data[slots], table.ends.data[slots], places, table.state.results(slots)
    )


def _numbers(rows: pa.Table, field: pa.Field) -> Times:
    numbers: Times = plain_column(rows.column(field.name)).to_numpy()
    return numbers
