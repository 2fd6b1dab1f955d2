"""Running totals of a window: a pane is added when it enters, and subtracted when it leaves.

That is exact for integers only: sums of floats would drift.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

import numpy as np
import pyarrow as pa

from ....errors import DataError
from ....state.aggregates.state import AggregateSpec, AggregateState
from ....state.slots.arrays import SlotArray, entries_of
from ....state.values import Array, Index, Values, values_of
from ...aggregation.aggregates import AggregatePlan
from .totals import NOWHERE, Between, Members, Totalled

_INT64_LIMIT = 2**63
_SAFE_LIMIT = float(_INT64_LIMIT) * (1 - 2.0**-9)


def has_running_totals(spec: AggregateSpec) -> bool:
    """Return True for aggregates that can be subtracted exactly: counts, integer sums and averages."""
    if spec.kind == "count":
        return True
    return spec.kind in ("sum", "avg") and spec.type is not None and pa.types.is_integer(spec.type)


class RunningTotals:
    """Totals of counts and sums of integers.

    `_bounds` limits, by state column, every sum of magnitudes. While it is small nothing can
    overflow; otherwise the sums are recomputed from the panes, in float64, to check.
    """

    def __init__(self, plan: AggregatePlan, between: Between, state: AggregateState) -> None:
        self._between, self._state = between, state
        self._specs = plan.specs
        self._counts: list[bool] = []  # by state column: True for a count, which is never null
        self._names: list[str] = []
        for spec in plan.specs:
            self._counts += {"count": [True], "sum": [False], "avg": [False, True]}[spec.kind]
            self._names += [spec.name] * (2 if spec.kind == "avg" else 1)
        self.clear()

    def clear(self) -> None:
        """Clear everything."""
        self._inside: list[Members] = []
        self.first = self.last = NOWHERE
        self._size = 0
        self._present = SlotArray(np.int64)  # the number of panes of the run that have the key
        self._sums = [SlotArray(np.int64) for _ in self._counts]
        self._seen: list[SlotArray | None] = [None] * len(self._counts)
        """The panes with a non-null value; None: all."""
        self._bounds = [0] * len(self._counts)

    def move(self, first: int, last: int, size: int) -> None:
        """Cover other panes."""
        if self._inside and self._inside[-1].number < first:
            self.clear()
        self._reserve(size)
        while self._inside and self._inside[0].number < first:
            self._change(*self._inside.pop(0).members(), -1)
        for pane in self._between(max(first, self.last + 1), last):
            self._inside.append(pane)
            self._change(*pane.members(), 1)
        self.first, self.last = first, last

    def before_add(self, keys: Index, cells: Index) -> None:
        """Subtract cells that are about to change."""
        self._change_any(keys, cells, -1)

    def after_add(self, keys: Index, cells: Index) -> None:
        """Add changed and new cells."""
        if len(keys):
            self._reserve(max(self._size, int(keys.max()) + 1))
        known = {pane.number for pane in self._inside}
        for pane in self._between(self.first, self.last):
            if pane.number not in known:
                insort(self._inside, pane, key=attrgetter("number"))
        self._change_any(keys, cells, 1)

    def _change_any(self, keys: Index, cells: Index, sign: int) -> None:
        """Change cells that may share keys, one cell of a key after the other."""
        while len(keys):
            first = np.unique(keys, return_index=True)[1]
            self._change(keys[first], cells[first], sign)
            keys, cells = np.delete(keys, first), np.delete(cells, first)

    def _reserve(self, size: int) -> None:
        self._size = size
        for array in (self._present, *self._sums, *self._seen):
            if array is not None:
                array.reserve(size)

    def _change(self, keys: Index, cells: Index, sign: int) -> None:
        """Add or subtract cells of distinct keys; sums wrap in both directions."""
        add = _add if sign > 0 else _subtract
        if not len(cells):
            return
        for at, column in enumerate(self._state.columns(cells)):
            values = values_of(column)
            data = _present_values(values)
            if sign > 0:
                self._bounds[at] += _magnitude(data)
            add(self._sums[at].data, keys, data)
            if not self._counts[at]:
                self._note_nulls(at, keys, values.valid, sign)
        self._present.data[keys] += sign

    def _note_nulls(self, at: int, keys: Index, valid: Array | None, sign: int) -> None:
        seen = self._seen[at]
        if seen is None:
            if valid is None:
                return
            seen = self._seen[at] = SlotArray(np.int64)
            seen.reserve(self._size)
            seen.data[: self._size] = self._present.data[: self._size]
        seen.data[keys if valid is None else keys[valid]] += sign

    # --- results -------------------------------------------------------------------------------

    def results(self) -> Totalled:
        """Return the aggregates of the keys that have records in the run."""
        keys = np.flatnonzero(self._present.data[: self._size])
        which = slice(0, self._size) if len(keys) == self._size else keys
        columns: list[pa.Array] = []
        at = 0
        for spec in self._specs:
            if spec.kind == "count":
                columns.append(pa.array(entries_of(self._sums[at].data, which)))
            else:
                self._check(at)
                sums = entries_of(self._sums[at].data, which)
                if spec.kind == "sum":
                    seen = self._seen[at]
                    nothing = None if seen is None else seen.data[which] == 0
                    columns.append(pa.array(sums, mask=nothing))
                else:
                    at += 1
                    columns.append(_average(sums, entries_of(self._sums[at].data, which)))
            at += 1
        return keys, columns

    def _check(self, at: int) -> None:
        """Raise DataError if a sum overflows int64."""
        if self._bounds[at] < _INT64_LIMIT:
            return
        self._bounds[at] = 0
        sums = np.zeros(self._size)
        for pane in self._inside:
            keys, cells = pane.members()
            data = _present_values(values_of(self._state.columns(cells)[at]))
            self._bounds[at] += _magnitude(data)
            np.add.at(sums, keys, data.astype(np.float64))
        if self._size and np.abs(sums).max() >= _SAFE_LIMIT:
            raise DataError(
                f"a sum left the range of int64 column=`{self._names[at]}`",
                fix="sum a float64 or decimal instead, for example CAST(x AS DOUBLE)",
            )


def _add(sums: Array, keys: Index, data: Array) -> None:
    sums[keys] += data


def _subtract(sums: Array, keys: Index, data: Array) -> None:
    sums[keys] -= data


def _present_values(values: Values) -> Array:
    return values.data if values.valid is None else np.where(values.valid, values.data, 0)


def _magnitude(data: Array) -> int:
    return max(abs(int(data.min())), abs(int(data.max()))) if len(data) else 0


def _average(sums: Array, counts: Array) -> pa.Array:
    averages = np.divide(sums, counts, out=np.zeros(len(counts)), where=counts > 0)
    empty = counts == 0
    return pa.array(averages, mask=empty if empty.any() else None)
