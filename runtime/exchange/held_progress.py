"""Watermarks that wait for the partly filled buffers in front of them.

A watermark goes to all channels behind all records, so the buffers have to leave first, however little is
in them. At full speed watermarks come after so many records, and windows end so often, that buffers would
never fill. So beyond a certain number per second a watermark waits until the buffers leave for another
reason, such as a barrier, the buffer timeout, or an idle subtask. Of those that wait the newest is enough.

A watermark that waits lets records pass that were emitted behind it. That is allowed: it only comes later,
like one that was sent later. Where a subtask gets all its records from one sender, what is late would
depend on it, so there no watermark waits.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, final

from ...operators.elements import Control, Element, Watermark, WatermarkStatus
from .queues import append_progress

PAUSE_S: Final = 0.1
"""One watermark in this time may make buffers leave, on average."""
BURST: Final = 10
"""This number may do so at once. A job that keeps up with the clock has fewer: none of them waits."""


@final
class HeldProgress:
    """The watermarks and statuses of one partition that wait, in the order in which they are sent."""

    def __init__(self, timeout_s: float) -> None:
        """Nothing waits; no watermark will wait for longer than `timeout_s`, or `PAUSE_S`."""
        self._pause_s = min(timeout_s, PAUSE_S)
        self._elements: deque[Element] = deque()
        self._counted_to = -math.inf
        """The time up to which watermarks have used what they may use, as for a leaky bucket."""

    def __bool__(self) -> bool:
        return bool(self._elements)

    @property
    def due(self) -> float:
        """The monotonic time at which the buffers leave because of a watermark that waits."""
        return self._counted_to - BURST * self._pause_s

    def hold(self, element: Watermark | WatermarkStatus, now: float) -> bool:
        """Hold `element` if it has to wait; otherwise return False: the buffers leave, and it does."""
        if not self._elements and now >= self.due:
            self._count(now)
            return False
        append_progress(self._elements, element)
        return True

    def take(self, now: float) -> list[Control]:
        """Take all that waits, which is sent now."""
        taken = [each for each in self._elements if isinstance(each, Watermark | WatermarkStatus)]
        self._elements.clear()
        self._count(now)
        return list(taken)

    def _count(self, now: float) -> None:
        self._counted_to = max(self._counted_to, now) + self._pause_s
