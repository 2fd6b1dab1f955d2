"""Totals of a window without subtraction: two stacks per key, for all keys at once.

Tangwongsan, Hirzel, Schneider, Wu: General Incremental Sliding-Window Aggregation (2015). The panes
of a window are in two parts, front and back. For each cell in the front there is the aggregate of
it and all later cells of its key in the front; for each key there is the aggregate of all its cells
in the back. So a window is one merge per key, and a pane that leaves takes its entries along: those
of the next pane are ready. When the front is used up the back becomes the front. Each cell is
copied and merged twice, whatever the length of windows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ....state.aggregates.state import AggregateState
from ....state.slots.arrays import SlotArray
from ....state.slots.epochs import TableEpoch
from ....state.values import Index
from ...aggregation.aggregates import AggregatePlan
from .table import state_table
from .totals import NOWHERE, Between, Members, Totalled


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
            more = np.flatnonzero(after)
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
        more = np.flatnonzero(tails)
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
