"""The common part of all join operators: input, output, late rows and event time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ...errors import PlanError
from ...state.slots.key_index import KeyHasher
from ...state.values import Index
from ..aggregation.keyed_aggregate import columns_of, identity_seed
from ..ahead import key_groups
from ..base import Operator, OperatorContext
from ..elements import WATERMARK_MIN, Batch, ColumnBatch
from ..windows.late import LATE, LateOutput, last_windows
from ..windows.panes.grid import Grid
from .columns import LEFT, RIGHT, JoinColumns, plain_rows

How: TypeAlias = Literal["inner", "left", "right", "full"]
"""The sides whose unmatched rows are in the result: none, one or both."""
HOWS: Final = ("inner", "left", "right", "full")
AS_OF_HOWS: Final = ("inner", "left")
LATE_OTHER: Final = "late_other"
"""The side output of late rows of the second stream; those of the first are in `late`."""
LATE_SIDES: Final = (LATE, LATE_OTHER)
WAITING_GAUGE: Final = "join_rows_waiting"
SIDES: Final = ("left", "right")


@dataclass(frozen=True)
class JoinStep:
    """The parts of a join step. Picklable.

    Attributes:
        name: the name of the step.
        columns: the columns of both sides and the result.
        outer: per side, whether unmatched rows are in the result.
    """

    name: str
    columns: JoinColumns
    outer: tuple[bool, bool]


def outer_sides(how: How) -> tuple[bool, bool]:
    """Return for which sides `how` keeps unmatched rows."""
    return how in ("left", "full"), how in ("right", "full")


class JoinOperator(Operator):
    """An operator with two inputs of columns with event times."""

    def __init__(self, step: JoinStep) -> None:
        self._step = step
        self._columns = step.columns
        self._watermark = WATERMARK_MIN

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._late_outputs = [LateOutput(context, self.output, tag) for tag in LATE_SIDES]
        for side, name in enumerate(SIDES):
            read = partial(self._waiting, side)
            context.metrics.gauge(WAITING_GAUGE, read, labels={"side": name})

    def _hasher(self) -> KeyHasher:
        """Return the hasher of the keys, which have the same types on both sides."""
        schema, keys = self._columns.sides[LEFT], self._columns.keys[LEFT]
        types = [schema.field(key).type for key in keys]
        return KeyHasher(types, identity_seed(self.context.job_name))

    def _waiting(self, side: int) -> int:
        """Return how many rows of a side wait."""
        raise NotImplementedError

    def _key_groups(self, side: int, data: pa.RecordBatch) -> Index:
        """Return the key group of each row."""
        return key_groups(self._columns.key_columns(side, data), self.context.max_parallelism)

    def _timely(
        self, batch: Batch, side: int, late_before: int | Index, now: int | Index
    ) -> tuple[pa.RecordBatch, Index]:
        """Return rows (as they are buffered) and times; rows before `late_before` are emitted as late.

        Event time is at `now`, for all rows or for each.
        """
        data, times = columns_of(batch, self._step.name), batch.timestamps
        if times is None:
            raise PlanError(
                f"`{self._step.name}` needs event time, but its input has none",
                fix='add .event_time("column", max_out_of_order="10s") before the join',
            )
        late = times < late_before
        if late.any():
            self._send_late(side, batch, np.flatnonzero(late), now)
            rest = batch.take(np.flatnonzero(~late))
            assert isinstance(rest, ColumnBatch)
            assert rest.timestamps is not None
            data, times = rest.data, rest.timestamps
        return plain_rows(data, self._columns.sides[side]), times

    def _send_late(self, side: int, batch: Batch, rows: Index, now: int | Index) -> None:
        """Emit the late rows of a batch; event time is at `now`, for all rows or for each."""
        late = batch.take(rows)
        times, grid = late.timestamps, self._grid_of_windows
        assert times is not None
        self._late_outputs[side].send(
            late,
            now if isinstance(now, int) else now[rows],
            None if grid is None else lambda: last_windows(grid, times),
        )

    @property
    def _grid_of_windows(self) -> Grid | None:
        """Return the windows of a join in windows."""
        return None

    def _send(
        self,
        side: int,
        own: Sequence[pa.Array],
        other: Sequence[pa.Array] | None,
        times: Index,
    ) -> None:
        """Emit result rows; `own` are the columns of `side`, which is complete."""
        left, right = (own, other) if side == LEFT else (other, own)
        self.output.emit(ColumnBatch(self._columns.compose(left, right, side, len(times)), times))


def other(side: int) -> int:
    """Return the opposite side."""
    return RIGHT if side == LEFT else LEFT
