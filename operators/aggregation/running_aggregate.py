"""Running aggregates per key: the updated row of each key a batch touched, once per batch.

The row has the place of the key's last record, and the greatest event time of the key's records in
that batch. Batch boundaries are undefined, and so is the number of intermediate results; the last
result of each key is always emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ...state.slots.arrays import SlotArray
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import KeyHasher
from ...state.snapshot import RestoredState, StateInfo, StateSnapshot
from ...state.values import NOW, Index, Values
from ..base import OperatorContext
from ..elements import Batch, ColumnBatch, Timestamps
from ..rollback import Rollback
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
from .queried_aggregate import QueriedAggregate
from .spilling_group import AggregateSpace, SpillingGroup, lies_on_disk

_RUNNING: Final = "running"
_CLEANUP_MS_MIN: Final = 1_000


class RunningAggregate(QueriedAggregate):
    """Aggregates since the start of the job, per key or, without keys, over all records."""

    def __init__(self, plan: AggregatePlan, step: str = "agg", *, committed: bool = False) -> None:
        assert not plan.added
        super().__init__(plan, committed=committed)
        self._step = step
        self._last_row = SlotArray(np.intp)  # scratch by slot, written before it is read
        self._last_time = SlotArray(np.int64)
        self._space: AggregateSpace | None = None
        self._cancel_cleanup: Callable[[], None] | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        expires = self._plan.ttl_ms is not None
        self._hasher = KeyHasher(types, identity_seed(context.job_name), dense=not expires)
        self._in_memory = KeyedGroup(self._plan, self._hasher, self._epoch)
        if lies_on_disk(self._plan, context):
            self._space = AggregateSpace(self._plan, context, _RUNNING)
            self._spilling = SpillingGroup(self._space)
            self._hasher = self._space.hasher
        elif expires:
            self._expiring = ExpiringGroup(self._plan, self._hasher, self._epoch)
            self._clean_up()
        if self._spilling is None:
            self._rollback = Rollback(context.options, _RUNNING, self._open_kept)

    def _clean_up(self) -> None:
        """Drop what has expired, also while no records come."""
        assert self._expiring is not None
        assert self._plan.ttl_ms is not None
        self._expiring.advance(self.context.clock.now_ms())
        period = max(generation_ms(self._plan.ttl_ms), _CLEANUP_MS_MIN)
        self._cancel_cleanup = self.context.timers.call_later(period, self._clean_up)

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        rows = KeyedRows(self._plan, self._hasher, data, batch.timestamps)
        if self._plan.ttl_ms is not None:
            rows.values[NOW] = Values(np.full(rows.size, self._advance()), None)
        slots = self._group.add(rows, None, self._keeper)
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

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `running`, with one row per key, or its runs."""
        self._note_cut(checkpoint_id)
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
        self._rollback.cut(checkpoint_id)
        return StateSnapshot(tables={_RUNNING: cut})

    def states(self) -> Sequence[StateInfo]:
        """Return the declaration of table `running`."""
        return [aggregate_info(self._plan, _RUNNING, "running")]

    @property
    def _uses_disk(self) -> bool:
        return self._spilling is not None

    def _restore(self, state: RestoredState) -> None:
        """Restore the aggregates; new ones start empty."""
        self._note_restored()
        self._epoch.restored()
        kept = self._rollback.found(state)
        if kept is None:
            self._read(state)
        elif self._expiring is not None:
            self._expiring.go_back(kept)
        else:
            self._in_memory = kept.go_back(self._epoch)
        self._rollback.restored(self.context.restored_checkpoint)

    def _read(self, state: RestoredState) -> None:
        """Take over what was read."""
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
        self._rollback.close()
        if self._cancel_cleanup is not None:
            self._cancel_cleanup()
        if self._expiring is not None:
            self._expiring.close()
        if self._spilling is not None:
            self._spilling.close()
        if self._space is not None:
            self._space.close()
