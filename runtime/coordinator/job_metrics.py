"""What a coordinator shows to those who scrape; read from another thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from ..observe.catalogue import JOB, STATUSES
from ..observe.metrics import MetricsGroup, Scope
from .recovered import register_recovery

if TYPE_CHECKING:
    from ..protocol.checkpoint_statistics import CheckpointRecord
    from .checkpointing import CheckpointDriver
    from .context import JobContext

NONE_YET = -1


def register_job(group: MetricsGroup, job: JobContext) -> None:
    """Register the metrics of a job."""
    scope = group.add(JOB)
    scope.gauge("numRestarts", lambda: job.restarts)
    scope.gauge("numRestartedTasks", lambda: job.restarted_tasks)
    scope.gauge("numLateMessages", lambda: job.late_messages)
    scope.gauge("lastTakeoverOrphanedTime", lambda: job.adopted_after_ms)
    scope.gauge("uptime", lambda: job.time_in("RUNNING")[0])
    scope.gauge("downtime", lambda: _downtime(job))
    scope.gauge("lastCheckpointRestoreTimestamp", lambda: job.restored_at_ms or NONE_YET)
    scope.gauge("numRegisteredTaskManagers", lambda: len(job.pool.live))
    scope.gauge("taskSlotsTotal", lambda: len(job.pool.live) * job.spec.slots_per_worker)
    for status in STATUSES:
        _register_status(scope, job, status)
    register_recovery(scope, job)
    if job.keeps_checkpoints:
        _register_checkpoints(scope, job.checkpoints)


def _register_status(scope: Scope, job: JobContext, status: str) -> None:
    scope.gauge(f"{status.lower()}State", lambda: job.status == status)
    scope.gauge(f"{status.lower()}Time", lambda: job.time_in(status)[0])
    scope.gauge(f"{status.lower()}TimeTotal", lambda: job.time_in(status)[1])


def _downtime(job: JobContext) -> int:
    """Since the failure that the job recovers from."""
    failed_ms = job.failures.recovering_since_ms
    return 0 if failed_ms is None else max(0, job.clock.now_ms() - failed_ms)


def _register_checkpoints(scope: Scope, checkpoints: CheckpointDriver) -> None:
    def last(value: int) -> int:
        return value if checkpoints.last_completed else NONE_YET

    scope.gauge("lastCompletedCheckpointId", lambda: last(checkpoints.last_completed))
    scope.gauge("lastCheckpointDuration", lambda: last(checkpoints.last_duration_ms))
    scope.gauge("lastCheckpointFullSize", lambda: last(checkpoints.last_size_bytes))
    for name, read in _OF_THE_LAST.items():
        scope.gauge(name, partial(_of_the_last, checkpoints, read))
    scope.gauge("lastCheckpointCompletedTimestamp", lambda: last(checkpoints.last_completed_at_ms))
    scope.gauge("numberOfInProgressCheckpoints", lambda: checkpoints.in_progress)
    scope.gauge("numberOfCompletedCheckpoints", lambda: checkpoints.completed)
    scope.gauge("numberOfFailedCheckpoints", lambda: checkpoints.failed)


_OF_THE_LAST: Final[dict[str, Callable[[CheckpointRecord], int]]] = {
    "lastCheckpointSize": lambda record: record.written_bytes,
    "lastCheckpointProcessedData": lambda record: record.processed_bytes,
    "lastCheckpointPersistedData": lambda record: record.persisted_bytes,
}


def _of_the_last(checkpoints: CheckpointDriver, read: Callable[[CheckpointRecord], int]) -> int:
    """Of the last checkpoint that this coordinator has seen complete."""
    record = checkpoints.history.last_completed
    return NONE_YET if record is None else read(record)
