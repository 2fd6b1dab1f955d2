"""The options of coordinators that come and go; `options.py` has the others."""

from __future__ import annotations

from typing import Any, Final

from .option_types import Duration, Integer, Option

ORPHANED_MAX = Option[int](
    "headgate.worker.orphaned-max",
    Duration(),
    60_000,
    "ms",
    "How long workers go on with records while they have no coordinator, before they give up; 0: they stop "
    "at once, and every new coordinator restores the newest checkpoint.",
)
STANDBY_COORDINATORS = Option[int](
    "headgate.coordinator.standby",
    Integer(at_least=0, at_most=1),
    0,
    "processes",
    "How many processes wait, with the job loaded, to take over from a coordinator that dies; on Ray, and "
    "for jobs with checkpoints. 0: Ray has to make one first.",
)
STORE_PATIENCE = Option[int](
    "headgate.coordinator.store-patience",
    Duration(),
    60_000,
    "ms",
    "How long a coordinator that takes over tries to read the job log, before the job ends with the error "
    "of the checkpoint store. The first coordinator of a job does not try again.",
)
COORDINATOR_RETURN_TIMEOUT = Option[int](
    "headgate.coordinator.return-timeout",
    Duration(at_least_ms=1_000),
    240_000,
    "ms",
    "How long the command that follows a job on Ray waits for a coordinator that leads, before it gives "
    "the job up: the job itself may go on. A process that dies while Ray is still starting it is missed by "
    "Ray only after a minute (its `worker_register_timeout_seconds`); there is time for two of them.",
)
CLUSTER_CONNECT_TIMEOUT = Option[int](
    "headgate.cluster.connect-timeout",
    Duration(at_least_ms=100),
    60_000,
    "ms",
    "How long `headgate run --cluster ADDRESS` tries to connect to the Ray cluster before it gives up.",
)
FORMER_WATCH = Option[int](
    "headgate.coordinator.former-watch",
    Duration(),
    20_000,
    "ms",
    "How long a new run watches the job log, if a former run has not ended and its coordinator cannot be "
    "reached, before it takes that one for dead. Anything the former run writes in this time shows that it "
    "lives: the new run is then refused.",
)
HISTORY_RUNS = Option[int](
    "headgate.history.runs",
    Integer(at_least=0, at_most=1_000),
    20,
    "runs",
    "How many former runs of a job its storage remembers: how each ended, when and why. The run that ended "
    "last is remembered in any case.",
)
SHUTDOWN_GRACE = Option[int](
    "headgate.shutdown.grace",
    Duration(at_least_ms=100),
    25_000,
    "ms",
    "How long a process that gets SIGTERM waits for the checkpoint with which it leaves: a worker on Ray, "
    "whose tasks go elsewhere, or a run with an id from outside (`--run-id`), which is left to its next "
    "start. It should end before the sender of SIGTERM kills: Kubernetes does after 30 s.",
)
PROBE_RACES = Option[int](
    "headgate.storage.probe.races",
    Integer(at_least=0, at_most=10_000),
    32,
    "objects",
    "How many objects two writers try to create at once when a job starts on S3: a store that gives one of "
    "them to both is refused. 0: that is not tried.",
)
PROBE_TIMEOUT = Option[int](
    "headgate.storage.probe.timeout",
    Duration(),
    5_000,
    "ms",
    "No more of these tries begin after this time; how many there were is logged.",
)
AVAILABILITY_OPTIONS: Final[tuple[Option[Any], ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Option)
)
