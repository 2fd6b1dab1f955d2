"""The range of event time of records, and of the times derived from them.

Records have times in the years 1000 to 8999. Times derived from them (bounds of windows, timers,
watermarks) may be further out, but stay within the years 1 to 9999: a Python datetime, Arrow, JSON
and CSV can all hold them, also in another time zone and in every unit. Durations are bounded so
that a time plus a duration never leaves that range.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


def _ms(moment: datetime) -> int:
    return (moment - _EPOCH) // _MS


EVENT_TIME_MIN_MS: Final = _ms(datetime(1000, 1, 1, tzinfo=UTC))
"""The earliest event time of a record, ms since 1970 UTC."""
EVENT_TIME_MAX_MS: Final = _ms(datetime(9000, 1, 1, tzinfo=UTC)) - 1
"""The latest event time of a record."""
INSTANT_MIN_MS: Final = _ms(datetime(1, 1, 1, tzinfo=UTC))
"""The earliest derived time: the bound of a window, a timer."""
INSTANT_MAX_MS: Final = _ms(datetime.max.replace(tzinfo=UTC))
"""The latest derived time, also of a watermark that is not the end of the stream."""
DURATION_MAX_MS: Final = 36_525 * 86_400_000
"""The longest duration, a hundred years: of windows, gaps, lateness, bounds of joins, time to live."""
RANGE_TEXT: Final = "event times lie in the years 1000 to 8999"
INSTANT_TEXT: Final = "the years 1 to 9999"


def bad_times(times: npt.NDArray[np.int64]) -> npt.NDArray[np.intp] | None:
    """Return the places of invalid event times; None if there are none.

    Args:
        times: ms since 1970 UTC.
    """
    if not len(times) or (times.min() >= EVENT_TIME_MIN_MS and times.max() <= EVENT_TIME_MAX_MS):
        return None
    return ((times < EVENT_TIME_MIN_MS) | (times > EVENT_TIME_MAX_MS)).nonzero()[0]


def is_instant(ms: int) -> bool:
    """Return True if the bound of a window, or a timer, may be at this time."""
    return INSTANT_MIN_MS <= ms <= INSTANT_MAX_MS
