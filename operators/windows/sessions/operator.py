"""Aggregates per key and session, a batch at a time.

Where fired sessions are merged or extended, the result is of the longer session, and the earlier
results are not retracted. A record is late if its own window has expired and meets no open session.
Sessions are in memory under every state backend. `windowed_aggregate.py` says what this has in
common with other windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pyarrow as pa

from ....state.aggregates.accumulators import Mask
from ....state.slots.key_index import BatchKeys, KeyIndex, plain_column
from ....state.snapshot import (
    KEY_GROUP_COLUMN,
    RestoredState,
    StateInfo,
    StateSnapshot,
)
from ...aggregation.aggregate_tables import CutPart, aggregate_info, restored_rows, table_cut
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows, columns_of
from ...base import OperatorContext
from ...elements import WATERMARK_MIN, Batch
from ...time_progress import WATERMARK_COLUMN, KeyGroupTable, clamped
from ..kinds import WINDOW_FIELDS
from ..windowed_aggregate import EMIT_ROWS_MAX, Fired, WindowedAggregate
from .gaps import ColumnGap, FixedGap
from .intervals import Index
from .table import SessionCut, SessionTable, superseded

_SESSIONS = "sessions"
_START, _END = WINDOW_FIELDS[0].name, WINDOW_FIELDS[1].name
_PROGRESS = KeyGroupTable.of_times("watermark", "window", WATERMARK_COLUMN, "gone_through")
"""`gone_through`: sessions that end at this time (ms) or before have expired."""
_BUCKETS_PER_GAP = 256
_WIDTH_MS = 1_000
"""The width of deadline buckets, where gaps are only known from records."""


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
        super().__init__(plan, step, _PROGRESS)
        self._gap, self._lateness_ms = gap, lateness_ms

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._table = self._new_table(WATERMARK_MIN)

    def _new_table(self, limit: int) -> SessionTable:
        width = _WIDTH_MS
        if isinstance(self._gap, FixedGap):
            width = max(1, self._gap.ms // _BUCKETS_PER_GAP)
        return SessionTable(self._plan, self._hasher, self._epoch, width, limit)

    # --- records -------------------------------------------------------------------------------

    def _late(self, times: Index, groups: Index | None) -> Mask:
        """Return none: whether a row is late depends on the open sessions of its key."""
        return np.zeros(len(times), np.bool_)

    def _add(
        self, batch: Batch, rows: KeyedRows, times: Index, groups: Index | None, earliest: int
    ) -> None:
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
            table.watch(touched, progress.watermark, self._lateness_ms)
            last = table.ends.data[touched] - 1
            again = np.flatnonzero(last <= progress.now(self._groups_of(touched)))
            self._emit(self._results(touched[again[np.argsort(last[again], kind="stable")]]))
        self._compact()

    def _groups_of(self, slots: Index) -> Index | None:
        """Return the key groups of these sessions; see `TimeProgress.groups_of`."""
        return self._progress.groups_of(lambda: self._key_columns(slots))

    def _key_columns(self, slots: Index) -> list[pa.Array]:
        """Return the keys of these sessions."""
        table = self._table
        return table.keys.take(table.key_of.data[slots].astype(np.intp)) if self._plan.keys else []

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
        return self._results(self._table.advance(before, watermark, self._lateness_ms, expired))

    def _drop_expired(self, watermark: int) -> None:
        self._compact()

    def _expired_at(self, watermark: int) -> int:
        """Return the time such that sessions that end there or before have expired at a watermark."""
        return clamped(watermark - self._lateness_ms + 1)

    def _compact(self) -> None:
        if self._table.is_worth_compacting():
            self._table = self._table.compacted(self._progress.watermark, self._lateness_ms)

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `sessions` (one row per open session) and `watermark` (one per key group)."""
        epoch = self._epoch.cut()
        cut = SessionCut(self._table, epoch)
        part = CutPart(cut, cut.edges)
        sessions = table_cut(self._plan, epoch, [part], self.context.max_parallelism)
        sessions = replace(sessions, keys=self._identity)
        return StateSnapshot(tables={_SESSIONS: sessions, _PROGRESS.name: self._progress.cut()})

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

    def restore(self, state: RestoredState) -> None:
        """Restore the progress of event time, and the open sessions."""
        self._epoch.restored()
        self._progress.restore(state)
        self._table = self._new_table(self._progress.bounds[0])
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
        self._table.load(keys, starts[kept], ends[kept], rows)
        self._table.watch(np.arange(len(kept)), self._progress.watermark, self._lateness_ms)

    def _numbered(self, table: pa.Table) -> Index:
        """Return the key of each row as a number."""
        keys = [self._key(table, key) for key in self._plan.keys]
        if not keys:
            return np.zeros(table.num_rows, np.intp)
        return KeyIndex(self._hasher).lookup(BatchKeys(self._hasher, keys)).astype(np.intp)

    @staticmethod
    def _key(table: pa.Table, name: str) -> pa.Array:
        return plain_column(table.column(name))
