"""The options of restarts; `options.py` has the others."""

from __future__ import annotations

from typing import Any, Final

from ..operators.restarts import MULTIPLIER_MAX
from ..operators.settings import (
    NO_RESTART,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    RestartSettings,
)
from .option_types import Choice, Duration, Integer, Number, Option, Text

RESTART_STRATEGY = Option[str | None](
    "restart-strategy.type",
    Choice(
        ("none", "fixed-delay", "failure-rate", "exponential-delay"),
        (
            ("off", "none"),
            ("disable", "none"),
            ("fixeddelay", "fixed-delay"),
            ("failurerate", "failure-rate"),
            ("exponentialdelay", "exponential-delay"),
        ),
    ),
    None,
    "",
    "What to do when a job fails; unset: as the job says, else `exponential-delay` with checkpoints, and "
    "`none` without.",
    ("restart-strategy",),
)
FAILOVER_STRATEGY = Option[str](
    "jobmanager.execution.failover-strategy",
    Choice(("region", "full")),
    "region",
    "",
    "What begins again when a task fails: `region` only the tasks that stream to it or from it, directly "
    "or through others; `full` all tasks of the job.",
)
FIXED_ATTEMPTS = Option[int](
    "restart-strategy.fixed-delay.attempts",
    Integer(),
    1,
    "restarts",
    "How many times a job is restarted before it fails.",
)
FIXED_DELAY = Option[int](
    "restart-strategy.fixed-delay.delay", Duration(), 1_000, "ms", "Pause before a restart."
)
RATE_FAILURES = Option[int](
    "restart-strategy.failure-rate.max-failures-per-interval",
    Integer(at_least=1),
    1,
    "failures",
    "One failure more within the interval, and the job fails.",
)
RATE_INTERVAL = Option[int](
    "restart-strategy.failure-rate.failure-rate-interval",
    Duration(at_least_ms=1),
    60_000,
    "ms",
    "The time in which failures are counted.",
)
RATE_DELAY = Option[int](
    "restart-strategy.failure-rate.delay", Duration(), 1_000, "ms", "Pause before a restart."
)
EXPONENTIAL_INITIAL = Option[int](
    "restart-strategy.exponential-delay.initial-backoff",
    Duration(at_least_ms=1),
    1_000,
    "ms",
    "The first pause; none is shorter.",
)
EXPONENTIAL_MAX = Option[int](
    "restart-strategy.exponential-delay.max-backoff",
    Duration(at_least_ms=1),
    60_000,
    "ms",
    "The longest pause.",
)
EXPONENTIAL_MULTIPLIER = Option[float](
    "restart-strategy.exponential-delay.backoff-multiplier",
    Number(1, MULTIPLIER_MAX),
    1.5,
    "",
    "From one pause to the next.",
)
EXPONENTIAL_JITTER = Option[float](
    "restart-strategy.exponential-delay.jitter-factor",
    Number(0, 1),
    0.1,
    "",
    "Part of a pause by which it is made longer or shorter at random, so that jobs that failed together do "
    "not start together.",
)
EXPONENTIAL_RESET = Option[int](
    "restart-strategy.exponential-delay.reset-backoff-threshold",
    Duration(at_least_ms=1),
    3_600_000,
    "ms",
    "After so long without a failure, counted from the restart, pauses and attempts begin anew.",
)
EXPONENTIAL_ATTEMPTS = Option[int | None](
    "restart-strategy.exponential-delay.attempts-before-reset-backoff",
    Integer(at_least=1),
    None,
    "restarts",
    "So many restarts until pauses begin anew; one failure more ends the job; unset: any number.",
)
EXCEPTION_HISTORY = Option[int](
    "web.exception-history-size",
    Integer(at_least=1, at_most=10_000),
    16,
    "failures",
    "The last failures of a job that are remembered, for `headgate history`.",
)
SAME_RECORD_MAX = Option[int | None](
    "headgate.restart.same-record-max",
    Integer(at_least=1),
    None,
    "failures",
    "So many failures of a function for the same record, and the job fails for good, whatever the restart "
    "strategy says; unset: no failures of a record are too many.",
)
SAME_FAILURE_MAX = Option[int](
    "headgate.restart.same-failure-max",
    Integer(at_least=1),
    10,
    "failures",
    "So many failures of the kinds `internal` and `job` with the same message, one after the other and "
    "with no completed checkpoint in between, and the job fails for good, whatever the restart strategy "
    "says.",
)
FAILURE_ENRICHERS = Option[str | None](
    "jobmanager.failure-enrichers",
    Text(),
    None,
    "",
    "Functions that add labels to failures in the history, as `module:function`, separated by commas; each "
    "gets a failure as a dict and returns labels, a dict of texts.",
)
RESTART_OPTIONS: tuple[Option[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
FIELDS: Final[dict[type[RestartSettings], dict[str, Option[Any]]]] = {
    FixedDelay: {"attempts": FIXED_ATTEMPTS, "delay_ms": FIXED_DELAY},
    FailureRate: {
        "max_failures": RATE_FAILURES,
        "interval_ms": RATE_INTERVAL,
        "delay_ms": RATE_DELAY,
    },
    ExponentialDelay: {
        "initial_ms": EXPONENTIAL_INITIAL,
        "max_ms": EXPONENTIAL_MAX,
        "multiplier": EXPONENTIAL_MULTIPLIER,
        "jitter": EXPONENTIAL_JITTER,
        "reset_ms": EXPONENTIAL_RESET,
        "attempts": EXPONENTIAL_ATTEMPTS,
    },
}
"""What each strategy takes from options."""
STRATEGIES: Final[dict[str, RestartSettings]] = {
    "none": NO_RESTART,
    "fixed-delay": FixedDelay(FIXED_ATTEMPTS.default, FIXED_DELAY.default),
    "failure-rate": FailureRate(),
    "exponential-delay": ExponentialDelay(),
}
"""By their names, with Flink's defaults."""
