"""The limits of an exchange. Every queue and buffer of this room is bounded by one of them."""

from __future__ import annotations

import msgspec

from ...errors import OptionError
from ..options.network import (
    BUFFER_ROWS,
    BUFFER_SIZE,
    BUFFER_TIMEOUT,
    BUFFER_TIMEOUT_ENABLED,
    BUFFERS_PER_CHANNEL,
    FLOATING_BUFFERS,
    FRAME_SIZE_MAX,
)
from ..options.registry import Options

FRAME_SIZE_MAX_BYTES = FRAME_SIZE_MAX.default
FRAME_SIZE_LIMIT_BYTES = 2**32 - 1
"""A frame's header has 32 bits for its length."""


class ExchangeSettings(msgspec.Struct, frozen=True):
    """Sizes and timeouts; the defaults are Flink's where Flink has the setting."""

    exclusive_buffers: int = 2
    """Credits a channel always has."""
    floating_buffers: int = 8
    """Credits of a gate that are lent to channels whose sender has a backlog."""
    buffer_size_max_bytes: int = 1 << 20
    """A buffer is cut to this size; a single larger record travels alone."""
    rows_per_buffer_target: int = 8192
    """Small column batches are put together until a buffer has this many rows."""
    rows_per_buffer_max: int = 65_536
    """Column batches above this are cut."""
    object_rows_per_buffer: int = 2048
    """Batches of Python objects are put together to this many records, and cut from twice as many."""
    buffer_timeout_ms: int | None = 100
    """A partly filled buffer waits at most this long; 0: not at all; None: until it is full."""
    queued_controls_max: int = 10_000
    """Control elements one channel may hold at either end; above it the channel fails."""
    frame_size_max_bytes: int = FRAME_SIZE_MAX_BYTES
    """Larger frames are not sent, and taken for a corrupt header where one seems to arrive."""
    write_buffer_high_bytes: int = 1 << 20
    """Above this much unsent data in a socket, frames wait in their channels' queues."""
    connect_timeout_ms: int = 10_000
    """A connection must be made, and its handshake be over, in this time."""

    def __post_init__(self) -> None:
        if self.frame_size_max_bytes > FRAME_SIZE_LIMIT_BYTES:
            raise OptionError(
                f"exchange setting is too large frame_size_max_bytes=`{self.frame_size_max_bytes}`",
                fix=f"at most {FRAME_SIZE_LIMIT_BYTES}",
            )
        may_be_zero = ("floating_buffers", "buffer_timeout_ms")
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < (0 if field.name in may_be_zero else 1):
                raise OptionError(
                    f"exchange setting is too small {field.name}=`{value}`",
                    fix=f"the default is {field.default}",
                )


def exchange_settings(options: Options) -> ExchangeSettings:
    """Buffers and their sizes."""
    return ExchangeSettings(
        exclusive_buffers=options.get(BUFFERS_PER_CHANNEL),
        floating_buffers=options.get(FLOATING_BUFFERS),
        buffer_size_max_bytes=options.get(BUFFER_SIZE),
        rows_per_buffer_target=options.get(BUFFER_ROWS),
        buffer_timeout_ms=options.get(BUFFER_TIMEOUT)
        if options.get(BUFFER_TIMEOUT_ENABLED)
        else None,
    )
