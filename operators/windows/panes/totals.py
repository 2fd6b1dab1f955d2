"""The totals of a window as it moves over panes: each cell is touched a few times, not once per window.

Counts and sums of integers are running totals: a pane is added when it enters, and subtracted when
it leaves. That is exact for integers only, because sums of floats would drift.

Everything else uses two stacks per key, for all keys at once, without subtraction (Tangwongsan,
Hirzel, Schneider, Wu: General Incremental Sliding-Window Aggregation, 2015). The panes of a window
are in two parts, front and back. For each cell in the front there is the aggregate of it and all
later cells of its key in the front; for each key there is the aggregate of all its cells in the
back. So a window is one merge per key, and a pane that leaves takes its entries along: those of the
next pane are ready. When the front is used up the back becomes the front. Each cell is copied and
merged twice, whatever the length of windows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from ....errors import DataError
from ....state.aggregates.state import AggregateSpec, AggregateState
from ....state.slots.arrays import SlotArray, entries_of
from ....state.slots.epochs import TableEpoch
from ....state.values import Array, Index, Values, values_of
from ...aggregation.aggregates import AggregatePlan
from .table import state_table

Totalled: TypeAlias = tuple[Index, list[pa.Array]]
"""Slots of keys, and one column per aggregate."""
NOWHERE = -(2**63)


class Members(Protocol):
    """A pane as totals see it."""

    @property
    def number(self) -> int:
        """The number of the pane; panes are numbered in order of time."""
        ...

    def members(self) -> tuple[Index, Index]:
        """Return the slots of its keys, each once, and their cells."""
        ...


Between: TypeAlias = Callable[[int, int], Iterable[Members]]


class Totals(Protocol):
    """The aggregates of a run of panes, per key. The run only moves forward."""

    first: int
    last: int
    """The panes of the run."""

    def move(self, first: int, last: int, size: int) -> None:
        """Cover the panes from `first` to `last`; there are `size` slots of keys."""
        ...

    def results(self) -> Totalled:
        """Return the aggregates of the keys that have records in the run."""
        ...

    def before_add(self, keys: Index, cells: Index) -> None:
        """Prepare for a change of these cells of panes in the run (each once); `keys` are their keys."""
        ...

    def after_add(self, keys: Index, cells: Index) -> None:
        """Take in these cells of panes in the run (each once), which have changed or are new."""
        ...

    def clear(self) -> None:
        """Clear everything: keys and cells were renumbered."""
        ...


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
        self._slots: dict[int, tuple[int, int]] = {}
        """By pane of the run, a range that has the slots of its keys: few of those of a table with many
        panes that have not fired."""
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
            left = self._inside.pop(0)
            self._slots.pop(left.number, None)
            self._change(*left.members(), -1)
        for pane in self._between(max(first, self.last + 1), last):
            self._inside.append(pane)
            keys, cells = pane.members()
            self._note_slots(pane.number, keys)
            self._change(keys, cells, 1)
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
        if self._inside:
            self._note_slots(self._inside[-1].number, keys)  # the last one to leave the run
        self._change_any(keys, cells, 1)

    def _note_slots(self, pane: int, keys: Index) -> None:
        """Widen the range of a pane in the run so that it has these slots."""
        if len(keys):
            low, high = int(keys.min()), int(keys.max()) + 1
            before = self._slots.get(pane, (low, high))
            self._slots[pane] = min(low, before[0]), max(high, before[1])

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
        low = min((low for low, _ in self._slots.values()), default=0)
        high = max((high for _, high in self._slots.values()), default=0)
        keys = np.flatnonzero(self._present.data[low:high] > 0) + low
        which = slice(low, high) if len(keys) == high - low else keys
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


class TwoStacks:
    """Totals of anything that can be merged.

    Entries are in `_held`: copies of cells, merged with others. `_heads` and `_tails` are, by key,
    entry + 1 of its earliest cell in the front, and of the back.
    """

    def __init__(self, plan: AggregatePlan, between: Between, state: AggregateState) -> None:
        self._plan, self._between, self._state = plan, between, state
        self._held = plan.new_state(TableEpoch())
        self._merged = plan.new_state(TableEpoch())  # scratch of `results`
        self.clear()

    def clear(self) -> None:
        """Clear everything."""
        self.first = self.last = NOWHERE
        self._size = 0
        self._stale = False
        self._front: list[tuple[int, Index, Index]] = []  # pane, keys, entries; the latest first
        self._back: list[Members] = []
        self._clear_held()

    def _clear_held(self) -> None:
        self._held.reset()
        self._heads, self._tails = SlotArray(np.int64), SlotArray(np.int64)
        self._next = SlotArray(np.int64)  # by entry of the front: the key's next entry + 1
        self._heads.reserve(self._size)
        self._tails.reserve(self._size)

    def before_add(self, keys: Index, cells: Index) -> None:
        """Clear everything, since a merge cannot be undone."""
        self._stale = True

    def after_add(self, keys: Index, cells: Index) -> None:
        """See `before_add`: new cells are in neither stack, either."""
        self._stale = True

    def move(self, first: int, last: int, size: int) -> None:
        """Cover other panes."""
        if self._stale or self.last < first:
            self.clear()
        self._size = size
        self._heads.reserve(size)
        self._tails.reserve(size)
        while self._front and self._front[-1][0] < first:
            _, keys, entries = self._front.pop()
            self._heads.data[keys] = self._next.data[entries]
        if not self._front and self._back and self._back[0].number < first:
            self._turn([pane for pane in self._back if pane.number >= first])
        for pane in self._between(max(first, self.last + 1), last):
            self._push(pane)
        self.first, self.last = first, last

    def _turn(self, panes: list[Members]) -> None:
        """Make these panes the front, and empty the back."""
        self._clear_held()
        self._back = []
        for pane in reversed(panes):
            keys, cells = pane.members()
            entries = copied(self._plan, self._state, cells, self._held)
            after = self._heads.data.take(keys)
            more = np.flatnonzero(after > 0)
            if more.size:
                self._held.merge(entries[more], after[more] - 1)
            self._next.reserve(self._held.size)
            self._next.data[entries] = after
            self._heads.data[keys] = entries + 1
            self._front.append((pane.number, keys, entries))

    def _push(self, pane: Members) -> None:
        """Add a pane to the back."""
        keys, cells = pane.members()
        entries = copied(self._plan, self._state, cells, self._held)
        tails = self._tails.data.take(keys)
        more = np.flatnonzero(tails > 0)
        if more.size:
            self._held.merge(tails[more] - 1, entries[more])
        if more.size < len(keys):
            fresh = np.flatnonzero(tails == 0)
            self._tails.data[keys[fresh]] = entries[fresh] + 1
        self._back.append(pane)

    def results(self) -> Totalled:
        """Return the aggregates of the keys that have records in the run."""
        heads, tails = self._heads.data[: self._size], self._tails.data[: self._size]
        both = np.flatnonzero((heads > 0) & (tails > 0))
        parts: list[Totalled] = []
        for keys in (
            np.flatnonzero((heads > 0) & (tails == 0)),
            np.flatnonzero((heads == 0) & (tails > 0)),
        ):
            if keys.size:
                entries = np.maximum(heads[keys], tails[keys]) - 1
                parts.append((keys, self._held.results(entries)))
        if both.size:
            into = copied(self._plan, self._held, heads[both] - 1, self._merged)
            source = copied(self._plan, self._held, tails[both] - 1, self._merged)
            self._merged.merge(into, source)
            parts.append((both, self._merged.results(into)))
            self._merged.reset()
        if not parts:
            nothing = np.empty(0, np.intp)
            return nothing, self._held.results(nothing)
        return joined(parts)


def copied(plan: AggregatePlan, state: AggregateState, slots: Index, into: AggregateState) -> Index:
    """Append copies of some slots of a state to another one; return their slots."""
    first = into.size
    new = np.arange(first, first + len(slots))
    into.load(new, state_table(plan, state, slots), first + len(slots))
    return new


def joined(parts: list[Totalled]) -> Totalled:
    """Concatenate the results of several sets of keys."""
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([keys for keys, _ in parts])
    columns = zip(*(columns for _, columns in parts), strict=True)
    return keys, [pa.concat_arrays(list(column)) for column in columns]
