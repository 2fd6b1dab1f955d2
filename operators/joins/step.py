"""The common part of all join operators: input, output, late rows and event time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar

import pyarrow as pa

from ...errors import PlanError
from ...state.aggregates.accumulators import Mask
from ...state.slots.key_index import KeyHasher
from ...state.snapshot import CommitPermit, KeptState, RestoredState, StateInfo, StateSnapshot
from ...state.values import Index
from ..aggregation.aggregate_tables import files_of_another_backend
from ..aggregation.keyed_aggregate import identity_seed
from ..base import OperatorContext
from ..elements import Batch, ColumnBatch
from ..keyed_backend import lies_in_rocksdb
from ..rollback import Kept, Rollback
from ..spilling_space import SpillingOperator
from ..time_progress import ExpiredAt, TimeProgress
from ..windows.late import LATE, LateOutput, last_windows
from ..windows.panes.grid import Grid
from .columns import LEFT, RIGHT, JoinColumns, plain_rows
from .side import Alive, KeptSide, SharedKeys, Side, not_before
from .spilling import R, SpillingRows, SpillingSide
from .tables import (
    SIDES,
    RestoredRows,
    RowsCut,
    join_infos,
    progress_table,
    restored_rows,
    rows_cut,
)

How: TypeAlias = Literal["inner", "left", "right", "full"]
"""The sides whose unmatched rows are in the result: none, one or both."""
HOWS: Final = ("inner", "left", "right", "full")
AS_OF_HOWS: Final = ("inner", "left")
LATE_OTHER: Final = "late_other"
"""The side output of late rows of the second stream; those of the first are in `late`."""
LATE_SIDES: Final = (LATE, LATE_OTHER)
WAITING_GAUGE: Final = "join_rows_waiting"


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


D = TypeVar("D", bound=SpillingRows[Any])


class JoinOperator(SpillingOperator, Generic[R, D]):
    """An operator with two inputs of columns with event times; input 0 is the left side.

    The rows of both sides wait in memory, and where the backend allows it, also on disk.

    Args:
        step: the parts of the step.
        expired_at: per side, the time before which rows are released at a watermark.
        marks: per side, whether rows are marked as matched.
    """

    kind = ""
    """The kind of the state."""
    window = ""
    """The windows of rows that wait for one: these must not change."""
    todays_rule: ClassVar = False
    """See `TimeProgress.restore`."""

    def __init__(
        self, step: JoinStep, *expired_at: ExpiredAt, marks: tuple[bool, bool] = (False, False)
    ) -> None:
        self._step, self._marks = step, marks
        self._columns = step.columns
        self._progress = TimeProgress(progress_table(self.kind), *expired_at)
        self._sides: list[R] = [self._new_rows(side) for side in (LEFT, RIGHT)]
        """The rows in memory."""
        self._disk: list[D] = []
        """The sides on disk; empty if rows stay in memory."""
        self._rollbacks: list[Rollback[Any]] = [Rollback.off() for _ in SIDES]
        """Those of the sides in memory."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._progress.open(context)
        self._late_outputs = [LateOutput(context, self.output, tag) for tag in LATE_SIDES]
        for side, name in enumerate(SIDES):
            read = partial(self._waiting, side)
            context.metrics.gauge(WAITING_GAUGE, read, labels={"side": name})
        if lies_in_rocksdb(context.options):
            self._disk = [self._new_disk(side) for side in (LEFT, RIGHT)]
        else:
            self._rollbacks = [
                Rollback(context.options, name, partial(self._open_kept, side))
                for side, name in enumerate(SIDES)
            ]

    def _hasher(self) -> KeyHasher:
        """Return the hasher of the keys, which have the same types on both sides."""
        schema, keys = self._columns.sides[LEFT], self._columns.keys[LEFT]
        types = [schema.field(key).type for key in keys]
        return KeyHasher(types, identity_seed(self.context.job_name))

    # --- rows that wait ------------------------------------------------------------------------

    @abstractmethod
    def _new_rows(self, side: int) -> R:
        """Return an empty container for rows of a side in memory."""

    @abstractmethod
    def _new_disk(self, side: int) -> D:
        """Return what holds the rows of a side on disk."""

    @abstractmethod
    def _cut(self, side: int) -> RowsCut:
        """Return a cut of the rows of a side in memory."""

    @abstractmethod
    def _load(self, side: int, found: RestoredRows) -> None:
        """Restore rows of a side to memory."""

    @abstractmethod
    def _open_kept(self, side: int) -> Kept:
        """Open a cut to which a side in memory can go back: the one that was just taken."""

    @abstractmethod
    def _go_back(self, side: int, kept: Any) -> None:
        """Take over a side of the attempt before, as it was at a cut that `_open_kept` opened."""

    def _dropped(self) -> None:
        """Note that rows were dropped, which stay in cuts that are kept."""
        for rollback in self._rollbacks:
            rollback.grew()

    def _waiting(self, side: int) -> int:
        """Return how many rows of a side wait."""
        on_disk = self._disk[side].rows_on_disk if self._disk else 0
        return self._sides[side].live + on_disk

    def _settle_disk(self) -> None:
        """Enforce the memory budget; called after each batch."""
        if self._disk:
            both = zip(self._disk, self._sides, strict=True)
            self._replace([disk.settle(rows) for disk, rows in both])

    def _replace(self, sides: list[R]) -> None:
        """Replace the rows in memory, because some are on disk now."""
        if sides != self._sides:
            self._sides[:] = sides
            self._replaced()

    def _replaced(self) -> None:
        """Do what is needed once the rows in memory have been replaced."""

    # --- input and output ----------------------------------------------------------------------

    def _groups_of(self, side: int, data: pa.RecordBatch) -> Index | None:
        """Return the key group of each row; see `TimeProgress.groups_of`."""
        return self._progress.groups_of(lambda: self._columns.key_columns(side, data))

    def _timely(
        self, batch: Batch, side: int, late_before: int | Index, groups: Index | None
    ) -> tuple[pa.RecordBatch, Index]:
        """Return rows (as they are buffered) and times; rows before `late_before` are emitted as late.

        `groups` are the key groups of the rows, as from `_groups_of`.
        """
        times = batch.timestamps
        if times is None:
            raise PlanError(
                f"`{self._step.name}` needs event time, but its input has none",
                fix='add .event_time("column", max_out_of_order="10s") before the join',
            )
        return self._without_late(batch, side, times < late_before, groups)

    def _without_late(
        self, batch: Batch, side: int, late: Mask, groups: Index | None
    ) -> tuple[pa.RecordBatch, Index]:
        """Emit the late rows of a batch; return the others, and their times."""
        grid = self._grid_of_windows
        windows = None if grid is None else partial(last_windows, grid)
        rest = self._late_outputs[side].split(batch, late, self._progress.now(groups), windows)
        assert isinstance(rest, ColumnBatch)
        assert rest.timestamps is not None
        return plain_rows(rest.data, self._columns.sides[side]), rest.timestamps

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

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot tables `left` and `right` (rows that wait) and `time` (event time)."""
        tables = {self._progress.table.name: self._progress.cut()}
        groups, files, sides = self.context.max_parallelism, {}, list(self._sides)
        for side, name in enumerate(SIDES):
            if self._disk and self._disk[side].active:
                files[name], sides[side] = self._disk[side].snapshot()
            else:
                tables[name] = rows_cut(self._cut(side), self._columns, side, groups)
            self._rollbacks[side].cut(checkpoint_id)
        self._replace(sides)
        return StateSnapshot(tables=tables, files=files)

    def states(self) -> Sequence[StateInfo]:
        """Return the declarations of tables `left`, `right` and `time`."""
        return join_infos(self._columns, self._marks, self.kind, self.window)

    @property
    def _uses_disk(self) -> bool:
        return bool(self._disk)

    def _restore(self, state: RestoredState) -> None:
        """Restore the rows that wait, and the progress of event time."""
        for name in SIDES:
            if name in state.files and not self._disk:
                raise files_of_another_backend(name, self._step.name)
        self._progress.restore(state, todays_rule=self.todays_rule)
        for side, disk in enumerate(self._disk):
            disk.released(self._progress.bounds[side], self._progress.further(side))
            if files := state.files.get(SIDES[side]):
                self._sides[side] = disk.restore_files(files)
        for side, rollback in enumerate(self._rollbacks):
            self._sides[side].epoch.restored()
            kept = rollback.found(state)
            if kept is not None:
                self._go_back(side, kept)
        for side, (own, marks) in enumerate(zip(self._sides, self._marks, strict=True)):
            found = restored_rows(
                state, side, own.schema, self._step.name, self._progress, marks=marks
            )
            if found is not None:
                self._load(side, found)
        self._settle_disk()

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        done = super().restore(state)
        for rollback in self._rollbacks:
            rollback.restored(self.context.restored_checkpoint)
        return done

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        for rollback in self._rollbacks:
            rollback.completed(permit.checkpoint_id)

    def drop_point(self, checkpoint_id: int) -> None:
        for rollback in self._rollbacks:
            rollback.aborted(checkpoint_id)

    def keep(self) -> dict[str, KeptState]:
        return {
            name: kept for rollback in self._rollbacks for name, kept in rollback.keep().items()
        }

    def close(self) -> None:
        for rollback in self._rollbacks:
            rollback.close()
        for disk in self._disk:
            disk.close()


class WaitingRowsJoin(JoinOperator[Side, SpillingSide]):
    """A join in which the rows of both sides wait by key and in order of time."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._keys = SharedKeys(self._hasher(), self._sides)

    def _new_rows(self, side: int) -> Side:
        return Side(self._columns.sides[side], marks=self._marks[side])

    def _new_disk(self, side: int) -> SpillingSide:
        keys, schema = self._columns.keys[side], self._columns.sides[side]
        marks = self._marks[side]
        return SpillingSide(self.context, SIDES[side], schema, keys, marks=marks, sent=marks)

    def _replaced(self) -> None:
        self._keys.tidy()

    def _cut(self, side: int) -> RowsCut:
        return self._sides[side].cut(self._alive(side))

    def _alive(self, side: int) -> Alive:
        """Return a function that tells which rows of a side count at a cut."""
        return not_before(self._progress.bounds[side])

    def _open_kept(self, side: int) -> KeptSide:
        return self._sides[side].keep(self._dropped, self._keys, self._alive(side))

    def _go_back(self, side: int, kept: KeptSide) -> None:
        self._keys.go_back(kept.index, kept.keys_then)
        self._sides[side].go_back(kept, self._keys.size)

    def _load(self, side: int, found: RestoredRows) -> None:
        slots = self._keys.slots(self._columns.key_columns(side, found.rows))
        keys = self._keys.size
        self._sides[side].load(found.rows, found.times, slots, keys, found.ids, found.matched)


def other(side: int) -> int:
    """Return the opposite side."""
    return RIGHT if side == LEFT else LEFT
