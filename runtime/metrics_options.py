"""The options of metrics and traces; `options.py` has the others."""

from __future__ import annotations

from typing import Any, Final

from .option_types import Duration, Integer, Option, Text

METRICS_PORT = Option[int | None](
    "metrics.port",
    Integer(at_most=65535),
    None,
    "",
    "TCP port of the Prometheus endpoints: each process takes the first free one from here on, "
    "workers on the machine of the coordinator the first free one above; 0: any free ones; unset: no "
    "endpoints.",
)
METRICS_HOST = Option[str](
    "metrics.bind-host",
    Text(),
    "127.0.0.1",
    "",
    "Address that the Prometheus endpoints bind to. They have no authentication.",
)
SUBTASK_LABELS_MAX = Option[int](
    "metrics.subtask-labels-max",
    Integer(at_most=1_000_000),
    64,
    "subtasks",
    "Metrics of a task with more subtasks than this have no label `subtask`: each process shows one series "
    "for all its subtasks. 0: never a label `subtask`.",
)
USER_SERIES_MAX = Option[int](
    "metrics.user-series-max",
    Integer(at_most=1_000_000),
    1000,
    "series",
    "How many series of metrics the functions of one operator subtask may make. All further ones count as "
    "one, whose labels are `other`.",
)
SPLIT_SERIES_MAX = Option[int](
    "metrics.split-series-max",
    Integer(at_most=100_000),
    32,
    "splits",
    "A source subtask with more open splits than this shows its lag as one figure only, not by split.",
)
LATENCY_INTERVAL = Option[int](
    "metrics.latency.interval",
    Duration(),
    0,
    "ms",
    "How often each source subtask sends a latency marker, which travels with the records, past all "
    "functions, and whose time to the sinks is the metric `headgate_latency_seconds`; 0: none are sent.",
)
TRACES_ENDPOINT = Option[str | None](
    "traces.otlp.endpoint",
    Text(),
    None,
    "",
    "Address of an OpenTelemetry collector that takes spans of checkpoints, restores and starts by OTLP "
    "over HTTP, such as `http://collector:4318/v1/traces`; unset: there are none. Needs headgate[otel].",
)
METRICS_OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
