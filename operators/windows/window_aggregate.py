"""Aggregates per key and tumbling event-time window.

A window fires when the watermark reaches its end - 1; the watermark is forwarded after its results.
With allowed lateness its state stays for a while, and a record that comes for a fired window makes
the result of its key be emitted again, once per batch and key. Rows of an expired window are late:
they go to the side output `late`, and are counted. The order of keys within a window's result is
undefined.

Deltas of the state carry no marks of expired windows. A row of the table is a key and a window, and
a window expires at a watermark that is in every later checkpoint, for each key group; once expired
it never comes back, since its records are late from then on. So a restore knows which rows of the
base, or of an older delta, belong to windows that had expired at the cut, and leaves them out. All
other rows are as they were then, because a row that changed after the base is in a delta, also when
a late but allowed record changed it. The watermark table itself has the window up to which all have
expired, so that a job restored with another lateness does not restore half of a window's state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ...errors import PlanError, StateError
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import KeyHasher
from ...state.snapshot import (
    KEY_GROUP_COLUMN,
    RestoredState,
    StateInfo,
    StateSnapshot,
)
from ...state.values import Array, Index
from ..aggregation.aggregate_tables import (
    CutPart,
    aggregate_info,
    files_of_another_backend,
    restored_rows,
    table_cut,
)
from ..aggregation.aggregates import AggregatePlan
from ..aggregation.keyed_aggregate import (
    KeyedGroup,
    KeyedRows,
    Rows,
    columns_of,
    identity_seed,
    row_count,
)
from ..aggregation.spilling_group import SpillingSpace, lies_on_disk
from ..base import Operator, OperatorContext
from ..elements import Batch, ColumnBatch
from ..time_progress import WATERMARK_COLUMN, KeyGroupTable, TimeProgress, clamped
from .kinds import WINDOW_FIELDS, TumblingWindow
from .late import LateOutput
from .small_windows import SMALL_ROWS, Fired, SmallWindows
from .spilling_windows import SpillingWindows

EMIT_ROWS_MAX = 65_536
_SPARE_GROUPS = 256
_SPARE_BYTES_MAX = 1 << 25
"""The most groups of expired windows kept for reuse, and the most memory of them."""
_WINDOWS = "windows"
_PROGRESS: Final = KeyGroupTable.of_times("watermark", "window", WATERMARK_COLUMN, "gone_through")
"""`gone_through`: windows that start at this time (ms) or before have expired."""


def _joined(columns: list[list[pa.Array]]) -> list[pa.Array]:
    if len(columns) == 1:
        return columns[0]
    return [pa.concat_arrays(list(column)) for column in zip(*columns, strict=True)]


class WindowAggregate(Operator):
    """Tumbling-window aggregates over columns, per key or without keys."""

    def __init__(self, window: TumblingWindow, plan: AggregatePlan, step: str = "window") -> None:
        assert plan.added == WINDOW_FIELDS
        self._window, self._plan, self._step = window, plan, step
        self._groups: dict[int, KeyedGroup] = {}  # by window start
        self._spare: list[KeyedGroup] = []
        self._spare_bytes = 0
        self._retired: list[Array] = []  # of the last expired window; freed one by one
        self._progress = TimeProgress(_PROGRESS, self._expired_at)
        """Rows at the expiry bound or before are late."""
        self._spilling: SpillingWindows | None = None  # instead of `_groups`

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        seed = identity_seed(context.job_name)
        self._hasher = KeyHasher(types, seed)
        self._small = SmallWindows(self._plan, self._window, seed, self._epoch)
        self._late_output = LateOutput(context, self.output)
        self._progress.open(context)
        if lies_on_disk(self._plan, context):
            space = SpillingSpace(self._plan, context, _WINDOWS)
            self._hasher = space.hasher
            self._spilling = SpillingWindows(space, self._window)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        data, times = columns_of(batch, self._step), batch.timestamps
        if self._retired:
            self._retired.pop()
        if times is None:
            raise PlanError(
                f"`{self._step}` needs event time, but its input has none",
                fix='add .event_time("column", max_out_of_order="10s") before the window',
            )
        if not len(times):
            return
        progress, earliest = self._progress, int(times.min())
        groups = progress.groups_of(lambda: self._keys_of(data))
        if groups is not None or earliest <= progress.bounds[0]:
            late = times <= progress.expired(groups)
            batch = self._late_output.split(batch, late, progress.now(groups), self._last_windows)
            if not len(batch):
                return
            groups = None if groups is None else groups[~late]
            data, times = columns_of(batch, self._step), batch.timestamps
            assert times is not None
            earliest = int(times.min())
        rows = KeyedRows(self._plan, self._hasher, data, times)
        few: list[tuple[int, Rows]] = []
        for start, which in self._window.split(times, earliest):
            if self._is_small(start, which):
                few.append((start, which))
                continue
            whole = isinstance(which, slice) and which.stop - which.start == rows.size
            self._add(start, rows, None if whole else which, groups)
        if few:
            self._add_few(rows, few, groups)
        if self._spilling is not None:
            self._spilling.settle(self._small)

    def _last_windows(self, times: Index) -> tuple[Index, Index]:
        starts = self._window.starts_of(times)
        return starts, starts + self._window.size_ms

    def _keys_of(self, data: pa.RecordBatch) -> list[pa.Array]:
        return [data.column(key) for key in self._plan.keys]

    @property
    def _large(self) -> SpillingWindows | dict[int, KeyedGroup]:
        """Return the windows with a table of their own."""
        return self._groups if self._spilling is None else self._spilling

    def _is_small(self, start: int, which: Rows) -> bool:
        """Return True if the window is in the shared table; it stays where its first rows went."""
        if start in self._small.open:
            return True
        return start not in self._large and row_count(which) < SMALL_ROWS

    def _add_few(
        self, rows: KeyedRows, parts: list[tuple[int, Rows]], groups: Index | None
    ) -> None:
        index, slots = self._small.add(rows, parts)
        if self._window.due_at(parts[0][0]) > self.latest:
            return  # none has fired yet: `parts` begins with the earliest
        if groups is not None:
            groups = groups[index]
        last = self._window.due_at(self._small.starts_of(slots))
        due = np.flatnonzero(last <= self._progress.now(groups))
        touched, first = np.unique(slots[due], return_index=True)
        if touched.size:
            self._emit([self._small.results(touched, rows.keys_at(index[due[first]]))])

    def _add(self, start: int, rows: KeyedRows, which: Rows | None, groups: Index | None) -> None:
        group = self._group(start)
        slots = group.add(rows, which)
        if self._window.due_at(start) > self.latest:
            return
        index = np.arange(rows.size)
        if which is not None:
            index = index[which]
        if groups is not None:
            due = np.flatnonzero(self._window.due_at(start) <= self._progress.now(groups[index]))
            assert slots is not None  # a stream without keys has one key group, its own
            index, slots = index[due], slots[due]
        self._fire_again(start, group, rows, index, slots)

    @property
    def latest(self) -> int:
        """The furthest event time of any key group; after a restore key groups may differ."""
        return self._progress.latest

    def _group(self, start: int) -> KeyedGroup:
        """Return the group to which rows of a large window are added."""
        if self._spilling is not None:
            return self._spilling.group(start)
        if start not in self._groups:
            self._groups[start] = self._new_group()
        return self._groups[start]

    def _new_group(self) -> KeyedGroup:
        if not self._spare:
            return KeyedGroup(self._plan, self._hasher, self._epoch)
        group = self._spare.pop()
        self._spare_bytes -= group.nbytes
        return group

    def _fire_again(
        self, start: int, group: KeyedGroup, rows: KeyedRows, index: Index, slots: Index | None
    ) -> None:
        """Emit the new results of the keys that late, but allowed, rows have touched."""
        if slots is None:
            self._emit([self._fired(start, [], group.state.results(slice(0, 1)), 1)])
            return
        touched, first = np.unique(slots, return_index=True)
        if touched.size:
            keys = rows.keys_at(index[first])
            self._emit([self._fired(start, keys, group.state.results(touched), len(touched))])

    @staticmethod
    def _fired(start: int, keys: list[pa.Array], values: list[pa.Array], size: int) -> Fired:
        return Fired(np.full(size, start, np.int64), keys, values)

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Fire due windows, earliest first; drop expired ones; forward the watermark."""
        before, window = self._progress.watermark, self._window
        if self._progress.advance(timestamp):
            due = [start for start in sorted(self._large) if window.due_at(start) <= timestamp]
            self._fire([start for start in due if window.due_at(start) > before], before)
            for start in due:
                if window.gone_at(start) <= timestamp:
                    self._drop(start)
            self._small.drop(window.last_gone(timestamp))
        self.output.emit_watermark(timestamp)

    def _expired_at(self, watermark: int) -> int:
        """Return the last instant of the windows that have expired at a watermark."""
        return clamped(self._window.first_kept(watermark) - 1)

    def _fire(self, starts: list[int], before: int) -> None:
        """Emit these windows and the small ones, in order; many in a batch, to avoid tiny batches."""
        after, last = (self._window.last_due(at) for at in (before, self._progress.watermark))
        fired: list[Fired] = []
        rows = 0
        for result in self._in_order(starts, self._small.fire(after, last)):
            result = self._not_fired(result)
            fired.append(result)
            rows += len(result.starts)
            if rows >= EMIT_ROWS_MAX:
                self._emit(fired)
                fired, rows = [], 0
        self._emit(fired)

    def _not_fired(self, result: Fired) -> Fired:
        """Leave out the rows of key groups for which their window had fired before a restore."""
        groups = self._progress.groups_of(lambda: result.keys)
        if groups is None:
            return result
        times = self._window.due_at(result.starts)
        keep = np.flatnonzero(self._progress.not_fired(groups, times))
        keys, values = (
            [column.take(pa.array(keep)) for column in columns]
            for columns in (result.keys, result.values)
        )
        return Fired(result.starts[keep], keys, values)

    def _in_order(self, starts: list[int], small: Fired | None) -> Iterator[Fired]:
        """Yield results of the windows with a table of their own, between those of the small ones."""
        at = 0
        for start in starts:
            if small is not None:
                upto = int(np.searchsorted(small.starts, start))
                if at < upto:
                    yield small.slice(at, upto)
                    at = upto
            yield from self._results(start)
        if small is not None and at < len(small.starts):
            yield small.slice(at, len(small.starts))

    def _results(self, start: int) -> Iterator[Fired]:
        """Yield the results of one window, `EMIT_ROWS_MAX` at a time."""
        group = self._group(start)
        size = group.state.size
        for low in range(0, size, EMIT_ROWS_MAX):
            high = min(low + EMIT_ROWS_MAX, size)
            keys = group.keys.keys(low, high) if self._plan.keys else []
            yield self._fired(start, keys, group.state.results(slice(low, high)), high - low)
        if self._spilling is not None:
            for keys, values in self._spilling.rest(start):
                yield self._fired(start, keys, values, len(values[0]))

    def _drop(self, start: int) -> None:
        if self._spilling is not None:
            self._spilling.drop(start)
            return
        group = self._groups.pop(start)
        if group.busy:
            return  # an open cut still reads it
        if len(self._spare) < _SPARE_GROUPS and (
            self._spare_bytes + group.nbytes <= _SPARE_BYTES_MAX
        ):
            group.clear()
            self._spare.append(group)
            self._spare_bytes += group.nbytes
        else:
            # Returning hundreds of MB to the system takes long, so one array is freed per batch.
            self._retired = group.memory()

    def _emit(self, fired: list[Fired]) -> None:
        """Emit results of some windows, many small ones in one batch, a large one in several."""
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
        """Snapshot table `windows` (one row per open window and key, or its runs) and `watermark`.

        The watermark is kept per key group so that each subtask finds it after a rescale: what was
        late before stays late.
        """
        epoch = self._epoch.cut()
        parts = [
            CutPart(group.cut(epoch), self._edges(start))
            for start, group in sorted(self._groups.items())
        ]
        parts.append(self._small.cut(epoch))
        windows = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        tables = {_PROGRESS.name: self._progress.cut()}
        if self._spilling is not None:
            return StateSnapshot(tables=tables, files={_WINDOWS: self._spilling.snapshot(windows)})
        return StateSnapshot(tables={_WINDOWS: windows, **tables})

    def _edges(self, start: int) -> Callable[[Rows], list[Array]]:
        end = start + self._window.size_ms
        return lambda which: [np.full(row_count(which), edge) for edge in (start, end)]

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `windows` and `watermark`."""
        return [
            aggregate_info(self._plan, _WINDOWS, "window"),
            _PROGRESS.info(),
        ]

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the open windows; watermark and expiry are the least of those restored."""
        if self._spilling is None:
            self._restore(state)
            return None
        # Files are read from end to end, which takes time for state larger than memory.
        return self.context.run_in_thread(lambda: self._restore(state))

    def _restore(self, state: RestoredState) -> None:
        self._epoch.restored()
        self._progress.restore(state, fitted=lambda time: self._window.first_behind(time) - 1)
        self._restore_rows(self._restore_files(state), state.states.get(_WINDOWS))
        self._restore_rows(state.tables.get(_WINDOWS), state.states.get(_WINDOWS))
        if self._spilling is not None:
            self._spilling.settle(self._small)

    def _restore_files(self, state: RestoredState) -> pa.Table | None:
        """Restore windows from files; return the rows of the small ones."""
        files = state.files.get(_WINDOWS)
        if not files:
            return None
        if self._spilling is None:
            raise files_of_another_backend(_WINDOWS, self._step)
        restored = self._spilling.restore_files(files)
        starts = np.array(sorted(restored.windows), np.int64)
        self._check_windows(starts, starts + restored.size_ms)
        return restored.small

    def _restore_rows(self, table: pa.Table | None, info: StateInfo | None) -> None:
        if table is None or not table.num_rows:
            return
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        table = restored_rows(self._plan, table, info, self._step)
        starts = table.column("window_start").cast(pa.int64()).to_numpy()
        ends = table.column("window_end").cast(pa.int64()).to_numpy()
        self._check_windows(starts, ends)
        # Sorted by window, so that each is a slice; without windows that had expired at the cut.
        order = np.argsort(starts, kind="stable")
        self._load(table, starts, order[(starts > self._progress.expired(groups))[order]])

    def _check_windows(self, starts: Index, ends: Index) -> None:
        """Raise StateError if these are not windows of this job."""
        window = self._window
        misplaced = (starts - window.offset_ms) % window.size_ms != 0
        wrong = np.flatnonzero((ends - starts != window.size_ms) | misplaced)
        if wrong.size:
            at = int(wrong[0])
            old = f"size {ends[at] - starts[at]} ms, start {starts[at]} ms"
            raise StateError(
                f"the snapshot has other windows old=`{old}` new=`{window.describe()}`",
                where=self._step,
                fix="keep the size and offset of the window, or give the step another name",
            )

    def _load(self, table: pa.Table, starts: Index, order: Index) -> None:
        """Load the rows `order`, which is by window."""
        windows, counts = np.unique(starts[order], return_counts=True)
        stops = np.cumsum(counts)
        few: list[Index] = []
        for start, stop, count in zip(windows.tolist(), stops, counts, strict=True):
            rows = order[stop - count : stop]
            if start not in self._large and count < SMALL_ROWS:
                few.append(rows)
                continue
            if self._spilling is not None:
                self._spilling.load(start, table.take(pa.array(rows)))
                continue
            group = KeyedGroup(self._plan, self._hasher, self._epoch)
            group.load(self._plan, self._hasher, table.take(pa.array(rows)))
            self._groups[start] = group
        if few:
            self._small.load(table.take(pa.array(np.concatenate(few))))

    def close(self) -> None:
        self._retired.clear()
        if self._spilling is not None:
            self._spilling.close()
