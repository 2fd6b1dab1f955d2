"""Options as the settings of the rooms that obey them."""

from __future__ import annotations

from ..exchange.settings import ExchangeSettings
from ..options import (
    BUFFER_ROWS,
    BUFFER_SIZE,
    BUFFER_TIMEOUT,
    BUFFERS_PER_CHANNEL,
    FLOATING_BUFFERS,
    TASK_SLICE,
    Options,
)
from ..task.environment import TaskSettings


def exchange_settings(options: Options) -> ExchangeSettings:
    """Buffers and their sizes."""
    return ExchangeSettings(
        exclusive_buffers=options.get(BUFFERS_PER_CHANNEL),
        floating_buffers=options.get(FLOATING_BUFFERS),
        buffer_size_max_bytes=options.get(BUFFER_SIZE),
        rows_per_buffer_target=options.get(BUFFER_ROWS),
        buffer_timeout_ms=options.get(BUFFER_TIMEOUT),
    )


def task_settings(options: Options) -> TaskSettings:
    """The mailbox's time slice."""
    return TaskSettings(slice_ms=options.get(TASK_SLICE))
