"""Key groups that are ahead of others in event time, after a restore.

Subtasks whose barriers overtook watermarks (unaligned checkpoints) were cut at different event
times. A subtask that gets key groups of several continues from the earliest. For the other key
groups, what had fired must not fire again, what had expired stays expired, and what was late stays
late, until event time has caught up with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ..state.aggregates.accumulators import Mask
from ..state.hashing import hash_columns, key_groups_of
from ..state.keygroups import KeyGroupRange
from ..state.values import Index
from .elements import WATERMARK_MIN


class Ahead:
    """The event time of each key group at the cut.

    Attributes:
        watermarks: by key group.
        gone: by key group, the bound of what had expired: a time, or another value of the operator
            that only grows.
        until: the last of the watermarks.
    """

    def __init__(self, watermarks: Index, gone: Index) -> None:
        self.watermarks, self.gone = watermarks, gone
        self.until = int(watermarks.max())
        self._all_gone = int(gone.max())

    @classmethod
    def restored(cls, watermarks: Index, least: int, gone: Index | None = None) -> Ahead | None:
        """Return None if all own key groups are equally far: none is behind `least`, and none ahead
        of it."""
        if int(watermarks.max()) <= least:
            return None
        return cls(watermarks, np.full(len(watermarks), WATERMARK_MIN) if gone is None else gone)

    def now(self, groups: Index, watermark: int) -> Index:
        """Return the event time of these key groups; `watermark` is that of the subtask."""
        return np.maximum(self.watermarks[groups], watermark)

    def gone_for(self, groups: Index, gone: int) -> Index:
        """Return the bound of what has expired for these key groups; `gone` is that of the subtask."""
        return np.maximum(self.gone[groups], gone)

    def not_fired(self, groups: Index, time: int | Index) -> Mask:
        """Return which of these key groups had not reached `time`, so that nothing of it had fired."""
        unfired: Mask = self.watermarks[groups] < time
        return unfired

    def caught_up(self, watermark: int, gone: int) -> bool:
        """Return True once the watermark, and the bound of what has expired, have caught up for all."""
        return watermark >= self.until and gone >= self._all_gone

    def cut(self, own: KeyGroupRange, watermark: int, gone: int) -> tuple[Index, Index]:
        """Return for each own key group its watermark and its bound, for a snapshot."""
        mine = np.arange(own.first, own.last + 1)
        return self.now(mine, watermark), self.gone_for(mine, gone)


def key_groups(columns: Sequence[pa.Array], max_parallelism: int) -> Index:
    """Return the key group of each row of some key columns."""
    return key_groups_of(hash_columns(list(columns)), max_parallelism).astype(np.int64)
