"""Running aggregates per key: the updated row of each key a batch touched, once per batch.

The row stands where the key's last record stood, and carries the greatest event time of the key's
records in that batch. How records are cut into batches is not defined, so neither is how many of the
intermediate results are seen; the last one of each key always is.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ..state.key_index import KeyHasher
from ..state.snapshot import RestoredState, StateSnapshot
from ..state.values import Index
from .aggregates import AggregatePlan
from .base import Operator, OperatorContext
from .elements import Batch, ColumnBatch, Timestamps
from .keyed_aggregate import (
    KeyedGroup,
    KeyedRows,
    check_state_table,
    columns_of,
    identity_seed,
    snapshot_table,
)

_RUNNING = "running"


class RunningAggregate(Operator):
    """Aggregates since the start of the job, per key or, with no keys, of all records."""

    def __init__(self, plan: AggregatePlan, step: str = "agg") -> None:
        assert not plan.added
        self._plan, self._step = plan, step
        self._last_row = np.zeros(0, np.intp)  # scratch by slot, written before it is read
        self._last_time = np.zeros(0, np.int64)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._group = KeyedGroup(self._plan, self._hasher)

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        rows = KeyedRows(self._plan, self._hasher, data)
        slots = self._group.add(rows, None)
        if slots is None:
            slots = np.zeros(rows.size, np.intp)
        last = self._last_rows(slots)
        touched = slots[last]
        columns = [*rows.keys_at(last), *self._group.state.results(touched)]
        times = None
        if batch.timestamps is not None:
            times = self._latest(slots, touched, batch.timestamps)
        result = pa.RecordBatch.from_arrays(columns, schema=self._plan.result_schema)
        self.output.emit(ColumnBatch(result, times))

    def _last_rows(self, slots: Index) -> Index:
        """The last row of each key in the batch, ascending."""
        size = self._group.state.size
        if size > len(self._last_row):
            self._last_row = np.zeros(2 * size, np.intp)
            self._last_time = np.zeros(2 * size, np.int64)
        order = np.arange(len(slots))
        self._last_row[slots] = order
        return np.flatnonzero(self._last_row[slots] == order)

    def _latest(self, slots: Index, touched: Index, times: Timestamps) -> Timestamps:
        """The greatest event time of each touched key."""
        self._last_time[touched] = np.iinfo(np.int64).min
        np.maximum.at(self._last_time, slots, times)
        return self._last_time[touched]

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Table `running`: one row per key."""
        plan, max_parallelism = self._plan, self.context.max_parallelism
        maker = self._group.freeze(plan, ())
        return StateSnapshot(
            tables={_RUNNING: lambda: snapshot_table(plan, [maker], max_parallelism)}
        )

    def restore(self, state: RestoredState) -> None:
        table = state.tables.get(_RUNNING)
        if table is not None and table.num_rows:
            check_state_table(self._plan, table)
            self._group.load(self._plan, self._hasher, table)
