"""A consistent cut of a table of sessions, and which rows of a restored one are those of open sessions.

A row is identified by its key and `window_start`. Deltas carry no marks of sessions that are gone: the
watermark says which these are, as with other windows. Nor of those that went into others, or whose start
moved back: such a row lies within that of the session it became part of, and open sessions of a key
never meet. So a restore leaves out what is gone, and what lies within another row of its key.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ...state.aggregate_state import StateCut
from ...state.epochs import SlotCut
from ...state.key_index import KeyCut
from ...state.values import Array
from ..keyed_aggregate import Rows
from .intervals import Index, Mask, Times
from .table import SessionTable


class SessionCut:
    """The sessions at a cut; `slots`, `edges` and `columns`, in this order, in any one thread."""

    def __init__(self, table: SessionTable, epoch: int) -> None:
        self._bounds: SlotCut = table.changed.cut(epoch, table.size)
        self._state: StateCut = table.state.cut(epoch)
        self._keys: KeyCut = table.keys.cut()
        self._key_of = table.key_of.data  # the key of a slot never changes
        self._limit = table.limit
        self._edges: list[Array] = []

    def slots(self, since: int | None) -> Index:
        """The sessions not gone at the cut that had changed after cut number `since`, ascending."""
        which = self._bounds.slots(since)
        starts, ends = self._bounds.values(which)
        alive = np.flatnonzero(ends > self._limit)
        self._edges = [starts[alive], ends[alive]]
        return alive if isinstance(which, slice) else which[alive]

    def edges(self, which: Rows) -> list[Array]:
        """Start and end of the sessions that `slots` returned."""
        return self._edges

    def columns(self, which: Rows) -> tuple[list[pa.ChunkedArray], list[pa.Array]]:
        """Key columns and state columns of these sessions. Closes the cut."""
        state = self._state.columns(which)
        keys = self._key_of[which].astype(np.intp)
        order = np.argsort(keys, kind="stable")
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        taken = self._keys.take(keys[order])
        return [column.take(pa.array(back)) for column in taken], state

    def close(self) -> None:
        """Nothing will be read any more."""
        self._bounds.close()
        self._state.close()


def superseded(keys: Index, starts: Times, ends: Times) -> Mask:
    """True for rows that lie within another row of their key."""
    order = np.lexsort((-ends, starts, keys))
    mask = np.zeros(len(order), np.bool_)
    if not len(order):
        return mask
    # ends by rank, and keys above them: the largest end so far is never that of another key
    _, ranks = np.unique(ends, return_inverse=True)
    high = keys[order].astype(np.int64) * (int(ranks.max()) + 2)
    reach = np.maximum.accumulate(high + ranks[order])
    mask[order[1:]] = (high + ranks[order])[1:] <= reach[:-1]
    return mask
