"""Global windows: aggregates over all records of each key, emitted now and then.

Results are emitted for changed keys as `Early` says, and at the end of the stream. They have the
greatest event time that the subtask has seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ....state.slots.epochs import TableEpoch
from ....state.slots.key_index import KeyHasher
from ....state.snapshot import RestoredState, StateInfo, StateSnapshot
from ....state.values import Index
from ...aggregation.aggregate_tables import (
    CutPart,
    aggregate_info,
    files_of_another_backend,
    restored_rows,
    table_cut,
)
from ...aggregation.aggregates import AggregatePlan
from ...aggregation.keyed_aggregate import KeyedGroup, KeyedRows, columns_of, identity_seed
from ...aggregation.queried_aggregate import QueriedAggregate
from ...aggregation.spilling_group import AggregateSpace, SpillingGroup, lies_on_disk
from ...base import OperatorContext
from ...elements import WATERMARK_MAX, WATERMARK_MIN, Batch, ColumnBatch
from ...rollback import Rollback
from ...time_progress import KeyGroupTable
from ..kinds import GlobalWindow
from ..windowed_aggregate import EMIT_ROWS_MAX
from .early import ChangedCells, ChangedRows, EarlyResults

_WHOLE: Final = "whole"
_TIME: Final = KeyGroupTable.of_times("time", "window", "seen")


class GlobalAggregate(QueriedAggregate):
    """Aggregates since the start of the job, per key or, without keys, over all records."""

    def __init__(
        self,
        window: GlobalWindow,
        plan: AggregatePlan,
        step: str = "window",
        *,
        committed: bool = False,
    ) -> None:
        assert not plan.added
        super().__init__(plan, committed=committed)
        self._window, self._step = window, step
        self._seen = WATERMARK_MIN
        self._ended = False
        self._space: AggregateSpace | None = None
        self._on_disk: ChangedRows | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._in_memory = KeyedGroup(self._plan, self._hasher, self._epoch)
        self._early = EarlyResults(self._window.early, context, self._show_changed)
        self._changed = ChangedCells()
        if lies_on_disk(self._plan, context):
            self._space = AggregateSpace(self._plan, context, _WHOLE)
            self._spilling = SpillingGroup(self._space)
            self._hasher = self._space.hasher
            self._on_disk = ChangedRows(self._spilling.table, self._space)
        else:
            self._rollback = Rollback(context.options, _WHOLE, self._open_kept)

    def process(self, batch: Batch, input_index: int) -> None:
        data = columns_of(batch, self._step)
        if not data.num_rows:
            return
        if batch.timestamps is not None:
            self._seen = max(self._seen, int(batch.timestamps.max()))
        rows = KeyedRows(self._plan, self._hasher, data, batch.timestamps)
        slots = self._group.add(rows, None, self._keeper)
        if self._window.early:
            changed = self._changed if self._on_disk is None else self._on_disk
            changed.note(np.zeros(1, np.intp) if slots is None else slots)
            self._early.note(data.num_rows)
        if self._spilling is not None and self._on_disk is not None:
            delta = self._spilling.table.delta
            self._spilling.settle()
            self._on_disk.after_write(delta)

    def on_watermark(self, timestamp: int) -> None:
        """Emit all results at the end of time."""
        if timestamp == WATERMARK_MAX:
            self._finish()
        self.output.emit_watermark(timestamp)

    def finish(self) -> Awaitable[None] | None:
        """Emit the results of a stream without event time."""
        self._finish()
        return None

    def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            self._early.stop()
            self._show(np.arange(self._group.state.size))
            if self._spilling is not None and self._space is not None:
                for rows in self._spilling.table.rows_on_disk():
                    self._emit(self._space.keys_of(rows), self._space.results(rows))

    def _show_changed(self) -> None:
        if self._on_disk is None or self._space is None:
            self._show(self._changed.take())
            return
        for rows in self._on_disk.take():
            self._emit(self._space.keys_of(rows), self._space.results(rows))

    def _show(self, slots: Index) -> None:
        for low in range(0, len(slots), EMIT_ROWS_MAX):
            part = slots[low : low + EMIT_ROWS_MAX]
            keys = self._group.keys.take(part) if self._plan.keys else []
            self._emit(keys, self._group.state.results(part))

    def _emit(self, keys: list[pa.Array], results: list[pa.Array]) -> None:
        data = pa.RecordBatch.from_arrays([*keys, *results], schema=self._plan.result_schema)
        known = self._seen > WATERMARK_MIN
        batch = ColumnBatch(data, np.full(len(data), self._seen) if known else None)
        for low in range(0, len(batch), EMIT_ROWS_MAX):
            self.output.emit(batch.slice(low, min(EMIT_ROWS_MAX, len(batch) - low)))

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot table `whole` (one row per key), or its runs, and `time` (per key group)."""
        self._note_cut(checkpoint_id)
        time = _TIME.cut(self.context.key_groups, self._seen)
        if self._spilling is not None and self._on_disk is not None:
            delta = self._spilling.table.delta
            files = {_WHOLE: self._spilling.snapshot()}
            self._on_disk.after_write(delta)
            return StateSnapshot(tables={_TIME.name: time}, files=files)
        epoch = self._epoch.cut()
        parts = [CutPart(self._group.cut(epoch))]
        whole = table_cut(self._plan, epoch, parts, self.context.max_parallelism)
        self._rollback.cut(checkpoint_id)
        return StateSnapshot(tables={_WHOLE: whole, _TIME.name: time})

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `whole` and `time`."""
        return [
            aggregate_info(self._plan, _WHOLE, "window"),
            _TIME.info(),
        ]

    @property
    def _uses_disk(self) -> bool:
        return self._spilling is not None

    def _restore(self, state: RestoredState) -> None:
        """Restore the aggregates; new ones start empty."""
        self._note_restored()
        self._epoch.restored()
        times = _TIME.restored(state)
        if times is not None:
            self._seen = int(times.column("seen").to_numpy().max())
        kept = self._rollback.found(state)
        if kept is None:
            self._read(state)
        else:
            self._in_memory = kept.go_back(self._epoch)
        self._rollback.restored(self.context.restored_checkpoint)

    def _read(self, state: RestoredState) -> None:
        """Take over what was read."""
        if files := state.files.get(_WHOLE):
            if self._spilling is None:
                raise files_of_another_backend(_WHOLE, self._step)
            self._spilling.restore_files(files)
        table = state.tables.get(_WHOLE)
        if table is None or not table.num_rows:
            return
        rows = restored_rows(self._plan, table, state.states.get(_WHOLE), self._step)
        if self._spilling is not None:
            self._spilling.restore_table(rows)
        else:
            self._in_memory.load(self._plan, self._hasher, rows)

    def close(self) -> None:
        self._rollback.close()
        early: EarlyResults | None = getattr(self, "_early", None)
        if early is not None:
            early.stop()
        if self._on_disk is not None:
            self._on_disk.close()
        if self._spilling is not None:
            self._spilling.close()
        if self._space is not None:
            self._space.close()
