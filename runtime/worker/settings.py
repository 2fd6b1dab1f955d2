"""Options as the settings of the rooms that obey them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..exchange.settings import ExchangeSettings
from ..options.execution import TASK_SLICE
from ..options.monitoring import LATENCY_INTERVAL
from ..options.network import (
    BUFFER_ROWS,
    BUFFER_SIZE,
    BUFFER_SIZE_MIN,
    BUFFER_TIMEOUT,
    BUFFERS_PER_CHANNEL,
    DEBLOAT,
    DEBLOAT_PERIOD,
    DEBLOAT_SAMPLES,
    DEBLOAT_TARGET,
    DEBLOAT_THRESHOLD,
    FLOATING_BUFFERS,
)
from ..options.recovery import LOCAL_BACKUP_DIRS
from ..options.registry import Options
from ..options.state import CHECKPOINT_INLINE, CHECKPOINT_MODE, DELTA_CHAIN_MAX, LOCAL_DIRS
from ..protocol.debloating import DebloatSettings
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
    """The mailbox's time slice, how state is written, and how much is under way."""
    return TaskSettings(
        slice_ms=options.get(TASK_SLICE),
        inline_bytes_max=options.get(CHECKPOINT_INLINE),
        delta_chain_max=options.get(DELTA_CHAIN_MAX),
        exactly_once=options.get(CHECKPOINT_MODE) == "EXACTLY_ONCE",
        latency_interval_ms=options.get(LATENCY_INTERVAL),
        debloat=_debloat_settings(options) if options.get(DEBLOAT) else None,
    )


def _debloat_settings(options: Options) -> DebloatSettings:
    return DebloatSettings(
        size_max=options.get(BUFFER_SIZE),
        size_min=options.get(BUFFER_SIZE_MIN),
        target_ms=options.get(DEBLOAT_TARGET),
        period_ms=options.get(DEBLOAT_PERIOD),
        samples=options.get(DEBLOAT_SAMPLES),
        threshold_percentages=options.get(DEBLOAT_THRESHOLD),
    )


def local_dirs(options: Options) -> tuple[Path, ...]:
    """Directories on this machine, at least one."""
    return _paths(options.get(LOCAL_DIRS) or "") or (Path(tempfile.gettempdir()),)


def backup_dirs(options: Options) -> tuple[Path, ...]:
    """Directories on this machine for copies of state files, at least one."""
    return _paths(options.get(LOCAL_BACKUP_DIRS) or "") or local_dirs(options)


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part.strip()).expanduser() for part in text.split(",") if part.strip())
