"""What aggregates over windows of event time have in common, whatever the kind of window.

An operator of this family is this shell around a table of windows. The shell reads batches, splits
late rows from them, knows how far time has come for which key group (`time_progress.py`), and emits
results. The table, which a subclass holds, adds rows to windows and says which of them fire.

A window fires when the watermark reaches its end - 1, and the watermark is forwarded after its
results. With allowed lateness its state stays for a while, and a record that comes for a fired
window makes the result of its key be emitted again, once per batch and key. Rows of an expired
window are late: they go to the side output `late`, and are counted. The order of keys within a
window's result is undefined.

Deltas of the state carry no marks of expired windows. A row of the table is a key and a window, and
a window expires at a watermark that is in every later checkpoint, for each key group; once expired
it never comes back, since its records are late from then on. So a restore knows which rows of the
base, or of an older delta, belong to windows that had expired at the cut, and leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from ...errors import PlanError
from ...state.aggregates.accumulators import Mask
from ...state.keyed.base import ABSENT
from ...state.keyed.keys import keys_of_columns
from ...state.queryable import KeyScan, NotKept
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import KeyHasher
from ...state.slots.table import SlotTable
from ...state.snapshot import CommitPermit, KeptState
from ...state.values import Index
from ..aggregation.aggregates import AggregatePlan
from ..aggregation.keyed_aggregate import KeyedRows, Rows, columns_of, identity_seed
from ..base import OperatorContext
from ..elements import Batch, ColumnBatch
from ..rollback import Rollback
from ..spilling_space import SpillingOperator
from ..time_progress import ExpiredAt, KeyGroupTable, TimeProgress
from .committed import CommittedWindows
from .kinds import WINDOW_FIELDS
from .late import LateOutput

EMIT_ROWS_MAX = 65_536
"""The most rows of a batch that is emitted."""


@dataclass(frozen=True, slots=True)
class Fired:
    """Results of windows, a row per window and key.

    Attributes:
        starts, ends: the bounds of the window of each row, ms.
        keys: the key columns, or the slots of the keys, for `WindowedAggregate._key_columns`; of answers
            to queries, the places of the keys among those asked for.
        values: the columns of the aggregates.
    """

    starts: Index
    ends: Index
    keys: list[pa.Array] | Index
    values: list[pa.Array]

    @classmethod
    def of_window(
        cls, start: int, end: int, size: int, keys: list[pa.Array] | Index, values: list[pa.Array]
    ) -> Fired:
        """Return `size` results of one window."""
        return cls(np.full(size, start, np.int64), np.full(size, end, np.int64), keys, values)

    @classmethod
    def together(cls, parts: Sequence[Fired]) -> Fired:
        """Return results that have slots or places of keys, one behind the other."""
        keys = [part.keys for part in parts if not isinstance(part.keys, list)]
        return cls(
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.ends for part in parts]),
            np.concatenate(keys),
            _joined([part.values for part in parts]),
        )

    @classmethod
    def by_end(cls, parts: Sequence[Fired]) -> Fired:
        """Return results that have key columns, in the order of the ends of their windows."""
        together = cls(
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.ends for part in parts]),
            _joined([part.keys for part in parts if isinstance(part.keys, list)]),
            _joined([part.values for part in parts]),
        )
        return together.take(np.argsort(together.ends, kind="stable"))

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Index) -> Fired:
        """Return some of the rows."""
        indices = pa.array(rows)
        return self._picked(rows, lambda column: column.take(indices))

    def _picked(self, rows: Rows, pick: Callable[[pa.Array], pa.Array]) -> Fired:
        keys = self.keys
        return Fired(
            self.starts[rows],
            self.ends[rows],
            list(map(pick, keys)) if isinstance(keys, list) else keys[rows],
            list(map(pick, self.values)),
        )

    def slice(self, low: int, high: int) -> Fired:
        """Return the rows from `low` to `high`."""
        return self._picked(slice(low, high), lambda column: column.slice(low, high - low))


class WindowedAggregate(SpillingOperator):
    """Aggregates over windows of event time, per key or without keys.

    Args:
        plan: keys and aggregates.
        step: the name of the step, for errors.
        progress: the table of the progress of event time.
        expired_at: returns the expiry bound at a watermark; by default, rows at the bound or before
            are late. See `TimeProgress`.
        committed: clients read the windows also as of checkpoints.
    """

    _cells = True
    """Windows have fixed bounds; see `CommittedWindows`."""

    def __init__(
        self,
        plan: AggregatePlan,
        step: str,
        progress: KeyGroupTable,
        expired_at: ExpiredAt,
        *,
        committed: bool = False,
    ) -> None:
        assert plan.added == WINDOW_FIELDS
        self._plan, self._step, self._committed = plan, step, committed
        self._old: CommittedWindows | None = None
        self._progress = TimeProgress(progress, expired_at)
        self._rollback: Rollback[Any] = Rollback.off()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        if self._committed:
            self._old = CommittedWindows(self._plan, context, cells=self._cells)
        self._late_output = LateOutput(context, self.output)
        self._progress.open(context)

    @property
    def latest(self) -> int:
        """The furthest event time of any key group; after a restore key groups may differ."""
        return self._progress.latest

    # --- the table of windows ------------------------------------------------------------------

    def _late(self, times: Index, groups: Index | None) -> Mask:
        """Return which rows of a batch are late."""
        late: Mask = times <= self._progress.expired(groups)
        return late

    def _last_windows(self, times: Index) -> tuple[Index, Index]:
        """Return start and end of the last window of each late row, which has one of these times."""
        raise NotImplementedError

    def _add(
        self, batch: Batch, rows: KeyedRows, times: Index, groups: Index | None, earliest: int
    ) -> None:
        """Add rows to their windows, and emit the new results of windows that have fired.

        Args:
            batch: at least one record.
            rows: its rows as the aggregates need them.
            times: their event times.
            groups: their key groups; see `TimeProgress.groups_of`.
            earliest: the least of the times.
        """
        raise NotImplementedError

    def _due(self, before: int, watermark: int) -> Iterator[Fired]:
        """Yield the results of windows that fire between two watermarks, earliest first."""
        raise NotImplementedError

    def _drop_expired(self, watermark: int) -> None:
        """Drop the windows that have expired at a watermark; their results are out."""
        raise NotImplementedError

    def _key_columns(self, slots: Index) -> list[pa.Array]:
        """Return the keys in these slots, if results have slots."""
        raise NotImplementedError

    # --- records and time ----------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        data, times = columns_of(batch, self._step), batch.timestamps
        if times is None:
            raise PlanError(
                f"`{self._step}` needs event time, but its input has none",
                fix='add .event_time("column", max_out_of_order="10s") before the window',
            )
        if not len(times):
            return
        progress, earliest = self._progress, int(times.min())
        groups = progress.groups_of(lambda: [data.column(key) for key in self._plan.keys])
        if groups is not None or earliest <= progress.bounds[0]:
            late = self._late(times, groups)
            batch = self._late_output.split(batch, late, progress.now(groups), self._last_windows)
            if not len(batch):
                return
            groups = None if groups is None else groups[~late]
            data, times = columns_of(batch, self._step), times[~late]
            earliest = int(times.min())
        rows = KeyedRows(self._plan, self._hasher, data, times)
        self._add(batch, rows, times, groups, earliest)

    def on_watermark(self, timestamp: int) -> None:
        """Fire due windows, earliest first; drop expired ones; forward the watermark."""
        before = self._progress.watermark
        if self._progress.advance(timestamp):
            self._emit(map(self._not_fired, self._due(before, timestamp)))
            self._drop_expired(timestamp)
        self.output.emit_watermark(timestamp)

    def _not_fired(self, fired: Fired) -> Fired:
        """Leave out results of key groups for which they had fired before a restore."""
        groups = self._progress.groups_of(lambda: self._keys_of([fired]))
        if groups is None:
            return fired
        return fired.take(np.flatnonzero(self._progress.not_fired(groups, fired.ends - 1)))

    # --- queries -------------------------------------------------------------------------------

    def _windows_of(self, columns: list[pa.Array]) -> Iterator[Fired]:
        """Yield the present results of the windows of some keys that have not expired.

        `columns` are the key columns; without any there is one key. The keys of the results are the
        places of the keys in them.
        """
        raise NotImplementedError

    def _keys_now(self, ending: ExitStack) -> Iterator[list[pa.Array]]:
        """Return the keys that there are now, in pieces, and perhaps others; a key may come several times.

        Columns behind those of the key do not matter. `ending` is closed when nobody reads on.
        """
        raise NotImplementedError

    def _windows_as_of(self, columns: list[pa.Array], checkpoint_id: int) -> Iterator[Fired]:
        """Yield the results that windows of some keys had at a checkpoint; see `_windows_of`.

        Raises:
            NotKept: they are not known.
        """
        raise NotImplementedError

    def query(self, state: str, key: Any, checkpoint_id: int = 0) -> Any:
        """Return the windows of a key, as rows with their bounds; the earliest first."""
        (value,) = self.query_many(state, [key], checkpoint_id)
        return value

    def query_many(self, state: str, keys: Sequence[Any], checkpoint_id: int = 0) -> Sequence[Any]:
        if not keys:
            return []
        if not self._plan.keys:  # they are all the one key that there is
            keys, times = keys[:1], len(keys)
            return list(self._rows_of(keys, checkpoint_id)) * times
        return self._rows_of(keys, checkpoint_id)

    def _rows_of(self, keys: Sequence[Any], checkpoint_id: int) -> Sequence[Any]:
        """Return the windows of each of some keys; see `query`."""
        columns = keys_of_columns(self._plan.key_fields).to_arrays(keys)
        names = [*(field.name for field in WINDOW_FIELDS), *self._plan.aggregates]
        rows: list[list[dict[str, Any]]] = [[] for _ in keys]
        for found in self._results_for(columns, checkpoint_id):
            values = found.values[: len(self._plan.aggregates)]
            lists = [column.to_pylist() for column in [*_edges(found.starts, found.ends), *values]]
            for place, row in zip(found.keys, zip(*lists, strict=True), strict=True):
                rows[place].append(dict(zip(names, row, strict=True)))
        return [sorted(each, key=lambda row: row[names[0]]) or ABSENT for each in rows]

    def _results_for(self, columns: list[pa.Array], checkpoint_id: int) -> Iterator[Fired]:
        if not checkpoint_id:
            return self._windows_of(columns)
        if self._old is None:
            raise NotKept
        return self._windows_as_of(columns, checkpoint_id)

    def scan(self, state: str, checkpoint_id: int = 0) -> KeyScan:
        ending = ExitStack()
        if not checkpoint_id:
            return KeyScan(self._each_once(self._keys_now(ending)), ending.close)
        if self._old is None:
            raise NotKept
        self._old.points.hold(checkpoint_id)
        ending.callback(self._old.points.release, checkpoint_id)
        # What is dropped from now on had been there at the start of the scan.
        found = chain(self._old.keys_since(checkpoint_id), self._keys_now(ending))
        return KeyScan(self._each_once(found), ending.close)

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        self._rollback.completed(permit.checkpoint_id)
        if self._old is not None:
            self._old.points.completed(permit.checkpoint_id)

    def keep(self) -> dict[str, KeptState]:
        return self._rollback.keep()

    def drop_point(self, checkpoint_id: int) -> None:
        self._rollback.aborted(checkpoint_id)
        if self._old is not None:
            self._old.points.aborted(checkpoint_id)

    def _note_cut(self, checkpoint_id: int) -> None:
        """Note that a snapshot is taken of the windows as they are now."""
        if self._old is not None:
            self._old.cut(checkpoint_id, self._progress)

    def _note_restored(self) -> None:
        """Note that the windows as they are now were restored."""
        if self._old is not None:
            self._old.restored(self.context.restored_checkpoint, self._progress)

    def _each_once(self, pieces: Iterator[list[pa.Array]]) -> Iterator[list[Any]]:
        """Yield the keys in some columns, without those that have come before."""
        if not self._plan.keys:
            yield [()]
            return
        shape, seen = keys_of_columns(self._plan.key_fields), SlotTable()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        hasher = KeyHasher(types, identity_seed(self.context.job_name), dense=False)
        for piece in pieces:
            columns = piece[: len(types)]
            fresh = np.sort(seen.lookup(*hasher.identify(columns))[1])
            if fresh.size:
                taken = [column.take(pa.array(fresh)) for column in columns]
                yield shape.from_table(pa.Table.from_arrays(taken, list(shape.names)))

    # --- results -------------------------------------------------------------------------------

    def _emit(self, fired: Iterable[Fired]) -> None:
        """Emit results: many small windows in one batch, a large one in several."""
        held: list[Fired] = []
        rows = 0
        for result in fired:
            held.append(result)
            rows += len(result)
            if rows >= EMIT_ROWS_MAX:
                self._send(held)
                held, rows = [], 0
        if rows:
            self._send(held)

    def _send(self, fired: Sequence[Fired]) -> None:
        starts, ends = fired[0].starts, fired[0].ends
        if len(fired) > 1:
            starts = np.concatenate([result.starts for result in fired])
            ends = np.concatenate([result.ends for result in fired])
        columns = [
            *self._keys_of(fired),
            *_edges(starts, ends),
            *_joined([result.values for result in fired]),
        ]
        data = pa.RecordBatch.from_arrays(columns, schema=self._plan.result_schema)
        batch = ColumnBatch(data, ends - 1)
        if (ends[1:] < ends[:-1]).any():
            batch = batch.take(np.argsort(ends, kind="stable"))
        for low in range(0, len(batch), EMIT_ROWS_MAX):
            self.output.emit(batch.slice(low, min(EMIT_ROWS_MAX, len(batch) - low)))

    def _keys_of(self, fired: Sequence[Fired]) -> list[pa.Array]:
        """Return the key columns of some results."""
        columns = [result.keys for result in fired if isinstance(result.keys, list)]
        if columns:
            return _joined(columns)
        slots = [result.keys for result in fired if not isinstance(result.keys, list)]
        return self._key_columns(slots[0] if len(slots) == 1 else np.concatenate(slots))


def _edges(starts: Index, ends: Index) -> list[pa.Array]:
    """Return the columns of the bounds of windows."""
    return [
        pa.array(edge).view(field.type)
        for edge, field in zip((starts, ends), WINDOW_FIELDS, strict=True)
    ]


def _joined(columns: list[list[pa.Array]]) -> list[pa.Array]:
    if len(columns) == 1:
        return columns[0]
    return [pa.concat_arrays(list(column)) for column in zip(*columns, strict=True)]
