"""The options of watching: who is alive, and what hangs; `options.py` has the others."""

from __future__ import annotations

from typing import Any, Final

from .option_types import Duration, Integer, Option

HEARTBEAT_INTERVAL = Option[int](
    "heartbeat.interval",
    Duration(at_least_ms=10),
    10_000,
    "ms",
    "How often the coordinator and the workers ask each other for a sign of life.",
)
HEARTBEAT_TIMEOUT = Option[int](
    "heartbeat.timeout",
    Duration(at_least_ms=10),
    50_000,
    "ms",
    "A peer silent for this long is taken for dead; must be above the interval.",
)
UNREACHABLE_AFTER = Option[int](
    "heartbeat.rpc-failure-threshold",
    Integer(at_least=1),
    2,
    "connections",
    "So many heartbeat connections in a row that fail, and a worker takes its coordinator for gone.",
)
STUCK_AFTER = Option[int](
    "headgate.task.stuck-after",
    Duration(),
    60_000,
    "ms",
    "A call of a subtask that has not returned after this time is reported with its stack, and again each "
    "time it has taken twice as long; 0: none is.",
)
CANCELLATION_INTERVAL = Option[int](
    "task.cancellation.interval",
    Duration(at_least_ms=1),
    30_000,
    "ms",
    "How often a worker logs what keeps an attempt from ending that was cancelled.",
)
CANCELLATION_TIMEOUT = Option[int](
    "task.cancellation.timeout",
    Duration(at_least_ms=1),
    180_000,
    "ms",
    "A worker that has not dropped the subtasks of a cancelled attempt by then is killed and replaced.",
)
STUCK_TIMEOUT = Option[int](
    "headgate.task.stuck-timeout",
    Duration(),
    0,
    "ms",
    "A call of a subtask that has not returned after this time fails the attempt; 0: it may take for ever.",
)
RECOVERY_STALL = Option[int](
    "headgate.recovery.stall-timeout",
    Duration(),
    600_000,
    "ms",
    "A start or restart in which for this time no state was read and no worker became ready fails; "
    "0: never. Must be longer than functions take to open.",
)
JOB_STALL = Option[int](
    "headgate.job.stall-timeout",
    Duration(),
    0,
    "ms",
    "A running job in which records wait, while for this time nothing moves, no event time and no "
    "checkpoint gets on, and no call is under way, is restarted; 0: never.",
)
LIVENESS_OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
