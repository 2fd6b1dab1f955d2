"""Metrics, traces, heartbeats, and the search for what is stuck."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import OptionError
from ...operators.durations import format_duration
from .types import Duration, Integer, Option, Text

METRICS_PORT = Option[int | None](
    "metrics.port",
    Integer(at_most=65535),
    None,
    "TCP port of the Prometheus endpoints: each process takes the first free one from here on, "
    "workers on the machine of the coordinator the first free one above; 0: any free ones; unset: no "
    "endpoints.",
)
METRICS_HOST = Option[str](
    "metrics.bind-host",
    Text(),
    "127.0.0.1",
    "Address that the Prometheus endpoints bind to. They have no authentication.",
)
SUBTASK_LABELS_MAX = Option[int](
    "metrics.subtask-labels-max",
    Integer(at_most=1_000_000, unit="subtasks"),
    64,
    "Metrics of a task with more subtasks than this have no label `subtask`: each process shows one series "
    "for all its subtasks. 0: never a label `subtask`.",
)
USER_SERIES_MAX = Option[int](
    "metrics.user-series-max",
    Integer(at_most=1_000_000, unit="series"),
    1000,
    "How many series of metrics the functions of one operator subtask may make. All further ones count as "
    "one, whose labels are `other`.",
)
SPLIT_SERIES_MAX = Option[int](
    "metrics.split-series-max",
    Integer(at_most=100_000, unit="splits"),
    32,
    "A source subtask with more open splits than this shows its lag as one figure only, not by split.",
)
LATENCY_INTERVAL = Option[int](
    "metrics.latency.interval",
    Duration(),
    0,
    "How often each source subtask sends a latency marker, which travels with the records, past all "
    "functions, and whose time to the sinks is the metric `headgate_latency_seconds`; 0: none are sent.",
)
TRACES_ENDPOINT = Option[str | None](
    "traces.otlp.endpoint",
    Text(),
    None,
    "Address of an OpenTelemetry collector that takes spans of checkpoints, restores and starts by OTLP "
    "over HTTP, such as `http://collector:4318/v1/traces`; unset: there are none. Needs headgate[otel].",
)
HEARTBEAT_INTERVAL = Option[int](
    "heartbeat.interval",
    Duration(at_least_ms=10),
    10_000,
    "How often the coordinator and the workers ask each other for a sign of life.",
)
HEARTBEAT_TIMEOUT = Option[int](
    "heartbeat.timeout",
    Duration(at_least_ms=10),
    50_000,
    "A peer silent for this long is taken for dead; must be above the interval.",
)
UNREACHABLE_AFTER = Option[int](
    "heartbeat.rpc-failure-threshold",
    Integer(at_least=1, unit="connections"),
    2,
    "A worker assumes that its coordinator is gone after this number of failed heartbeat connections in "
    "a row.",
)
STUCK_AFTER = Option[int](
    "headgate.task.stuck-after",
    Duration(),
    60_000,
    "A call of a subtask that has not returned after this time is reported with its stack, and again "
    "each time its duration has doubled; 0: no call is reported.",
)
CANCELLATION_INTERVAL = Option[int](
    "task.cancellation.interval",
    Duration(at_least_ms=1),
    30_000,
    "How often a worker logs what keeps an attempt from ending that was cancelled.",
)
CANCELLATION_TIMEOUT = Option[int](
    "task.cancellation.timeout",
    Duration(at_least_ms=1),
    180_000,
    "A worker that has not dropped the subtasks of a cancelled attempt by then is killed and replaced.",
)
STUCK_TIMEOUT = Option[int](
    "headgate.task.stuck-timeout",
    Duration(),
    0,
    "A call of a subtask that has not returned after this time fails the attempt; 0: it may take for ever.",
)
RECOVERY_STALL = Option[int](
    "headgate.recovery.stall-timeout",
    Duration(),
    600_000,
    "A start or restart in which for this time no state was read and no worker became ready fails; "
    "0: never. Must be longer than functions take to open.",
)
JOB_STALL = Option[int](
    "headgate.job.stall-timeout",
    Duration(),
    0,
    "A running job in which records wait, while for this time nothing moves, no event time and no "
    "checkpoint gets on, and no call is under way, is restarted; 0: never.",
)


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, OptionError]]:
    """Options of this module that are fine alone and wrong together, each with the key to blame."""
    interval = values.get(HEARTBEAT_INTERVAL.key, HEARTBEAT_INTERVAL.default)
    timeout = values.get(HEARTBEAT_TIMEOUT.key, HEARTBEAT_TIMEOUT.default)
    if timeout <= interval:
        blamed = HEARTBEAT_TIMEOUT if HEARTBEAT_TIMEOUT.key in values else HEARTBEAT_INTERVAL
        yield (
            blamed.key,
            OptionError(
                f"heartbeat timeout is not above the interval "
                f"interval=`{format_duration(interval)}` timeout=`{format_duration(timeout)}`",
                fix=f"raise {HEARTBEAT_TIMEOUT.key}, or lower {HEARTBEAT_INTERVAL.key}",
            ),
        )
