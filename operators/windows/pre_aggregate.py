"""Aggregates the records of windows in front of them, so that fewer rows cross an exchange.

The operator runs at the sender. It holds partial results (`aggregation/partials.py`) per pane and
key, and has no state: all of them go on before a barrier, before the stream goes idle, at its end,
and when there are too many. Those of a pane go on before a watermark that ends the pane.

The step behind the exchange cannot tell from its results whether records came one by one:

* A record goes on as it is unless it is ahead of the watermark of this sender. The watermark of the
  receiver is never ahead of that, so a record that is held is not late, and its windows have not
  fired. The same is true when it leaves, since the watermark has not ended its pane.
* After a restore the receiver may be further than this sender. Then all the records of a partial
  result are late, or none is: they have one key and one pane. They are counted one by one
  (`PARTIAL_ROWS`). Where late records are read, no such operator is in the job.
* After an idle time the receiver does not wait for this sender until it has caught up, so records that
  were held could become late meanwhile. From the first idle time on, records go on as they are, unless
  this sender is the only one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import KeyHasher
from ..aggregation.aggregates import AggregatePlan
from ..aggregation.keyed_aggregate import KeyedGroup, KeyedRows, Rows, identity_seed
from ..aggregation.partials import partial_plan
from ..base import Operator, OperatorContext
from ..elements import WATERMARK_MIN, Batch, ColumnBatch, Timestamps
from .dense_partials import DensePartials
from .kinds import TimeWindow
from .panes.grid import split
from .windowed_aggregate import EMIT_ROWS_MAX

GROUPS_OPTION: Final = "headgate.pre-aggregation.groups-max"
GROUPS_MAX: Final = 65_536
PANES_MAX: Final = 16
"""A batch whose records are in more panes than this goes on as it is: there is little to gain."""
SAMPLE_ROWS: Final = 16_384
"""The gain is judged when this number of records has gone on."""
REDUCTION_MIN: Final = 2
"""With fewer records per partial result than this, records go on as they are."""
REDUCTION_AGAIN: Final = 3
"""From this number of records per partial result on, they are aggregated again."""
PAUSE_ROWS: Final = 1 << 20
PAUSE_ROWS_MAX: Final = 1 << 24
"""The records that go on as they are before the gain is measured again: the first time, and at most."""
_SPARE_BYTES_MAX: Final = 1 << 22

Part: TypeAlias = tuple[int, Rows | None, int]
"""A pane, its rows in a batch (None: all), and how many these are."""


class Gain:
    """Decides whether it is worthwhile to aggregate, from what it has saved so far."""

    def __init__(self) -> None:
        self._pause = 0
        """The length of the last pause; 0: aggregating has paid off since the last one."""
        self._left = 0
        self._records = self._partials = 0

    def passes(self, records: int) -> bool:
        """Return True if these records shall go on as they are."""
        if self._left <= 0:
            return False
        self._left -= records
        return True

    def note(self, records: int, partials: int) -> None:
        """Note that partial results of this number of records have gone on."""
        self._records += records
        self._partials += partials
        if self._records < SAMPLE_ROWS:
            return
        needed = REDUCTION_AGAIN if self._pause else REDUCTION_MIN
        if self._records >= needed * self._partials:
            self._pause = 0
        else:
            self._left = self._pause = min(self._pause * 2 or PAUSE_ROWS, PAUSE_ROWS_MAX)
        self._records = self._partials = 0


class PreAggregate(Operator):
    """Partial results per key and pane, at the sender of an exchange.

    Args:
        window: the windows of the step behind the exchange.
        plan: its keys and aggregates.
    """

    def __init__(self, window: TimeWindow, plan: AggregatePlan) -> None:
        self._grid = window.grid()
        self._plan = partial_plan(plan)
        self._schema = pa.schema([*plan.key_fields, *plan.partial_fields])
        self._panes: dict[int, KeyedGroup | DensePartials] = {}
        self._records: dict[int, int] = {}
        """The number of records in the partial results of each pane."""
        self._spare: list[KeyedGroup] = []
        self._spare_dense: list[DensePartials] = []
        self._gain = Gain()
        self._watermark = WATERMARK_MIN

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._epoch = TableEpoch()
        types = [self._plan.schema.field(key).type for key in self._plan.keys]
        self._hasher = KeyHasher(types, identity_seed(context.job_name))
        self._groups_max = int(context.options.get(GROUPS_OPTION, GROUPS_MAX))
        self._dense = DensePartials.fits(self._plan)
        self._alone = context.parallelism == 1
        """One sender would look up alone what all receivers can share, so it looks no key up."""
        self._pays = self._dense or not self._alone

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        times = batch.timestamps
        if (
            not self._pays
            or times is None
            or not isinstance(batch, ColumnBatch)
            or self._gain.passes(len(batch))
        ):
            self.output.emit(batch)
            return
        if len(batch) and int(times.min()) <= self._watermark:
            behind = times <= self._watermark
            self.output.emit(batch.take(np.flatnonzero(behind)))
            batch, times = batch.take(np.flatnonzero(~behind)), times[~behind]
        if not len(batch):
            return
        parts = self._parts(times)
        if len(parts) > PANES_MAX:
            self.output.emit(batch)
            return
        rows = KeyedRows(self._plan, self._hasher, batch.data)
        for pane, which, count in parts:
            if not self._add_dense(pane, rows, which):
                if self._alone:
                    rest = batch if which is None else batch.take(np.arange(len(batch))[which])
                    self.output.emit(rest)
                    self._gain.note(count, count)
                    continue
                self._keyed_group(pane).add(rows, which)
            self._records[pane] += count
        if sum(map(_size_of, self._panes.values())) >= self._groups_max:
            self._flush()

    def _add_dense(self, pane: int, rows: KeyedRows, which: Rows | None) -> bool:
        """Add rows without looking up their keys; return False if these are not integers close together.

        The step takes half the time then.
        """
        keys, values = None if rows.keys is None else rows.keys.integers, rows.values
        group = self._panes.get(pane)
        if keys is None or not self._dense or isinstance(group, KeyedGroup):
            return False
        if not DensePartials.suits(values):
            return False
        if which is not None:
            keys = keys[which]
            values = {name: column.pick(which) for name, column in values.items()}
        if group is not None:
            if group.add(keys, values):
                return True
            self._send([pane])
        spare = self._spare_dense
        new = spare.pop() if spare else DensePartials(self._plan, self._epoch)
        if not new.add(keys, values):
            spare.append(new)
            return False
        self._panes[pane], self._records[pane] = new, 0
        return True

    def _parts(self, times: Timestamps) -> list[Part]:
        """Return the rows of each pane."""
        first, last = self._grid.pane_of(int(times.min())), self._grid.pane_of(int(times.max()))
        if first == last:
            return [(first, None, len(times))]
        panes = self._grid.panes_of(times)
        return [(pane, rows, len(times[rows])) for pane, rows in split(panes)]

    def _keyed_group(self, pane: int) -> KeyedGroup:
        """Return the group of a pane in which keys are looked up."""
        group = self._panes.get(pane)
        if isinstance(group, KeyedGroup):
            return group
        if group is not None:
            self._send([pane])
        spare = self._spare
        new = spare.pop() if spare else KeyedGroup(self._plan, self._hasher, self._epoch)
        self._panes[pane], self._records[pane] = new, 0
        return new

    # --- partial results -----------------------------------------------------------------------

    def _flush(self) -> None:
        """Send all partial results."""
        self._send(list(self._panes))

    def _send(self, panes: Iterable[int]) -> None:
        """Send the partial results of some panes, the earliest first."""
        found = [self._taken(pane) for pane in sorted(panes)]
        if not found:
            return
        columns = [columns for columns, _ in found]
        joined = columns[0]
        if len(columns) > 1:
            joined = [pa.concat_arrays(list(column)) for column in zip(*columns, strict=True)]
        data = pa.RecordBatch.from_arrays(joined, schema=self._schema)
        batch = ColumnBatch(data, np.concatenate([times for _, times in found]))
        for low in range(0, len(batch), EMIT_ROWS_MAX):
            self.output.emit(batch.slice(low, min(EMIT_ROWS_MAX, len(batch) - low)))

    def _taken(self, pane: int) -> tuple[list[pa.Array], Timestamps]:
        """Remove a pane; return its columns, and an event time in it ahead of the watermark per row."""
        group = self._panes.pop(pane)
        if isinstance(group, DensePartials):
            columns = group.columns()
        else:
            keys = group.keys.keys() if self._plan.keys else []
            columns = [*keys, *group.state.columns(np.arange(group.state.size))]
        size = len(columns[0])
        self._gain.note(self._records.pop(pane), size)
        spare: list[Any] = self._spare_dense if isinstance(group, DensePartials) else self._spare
        if len(spare) < PANES_MAX and group.nbytes <= _SPARE_BYTES_MAX:
            group.clear()
            spare.append(group)
        time = max(self._grid.pane_bounds(pane)[0], self._watermark + 1)
        return columns, np.full(size, time, np.int64)

    # --- what nothing may wait for -------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        """Send the partial results of the panes that have ended, and then the watermark."""
        bounds = self._grid.pane_bounds
        self._send([pane for pane in self._panes if bounds(pane)[1] - 1 <= timestamp])
        self._watermark = max(self._watermark, timestamp)
        self.output.emit_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        """Send everything, now and from now on: the receiver may go ahead of one of several senders."""
        self._flush()
        self._pays &= self._alone
        self.output.emit_idle(idle)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """Send everything, so that there is nothing to store."""
        self._flush()

    def finish(self) -> Awaitable[None] | None:
        """Send everything at the end of the input."""
        self._flush()
        return None


def _size_of(group: KeyedGroup | DensePartials) -> int:
    """Return the number of keys, as far as memory is concerned."""
    return group.size if isinstance(group, DensePartials) else group.state.size
