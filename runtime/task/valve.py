"""The watermark of a subtask: the minimum over its input channels.

The rules are those of Flink's `StatusWatermarkValve`, with one exception. There, a channel that ended
counts as one at the maximal watermark, so that a stream whose other channels are merely idle jumps to
the end of time, and all they send later is late. Here an ended channel is left out like an idle one, and
time ends only when all channels have.
"""

from __future__ import annotations

from typing import NamedTuple, final

import msgspec

from ...errors import check
from ...operators.elements import WATERMARK_MAX, WATERMARK_MIN


@final
class ValveOutput(NamedTuple):
    """The events to forward: `idle=False` goes before the watermark, `idle=True` after it."""

    watermark: int | None = None
    idle: bool | None = None


_NOTHING = ValveOutput()


class _Channel(msgspec.Struct):
    watermark: int = WATERMARK_MIN
    idle: bool = False
    ended: bool = False
    aligned: bool = True
    """True if it takes part in the minimum: it is active, and not behind the watermark already sent."""


@final
class WatermarkValve:
    """Combines watermarks and idleness of the channels of one input of a subtask."""

    def __init__(self, channels: int) -> None:
        check(channels > 0, "a watermark valve without channels", channels=channels)
        self._channels = [_Channel() for _ in range(channels)]
        self._watermark = WATERMARK_MIN
        self._idle = False

    @property
    def watermark(self) -> int:
        """The last watermark forwarded."""
        return self._watermark

    @property
    def idle(self) -> bool:
        """True if no channel that could advance time is active."""
        return self._idle

    def on_watermark(self, position: int, timestamp: int) -> ValveOutput:
        """Handle a watermark; those of idle channels, and those that go back, are ignored."""
        channel = self._channels[position]
        if timestamp == WATERMARK_MAX:
            return self.on_end(position)
        if channel.idle or channel.ended or timestamp <= channel.watermark:
            return _NOTHING
        channel.watermark = timestamp
        if timestamp >= self._watermark:
            channel.aligned = True
        return self._advance_to_minimum()

    def on_status(self, position: int, idle: bool) -> ValveOutput:
        """Handle that a channel went idle, or is active again."""
        channel = self._channels[position]
        if channel.ended or channel.idle == idle:
            return _NOTHING
        channel.idle = idle
        if idle:
            channel.aligned = False
            return self._left(channel)
        channel.aligned = channel.watermark >= self._watermark
        if not self._idle:
            return _NOTHING
        self._idle = False
        return ValveOutput(idle=False)

    def on_end(self, position: int) -> ValveOutput:
        """Handle the end of a channel's data: its time is over."""
        channel = self._channels[position]
        if channel.ended:
            return _NOTHING
        was_idle = channel.idle
        channel.ended, channel.idle, channel.aligned = True, False, False
        if all(other.ended for other in self._channels):
            woken, self._idle = self._idle, False
            return ValveOutput(self._advance(WATERMARK_MAX), idle=False if woken else None)
        return _NOTHING if was_idle else self._left(channel)

    def _left(self, channel: _Channel) -> ValveOutput:
        """Handle that an active channel left the minimum, which may have been due to it alone."""
        held_minimum = channel.watermark == self._watermark
        if any(not other.idle and not other.ended for other in self._channels):
            return self._advance_to_minimum() if held_minimum else _NOTHING
        self._idle = True
        if not held_minimum:
            return ValveOutput(idle=True)
        # No channel can advance, so none has to be waited for: flush what any channel has reached.
        highest = max(other.watermark for other in self._channels)
        return ValveOutput(self._advance(highest), idle=True)

    def _advance_to_minimum(self) -> ValveOutput:
        aligned = [channel.watermark for channel in self._channels if channel.aligned]
        return ValveOutput(self._advance(min(aligned))) if aligned else _NOTHING

    def _advance(self, timestamp: int) -> int | None:
        if timestamp <= self._watermark:
            return None
        self._watermark = timestamp
        return timestamp
