"""Aggregates per key and tumbling window: the fast path for windows of one pane each.

Windows with many rows have a table each, in memory or on disk, whose slots are those of its keys;
the others share one (`small_windows.py`). When a window expires, its table is used again.

The table of the snapshot has a row per key and window. The progress of event time has the window up
to which all have expired, so that a job restored with another lateness does not restore half of a
window's state. `windowed_aggregate.py` says what this has in common with other windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.slots.key_index import BatchKeys
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
    KeptGroup,
    KeptGroups,
    KeyedGroup,
    KeyedRows,
    Rows,
    identity_seed,
    row_count,
)
from ..aggregation.spilling_group import AggregateSpace, lies_on_disk
from ..base import OperatorContext
from ..elements import WATERMARK_MIN, Batch
from ..rollback import Rollback
from ..time_progress import WATERMARK_COLUMN, KeyGroupTable, clamped
from .committed import CommittedWindows
from .kinds import TumblingWindow
from .small_windows import SMALL_ROWS, KeptSmallWindows, SmallWindows
from .spilling_windows import SpillingWindows
from .windowed_aggregate import EMIT_ROWS_MAX, Fired, WindowedAggregate

_SPARE_GROUPS = 256
_SPARE_BYTES_MAX = 1 << 25
"""The most groups of expired windows kept for reuse, and the most memory of them."""
_WINDOWS = "windows"
_PROGRESS: Final = KeyGroupTable.of_times("watermark", "window", WATERMARK_COLUMN, "gone_through")
"""`gone_through`: windows that start at this time (ms) or before have expired."""


def _expired_at(window: TumblingWindow, watermark: int) -> int:
    """Return the last instant of the windows that have expired at a watermark."""
    return clamped(window.first_kept(watermark) - 1)


class KeptWindows(KeptGroups):
    """A cut to which windows can go back.

    Args:
        large: those with a table of their own, by their starts.
        small: the others.
        now: the windows with a table of their own at any time.
        small_now: the table of the others.
    """

    def __init__(
        self,
        large: dict[int, KeptGroup],
        small: KeptSmallWindows,
        now: dict[int, KeyedGroup],
        small_now: SmallWindows,
    ) -> None:
        super().__init__(
            {**large, WATERMARK_MIN: small.group},
            lambda start, group: now.get(start) is group or small_now.has(group),
        )
        self.large, self.small = large, small


class TumblingAggregate(WindowedAggregate):
    """Tumbling-window aggregates over columns, per key or without keys."""

    def __init__(
        self,
        window: TumblingWindow,
        plan: AggregatePlan,
        step: str = "window",
        *,
        committed: bool = False,
    ) -> None:
        expired_at = partial(_expired_at, window)
        super().__init__(plan, step, _PROGRESS, expired_at, committed=committed)
        self._window = window
        self._groups: dict[int, KeyedGroup] = {}  # by window start
        self._spare: list[KeyedGroup] = []
        self._spare_bytes = 0
        self._retired: list[Array] = []  # of the last expired window; freed one by one
        self._spilling: SpillingWindows | None = None  # instead of `_groups`

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        seed = identity_seed(context.job_name)
        self._small = SmallWindows(self._plan, self._window, seed, self._epoch)
        if lies_on_disk(self._plan, context):
            space = AggregateSpace(self._plan, context, _WINDOWS)
            self._hasher = space.hasher
            self._spilling = SpillingWindows(space, self._window)
        else:
            self._rollback = Rollback(context.options, _WINDOWS, self._open_kept)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if self._retired:
            self._retired.pop()
        super().process(batch, input_index)

    def _last_windows(self, times: Index) -> tuple[Index, Index]:
        starts = self._window.starts_of(times)
        return starts, starts + self._window.size_ms

    def _add(
        self, batch: Batch, rows: KeyedRows, times: Index, groups: Index | None, earliest: int
    ) -> None:
        few: list[tuple[int, Rows]] = []
        for start, which in self._window.split(times, earliest):
            if self._is_small(start, which):
                few.append((start, which))
                continue
            whole = isinstance(which, slice) and which.stop - which.start == rows.size
            self._add_many(start, rows, None if whole else which, groups)
        if few:
            self._add_few(rows, few, groups)
        if self._spilling is not None:
            self._spilling.settle(self._small)

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
        kept = self._old is not None and self._old.keeps
        index, slots = self._small.add(rows, parts, self._keep if kept else None)
        if self._window.due_at(parts[0][0]) > self.latest:
            return  # none has fired yet: `parts` begins with the earliest
        if groups is not None:
            groups = groups[index]
        last = self._window.due_at(self._small.starts_of(slots))
        due = np.flatnonzero(last <= self._progress.now(groups))
        touched, first = np.unique(slots[due], return_index=True)
        if touched.size:
            self._emit([self._small.results(touched, rows.keys_at(index[due[first]]))])

    def _add_many(
        self, start: int, rows: KeyedRows, which: Rows | None, groups: Index | None
    ) -> None:
        group = self._group(start)

        def keeper(_: BatchKeys | None, slots: Index, fresh: Index) -> None:
            self._keep(group, slots, fresh, start)

        kept = self._old is not None and self._old.keeps
        slots = group.add(rows, which, keeper if kept else None)
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

    def _keep(
        self, group: KeyedGroup, slots: Index, fresh: Index, start: int | None = None
    ) -> None:
        """Keep the results of those slots of a group that are about to change.

        Args:
            group: of one window, or of all small ones.
            slots: of the rows that are added.
            fresh: those that have no state yet.
            start: of the window; None: the group is that of the small windows.
        """
        assert self._old is not None
        if start is None or self._spilling is None:
            held = group.state.first_changes(slots, max(1, group.keys.size))
            held = held if start is not None else self._small.of_open(held)
        else:
            held = np.setdiff1d(slots, fresh)
        changed = np.concatenate([held, fresh])
        if not changed.size:
            return
        keys = group.keys.take(changed)[: len(self._plan.keys)]
        if start is None:
            starts = self._small.starts_of(changed)
        else:
            starts = np.full(len(changed), start)

        def read(places: Index) -> tuple[Index, list[pa.Array]]:
            owners = np.flatnonzero(places < len(held))
            return owners, group.state.results(changed[places[owners]])

        self._old.keep(keys, starts, read)

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
            self._emit([self._fired(start, 1, [], group.state.results(slice(0, 1)))])
            return
        touched, first = np.unique(slots, return_index=True)
        if touched.size:
            keys = rows.keys_at(index[first])
            values = group.state.results(touched)
            self._emit([self._fired(start, len(touched), keys, values)])

    def _fired(
        self, start: int, size: int, keys: list[pa.Array] | Index, values: list[pa.Array]
    ) -> Fired:
        return Fired.of_window(start, start + self._window.size_ms, size, keys, values)

    # --- time ----------------------------------------------------------------------------------

    def _due(self, before: int, watermark: int) -> Iterator[Fired]:
        after, last = self._window.last_due(before), self._window.last_due(watermark)
        large = [start for start in self._large if after < start <= last]
        return self._in_order(sorted(large), self._small.fire(after, last))

    def _drop_expired(self, watermark: int) -> None:
        last = self._window.last_expired(watermark)
        if self._old is not None and self._old.keeps:
            self._keep_expired(self._old, last)
        for start in [start for start in self._large if start <= last]:
            self._drop(start)
        self._small.drop(last)
        self._rollback.grew()  # what was dropped stays in kept cuts

    def _keep_expired(self, old: CommittedWindows, last: int) -> None:
        """Keep the results of windows that are about to be dropped."""
        small = self._small.fire(WATERMARK_MIN, last)
        large = (self._results(start) for start in list(self._large) if start <= last)
        for fired in chain([] if small is None else [small], chain.from_iterable(large)):
            if not old.keeps:
                return  # it is too much
            old.keep_all(self._keys_of([fired]), fired.starts, fired.values)

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
            yield self._fired(start, high - low, keys, group.state.results(slice(low, high)))
        if self._spilling is not None:
            for keys, values in self._spilling.rest(start):
                yield self._fired(start, len(values[0]), keys, values)

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

    # --- queries -------------------------------------------------------------------------------

    def _windows_of(self, columns: list[pa.Array]) -> Iterator[Fired]:
        yield self._small.find(columns)
        for start in list(self._large):
            if self._spilling is not None:
                yield from self._found_on_disk(self._spilling, start, columns)
                continue
            group = self._groups[start]
            slots = group.find_many(columns)
            places = np.flatnonzero(slots >= 0)
            if places.size:
                yield self._fired(start, len(places), places, group.state.results(slots[places]))

    def _windows_as_of(self, columns: list[pa.Array], checkpoint_id: int) -> Iterator[Fired]:
        assert self._old is not None
        kept = self._old.find(columns, checkpoint_id)
        for places, (starts, *values) in kept.rows:
            begins = starts.to_numpy()
            yield Fired(begins, begins + self._window.size_ms, places, values)
        for fired in self._windows_of(columns):
            assert not isinstance(fired.keys, list)
            yield fired.take(np.flatnonzero(~kept.is_kept(fired.keys, fired.starts)))

    def _found_on_disk(
        self, spilling: SpillingWindows, start: int, columns: list[pa.Array]
    ) -> Iterator[Fired]:
        for place in range(len(columns[0])):
            values = spilling.results_of(start, [column.slice(place, 1) for column in columns])
            if values is not None:
                yield self._fired(start, 1, np.array([place]), values)

    def _keys_now(self, ending: ExitStack) -> Iterator[list[pa.Array]]:
        parts = [self._small.keys_now()]
        if self._spilling is None:
            parts += [group.keys.cut().pieces() for group in self._groups.values()]
        else:
            for start in self._spilling:
                pieces, close = self._spilling.keys_now(start)
                ending.callback(close)
                parts.append(pieces)
        return chain.from_iterable(parts)

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `windows` (one row per open window and key, or its runs) and `watermark`.

        The watermark is kept per key group so that each subtask finds it after a rescale: what was
        late before stays late.
        """
        self._note_cut(checkpoint_id)
        epoch = self._epoch.cut()
        parts = [
            CutPart(group.cut(epoch), self._edges(start))
            for start, group in sorted(self._groups.items())
        ]
        parts.append(self._small.cut(epoch))
        self._rollback.cut(checkpoint_id)
        windows = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        tables = {_PROGRESS.name: self._progress.cut()}
        if self._spilling is not None:
            return StateSnapshot(tables=tables, files={_WINDOWS: self._spilling.snapshot(windows)})
        return StateSnapshot(tables={_WINDOWS: windows, **tables})

    def _open_kept(self) -> KeptWindows:
        """Open a cut to which the windows can go back; see `Rollback`."""
        grew = self._rollback.grew
        groups = {start: group.keep(grew) for start, group in self._groups.items()}
        return KeptWindows(groups, self._small.keep(grew), self._groups, self._small)

    def _edges(self, start: int) -> Callable[[Rows], list[Array]]:
        end = start + self._window.size_ms
        return lambda which: [np.full(row_count(which), edge) for edge in (start, end)]

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `windows` and `watermark`."""
        return [
            aggregate_info(self._plan, _WINDOWS, "window"),
            _PROGRESS.info(),
        ]

    @property
    def _uses_disk(self) -> bool:
        return self._spilling is not None

    def _restore(self, state: RestoredState) -> None:
        """Restore the open windows; watermark and expiry are the least of those restored."""
        self._epoch.restored()
        self._progress.restore(state, fitted=lambda time: self._window.first_behind(time) - 1)
        kept = self._rollback.found(state)
        if kept is not None:
            for start, group in kept.large.items():
                self._groups[start] = group.go_back(self._epoch)
            self._small.go_back(kept.small)
        self._restore_rows(self._restore_files(state), state.states.get(_WINDOWS))
        self._restore_rows(state.tables.get(_WINDOWS), state.states.get(_WINDOWS))
        if self._spilling is not None:
            self._spilling.settle(self._small)
        self._note_restored()
        self._rollback.restored(self.context.restored_checkpoint)

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
        self._rollback.close()
        self._retired.clear()
        if self._spilling is not None:
            self._spilling.close()
