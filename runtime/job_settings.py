"""The settings of a job: options that are set explicitly come first, then what the job says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..api.settings import NO_RESTART, CheckpointSettings, ExponentialDelay, RestartSettings
from ..errors import OptionError
from ..operators.durations import format_duration
from .options.recovery import (
    EXPONENTIAL_INITIAL,
    EXPONENTIAL_MAX,
    FIELDS,
    RESTART_STRATEGY,
    STRATEGIES,
)
from .options.registry import Options
from .options.state import (
    ALIGNED_TIMEOUT,
    CHECKPOINT_DIR,
    CHECKPOINT_INCREMENTAL,
    CHECKPOINT_INTERVAL,
    CHECKPOINT_INTERVAL_BACKLOG,
    CHECKPOINT_MAX_CONCURRENT,
    CHECKPOINT_MIN_PAUSE,
    CHECKPOINT_MODE,
    CHECKPOINT_RETAINED,
    CHECKPOINT_TIMEOUT,
    CHECKPOINT_TOLERABLE_FAILURES,
    UNALIGNED,
)
from .options.types import Option
from .protocol.checkpoints.settings import CheckpointRules

_CHECKPOINT_FIELDS: dict[str, Option[int]] = {
    "timeout_ms": CHECKPOINT_TIMEOUT,
    "min_pause_ms": CHECKPOINT_MIN_PAUSE,
    "max_concurrent": CHECKPOINT_MAX_CONCURRENT,
    "tolerable_failures": CHECKPOINT_TOLERABLE_FAILURES,
    "retain": CHECKPOINT_RETAINED,
}


def checkpoint_rules(settings: CheckpointSettings | None, options: Options) -> CheckpointRules:
    """When a job takes checkpoints, and how; without storage only savepoints, on request.

    Raises:
        OptionError: what is asked for does not go together.
    """
    incremental = options.get(CHECKPOINT_INCREMENTAL)
    if settings is None:
        return CheckpointRules(
            None, timeout_ms=options.get(CHECKPOINT_TIMEOUT), incremental=incremental
        )
    return CheckpointRules(
        interval_ms=settings.every_ms,
        timeout_ms=settings.timeout_ms,
        min_pause_ms=settings.min_pause_ms,
        max_concurrent=settings.max_concurrent,
        tolerable_failures=settings.tolerable_failures,
        incremental=incremental,
        exactly_once=options.get(CHECKPOINT_MODE) == "EXACTLY_ONCE",
        unaligned=options.get(UNALIGNED),
        aligned_timeout_ms=options.get(ALIGNED_TIMEOUT),
        interval_during_backlog_ms=options.get(CHECKPOINT_INTERVAL_BACKLOG),
    )


def restart_settings(
    written: RestartSettings | None, options: Options, checkpoints: bool
) -> RestartSettings:
    """The strategy of a job.

    Args:
        written: what `job.restart` or the manifest said, if anything.
        options: those that are set explicitly change single values of the strategy.
        checkpoints: the job takes some; without them it is restarted only if it says so.

    Raises:
        OptionError: an option is set for another strategy than the one that is chosen.
    """
    name = options.get(RESTART_STRATEGY)
    if name is None:
        chosen = written or (ExponentialDelay() if checkpoints else NO_RESTART)
        _refuse_others(chosen, options)
    else:
        named = STRATEGIES[name]
        alike = name != "none" and type(written) is type(named)
        chosen = written if written is not None and alike else named
    if chosen == NO_RESTART:
        return chosen
    fields = FIELDS[type(chosen)]
    changed = replace(
        chosen, **{field: options.get(o) for field, o in fields.items() if options.is_set(o)}
    )
    if isinstance(changed, ExponentialDelay) and changed.max_ms < changed.initial_ms:
        raise OptionError(
            f"the longest restart delay is below the first "
            f"{EXPONENTIAL_INITIAL.key}=`{format_duration(changed.initial_ms)}` "
            f"{EXPONENTIAL_MAX.key}=`{format_duration(changed.max_ms)}`",
            fix=f"raise {EXPONENTIAL_MAX.key}",
        )
    return changed


def _refuse_others(chosen: RestartSettings, options: Options) -> None:
    """No option names a strategy, but one sets a value of another one: it would have no effect."""
    names = {type(settings): name for name, settings in STRATEGIES.items() if name != "none"}
    own = None if chosen == NO_RESTART else type(chosen)
    for kind, fields in FIELDS.items():
        for option in fields.values():
            if kind is not own and options.is_set(option):
                strategy = "none" if own is None else names[own]
                raise OptionError(
                    f"option has no effect key=`{option.key}` strategy=`{strategy}`",
                    fix=f"set {RESTART_STRATEGY.key} to {names[kind]}",
                )


def checkpoint_settings(
    written: CheckpointSettings | None, options: Options
) -> CheckpointSettings | None:
    """The settings of `job.checkpoint(...)`; options that are set explicitly win over them."""
    storage = options.get(CHECKPOINT_DIR) or (written.storage if written else None)
    if storage is None:
        return None
    interval = options.get(CHECKPOINT_INTERVAL)
    every_ms = interval if interval is not None else (written.every_ms if written else None)
    settings = replace(
        written or CheckpointSettings(every_ms=every_ms, storage=storage),
        every_ms=every_ms,
        storage=absolute(storage),
    )
    changed: dict[str, Any] = {
        name: options.get(option)
        for name, option in _CHECKPOINT_FIELDS.items()
        if options.is_set(option)
    }
    return replace(settings, **changed)


def absolute(storage: str) -> str:
    """A relative directory as seen from here: workers may run elsewhere."""
    return storage if "://" in storage else os.path.abspath(Path(storage).expanduser())
