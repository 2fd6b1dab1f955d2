"""What looks at event times and says how far time has come."""

from __future__ import annotations

from typing import final

from ..elements import WATERMARK_MIN, Timestamps


class WatermarkGenerator:
    """Says how far event time has come; one per split. Subclass it for a rule of your own.

    A watermark `t` (ms since 1970 UTC) says: no more records of `t` or before are expected. Those that
    go back are ignored. What a generator remembers is not state: it starts anew with each attempt.
    """

    def on_batch(self, times: Timestamps) -> int | None:
        """The event times of one batch, at least one, int64 ms, as they came.

        How records are cut into batches is chance. Returns a watermark that is to go out right behind
        the batch, or None.
        """
        return None

    def on_interval(self) -> int | None:
        """Called every `pipeline.auto-watermark-interval`, after so many records at full speed, and when
        its split has ended.

        Returns the watermark reached by now, or None: no other than before.
        """
        return None


@final
class BoundedGenerator(WatermarkGenerator):
    """The latest time seen - bound - 1 ms."""

    def __init__(self, bound_ms: int) -> None:
        self._bound_ms = bound_ms
        self._latest = WATERMARK_MIN

    def on_batch(self, times: Timestamps) -> int | None:
        self.on_latest(int(times.max()))
        return None

    def on_latest(self, latest: int) -> None:
        """Like `on_batch`, for who knows the greatest of the times already."""
        self._latest = max(self._latest, latest)

    def on_interval(self) -> int | None:
        if self._latest == WATERMARK_MIN:
            return None
        return max(self._latest - self._bound_ms - 1, WATERMARK_MIN)
