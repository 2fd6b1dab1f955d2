"""Key groups that are ahead of others in event time, after a restore.

Subtasks whose barriers overtook watermarks (unaligned checkpoints) were cut at different times. One that
gets key groups of several goes by the earliest. For the rest, what had fired must not fire again, what was
gone stays gone, and what was late is late, until time has come as far as it was for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ..state.accumulators import Mask
from ..state.hashing import hash_columns, key_groups_of
from ..state.keygroups import KeyGroupRange
from ..state.values import Index
from .elements import WATERMARK_MIN


class Ahead:
    """Where event time was for each key group.

    Attributes:
        watermarks: by key group.
        gone: by key group, the bound of what was gone: a time, or whatever else the operator goes by that
            only grows.
        until: the last of the watermarks.
    """

    def __init__(self, watermarks: Index, gone: Index) -> None:
        self.watermarks, self.gone = watermarks, gone
        self.until = int(watermarks.max())
        self._all_gone = int(gone.max())

    @classmethod
    def restored(cls, watermarks: Index, least: int, gone: Index | None = None) -> Ahead | None:
        """None if all own key groups are equally far: none is behind `least`, and none ahead of it."""
        if int(watermarks.max()) <= least:
            return None
        return cls(watermarks, np.full(len(watermarks), WATERMARK_MIN) if gone is None else gone)

    def now(self, groups: Index, watermark: int) -> Index:
        """How far event time is for these key groups; `watermark` is where the subtask is."""
        return np.maximum(self.watermarks[groups], watermark)

    def gone_for(self, groups: Index, gone: int) -> Index:
        """The bound of what is gone for these key groups; `gone` is that of the subtask."""
        return np.maximum(self.gone[groups], gone)

    def not_fired(self, groups: Index, time: int | Index) -> Mask:
        """Which of these key groups had not come to `time`: nothing of it had fired."""
        unfired: Mask = self.watermarks[groups] < time
        return unfired

    def caught_up(self, watermark: int, gone: int) -> bool:
        """True once time, and the bound of what is gone, are as far for all."""
        return watermark >= self.until and gone >= self._all_gone

    def cut(self, own: KeyGroupRange, watermark: int, gone: int) -> tuple[Index, Index]:
        """What a snapshot says of each own key group: its watermark, and what is gone."""
        mine = np.arange(own.first, own.last + 1)
        return self.now(mine, watermark), self.gone_for(mine, gone)


def key_groups(columns: Sequence[pa.Array], max_parallelism: int) -> Index:
    """The key group of each row of some key columns."""
    return key_groups_of(hash_columns(list(columns)), max_parallelism).astype(np.int64)
