"""Sizes the buffers of a gate so that the data in flight is worth a set time of work.

At the end of every period a gate reports the bytes it has consumed and the time it was not idle.
From that follows its throughput; the data in flight may be throughput × target, and each buffer in
use gets its share. The size changes smoothly, and senders are told only of changes that matter
(Flink's buffer debloating).
"""

from __future__ import annotations

from typing import final

import msgspec

GROWTH_MAX = 2
"""The target is at most this multiple of the present size, so that a short burst does not undo
everything."""

STEPS_MAX = 100
"""A call counts as at most this many periods; after that the size has reached its target anyway."""
ACTIVE_MIN_MS = 0.001
"""Less time than this is a rounding error of zero."""


class DebloatSettings(msgspec.Struct, frozen=True):
    """Options of debloating; sizes in bytes."""

    size_max: int
    size_min: int = 256
    target_ms: int = 1000
    period_ms: int = 200
    samples: int = 20
    threshold_percentages: int = 25


@final
class BufferDebloater:
    """The buffer sizes of one gate. Has no clock: see `period_over`."""

    def __init__(self, settings: DebloatSettings, size: int | None = None) -> None:
        """Begin with the largest size, or with `size`."""
        size = settings.size_max if size is None else size
        self._settings = settings
        self._alpha = 2 / (settings.samples + 1)
        self._average = float(size)
        self._bytes = 0
        self._throughput: int | None = None
        self.announced = size
        """The size that the senders know, bytes."""
        self.time_to_consume_ms = 0
        """How long the buffers in use will last, if all are full, ms."""

    def consumed(self, size_bytes: int) -> None:
        """Count processed bytes of the gate's records."""
        self._bytes += size_bytes

    def period_over(self, elapsed_ms: float, idle_ms: float, buffers_in_use: int) -> int | None:
        """End a period; return the size to tell the senders, or None if they keep theirs.

        A period that took as long as several, because of a long call, counts as that many.

        Args:
            elapsed_ms: since the last call.
            idle_ms: the part of it without input.
            buffers_in_use: buffers that wait at the gate, or at its senders for room in it.
        """
        throughput = self._measure(elapsed_ms - idle_ms, idle_ms, buffers_in_use)
        if throughput is None:
            return None
        settings, buffers = self._settings, max(1, buffers_in_use)
        share = throughput * settings.target_ms // 1000 // buffers
        for _ in range(max(1, min(STEPS_MAX, int(elapsed_ms / settings.period_ms)))):
            self._follow(share)
        size = int(self._average + 0.5)
        self.time_to_consume_ms = size * buffers * 1000 // max(1, throughput)
        if not self._is_worth_telling(size):
            return None
        self.announced = size
        return size

    def _follow(self, share: int) -> None:
        wanted = min(share, GROWTH_MAX * self._average)
        average = self._average + self._alpha * (wanted - self._average)
        self._average = min(max(average, self._settings.size_min), self._settings.size_max)

    def _measure(self, active_ms: float, idle_ms: float, buffers_in_use: int) -> int | None:
        """Return bytes per second; the last value where there was nothing to measure, None before
        the first."""
        size_bytes, self._bytes = self._bytes, 0
        # Without records there may still be work, such as watermarks, or mail while barriers are
        # aligned, which tells nothing about throughput. Only a gate that has records and is busy
        # with none of them is slow.
        stuck = buffers_in_use > 0 and active_ms >= idle_ms
        if active_ms >= ACTIVE_MIN_MS and (size_bytes or stuck):
            self._throughput = int(size_bytes * 1000 / active_ms)
        return self._throughput

    def _is_worth_telling(self, size: int) -> bool:
        settings, change = self._settings, abs(size - self.announced)
        if change == 0:
            return False
        if size <= settings.size_min or size >= settings.size_max:
            return True  # otherwise the limits might never be reached
        return change >= self.announced * settings.threshold_percentages // 100
