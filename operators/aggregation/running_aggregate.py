"""Running aggregates per key: the updated row of each key a batch touched, once per batch.

The row has the place of the key's last record, and the greatest event time of the key's records in
that batch. Batch boundaries are undefined, and so is the number of intermediate results; the last
result of each key is always emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...state.keyed.base import ABSENT
from ...state.keyed.keys import KeyShape, keys_of_columns
from ...state.queryable import CommittedPoints, KeyScan, NotKept
from ...state.slots.arrays import SlotArray
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import BatchKeys, KeyHasher
from ...state.snapshot import CommitPermit, RestoredState, StateInfo, StateSnapshot
from ...state.values import NOW, Index, Values
from ..base import OperatorContext
from ..elements import Batch, ColumnBatch, Timestamps
from ..queries import old_values_max
from ..spilling_space import SpillingOperator
from .aggregate_tables import (
    CutPart,
    aggregate_info,
    files_of_another_backend,
    restored_rows,
    table_cut,
)
from .aggregates import AggregatePlan
from .expiring_group import ExpiringGroup, generation_ms, living_rows
from .keyed_aggregate import KeyedGroup, KeyedRows, columns_of, identity_seed
from .old_rows import OldRows
from .spilling_group import AggregateSpace, SpillingGroup, lies_on_disk

_RUNNING: Final = "running"
_CLEANUP_MS_MIN: Final = 1_000


class RunningAggregate(SpillingOperator):
    """Aggregates since the start of the job, per key or, without keys, over all records."""

    def __init__(self, plan: AggregatePlan, step: str = "agg", *, committed: bool = False) -> None:
        assert not plan.added
        self._plan, self._step = plan, step
        self._committed = committed
        self._points: CommittedPoints[OldRows] | None = None
        self._cuts = 0
        # The number of the cut since which a slot of `_in_memory` has an old value; 0: of none.
        self._kept_since = SlotArray(np.uint32)
        self._last_row = SlotArray(np.intp)  # scratch by slot, written before it is read
        self._last_time = SlotArray(np.int64)
        self._expiring: ExpiringGroup | None = None
        self._space: AggregateSpace | None = None
        self._spilling: SpillingGroup | None = None
        self._cancel_cleanup: Callable[[], None] | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        expires = self._plan.ttl_ms is not None
        if self._committed:
            self._points = CommittedPoints(OldRows, old_values_max(context.options))
        self._hasher = KeyHasher(types, identity_seed(context.job_name), dense=not expires)
        self._in_memory = KeyedGroup(self._plan, self._hasher, self._epoch)
        if lies_on_disk(self._plan, context):
            self._space = AggregateSpace(self._plan, context, _RUNNING)
            self._spilling = SpillingGroup(self._space)
            self._hasher = self._space.hasher
        elif expires:
            self._expiring = ExpiringGroup(self._plan, self._hasher, self._epoch)
            self._clean_up()

    def _clean_up(self) -> None:
        """Drop what has expired, also while no records come."""
        assert self._expiring is not None
        assert self._plan.ttl_ms is not None
        self._expiring.advance(self.context.clock.now_ms())
        period = max(generation_ms(self._plan.ttl_ms), _CLEANUP_MS_MIN)
        self._cancel_cleanup = self.context.timers.call_later(period, self._clean_up)

    @property
    def _group(self) -> KeyedGroup:
        """The group to which rows are added now; it changes with each `settle` and `advance`."""
        if self._expiring is not None:
            return self._expiring.group
        return self._in_memory if self._spilling is None else self._spilling.group

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        rows = KeyedRows(self._plan, self._hasher, data, batch.timestamps)
        if self._plan.ttl_ms is not None:
            rows.values[NOW] = Values(np.full(rows.size, self._advance()), None)
        kept = self._points is not None and self._points.newest is not None
        slots = self._group.add(rows, None, self._keep if kept else None)
        if slots is None:
            slots = np.zeros(rows.size, np.intp)
        last = self._last_rows(slots)
        touched = slots[last]
        results = self._group.state.results(touched)[: len(self._plan.aggregates)]
        columns = [*rows.keys_at(last), *results]
        times = None
        if batch.timestamps is not None:
            times = self._latest(slots, touched, batch.timestamps)
        result = pa.RecordBatch.from_arrays(columns, schema=self._plan.result_schema)
        self.output.emit(ColumnBatch(result, times))
        if self._spilling is not None:
            self._spilling.settle()

    def _advance(self) -> int:
        """Let time pass for keys that expire, and return the machine's time (ms)."""
        now = self.context.clock.now_ms()
        if self._spilling is not None:
            self._spilling.advance(now)
        elif self._expiring is not None:
            self._expiring.advance(now)
        return now

    def _last_rows(self, slots: Index) -> Index:
        """Return the last row of each key in the batch, ascending."""
        self._last_row.reserve(self._group.state.size)
        order, last = np.arange(len(slots)), self._last_row.data
        last[slots] = order
        return np.flatnonzero(last.take(slots) == order)

    def _latest(self, slots: Index, touched: Index, times: Timestamps) -> Timestamps:
        """Return the greatest event time of each touched key."""
        self._last_time.reserve(self._group.state.size)
        latest = self._last_time.data
        latest[touched] = np.iinfo(np.int64).min
        np.maximum.at(latest, slots, times)
        return latest.take(touched)

    def _keep(self, keys: BatchKeys | None, slots: Index, fresh: Index) -> None:
        """Keep the results of keys that change for the first time since the newest cut; see `Keeper`."""
        points = self._points
        assert keys is not None
        assert points is not None
        assert points.newest is not None
        group, count = self._group, len(self._plan.aggregates)
        expires = self._plan.ttl_ms is not None
        if group is self._in_memory:
            # Its slots stay those of their keys, so that most rows need no look into the index.
            self._kept_since.reserve(group.keys.size)
            rows = np.flatnonzero(self._kept_since.data.take(slots) != self._cuts)
            if not rows.size:
                return
            slots = slots[rows]
            self._kept_since.data[slots] = self._cuts
            taken = [column.take(pa.array(rows)) for column in keys.columns]
            keys = BatchKeys(self._hasher, taken)

        def read(rows: Index) -> tuple[Index, list[pa.Array]]:
            at = slots[rows]
            owners = np.flatnonzero(~np.isin(at, fresh, assume_unique=True))
            at = at[owners]
            results = group.state.results(at)[:count]
            if expires:
                results.append(pa.array(group.state.last_numbers().take(at)))
            return owners, results

        if points.newest.keep(*keys.lanes(None), read):
            points.grew()

    def scan(self, state: str, checkpoint_id: int = 0) -> KeyScan:
        points, shape = self._points, self._key_shape
        ending = ExitStack()
        if checkpoint_id:
            if points is None:
                raise NotKept
            points.hold(checkpoint_id)
            ending.callback(points.release, checkpoint_id)
        # No key is ever removed, unless it has expired.
        if self._spilling is not None:
            found, close = self._spilling.keys_now()
            ending.callback(close)
        elif self._expiring is not None:
            found = self._expiring.keys_now()
        else:
            found = self._in_memory.keys.cut().pieces()
        names = list(shape.names)
        pieces = (shape.from_table(pa.Table.from_arrays(columns, names)) for columns in found)
        return KeyScan(pieces, ending.close)

    def query_many(self, state: str, keys: Sequence[Any], checkpoint_id: int = 0) -> Iterable[Any]:
        if self._spilling is not None or self._expiring is not None:
            return super().query_many(state, keys, checkpoint_id)
        columns = self._key_shape.to_arrays(keys)
        values: list[Any] = [ABSENT] * len(keys)
        rest = np.arange(len(keys))
        if checkpoint_id:
            rest = self._fill_as_of(values, columns, checkpoint_id)
            columns = [column.take(pa.array(rest)) for column in columns]
        slots = self._in_memory.keys.find_keys(BatchKeys(self._hasher, columns)).astype(np.intp)
        found = np.flatnonzero(slots >= 0)
        rows = self._rows(self._in_memory.state.results(slots[found]))
        if len(rows) == len(keys):
            return rows
        for place, row in zip(rest[found].tolist(), rows, strict=True):
            values[place] = row
        return values

    def _fill_as_of(
        self, values: list[Any], columns: Sequence[pa.Array], checkpoint_id: int
    ) -> Index:
        """Fill in the values of keys that have changed since a checkpoint; return the places of others."""
        if self._points is None:
            raise NotKept
        hashes, checks = self._hasher.identify(columns)
        rest = np.arange(len(values))
        for old in self._points.since(checkpoint_id):
            known, found = old.find(hashes[rest], None if checks is None else checks[rest])
            for at, results in found:
                rows = self._rows(results)
                for place, row in zip(rest[at].tolist(), rows, strict=True):
                    values[place] = row
            rest = np.delete(rest, known)
        return rest

    def _rows(self, results: Sequence[pa.Array]) -> list[Any]:
        """Return the results of some keys, one object for each key."""
        lists = [column.to_pylist() for column in results[: len(self._plan.aggregates)]]
        return list(map(self._row_type, *lists))

    @cached_property
    def _row_type(self) -> type[msgspec.Struct]:
        names = {f"r{number}": name for number, name in enumerate(self._plan.aggregates)}
        return msgspec.defstruct("Results", names, rename=names, gc=False)

    def _named(self, results: list[pa.Array] | None) -> Any:
        """Return the results of one key as the value that clients read."""
        if results is None:
            return ABSENT
        names = self._plan.aggregates
        return {name: column[0].as_py() for name, column in zip(names, results, strict=False)}

    def query(self, state: str, key: Any, checkpoint_id: int = 0) -> Any:
        columns = self._key_shape.to_arrays([key])
        used_after = None
        if self._plan.ttl_ms is not None:
            used_after = self.context.clock.now_ms() - self._plan.ttl_ms
        if checkpoint_id:
            results = self._results_as_of(columns, used_after, checkpoint_id)
        else:
            results = self._results_of(columns, used_after)
        return self._named(results)

    @cached_property
    def _key_shape(self) -> KeyShape:
        return keys_of_columns(self._plan.key_fields)

    def _results_of(self, columns: list[pa.Array], used_after: int | None) -> list[pa.Array] | None:
        if self._spilling is not None:
            return self._spilling.results_of(columns, used_after)
        if self._expiring is not None:
            assert used_after is not None
            return self._expiring.results_of(columns, used_after)
        slots = self._in_memory.find(columns, None)
        return self._in_memory.state.results(slots) if slots.size else None

    def _results_as_of(
        self, columns: list[pa.Array], used_after: int | None, checkpoint_id: int
    ) -> list[pa.Array] | None:
        """Return the results that a key had at a checkpoint, unless it has expired since."""
        if self._points is None:
            raise NotKept
        hashes, checks = self._hasher.identify(columns)
        for old in self._points.since(checkpoint_id):
            known, found = old.find(hashes, checks)
            for _, results in found:
                used = 0 if used_after is None else results[-1][0].as_py()
                return None if used_after is not None and used <= used_after else results
            if known.size:
                return None
        return self._results_of(columns, used_after)

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        if self._points is not None:
            self._points.completed(permit.checkpoint_id)

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        if self._points is not None:
            self._points.aborted(checkpoint_id)

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `running`, with one row per key, or its runs."""
        if self._points is not None:
            self._points.cut(checkpoint_id)
            self._cuts += 1
        if self._spilling is not None:
            return StateSnapshot(files={_RUNNING: self._spilling.snapshot()})
        if self._expiring is not None:
            self._advance()
        epoch = self._epoch.cut()
        parts = (
            [CutPart(self._group.cut(epoch))]
            if self._expiring is None
            else self._expiring.cut(epoch)
        )
        cut = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        return StateSnapshot(tables={_RUNNING: cut})

    def states(self) -> Sequence[StateInfo]:
        """Return the declaration of table `running`."""
        return [aggregate_info(self._plan, _RUNNING, "running")]

    @property
    def _uses_disk(self) -> bool:
        return self._spilling is not None

    def _restore(self, state: RestoredState) -> None:
        """Restore the aggregates; new ones start empty."""
        if self._points is not None:
            self._points.restored(self.context.restored_checkpoint)
            self._cuts += 1
        self._epoch.restored()
        files = state.files.get(_RUNNING)
        if files:
            if self._spilling is None:
                raise files_of_another_backend(_RUNNING, self._step)
            self._spilling.restore_files(files)
        table = state.tables.get(_RUNNING)
        if table is None or not table.num_rows:
            return
        rows = restored_rows(self._plan, table, state.states.get(_RUNNING), self._step)
        if self._plan.ttl_ms is not None:
            rows = living_rows(rows, self.context.clock.now_ms(), self._plan.ttl_ms)
        if self._spilling is not None:
            self._spilling.restore_table(rows)
        elif self._expiring is not None:
            self._expiring.load(rows)
        else:
            self._in_memory.load(self._plan, self._hasher, rows)

    def close(self) -> None:
        if self._cancel_cleanup is not None:
            self._cancel_cleanup()
        if self._expiring is not None:
            self._expiring.close()
        if self._spilling is not None:
            self._spilling.close()
        if self._space is not None:
            self._space.close()
