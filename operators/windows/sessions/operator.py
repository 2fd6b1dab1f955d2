"""Aggregates per key and session, a batch at a time.

A session fires when the watermark reaches its end - 1; the watermark is forwarded after its
results. With allowed lateness it stays for a while, and records that come to a session that has
fired make it emit its result again, once per batch. Where fired sessions are merged or extended,
the result is of the longer session, and the earlier results are not retracted. A record is late if
its own window has expired and meets no open session: it goes to the side output `late`, and is
counted. Sessions are in memory under every state backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pyarrow as pa

from ....errors import PlanError
from ....state.slots.epochs import TableEpoch
from ....state.slots.key_index import BatchKeys, KeyHasher, KeyIndex, plain_column
from ....state.snapshot import (
    KEY_GROUP_COLUMN,
    RestoredState,
    StateInfo,
    StateSnapshot,
)
from ...aggregation.aggregate_tables import CutPart, aggregate_info, restored_rows, table_cut
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedRows, columns_of, identity_seed
from ...base import Operator, OperatorContext
from ...elements import WATERMARK_MIN, Batch, ColumnBatch
from ...time_progress import WATERMARK_COLUMN, KeyGroupTable, TimeProgress, clamped
from ..kinds import WINDOW_FIELDS
from ..late import LateOutput
from ..window_aggregate import EMIT_ROWS_MAX
from .cut import SessionCut, superseded
from .gaps import ColumnGap, FixedGap
from .intervals import Index
from .table import SessionTable

_SESSIONS = "sessions"
_START, _END = WINDOW_FIELDS[0].name, WINDOW_FIELDS[1].name
_PROGRESS = KeyGroupTable.of_times("watermark", "window", WATERMARK_COLUMN, "gone_through")
"""`gone_through`: sessions that end at this time (ms) or before have expired."""
_BUCKETS_PER_GAP = 256
_WIDTH_MS = 1_000
"""The width of deadline buckets, where gaps are only known from records."""


class SessionAggregate(Operator):
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
        assert plan.added == WINDOW_FIELDS
        self._gap, self._lateness_ms, self._plan, self._step = gap, lateness_ms, plan, step
        self._progress = TimeProgress(_PROGRESS, self._expired_at)
        """Sessions that end at the expiry bound or before have expired."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._progress.open(context)
        self._table = self._new_table(WATERMARK_MIN)
        self._late_output = LateOutput(context, self.output)

    def _new_table(self, limit: int) -> SessionTable:
        width = _WIDTH_MS
        if isinstance(self._gap, FixedGap):
            width = max(1, self._gap.ms // _BUCKETS_PER_GAP)
        return SessionTable(self._plan, self._hasher, self._epoch, width, limit)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        data, times = columns_of(batch, self._step), batch.timestamps
        if times is None:
            raise PlanError(
                f"`{self._step}` needs event time, but its input has none",
                fix='add .event_time("column", max_out_of_order="10s") before the window',
            )
        if not len(times):
            return
        rows = KeyedRows(self._plan, self._hasher, data, times)
        table, progress = self._table, self._progress
        groups = progress.groups_of(lambda: [data.column(key) for key in self._plan.keys])
        key_slots = table.key_slots(rows.keys, rows.size)
        ends = times + self._gap.of(data)
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
            self._emit(touched[again[np.argsort(last[again], kind="stable")]])
        self._compact()

    def _groups_of(self, slots: Index) -> Index | None:
        """Return the key groups of these sessions; see `TimeProgress.groups_of`."""
        return self._progress.groups_of(lambda: self._keys_of(slots))

    def _keys_of(self, slots: Index) -> list[pa.Array]:
        table = self._table
        return table.keys.take(table.key_of.data[slots].astype(np.intp)) if self._plan.keys else []

    def _emit(self, slots: Index) -> None:
        """Emit the results of these sessions, which are in order of their ends."""
        table, plan = self._table, self._plan
        for low in range(0, len(slots), EMIT_ROWS_MAX):
            part = slots[low : low + EMIT_ROWS_MAX]
            starts, ends = table.starts.data[part], table.ends.data[part]
            edges = [
                pa.array(edge).view(field.type)
                for edge, field in zip((starts, ends), WINDOW_FIELDS, strict=True)
            ]
            columns = [*self._keys_of(part), *edges, *table.state.results(part)]
            data = pa.RecordBatch.from_arrays(columns, schema=plan.result_schema)
            self.output.emit(ColumnBatch(data, ends - 1))

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Fire due sessions, earliest end first; drop expired ones; forward the watermark."""
        before = self._progress.watermark
        if self._progress.advance(timestamp):
            expired = self._progress.bounds[0]
            fired = self._table.advance(before, timestamp, self._lateness_ms, expired)
            self._emit(self._not_fired(fired))
            self._compact()
        self.output.emit_watermark(timestamp)

    def _not_fired(self, slots: Index) -> Index:
        """Leave out sessions of key groups for which they had fired before a restore."""
        groups = self._groups_of(slots)
        if groups is None:
            return slots
        return slots[self._progress.not_fired(groups, self._table.ends.data[slots] - 1)]

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
