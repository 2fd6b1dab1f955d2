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
from ...ahead import Ahead, key_groups
from ...base import Operator, OperatorContext
from ...elements import WATERMARK_MAX, WATERMARK_MIN, Batch, ColumnBatch
from ...key_group_times import WATERMARK_COLUMN, by_group, times_cut, times_info, times_schema
from ..kinds import WINDOW_FIELDS
from ..late import LateOutput
from ..window_aggregate import EMIT_ROWS_MAX
from .cut import SessionCut, superseded
from .gaps import ColumnGap, FixedGap
from .intervals import Index
from .table import SessionTable

_SESSIONS, _WATERMARK = "sessions", "watermark"
_GONE_THROUGH = "gone_through"
_START, _END = WINDOW_FIELDS[0].name, WINDOW_FIELDS[1].name
_WATERMARK_SCHEMA = times_schema(WATERMARK_COLUMN, _GONE_THROUGH)
"""`gone_through`: sessions that end at this time (ms) or before have expired."""
_BUCKETS_PER_GAP = 256
_WIDTH_MS = 1_000
"""The width of deadline buckets, where gaps are only known from records."""
_INT64_MIN = np.iinfo(np.int64).min


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
        self._watermark = WATERMARK_MIN
        self._ahead: Ahead | None = None
        """Key groups that are ahead; sessions that end at their bound or before have expired."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._table = self._new_table(_INT64_MIN)
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
        table = self._table
        key_slots = table.key_slots(rows.keys, rows.size)
        ends, limit = times + self._gap.of(data), self._limit_for(data)
        taken, touched = table.add(key_slots, times, ends, rows.values, limit)
        if taken is not None:
            self._send_late(batch, ends, np.flatnonzero(~taken))
        if touched.size:
            table.watch(touched, self._watermark, self._lateness_ms)
            last = table.ends.data[touched] - 1
            again = np.flatnonzero(last <= self._now(touched))
            self._emit(touched[again[np.argsort(last[again], kind="stable")]])
        self._compact()

    def _limit_for(self, data: pa.RecordBatch) -> int | Index:
        """Return the limit of the table for each row."""
        if self._ahead is None:
            return self._table.limit
        groups = self._groups_of([data.column(key) for key in self._plan.keys])
        return self._ahead.gone_for(groups, self._table.limit)

    def _now(self, slots: Index) -> int | Index:
        """Return how far event time is for these sessions."""
        if self._ahead is None:
            return self._watermark
        return self._ahead.now(self._groups_of(self._keys_of(slots)), self._watermark)

    def _groups_of(self, keys: list[pa.Array]) -> Index:
        return key_groups(keys, self.context.max_parallelism)

    def _keys_of(self, slots: Index) -> list[pa.Array]:
        table = self._table
        return table.keys.take(table.key_of.data[slots].astype(np.intp)) if self._plan.keys else []

    def _send_late(self, batch: Batch, ends: Index, rows: Index) -> None:
        """Emit the late rows of a batch, whose own sessions end at `ends`."""
        late, now = batch.take(rows), self._watermark
        times = late.timestamps
        assert times is not None
        if self._ahead is None:
            self._late_output.send(late, now, lambda: (times, ends[rows]))
            return
        data = columns_of(late, self._step)
        groups = self._groups_of([data.column(key) for key in self._plan.keys])
        self._late_output.send(late, self._ahead.now(groups, now), lambda: (times, ends[rows]))

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
        before = self._watermark
        if timestamp > before:
            self._watermark = timestamp
            limit = self._limit(timestamp)
            fired = self._table.advance(before, timestamp, self._lateness_ms, limit)
            self._emit(self._not_fired(fired))
            self._compact()
            if self._ahead is not None and self._ahead.caught_up(timestamp, limit):
                self._ahead = None
        self.output.emit_watermark(timestamp)

    def _not_fired(self, slots: Index) -> Index:
        """Leave out sessions of key groups for which they had fired before a restore."""
        if self._ahead is None or not slots.size:
            return slots
        groups = self._groups_of(self._keys_of(slots))
        return slots[self._ahead.not_fired(groups, self._table.ends.data[slots] - 1)]

    def _limit(self, watermark: int) -> int:
        """Return the time such that sessions that end there or before have expired; it never decreases."""
        return max(self._table.limit, min(watermark - self._lateness_ms + 1, WATERMARK_MAX))

    def _compact(self) -> None:
        if self._table.is_worth_compacting():
            self._table = self._table.compacted(self._watermark, self._lateness_ms)

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `sessions` (one row per open session) and `watermark` (one per key group)."""
        epoch = self._epoch.cut()
        cut = SessionCut(self._table, epoch)
        part = CutPart(cut, cut.edges)
        sessions = table_cut(self._plan, epoch, [part], self.context.max_parallelism)
        sessions = replace(sessions, keys=self._identity)
        own = self.context.key_groups
        times: tuple[int | Index, int | Index] = (self._watermark, self._table.limit)
        if self._ahead is not None:
            times = self._ahead.cut(own, self._watermark, self._table.limit)
        watermark = times_cut(own, _WATERMARK_SCHEMA, *times)
        return StateSnapshot(tables={_SESSIONS: sessions, _WATERMARK: watermark})

    @property
    def _identity(self) -> tuple[str, ...]:
        return (*self._plan.keys, _START)

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `sessions` and `watermark`."""
        sessions = aggregate_info(self._plan, _SESSIONS, "window")
        return [
            msgspec.structs.replace(sessions, keys=self._identity),
            times_info(_WATERMARK, "window", _WATERMARK_SCHEMA),
        ]

    def restore(self, state: RestoredState) -> None:
        """Restore the open sessions; watermark and limit are the least of those restored."""
        self._epoch.restored()
        groups = self.context.max_parallelism
        watermarks = state.tables.get(_WATERMARK)
        limits = by_group(watermarks, _GONE_THROUGH, groups)
        if watermarks is not None and watermarks.num_rows:
            self._watermark = int(watermarks.column(WATERMARK_COLUMN).to_numpy().min())
            self._table = self._new_table(int(watermarks.column(_GONE_THROUGH).to_numpy().min()))
            self._table.limit = self._limit(self._watermark)
            times = by_group(watermarks, WATERMARK_COLUMN, groups)
            # By today's lateness, too; there are few different times.
            today = {time: self._limit(time) for time in np.unique(times).tolist()}
            gone = np.maximum(limits, [today[time] for time in times.tolist()])
            self._ahead = Ahead.restored(times, self._watermark, gone)
        table = state.tables.get(_SESSIONS)
        if table is not None and table.num_rows:
            self._load(table, limits, state.states.get(_SESSIONS))

    def _load(self, table: pa.Table, limits: Index, info: StateInfo | None) -> None:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        if info is not None:
            info = msgspec.structs.replace(info, keys=(*info.keys, _END))
        table = restored_rows(self._plan, table, info, self._step)
        ends = table.column(_END).cast(pa.int64()).to_numpy()
        open_ = np.flatnonzero(ends > np.maximum(limits[groups], self._table.limit))
        table, ends = table.take(pa.array(open_)), ends[open_]
        starts = table.column(_START).cast(pa.int64()).to_numpy()
        kept = np.flatnonzero(~superseded(self._numbered(table), starts, ends))
        rows = table.take(pa.array(kept))
        keys = [self._key(rows, key) for key in self._plan.keys]
        self._table.load(keys, starts[kept], ends[kept], rows)
        self._table.watch(np.arange(len(kept)), self._watermark, self._lateness_ms)

    def _numbered(self, table: pa.Table) -> Index:
        """Return the key of each row as a number."""
        keys = [self._key(table, key) for key in self._plan.keys]
        if not keys:
            return np.zeros(table.num_rows, np.intp)
        return KeyIndex(self._hasher).lookup(BatchKeys(self._hasher, keys)).astype(np.intp)

    @staticmethod
    def _key(table: pa.Table, name: str) -> pa.Array:
        return plain_column(table.column(name))
