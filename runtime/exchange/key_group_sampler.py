"""Which key group most of a sender's records are in, by a sample.

Of each second the first batches are counted, by one `bincount` each: whether a sender sends thousands of
batches per second or, held up, one, there is a sample, and it costs next to nothing.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from ...state.keygroups import key_group_range, owner_of
from ..protocol.backpressure import HotGroup

BATCHES_MAX: Final = 16
"""The number of batches that are counted per window."""
RECORDS_MAX: Final = 32_768
"""After this number of records no further batch of the window is counted."""
KEPT: Final = 0.9
"""The factor by which older counts lose weight with each window in which anything was counted."""


@final
class KeyGroupSampler:
    """The counts of one sender on one exchange."""

    def __init__(self, edge: int, receivers: int, max_parallelism: int) -> None:
        """Nothing is counted yet; the first window is open.

        Args:
            edge: id of the exchange.
            receivers: parallelism of who receives.
            max_parallelism: number of key groups.
        """
        self._edge = edge
        self._receivers = receivers
        self._max_parallelism = max_parallelism
        self._counts = np.zeros(max_parallelism)
        self._batches = self._records = 0

    def count(self, groups: npt.NDArray[Any]) -> None:
        """Take in the key groups of a batch, or, mostly, do nothing."""
        if self._batches >= BATCHES_MAX or self._records >= RECORDS_MAX:
            return
        if not self._batches:
            self._counts *= KEPT
        self._batches += 1
        self._records += len(groups)
        self._counts += np.bincount(groups, minlength=self._max_parallelism)

    def next_window(self) -> None:
        """A second is over. What was counted before counts less once there is something new."""
        self._batches = self._records = 0

    def hottest(self) -> HotGroup | None:
        """The key group with the most records; None: there were none."""
        group = int(self._counts.argmax())
        if self._counts[group] < 1:
            return None
        subtask = owner_of(group, self._receivers, self._max_parallelism)
        own = key_group_range(subtask, self._receivers, self._max_parallelism)
        of_subtask = self._counts[own.first : own.last + 1].sum()
        return HotGroup(
            edge=self._edge,
            subtask=subtask,
            group=group,
            records=round(self._counts[group]),
            of_subtask=round(of_subtask),
            of_all=round(self._counts.sum()),
        )
