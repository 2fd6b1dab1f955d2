"""Key groups that are ahead of others in event time, after a restore.

Subtasks whose barriers overtook watermarks (unaligned checkpoints) were cut at different times. One that
gets key groups of several goes by the earliest. For the rest, what had fired must not fire again, and what
was gone stays gone, until time has come as far as it was for them.
"""

from __future__ import annotations

import numpy as np

from ...state.accumulators import Mask
from ...state.keygroups import KeyGroupRange
from ...state.values import Index
from .columns import LEFT
from .tables import RestoredTimes


class Ahead:
    """Where event time was for each key group.

    Attributes:
        watermarks: by key group.
        gone_before: by key group; rows before this time were gone, of either side.
        until: the last of the watermarks.
    """

    def __init__(self, watermarks: Index, gone_before: Index) -> None:
        self.watermarks, self.gone_before = watermarks, gone_before
        self.until = int(watermarks.max())

    @classmethod
    def restored(cls, times: RestoredTimes, max_parallelism: int) -> Ahead | None:
        """None if all own key groups are equally far."""
        groups = np.arange(max_parallelism)
        watermarks = times.watermarks(groups)
        if watermarks.max() <= times.watermark:
            return None
        return cls(watermarks, times.gone_before_by_group(LEFT, groups))

    def not_fired(self, groups: Index, time: int) -> Mask:
        """Rows of which key groups had not fired a window whose last instant is `time`."""
        unfired: Mask = self.watermarks[groups] < time
        return unfired

    def fired(self, groups: Index, watermark: int, start: int, time: int, lateness_ms: int) -> Mask:
        """Rows of which key groups come late for a window from `start` to `time` that is not gone."""
        now = np.maximum(self.watermarks[groups], watermark)
        there = (now - lateness_ms < time) & (start >= self.gone_before[groups])
        late: Mask = (time <= now) & there
        return late

    def caught_up(self, watermark: int, bound: int) -> bool:
        """True once time, and the time before which rows are gone, are as far for all."""
        return watermark >= self.until and bound >= int(self.gone_before.max())

    def now(self, own: KeyGroupRange, watermark: int, gone_before: int) -> tuple[Index, Index]:
        """What a snapshot says of each own key group: its watermark, and what is gone."""
        mine = slice(own.first, own.last + 1)
        return (
            np.maximum(self.watermarks[mine], watermark),
            np.maximum(self.gone_before[mine], gone_before),
        )
