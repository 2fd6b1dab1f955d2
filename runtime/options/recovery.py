"""Restarts after failures, copies of state on workers, spare workers, and changes of the coordinator."""

from __future__ import annotations

from typing import Any, Final

from ...api.restarts import MULTIPLIER_MAX
from ...api.settings import (
    NO_RESTART,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    RestartSettings,
)
from ...state.keyed.rollback import KEEP_STATE_OPTION, KEPT_BYTES_MAX, KEPT_BYTES_MAX_OPTION
from .types import Boolean, Choice, Duration, Integer, Number, Option, Size, Text

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
    "What to do when a job fails; unset: as the job says, else `exponential-delay` with checkpoints, and "
    "`none` without.",
    ("restart-strategy",),
)
FAILOVER_STRATEGY = Option[str](
    "jobmanager.execution.failover-strategy",
    Choice(("region", "full")),
    "region",
    "The tasks that restart when a task fails: `region`: only those that stream to it or from it, "
    "directly or through others; `full`: all tasks of the job.",
)
FIXED_ATTEMPTS = Option[int](
    "restart-strategy.fixed-delay.attempts",
    Integer(unit="restarts"),
    1,
    "How many times a job is restarted before it fails.",
)
FIXED_DELAY = Option[int](
    "restart-strategy.fixed-delay.delay", Duration(), 1_000, "Pause before a restart."
)
RATE_FAILURES = Option[int](
    "restart-strategy.failure-rate.max-failures-per-interval",
    Integer(at_least=1, unit="failures"),
    1,
    "The number of failures within the interval; one more fails the job.",
)
RATE_INTERVAL = Option[int](
    "restart-strategy.failure-rate.failure-rate-interval",
    Duration(at_least_ms=1),
    60_000,
    "The time in which failures are counted.",
)
RATE_DELAY = Option[int](
    "restart-strategy.failure-rate.delay", Duration(), 1_000, "Pause before a restart."
)
EXPONENTIAL_INITIAL = Option[int](
    "restart-strategy.exponential-delay.initial-backoff",
    Duration(at_least_ms=1),
    1_000,
    "The first pause; none is shorter.",
)
EXPONENTIAL_MAX = Option[int](
    "restart-strategy.exponential-delay.max-backoff",
    Duration(at_least_ms=1),
    60_000,
    "The longest pause.",
)
EXPONENTIAL_MULTIPLIER = Option[float](
    "restart-strategy.exponential-delay.backoff-multiplier",
    Number(1, MULTIPLIER_MAX),
    1.5,
    "The growth from one pause to the next.",
)
EXPONENTIAL_JITTER = Option[float](
    "restart-strategy.exponential-delay.jitter-factor",
    Number(0, 1),
    0.1,
    "Part of a pause by which it is made longer or shorter at random, so that jobs that failed together do "
    "not start together.",
)
EXPONENTIAL_RESET = Option[int](
    "restart-strategy.exponential-delay.reset-backoff-threshold",
    Duration(at_least_ms=1),
    3_600_000,
    "After this time without a failure, counted from the restart, pauses and attempts start over.",
)
EXPONENTIAL_ATTEMPTS = Option[int | None](
    "restart-strategy.exponential-delay.attempts-before-reset-backoff",
    Integer(at_least=1, unit="restarts"),
    None,
    "The number of restarts until pauses start over; one failure more ends the job; unset: any number.",
)
EXCEPTION_HISTORY = Option[int](
    "web.exception-history-size",
    Integer(at_least=1, at_most=10_000, unit="failures"),
    16,
    "The last failures of a job that are remembered, for `headgate history`.",
)
SAME_RECORD_MAX = Option[int | None](
    "headgate.restart.same-record-max",
    Integer(at_least=1, unit="failures"),
    None,
    "The job fails for good after this number of failures of a function for the same record, under "
    "every restart strategy; unset: there is no limit.",
)
SAME_FAILURE_MAX = Option[int](
    "headgate.restart.same-failure-max",
    Integer(at_least=1, unit="failures"),
    10,
    "The job fails for good after this number of failures of the kinds `internal` and `job` with the "
    "same message, one after the other and without a completed checkpoint in between, under every "
    "restart strategy.",
)
FAILURE_ENRICHERS = Option[str | None](
    "jobmanager.failure-enrichers",
    Text(),
    None,
    "Functions that add labels to failures in the history, as `module:function`, separated by commas; each "
    "gets a failure as a dict and returns labels, a dict of texts.",
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
"""The options that set the fields of each strategy."""
STRATEGIES: Final[dict[str, RestartSettings]] = {
    "none": NO_RESTART,
    "fixed-delay": FixedDelay(FIXED_ATTEMPTS.default, FIXED_DELAY.default),
    "failure-rate": FailureRate(),
    "exponential-delay": ExponentialDelay(),
}
"""The strategies by name, with Flink's defaults."""
LOCAL_BACKUP = Option[bool](
    "execution.checkpointing.local-backup.enabled",
    Boolean(),
    False,
    "Workers keep a copy of the state files of the newest checkpoint on their own disk.",
)
FROM_LOCAL = Option[bool](
    "execution.state-recovery.from-local",
    Boolean(),
    False,
    "A restore reads the copies on the worker's machine, and reads from the checkpoint's storage only "
    "files that are missing or damaged there.",
)
LOCAL_BACKUP_DIRS = Option[str | None](
    "execution.checkpointing.local-backup.dirs",
    Text(),
    None,
    "Directories of the worker's machine for these copies, separated by commas; unset: `io.tmp.dirs`. On "
    "the same file system as `io.tmp.dirs` a copy of state on disk is a link, and costs nothing.",
)
LOCAL_BACKUP_SIZE = Option[int](
    "headgate.local-backup.size-max",
    Size(),
    10 << 30,
    "The most bytes that the copies of one worker may have; further files are not kept, and a restore "
    "reads them from the checkpoint's storage.",
)
KEEP_STATE = Option[bool](
    KEEP_STATE_OPTION,
    Boolean(),
    False,
    "Experimental: tasks that are restarted because of another one, on a worker that lives, take their "
    "keyed state over from memory. It goes back to the restored checkpoint, and is not read again. This "
    "covers state and timers of process functions and patterns, `reduce`, running aggregates, windows and "
    "joins, with the backend `hashmap`.",
)
KEPT_OLD_VALUES = Option[int](
    KEPT_BYTES_MAX_OPTION,
    Size(at_least=1, at_most=1 << 40),
    KEPT_BYTES_MAX,
    "How many bytes of old values one state of one subtask keeps in order to go back to a checkpoint. If "
    "more changes between two checkpoints, a restart reads that state.",
)
KEEP_STATE_TIMEOUT = Option[int](
    "headgate.recovery.keep-state.timeout",
    Duration(at_least_ms=1),
    60_000,
    "How long a worker keeps the state of tasks that were cancelled in memory, while no attempt follows.",
)
REDUNDANT_WORKERS = Option[int](
    "slotmanager.redundant-taskmanager-num",
    Integer(at_most=1_000, unit="workers"),
    0,
    "Spare workers of each slot sharing group: started, connected and ready, to take the place of one that "
    "dies.",
)
REGISTRATION_TIMEOUT = Option[int](
    "resourcemanager.taskmanager-registration.timeout",
    Duration(at_least_ms=1_000),
    120_000,
    "A worker that was started and has not connected to the coordinator by then counts as failed. Raise it "
    "where machines are slow to come up, or install packages first.",
)
START_FAILURES_MAX = Option[float](
    "resourcemanager.start-worker.max-failure-rate",
    Number(0.001, 1_000_000, unit="failures/min"),
    10.0,
    "If this many spare workers within a minute did not start, or died before they were needed, there "
    "is a pause.",
)
START_RETRY = Option[int](
    "resourcemanager.start-worker.retry-interval",
    Duration(at_least_ms=1),
    3_000,
    "That pause, and the pause after each failure.",
)
TAKEOVERS_MAX = Option[int](
    "headgate.coordinator.takeovers-max",
    Integer(at_least=1, unit="takeovers"),
    10,
    "The number of coordinators of one run that may die within `headgate.coordinator.takeovers-window` "
    "without a checkpoint in between; when one more dies, the job fails.",
)
TAKEOVERS_WINDOW = Option[int](
    "headgate.coordinator.takeovers-window",
    Duration(at_least_ms=1_000),
    600_000,
    "The time in which deaths of coordinators are counted.",
)
ORPHANED_MAX = Option[int](
    "headgate.worker.orphaned-max",
    Duration(),
    60_000,
    "How long workers go on with records while they have no coordinator, before they give up; 0: they stop "
    "at once, and every new coordinator restores the newest checkpoint.",
)
STANDBY_COORDINATORS = Option[int](
    "headgate.coordinator.standby",
    Integer(at_least=0, at_most=1, unit="processes"),
    0,
    "How many processes wait, with the job loaded, to take over from a coordinator that dies; on Ray, and "
    "for jobs with checkpoints. 0: Ray has to make one first.",
)
STORE_PATIENCE = Option[int](
    "headgate.coordinator.store-patience",
    Duration(),
    60_000,
    "How long a coordinator that takes over tries to read the job log, before the job ends with the error "
    "of the checkpoint store. The first coordinator of a job does not try again.",
)
COORDINATOR_RETURN_TIMEOUT = Option[int](
    "headgate.coordinator.return-timeout",
    Duration(at_least_ms=1_000),
    240_000,
    "How long the command that follows a job on Ray waits for a coordinator that leads, before it gives "
    "the job up: the job itself may go on. A process that dies while Ray is still starting it is missed by "
    "Ray only after a minute (its `worker_register_timeout_seconds`); there is time for two of them.",
)
CLUSTER_CONNECT_TIMEOUT = Option[int](
    "headgate.cluster.connect-timeout",
    Duration(at_least_ms=100),
    60_000,
    "How long `headgate run --cluster ADDRESS` tries to connect to the Ray cluster before it gives up.",
)
FORMER_WATCH = Option[int](
    "headgate.coordinator.former-watch",
    Duration(),
    20_000,
    "How long a new run watches the job log, if a former run has not ended and its coordinator cannot be "
    "reached, before it takes that one for dead. Anything the former run writes in this time shows that it "
    "lives: the new run is then refused.",
)
HISTORY_RUNS = Option[int](
    "headgate.history.runs",
    Integer(at_least=0, at_most=1_000, unit="runs"),
    20,
    "The number of former runs of a job in its storage, with the end, the time and the reason of each. "
    "The run that ended last is kept in any case.",
)
SHUTDOWN_GRACE = Option[int](
    "headgate.shutdown.grace",
    Duration(at_least_ms=100),
    25_000,
    "How long a process that gets SIGTERM waits for the checkpoint with which it leaves: a worker on Ray, "
    "whose tasks go elsewhere, or a run with an id from outside (`--run-id`), which is left to its next "
    "start. It should end before the sender of SIGTERM kills: Kubernetes does after 30 s.",
)
