"""The options of quick recovery: copies of state on workers' disks, and spare workers."""

from __future__ import annotations

from typing import Any

from .option_types import Boolean, Duration, Integer, Number, Option, Size, Text

LOCAL_BACKUP = Option[bool](
    "execution.checkpointing.local-backup.enabled",
    Boolean(),
    False,
    "",
    "Workers keep a copy of the state files of the newest checkpoint on their own disk.",
)
FROM_LOCAL = Option[bool](
    "execution.state-recovery.from-local",
    Boolean(),
    False,
    "",
    "A restore takes the copies on the worker's machine, and from the checkpoint's storage only what is "
    "missing or damaged there.",
)
LOCAL_BACKUP_DIRS = Option[str | None](
    "execution.checkpointing.local-backup.dirs",
    Text(),
    None,
    "",
    "Directories of the worker's machine for these copies, separated by commas; unset: `io.tmp.dirs`. On "
    "the same file system as `io.tmp.dirs` a copy of state on disk is a link, and costs nothing.",
)
LOCAL_BACKUP_SIZE = Option[int](
    "headgate.local-backup.size-max",
    Size(),
    10 << 30,
    "bytes",
    "What the copies of one worker take at most; files beyond are not kept, and a restore reads them from "
    "the checkpoint's storage.",
)
REDUNDANT_WORKERS = Option[int](
    "slotmanager.redundant-taskmanager-num",
    Integer(at_most=1_000),
    0,
    "workers",
    "Spare workers of each slot sharing group: started, connected and ready, to take the place of one that "
    "dies.",
)
REGISTRATION_TIMEOUT = Option[int](
    "resourcemanager.taskmanager-registration.timeout",
    Duration(at_least_ms=1_000),
    120_000,
    "ms",
    "A worker that was started and has not connected to the coordinator by then counts as failed. Raise it "
    "where machines are slow to come up, or install packages first.",
)
START_FAILURES_MAX = Option[float](
    "resourcemanager.start-worker.max-failure-rate",
    Number(0.001, 1_000_000),
    10.0,
    "failures/min",
    "After so many spare workers within a minute that did not start, or died before they were needed, "
    "there is a pause.",
)
START_RETRY = Option[int](
    "resourcemanager.start-worker.retry-interval",
    Duration(at_least_ms=1),
    3_000,
    "ms",
    "That pause, and the one behind each failure.",
)
RECOVERY_OPTIONS: tuple[Option[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
