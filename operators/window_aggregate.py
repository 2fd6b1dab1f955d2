"""Aggregates per key and tumbling event-time window (features.md TIM-06, TIM-08, TIM-09).

A window fires when the watermark reaches its end - 1; the watermark goes on behind its results. With
allowed lateness its state stays for a while, and a record that comes for a fired window makes the
result of its key come again, once per batch and key. Rows of a window that is gone are late: they go to
the side output `late`, and are counted. The order of keys within a window's result is not defined.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ..errors import PlanError
from ..state.key_index import KeyHasher
from ..state.snapshot import KEY_GROUP_COLUMN, RestoredState, StateSnapshot
from ..state.values import Index
from .aggregates import AggregatePlan
from .base import Operator, OperatorContext
from .elements import WATERMARK_MIN, Batch, ColumnBatch
from .keyed_aggregate import (
    KeyedGroup,
    KeyedRows,
    Rows,
    check_state_table,
    columns_of,
    identity_seed,
    row_count,
    snapshot_table,
)
from .small_windows import SMALL_ROWS, Fired, SmallWindows
from .windows import WINDOW_FIELDS, TumblingWindow

LATE = "late"
"""The side output of rows whose window is gone."""
LATE_COUNTER = "numLateRecordsDropped"
"""Counts all late rows, also where a job reads the side output."""
EMIT_ROWS_MAX = 65_536
_SPARE_GROUPS = 256
_SPARE_KEYS_MAX = 262_144
"""Groups of windows that are gone are used again, up to so many, and so many keys in all."""
_WINDOWS, _WATERMARK = "windows", "watermark"
_WATERMARK_SCHEMA = pa.schema(
    [pa.field(KEY_GROUP_COLUMN, pa.int32(), False), pa.field("watermark", pa.int64(), False)]
)


def _joined(columns: list[list[pa.Array]]) -> list[pa.Array]:
    if len(columns) == 1:
        return columns[0]
    return [pa.concat_arrays(list(column)) for column in zip(*columns, strict=True)]


class WindowAggregate(Operator):
    """Keyed, or with no keys global, tumbling-window aggregates over columns."""

    def __init__(self, window: TumblingWindow, plan: AggregatePlan, step: str = "window") -> None:
        assert plan.added == WINDOW_FIELDS
        self._window, self._plan, self._step = window, plan, step
        self._groups: dict[int, KeyedGroup] = {}  # by window start
        self._spare: list[tuple[KeyedGroup, int]] = []  # with the keys it had room for
        self._spare_keys = 0
        self._watermark = WATERMARK_MIN
        self._first_kept = WATERMARK_MIN  # rows before it are late

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        seed = identity_seed(context.job_name)
        self._hasher = KeyHasher(types, seed)
        self._small = SmallWindows(self._plan, self._window, seed)
        self._late_rows = context.metrics.counter(LATE_COUNTER)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        data, times = columns_of(batch, self._step), batch.timestamps
        if times is None:
            raise PlanError(
                f"`{self._step}` needs event time, but its input has none",
                fix='add .event_time("column", max_out_of_order="10s") before the window',
            )
        if len(times) and int(times.min()) < self._first_kept:
            late = times < self._first_kept
            self._late_rows.inc(int(np.count_nonzero(late)))
            self.output.emit_side(LATE, batch.take(np.flatnonzero(late)))
            batch = batch.take(np.flatnonzero(~late))
            data, times = columns_of(batch, self._step), batch.timestamps
            assert times is not None
        if not len(times):
            return
        rows = KeyedRows(self._plan, self._hasher, data)
        few: list[tuple[int, Rows]] = []
        for start, which in self._window.split(times):
            if self._is_small(start, which):
                few.append((start, which))
                continue
            whole = isinstance(which, slice) and which.stop - which.start == rows.size
            self._add(start, rows, None if whole else which)
        if few:
            self._add_few(rows, few)

    def _is_small(self, start: int, which: Rows) -> bool:
        """A window stays where its first rows went."""
        if start in self._small.open:
            return True
        return start not in self._groups and row_count(which) < SMALL_ROWS

    def _add_few(self, rows: KeyedRows, parts: list[tuple[int, Rows]]) -> None:
        slots = self._small.add(rows, parts)
        if self._window.due_at(parts[0][0]) > self._watermark:
            return  # none has fired yet: `parts` begins with the earliest
        due = self._small.starts_of(slots) <= self._window.last_due(self._watermark)
        touched = np.unique(slots[due])
        if touched.size:
            self._emit([self._small.results(touched)])

    def _add(self, start: int, rows: KeyedRows, which: Rows | None) -> None:
        group = self._groups.get(start)
        if group is None:
            group = self._new_group()
            self._groups[start] = group
        slots = group.add(rows, which)
        if self._window.due_at(start) <= self._watermark:
            self._fire_again(start, group, rows, which, slots)

    def _new_group(self) -> KeyedGroup:
        if not self._spare:
            return KeyedGroup(self._plan, self._hasher)
        group, keys = self._spare.pop()
        self._spare_keys -= keys
        return group

    def _fire_again(
        self,
        start: int,
        group: KeyedGroup,
        rows: KeyedRows,
        which: Rows | None,
        slots: Index | None,
    ) -> None:
        """Emit the new results of the keys that late, but allowed, rows have touched."""
        if slots is None:
            self._emit([self._fired(start, [], group.state.results(slice(0, 1)), 1)])
            return
        touched, first = np.unique(slots, return_index=True)
        if which is not None:
            first = first + which.start if isinstance(which, slice) else which[first]
        keys = rows.keys_at(first)
        self._emit([self._fired(start, keys, group.state.results(touched), len(touched))])

    @staticmethod
    def _fired(start: int, keys: list[pa.Array], values: list[pa.Array], size: int) -> Fired:
        return Fired(np.full(size, start, np.int64), keys, values)

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Fire what is due, earliest window first; drop what is gone; pass the watermark on."""
        before = self._watermark
        if timestamp > before:
            self._set_watermark(timestamp)
            window = self._window
            due = [start for start in sorted(self._groups) if window.due_at(start) <= timestamp]
            self._fire([start for start in due if window.due_at(start) > before], before)
            for start in due:
                if window.gone_at(start) <= timestamp:
                    self._drop(start)
            self._small.drop(window.last_gone(timestamp))
        self.output.emit_watermark(timestamp)

    def _fire(self, starts: list[int], before: int) -> None:
        """Emit these windows and the small ones, in order; many in a batch, to spare tiny ones."""
        fired: list[Fired] = []
        if self._small.open:
            window = self._window
            after, last = window.last_due(before), window.last_due(self._watermark)
            small = self._small.fire(after, last)
            if small is not None:
                fired.append(small)
        rows = 0
        for start in starts:
            result = self._result(start)
            fired.append(result)
            rows += len(result.starts)
            if rows >= EMIT_ROWS_MAX and not self._small.open:
                self._emit(fired)
                fired, rows = [], 0
        self._emit(fired)

    def _result(self, start: int) -> Fired:
        group = self._groups[start]
        keys = group.keys.keys() if self._plan.keys else []
        size = group.state.size
        return self._fired(start, keys, group.state.results(slice(0, size)), size)

    def _set_watermark(self, timestamp: int) -> None:
        self._watermark = timestamp
        self._first_kept = self._window.first_kept(timestamp)

    def _drop(self, start: int) -> None:
        group = self._groups.pop(start)
        keys = group.state.size
        if len(self._spare) < _SPARE_GROUPS and self._spare_keys + keys <= _SPARE_KEYS_MAX:
            group.clear()
            self._spare.append((group, keys))
            self._spare_keys += keys

    def _emit(self, fired: list[Fired]) -> None:
        """Send results of some windows, many small ones in one batch, a large one in several."""
        if not fired:
            return
        starts = np.concatenate([result.starts for result in fired])
        ends = starts + self._window.size_ms
        edges = [
            pa.array(edge).view(field.type)
            for edge, field in zip((starts, ends), WINDOW_FIELDS, strict=True)
        ]
        keys = _joined([result.keys for result in fired])
        values = _joined([result.values for result in fired])
        data = pa.RecordBatch.from_arrays([*keys, *edges, *values], schema=self._plan.result_schema)
        times = starts + (self._window.due_at(0))
        whole = ColumnBatch(data, times)
        if (starts[1:] < starts[:-1]).any():
            whole = whole.take(np.argsort(starts, kind="stable"))
        for low in range(0, len(whole), EMIT_ROWS_MAX):
            self.output.emit(whole.slice(low, min(EMIT_ROWS_MAX, len(whole) - low)))

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Table `windows`: one row per open window and key. Table `watermark`: per key group.

        The watermark is kept per key group so that each subtask finds it after a rescale: what was late
        before stays late.
        """
        plan, max_parallelism = self._plan, self.context.max_parallelism
        makers = [
            group.freeze(plan, (start, start + self._window.size_ms))
            for start, group in sorted(self._groups.items())
        ]
        makers.append(self._small.freeze())
        own, watermark = self.context.key_groups, self._watermark

        def watermark_table() -> pa.Table:
            groups = np.arange(own.first, own.last + 1, dtype=np.int32)
            times = np.full(len(groups), watermark)
            return pa.Table.from_arrays(
                [pa.array(groups), pa.array(times)], schema=_WATERMARK_SCHEMA
            )

        return StateSnapshot(
            tables={
                _WINDOWS: lambda: snapshot_table(plan, makers, max_parallelism),
                _WATERMARK: watermark_table,
            }
        )

    def restore(self, state: RestoredState) -> None:
        """Rebuild the open windows; the watermark is the least of those restored."""
        watermarks = state.tables.get(_WATERMARK)
        if watermarks is not None and watermarks.num_rows:
            self._set_watermark(int(watermarks.column("watermark").to_numpy().min()))
        table = state.tables.get(_WINDOWS)
        if table is None or not table.num_rows:
            return
        check_state_table(self._plan, table)
        starts = table.column("window_start").cast(pa.int64()).to_numpy()
        windows, counts = np.unique(starts, return_counts=True)
        large = windows[counts >= SMALL_ROWS].tolist()
        for start in large:
            group = KeyedGroup(self._plan, self._hasher)
            rows = table.take(pa.array(np.flatnonzero(starts == start)))
            group.load(self._plan, self._hasher, rows)
            self._groups[start] = group
        few = np.flatnonzero(~np.isin(starts, large))
        if few.size:
            self._small.load(table.take(pa.array(few)))
