"""Windows: how event time is cut into pieces (features.md TIM-06)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import PlanError
from .durations import Duration, format_duration, parse_duration
from .elements import Timestamps

WINDOW_FIELDS = (
    pa.field("window_start", pa.timestamp("ms", tz="UTC"), False),
    pa.field("window_end", pa.timestamp("ms", tz="UTC"), False),
)


@dataclass(frozen=True, slots=True)
class TumblingWindow:
    """Windows [start, start + size), one behind the other; all in ms.

    A window's result is due when the watermark reaches its end - 1; its state is kept, and late records
    update the result, until the watermark reaches end - 1 + `allowed_lateness_ms`.
    """

    size_ms: int
    offset_ms: int = 0
    allowed_lateness_ms: int = 0

    def start_of(self, timestamp: int) -> int:
        """The start of the window `timestamp` lies in."""
        return timestamp - (timestamp - self.offset_ms) % self.size_ms

    def due_at(self, start: int) -> int:
        """The watermark that fires the window, and the event time of its results: end - 1."""
        return start + self.size_ms - 1

    def gone_at(self, start: int) -> int:
        """The watermark that drops the window's state; records that come behind it are late."""
        return self.due_at(start) + self.allowed_lateness_ms

    def last_due(self, watermark: int) -> int:
        """A window has fired once it starts at this time or before."""
        return watermark - self.size_ms + 1

    def last_gone(self, watermark: int) -> int:
        """A window is gone once it starts at this time or before."""
        return self.last_due(watermark) - self.allowed_lateness_ms

    def first_kept(self, watermark: int) -> int:
        """The start of the earliest window that `watermark` has not dropped."""
        return self.first_behind(self.last_gone(watermark))

    def first_behind(self, time: int) -> int:
        """The start of the earliest window that starts behind `time`."""
        return self.start_of(time) + self.size_ms

    def split(
        self, timestamps: Timestamps, earliest: int | None = None
    ) -> Iterator[tuple[int, slice | npt.NDArray[np.intp]]]:
        """The rows of each window, earliest first; in order of arrival within a window.

        Slices if the timestamps ascend, and for a batch that lies in one window. `earliest` is the least
        timestamp, if it is known.
        """
        first = self.start_of(int(timestamps.min()) if earliest is None else earliest)
        if int(timestamps.max()) < first + self.size_ms:
            yield first, slice(0, len(timestamps))
            return
        numbers = (timestamps - first) // self.size_ms
        order = None
        if not (numbers[1:] >= numbers[:-1]).all():
            # radix sort for 16 bits
            small = numbers.astype(np.uint16) if int(numbers.max()) < 2**16 else numbers
            order = np.argsort(small, kind="stable")
            numbers = numbers[order]
        cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        for low, high in pairwise(cuts):
            rows = slice(low, high) if order is None else order[low:high]
            yield first + int(numbers[low]) * self.size_ms, rows

    def describe(self) -> str:
        """For `explain`, such as `tumbling 1m`."""
        text = f"tumbling {format_duration(self.size_ms)}"
        if self.offset_ms:
            text += f", offset {format_duration(self.offset_ms)}"
        if self.allowed_lateness_ms:
            text += f", allowed lateness {format_duration(self.allowed_lateness_ms)}"
        return text


def tumbling(
    size: Duration, *, offset: Duration = "0s", allowed_lateness: Duration = "0s"
) -> TumblingWindow:
    """Windows of a fixed size, aligned with the epoch (UTC) plus `offset`.

    Raises:
        UsageError: a duration that does not parse.
        PlanError: the size is 0, or the offset is not below it.
    """
    window = TumblingWindow(
        parse_duration(size, "window size"),
        parse_duration(offset, "window offset"),
        parse_duration(allowed_lateness, "allowed lateness"),
    )
    if window.size_ms <= 0:
        raise PlanError(f"a window needs a size value=`{size}`", fix='such as tumbling("1m")')
    if window.offset_ms >= window.size_ms:
        raise PlanError(
            f"the offset of a window must be less than its size offset=`{offset}` size=`{size}`"
        )
    return window
