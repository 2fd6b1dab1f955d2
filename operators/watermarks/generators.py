"""Watermark generators derive watermarks from event times."""

from __future__ import annotations

from typing import final

from ..elements import WATERMARK_MIN, Timestamps


class WatermarkGenerator:
    """Generates watermarks; one per split. Subclass it for a rule of your own.

    A watermark `t` (ms since 1970 UTC) means that no more records at `t` or before are expected.
    Watermarks that go back are ignored. The attributes of a generator are not state: a new one is
    made for each attempt.
    """

    def on_batch(self, times: Timestamps) -> int | None:
        """Observe the event times of one batch, at least one, int64 ms, in order of arrival.

        Results must not depend on the batch boundaries. Return a watermark to send directly after
        the batch, or None.
        """
        return None

    def on_interval(self) -> int | None:
        """Return the current watermark, or None if it has not changed.

        Called every `pipeline.auto-watermark-interval`, after a number of records at full speed,
        and when the split has ended.
        """
        return None


@final
class BoundedGenerator(WatermarkGenerator):
    """Generates the latest time seen - bound - 1 ms."""

    def __init__(self, bound_ms: int) -> None:
        self._bound_ms = bound_ms
        self._latest = WATERMARK_MIN

    def on_batch(self, times: Timestamps) -> int | None:
        self.on_latest(int(times.max()))
        return None

    def on_latest(self, latest: int) -> None:
        """Observe a batch whose greatest time is already known."""
        self._latest = max(self._latest, latest)

    def on_interval(self) -> int | None:
        if self._latest == WATERMARK_MIN:
            return None
        return max(self._latest - self._bound_ms - 1, WATERMARK_MIN)
