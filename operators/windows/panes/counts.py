"""Aggregates over the last records of each key, at every so many records: count windows.

A result is emitted with the record that completes its window, and has its event time. Time plays no
other role, so nothing is late. As in Flink, the first results of a key cover fewer records if
windows overlap.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ....errors import StateError
from ....state.slots.epochs import TableEpoch
from ....state.slots.key_index import KeyHasher, plain_column
from ....state.snapshot import RestoredState, StateInfo, StateSnapshot
from ....state.values import Array
from ...aggregation.aggregate_tables import CutPart, aggregate_info, restored_rows, table_cut
from ...aggregation.aggregates import Aggregate, AggregatePlan
from ...aggregation.keyed_aggregate import GroupCut, KeyedRows, Rows, columns_of, identity_seed
from ...base import Operator, OperatorContext
from ...elements import Batch, ColumnBatch
from ..kinds import CountWindow
from .count_table import CountTable
from .table import CellKeys

_COUNTS: Final = "counts"
_FIRST = pa.field("__first_row", pa.int64(), False)
_ROWS: Final = "__rows"


class CountAggregate(Operator):
    """Aggregates over windows of a number of records, per key, or without keys over all records."""

    def __init__(self, window: CountWindow, plan: AggregatePlan, step: str = "window") -> None:
        assert not plan.added
        self._window, self._step = window, step
        self._result_schema = plan.result_schema
        aggregates = {**plan.aggregates, _ROWS: Aggregate("count")}
        self._plan = AggregatePlan(plan.keys, aggregates, plan.schema, (_FIRST,), plan.where)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._table = CountTable(self._window, self._plan, self._hasher, self._epoch)

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        rows = KeyedRows(self._plan, self._hasher, data, batch.timestamps)
        last, results = self._table.add(rows)
        if not last.size:
            return
        columns = [*rows.keys_at(last), *results[:-1]]
        found = pa.RecordBatch.from_arrays(columns, schema=self._result_schema)
        times = None if batch.timestamps is None else batch.timestamps[last]
        self.output.emit(ColumnBatch(found, times))

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `counts`: one row per key and pane, always all of them."""
        epoch, table = self._epoch.cut(), self._table
        keys = table.keys.cut()
        pane, panes = table.pane_rows, table.cell_panes.data

        def first_rows(which: Rows) -> list[Array]:
            return [panes[which] * pane]

        cells = CellKeys(keys._pieces, keys.size, table.cell_keys.data)
        parts = [CutPart(GroupCut(cells, table.state.cut(epoch)), first_rows)]
        cut = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        cut.epoch = 0  # a delta could not tell which cells were dropped
        return StateSnapshot(tables={_COUNTS: cut})

    def states(self) -> Sequence[StateInfo]:
        """Return the declaration of table `counts`."""
        return [aggregate_info(self._plan, _COUNTS, "window")]

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the panes."""
        self._epoch.restored()
        table = state.tables.get(_COUNTS)
        if table is None or not table.num_rows:
            return None
        rows = restored_rows(self._plan, table, state.states.get(_COUNTS), self._step)
        first = plain_column(rows.column(_FIRST.name)).to_numpy()
        counts = plain_column(rows.column(_ROWS)).to_numpy()
        pane = self._table.pane_rows
        if (first % pane != 0).any() or int(counts.max()) > pane:
            raise StateError(
                f"the snapshot has other windows new=`{self._window.describe()}`",
                where=self._step,
                fix="keep size and slide of the window, or give the step another name",
            )
        columns = [plain_column(rows.column(key)) for key in self._plan.keys]
        self._table.load(columns, np.asarray(first // pane), counts, rows)
        return None
