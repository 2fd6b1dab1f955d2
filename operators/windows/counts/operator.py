"""Aggregates over the last records of each key, after a fixed number of records: count windows.

A result is emitted with the record that completes its window, and has its event time. Time plays no
other role, so nothing is late. As in Flink, the first results of a key cover fewer records if
windows overlap.

`table.py` says what panes and cells are. A snapshot has the number of rows of each cell as one more
aggregate, which makes it complete.
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
from ...aggregation.aggregate_tables import (
    CutPart,
    aggregate_info,
    files_of_another_backend,
    restored_rows,
    table_cut,
)
from ...aggregation.aggregates import Aggregate, AggregatePlan
from ...aggregation.keyed_aggregate import GroupCut, KeyedRows, Rows, columns_of, identity_seed
from ...aggregation.spilling_group import lies_on_disk
from ...base import Operator, OperatorContext
from ...elements import Batch, ColumnBatch
from ..kinds import CountWindow
from ..panes.table import CellKeys
from .spilling import FIRST_ROW, ROWS, SpillingCounts
from .table import CountTable

_COUNTS: Final = "counts"


class CountAggregate(Operator):
    """Aggregates over windows of a number of records, per key, or without keys over all records."""

    def __init__(self, window: CountWindow, plan: AggregatePlan, step: str = "window") -> None:
        assert not plan.added
        self._window, self._step = window, step
        self._result_schema = plan.result_schema
        aggregates = {**plan.aggregates, ROWS: Aggregate("count")}
        self._plan = AggregatePlan(plan.keys, aggregates, plan.schema, (FIRST_ROW,), plan.where)
        self._disk: SpillingCounts | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._in_memory = self._new_table(self._hasher)
        if lies_on_disk(self._plan, context):
            self._disk = SpillingCounts(
                self._plan, context, _COUNTS, self._new_table, self._other_windows
            )

    def _new_table(self, hasher: KeyHasher) -> CountTable:
        return CountTable(self._window, self._plan, hasher, self._epoch)

    @property
    def _spilling(self) -> SpillingCounts | None:
        """The cells on disk if they are there, instead of `_in_memory`."""
        disk = self._disk
        return disk if disk is not None and disk.active else None

    @property
    def _table(self) -> CountTable:
        """The cells to which rows are added now; it may change with each `_settle`."""
        return self._in_memory if self._spilling is None else self._spilling.cells

    def _settle(self) -> None:
        """Enforce the memory budget; called after each batch."""
        disk = self._disk
        if disk is None:
            return
        if disk.active:
            disk.settle()
        elif self._in_memory.used_bytes > disk.room:
            disk.take_over(self._in_memory)
            self._in_memory = self._new_table(self._hasher)

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        rows = KeyedRows(self._plan, self._hasher, data, batch.timestamps)
        if self._spilling is not None:
            self._spilling.fetch(rows.keys)
        last, results = self._table.add(rows)
        if last.size:
            columns = [*rows.keys_at(last), *results[:-1]]
            found = pa.RecordBatch.from_arrays(columns, schema=self._result_schema)
            times = None if batch.timestamps is None else batch.timestamps[last]
            self.output.emit(ColumnBatch(found, times))
        self._settle()

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `counts`: one row per key and pane, always all of them; or its runs."""
        if self._spilling is not None:
            return StateSnapshot(files={_COUNTS: self._spilling.snapshot()})
        epoch, table = self._epoch.cut(), self._in_memory
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
        if self._disk is None:
            self._restore(state)
            return None
        # Files are read from end to end, which takes time for state larger than memory.
        return self.context.run_in_thread(lambda: self._restore(state))

    def _restore(self, state: RestoredState) -> None:
        self._epoch.restored()
        if files := state.files.get(_COUNTS):
            if self._disk is None:
                raise files_of_another_backend(_COUNTS, self._step)
            self._disk.restore_files(files)
        table = state.tables.get(_COUNTS)
        if table is not None and table.num_rows:
            self._load(table, state.states.get(_COUNTS))

    def _load(self, table: pa.Table, info: StateInfo | None) -> None:
        rows = restored_rows(self._plan, table, info, self._step)
        first = plain_column(rows.column(FIRST_ROW.name)).to_numpy()
        counts = plain_column(rows.column(ROWS)).to_numpy()
        pane = self._in_memory.pane_rows
        if (first % pane != 0).any() or int(counts.max()) > pane:
            raise self._other_windows()
        columns = [plain_column(rows.column(key)) for key in self._plan.keys]
        panes = np.asarray(first // pane)
        if self._disk is not None and rows.nbytes > self._disk.room:
            self._disk.active = True
        if self._spilling is not None:
            self._spilling.load(columns, panes, counts, rows)
        else:
            self._in_memory.load(columns, panes, counts, rows)

    def _other_windows(self) -> StateError:
        return StateError(
            f"the snapshot has other windows new=`{self._window.describe()}`",
            where=self._step,
            fix="keep size and slide of the window, or give the step another name",
        )

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
