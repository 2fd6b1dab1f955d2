"""A consistent cut of a table of sessions, and the choice of open sessions in a restored one.

A row is identified by its key and `window_start`. Deltas carry no marks of expired sessions: the
watermark tells which these are, as with other windows. Nor do they mark sessions that were merged
into others, or whose start moved back: such a row lies within that of the session it became part
of, and open sessions of a key never touch. So a restore leaves out expired rows, and those within
another row of their key.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ....state.aggregates.state import StateCut
from ....state.slots.epochs import SlotCut
from ....state.slots.key_index import KeyCut
from ....state.values import Array
from ...aggregation.keyed_aggregate import Rows
from .intervals import Index, Mask, Times
from .table import SessionTable


class SessionCut:
    """The sessions at a cut; call `slots`, `edges` and `columns` in this order, in any one thread."""

    def __init__(self, table: SessionTable, epoch: int) -> None:
        self._bounds: SlotCut = table.changed.cut(epoch, table.size)
        self._state: StateCut = table.state.cut(epoch)
        self._keys: KeyCut = table.keys.cut()
        self._key_of = table.key_of.data  # the key of a slot never changes
        self._limit = table.limit
        self._edges: list[Array] = []

    def slots(self, since: int | None) -> Index:
        """Return the sessions open at the cut that had changed after cut number `since`, ascending."""
        which = self._bounds.slots(since)
        starts, ends = self._bounds.values(which)
        alive = np.flatnonzero(ends > self._limit)
        self._edges = [starts[alive], ends[alive]]
        return alive if isinstance(which, slice) else which[alive]

    def edges(self, which: Rows) -> list[Array]:
        """Return start and end of the sessions that `slots` returned."""
        return self._edges

    def columns(self, which: Rows) -> tuple[list[pa.ChunkedArray], list[pa.Array]]:
        """Return key columns and state columns of these sessions, and close the cut."""
        state = self._state.columns(which)
        keys = self._key_of[which].astype(np.intp)
        order = np.argsort(keys, kind="stable")
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        taken = self._keys.take(keys[order])
        return [column.take(pa.array(back)) for column in taken], state

    def close(self) -> None:
        """Close the cut."""
        self._bounds.close()
        self._state.close()


def superseded(keys: Index, starts: Times, ends: Times) -> Mask:
    """Return True for rows that lie within another row of their key."""
    order = np.lexsort((-ends, starts, keys))
    mask = np.zeros(len(order), np.bool_)
    if not len(order):
        return mask
    # ends as ranks, with keys in the high part: a running maximum never mixes keys
    _, ranks = np.unique(ends, return_inverse=True)
    high = keys[order].astype(np.int64) * (int(ranks.max()) + 2)
    reach = np.maximum.accumulate(high + ranks[order])
    mask[order[1:]] = (high + ranks[order])[1:] <= reach[:-1]
    return mask
