"""Event-time progress of an operator subtask: one watermark, and key groups that have gone further.

Every operator in event time asks the same questions: how far has time come, which rows are late,
which windows have fired, and which have expired. As long as a job runs without a restore, all key
groups of a subtask share one answer, the *watermark* of the subtask. `TimeProgress` holds it.

**Why key groups may have progressed further.** A snapshot says how far time had come for each key
group, because key groups move between subtasks. After a rescale a subtask may own key groups of
several former subtasks, and those need not have been cut at the same event time: the barrier of an
unaligned checkpoint overtakes watermarks, each on its own channel. The subtask continues from the
least watermark of its key groups, since records for that key group may still be on their way. The
other key groups keep a *key-group progress* of their own, so that they behave as if they had stayed
where they were: what had fired for them does not fire again, what had expired stays expired, and
what was late stays late. Once the watermark of the subtask has caught up with all of them, their
progress is dropped, and the fast path with one answer for all is taken again. An operator without
keys has a single key group, so it never sees a difference.

**What has expired.** State is released some time behind the watermark, later than results are
emitted if lateness is allowed. An operator describes this by one or more *expiry bounds*: event
times that only grow, with columns in the snapshot. A bound is a function of the watermark
(`expired_at`), such as "windows that start at or before this time have expired". It is stored and
not only computed, because of the next two points.

* Deltas of the state carry no marks of rows that have expired. A restore merges the base and its
  deltas, and then leaves out the rows behind the stored bound of their key group; the others are as
  they were at the cut, since every row that changed after the base is in a delta.
* A job may be restored with another allowed lateness. Then the *later* of two bounds counts: the
  one stored by the former job, and the one that today's lateness gives for the stored watermark.
  If the lateness grew, rows that had been released cannot come back, and a window without them
  would be wrong. If it shrank, windows that have expired by today's rule take no more rows. Joins
  that emit rows as they release them follow today's rule from the next watermark on.

So the rules for a row or a window of key group g are:

* time has come to `now(g)`: the greater of the watermarks of g at the cut and of the subtask;
* it has expired if it is behind `expired(g)`: the greater of the bounds of g and of the subtask;
* when the subtask's watermark passes its end, it fires only if g had not passed that at the cut
  (`not_fired`); otherwise its result is already out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import msgspec
import numpy as np
import pyarrow as pa

from ..state.aggregates.accumulators import Mask
from ..state.hashing import hash_columns, key_groups_of
from ..state.keygroups import KeyGroupRange
from ..state.snapshot import KEY_GROUP_COLUMN, RestoredState, StateInfo, TableCut, state_info
from ..state.values import Index
from .base import OperatorContext
from .elements import WATERMARK_MAX, WATERMARK_MIN

WATERMARK_COLUMN = "watermark"
ExpiredAt = Callable[[int], int]
"""A function that returns the expiry bound (ms) at a watermark. It never decreases."""


def clamped(time: int) -> int:
    """Return a time as int64, ms."""
    return max(WATERMARK_MIN, min(WATERMARK_MAX, time))


class KeyGroupTable(msgspec.Struct, frozen=True):
    """A table of a snapshot that has one row for each key group of a subtask.

    Attributes:
        name: the name of the table.
        kind: the kind of the state.
        columns: the columns after the key group.
    """

    name: str
    kind: str
    columns: tuple[pa.Field, ...]

    @classmethod
    def of_times(cls, name: str, kind: str, *columns: str) -> KeyGroupTable:
        """Return a table of times, int64 ms."""
        return cls(name, kind, tuple(pa.field(column, pa.int64(), False) for column in columns))

    @property
    def schema(self) -> pa.Schema:
        """The schema of the table."""
        return pa.schema([pa.field(KEY_GROUP_COLUMN, pa.int32(), False), *self.columns])

    def info(self) -> StateInfo:
        """Return the declaration of the table."""
        return state_info(self.name, self.kind, self.schema, (KEY_GROUP_COLUMN,))

    def cut(self, own: KeyGroupRange, *values: int | str | Index) -> TableCut:
        """Return the table; a column has one value for all own key groups, or one for each."""

        def make(_: int | None) -> pa.Table:
            groups = pa.array(range(own.first, own.last + 1), pa.int32())
            columns = [
                pa.array(value, field.type)
                if isinstance(value, np.ndarray)
                else pa.repeat(pa.scalar(value, field.type), len(groups))
                for value, field in zip(values, self.columns, strict=True)
            ]
            return pa.Table.from_arrays([groups, *columns], schema=self.schema)

        return TableCut(make, keys=(KEY_GROUP_COLUMN,))

    def restored(self, state: RestoredState) -> pa.Table | None:
        """Return the restored rows; None if there are none."""
        table = state.tables.get(self.name)
        return None if table is None or not table.num_rows else table


class _KeyGroupProgress(msgspec.Struct, frozen=True):
    """The progress at the cut, by key group; the least time for those of other subtasks."""

    watermarks: Index
    bounds: tuple[Index, ...]

    def exceeds(self, watermark: int, bounds: Sequence[int]) -> bool:
        """Return True if any key group has come further than these."""
        return int(self.watermarks.max()) > watermark or any(
            int(of_groups.max()) > bound
            for of_groups, bound in zip(self.bounds, bounds, strict=True)
        )


class TimeProgress:
    """The watermark of a subtask, its expiry bounds, and the progress of key groups beyond them.

    Args:
        table: the table of the snapshot. Its columns are the watermark, the expiry bounds, and
            further ones whose values are given to `cut`.
        expired_at: one function for each bound. It must not refer to the operator that has the
            progress: in a circle of references, the state of a finished operator would wait for the
            garbage collector.

    Attributes:
        watermark: the watermark of the subtask, which all of its key groups have reached.
        bounds: the expiry bounds that hold for all key groups.
    """

    def __init__(self, table: KeyGroupTable, *expired_at: ExpiredAt) -> None:
        self.table = table
        self.watermark = WATERMARK_MIN
        self.bounds = [WATERMARK_MIN] * len(expired_at)
        self._expired_at = expired_at
        self._groups: _KeyGroupProgress | None = None
        self._own = KeyGroupRange(0, 0)
        self._max_parallelism = 1

    def open(self, context: OperatorContext) -> None:
        """Take the key groups of the subtask."""
        self._own, self._max_parallelism = context.key_groups, context.max_parallelism

    def copied(self) -> TimeProgress:
        """Return the progress as it is now, which does not change with this one."""
        found = copy(self)
        found.bounds = list(self.bounds)
        return found

    # --- questions -----------------------------------------------------------------------------

    @property
    def differs(self) -> bool:
        """True if some key groups have progressed further than the subtask."""
        return self._groups is not None

    @property
    def latest(self) -> int:
        """The furthest watermark of any key group."""
        if self._groups is None:
            return self.watermark
        return max(self.watermark, int(self._groups.watermarks.max()))

    def groups_of(self, keys: Callable[[], Sequence[pa.Array]]) -> Index | None:
        """Return the key group of each row, or None while there is no need to tell them apart.

        Args:
            keys: returns the key columns of the rows.
        """
        if self._groups is None:
            return None
        hashes = hash_columns(list(keys()))
        return key_groups_of(hashes, self._max_parallelism).astype(np.int64)

    def now(self, groups: Index | None) -> int | Index:
        """Return how far time has come for these key groups, or for all if `groups` is None."""
        if self._groups is None or groups is None:
            return self.watermark
        return np.maximum(self._groups.watermarks[groups], self.watermark)

    def now_of(self, group: int) -> int:
        """Return how far time has come for one key group."""
        if self._groups is None:
            return self.watermark
        return max(self.watermark, int(self._groups.watermarks[group]))

    def expired(self, groups: Index | None, bound: int = 0) -> int | Index:
        """Return an expiry bound of these key groups, or of all if `groups` is None."""
        if self._groups is None or groups is None:
            return self.bounds[bound]
        return np.maximum(self._groups.bounds[bound][groups], self.bounds[bound])

    def further(self, bound: int = 0) -> Index | None:
        """Return an expiry bound by key group; None while there is no need to tell them apart."""
        return None if self._groups is None else self._groups.bounds[bound]

    def not_fired(self, groups: Index, times: int | Index) -> Mask:
        """Return for which of these key groups the results of `times` had not fired at the cut.

        Args:
            groups: as from `groups_of`.
            times: the watermarks at which the results are due, for all rows or for each.
        """
        assert self._groups is not None
        mask: Mask = self._groups.watermarks[groups] < times
        return mask

    # --- progress ------------------------------------------------------------------------------

    def advance(self, timestamp: int) -> bool:
        """Advance the watermark and the bounds for all key groups; return False if time is no later.

        The progress of key groups that have been caught up is dropped with the next watermark,
        because results that become due with this one may still depend on it.
        """
        if timestamp <= self.watermark:
            return False
        if self._groups is not None and not self._groups.exceeds(self.watermark, self.bounds):
            self._groups = None
        self.watermark = timestamp
        for number, expired_at in enumerate(self._expired_at):
            self.bounds[number] = max(self.bounds[number], expired_at(timestamp))
        return True

    # --- state ---------------------------------------------------------------------------------

    def cut(self, *constants: str) -> TableCut:
        """Return the table of the snapshot; `constants` are the values of its further columns."""
        groups = None if self._groups is None else np.arange(self._own.first, self._own.last + 1)
        bounds = [self.expired(groups, number) for number in range(len(self.bounds))]
        return self.table.cut(self._own, self.now(groups), *bounds, *constants)

    def restore(
        self,
        state: RestoredState,
        *,
        fitted: Callable[[int], int] | None = None,
        todays_rule: bool = True,
    ) -> None:
        """Restore the progress: the subtask continues from the least of all its key groups.

        Args:
            state: all that was restored.
            fitted: returns a stored bound as today's windows need it.
            todays_rule: whether the bounds of `expired_at` count at once, or only from the next
                watermark on, because the operator emits what it releases.
        """
        table = self.table.restored(state)
        if table is None:
            return
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        watermarks = table.column(WATERMARK_COLUMN).to_numpy()
        bounds: list[Index] = []
        for field, expired_at in zip(self.table.columns[1:], self._expired_at, strict=False):
            stored = today = _each(expired_at, watermarks)
            if field.name in table.column_names:  # the first snapshots had no bounds
                stored = table.column(field.name).to_numpy()
                stored = stored if fitted is None else _each(fitted, stored)
            bounds.append(np.maximum(stored, today) if todays_rule else stored)
        self.watermark = int(watermarks.min())
        self.bounds = [int(bound.min()) for bound in bounds]
        further = _KeyGroupProgress(
            self._by_group(groups, watermarks),
            tuple(self._by_group(groups, bound) for bound in bounds),
        )
        self._groups = further if further.exceeds(self.watermark, self.bounds) else None

    def _by_group(self, groups: Index, values: Index) -> Index:
        by_group = np.full(self._max_parallelism, WATERMARK_MIN)
        by_group[groups] = values
        return by_group


def _each(function: Callable[[int], int], times: Index) -> Index:
    """Apply a function to many times, most of them equal; the least time remains."""
    different, which = np.unique(times, return_inverse=True)
    found = [time if time == WATERMARK_MIN else function(time) for time in different.tolist()]
    return np.array(found, np.int64)[which]
