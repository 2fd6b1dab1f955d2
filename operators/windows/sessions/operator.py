"""Aggregates per key and session, a batch at a time.

Where fired sessions are merged or extended, the result is of the longer session, and the earlier
results are not retracted. A record is late if its own window has expired and meets no open session.
`windowed_aggregate.py` says what this has in common with other windows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from ....state.aggregates.accumulators import Mask
from ....state.slots.key_index import BatchKeys, KeyHasher, KeyIndex, plain_column
from ....state.snapshot import (
    KEY_GROUP_COLUMN,
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
from ...aggregation.spilling_group import lies_on_disk
from ...base import OperatorContext
from ...elements import WATERMARK_MIN, Batch
from ...time_progress import WATERMARK_COLUMN, KeyGroupTable, clamped
from ..kinds import WINDOW_FIELDS
from ..windowed_aggregate import EMIT_ROWS_MAX, Fired, WindowedAggregate
from .gaps import ColumnGap, FixedGap
from .intervals import Index
from .spilling import SpillingSessions
from .table import SessionCut, SessionTable, superseded

_SESSIONS = "sessions"
_START, _END = WINDOW_FIELDS[0].name, WINDOW_FIELDS[1].name
_PROGRESS = KeyGroupTable.of_times("watermark", "window", WATERMARK_COLUMN, "gone_through")
"""`gone_through`: sessions that end at this time (ms) or before have expired."""
_BUCKETS_PER_GAP = 256
_WIDTH_MS = 1_000
"""The width of deadline buckets, where gaps are only known from records."""


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
    """

    def __init__(
        self, gap: FixedGap | ColumnGap, lateness_ms: int, plan: AggregatePlan, step: str
    ) -> None:
        super().__init__(plan, step, _PROGRESS, partial(_expired_at, lateness_ms))
        self._gap, self._lateness_ms = gap, lateness_ms
        self._disk: SpillingSessions | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._in_memory = self._new_table(self._hasher, WATERMARK_MIN)
        if lies_on_disk(self._plan, context):
            self._disk = SpillingSessions(
                self._plan, context, _SESSIONS, self._new_table, self._watch
            )

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
        return self._in_memory if self._spilling is None else self._spilling.sessions

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
        slots = self._table.advance(before, watermark, self._lateness_ms, expired)
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
        else:
            self._spilling.sessions = compacted

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `sessions` (one row per open session) and `watermark` (one per key group)."""
        progress = {_PROGRESS.name: self._progress.cut()}
        if self._spilling is not None:
            return StateSnapshot(tables=progress, files={_SESSIONS: self._spilling.snapshot()})
        epoch = self._epoch.cut()
        cut = SessionCut(self._in_memory, epoch)
        part = CutPart(cut, cut.edges)
        sessions = table_cut(self._plan, epoch, [part], self.context.max_parallelism)
        sessions = replace(sessions, keys=self._identity)
        return StateSnapshot(tables={_SESSIONS: sessions, **progress})

    @property
    def _identity(self) -> tuple[str, ...]:
        return (*self._plan.keys, _START)

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `sessions` and `watermark`."""
        sessions = aggregate_info(self._plan, _SESSIONS, "window")
        return [
            msgspec.structs.replace(sessions, keys=self._identity),
            _PROGRESS.info(),
        ]

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the progress of event time, and the open sessions."""
        if self._disk is None:
            self._restore(state)
            return None
        # Files are read from end to end, which takes time for state larger than memory.
        return self.context.run_in_thread(lambda: self._restore(state))

    def _restore(self, state: RestoredState) -> None:
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
        table = state.tables.get(_SESSIONS)
        if table is not None and table.num_rows:
            self._load(table, state.states.get(_SESSIONS))

    def _load(self, table: pa.Table, info: StateInfo | None) -> None:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        if info is not None:
            info = msgspec.structs.replace(info, keys=(*info.keys, _END))
        table = restored_rows(self._plan, table, info, self._step)
        ends = table.column(_END).cast(pa.int64()).to_numpy()
        open_ = np.flatnonzero(ends > self._progress.expired(groups))
        table, ends = table.take(pa.array(open_)), ends[open_]
        starts = table.column(_START).cast(pa.int64()).to_numpy()
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
        if self._disk is not None:
            self._disk.close()
