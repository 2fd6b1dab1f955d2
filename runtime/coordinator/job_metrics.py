"""The metrics of a job that a coordinator exports; they are read from another thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from ..job_spec import checkpoint_rules
from ..observe.catalogue import STATUSES
from ..observe.metrics import MetricsGroup, Scope
from ..protocol.failures import FailureCategory

if TYPE_CHECKING:
    from ..protocol.checkpoints.statistics import CheckpointRecord
    from .checkpointing import CheckpointDriver
    from .context import JobContext

_INVALID: Final = re.compile(r"[^a-zA-Z0-9_]")


def register_job(group: MetricsGroup, job: JobContext) -> None:
    """Register the metrics of a job."""
    scope = group.add()
    scope.gauge("job_info", lambda: 1, _info(job.spec.labels))
    scope.count("job_restarts", lambda: job.restarts)
    scope.count("job_restarted_tasks", lambda: job.restarted_tasks)
    scope.count("job_stale_messages", lambda: job.late_messages)
    scope.gauge("job_uptime_seconds", lambda: job.time_in("RUNNING")[0] / 1000)
    scope.gauge("job_downtime_seconds", lambda: _downtime_ms(job) / 1000)
    scope.gauge("job_state_since_timestamp_seconds", lambda: job.status_since_ms / 1000)
    scope.gauge("job_parallelism", lambda: job.parallelism)
    scope.gauge("job_workers", lambda: len(job.pool.live))
    scope.gauge(
        "job_slots",
        lambda: sum(job.spec.slots_of(worker.group) for worker in job.pool.live.values()),
    )
    scope.gauge("coordinator_generation", lambda: job.generation)
    scope.gauge("coordinator_orphaned_seconds", lambda: _seconds(job.adopted_after_ms, none=-1))
    scope.gauge("restore_timestamp_seconds", lambda: _seconds(job.restored_at_ms))
    for status in STATUSES:
        _register_status(scope, job, status)
    _register_figures(scope, job)
    if job.keeps_checkpoints:
        _register_checkpoints(scope, job)


def _info(labels: dict[str, str]) -> dict[str, str]:
    """Labels of a job as those of a metric: `example.org/team` becomes `label_example_org_team`."""
    return {f"label_{_INVALID.sub('_', name)}": value for name, value in labels.items()}


def _register_status(scope: Scope, job: JobContext, status: str) -> None:
    labels = {"state": status.lower()}
    scope.gauge("job_state", lambda: job.status == status, labels)
    scope.count("job_state_seconds", lambda: job.time_in(status)[1] / 1000, labels)


def _register_figures(scope: Scope, job: JobContext) -> None:
    figures = job.observed
    for category in FailureCategory:
        scope.count(
            "job_failures",
            partial(figures.failures_of, category.value),
            {"category": category.value},
        )
    scope.distribution("restart_duration_seconds", figures.restart)
    for phase, spent in figures.phases.items():
        scope.distribution("restart_phase_seconds", spent, {"phase": phase})
    scope.distribution("restore_duration_seconds", figures.restore)
    scope.count("restore_bytes", lambda: figures.local_bytes, {"location": "local"})
    scope.count("restore_bytes", lambda: figures.storage_bytes, {"location": "storage"})
    scope.distribution("rescale_duration_seconds", figures.rescale)


def _downtime_ms(job: JobContext) -> int:
    """Since the failure that the job recovers from."""
    failed_ms = job.failures.recovering_since_ms
    return 0 if failed_ms is None else max(0, job.clock.now_ms() - failed_ms)


def _seconds(ms: int, none: int = 0) -> float | None:
    return None if ms == none else ms / 1000


def _register_checkpoints(scope: Scope, job: JobContext) -> None:
    checkpoints = job.checkpoints

    def last(value: float) -> float | None:
        return value if checkpoints.last_completed else None

    scope.count("checkpoints", lambda: checkpoints.completed, {"outcome": "completed"})
    scope.count("checkpoints", lambda: checkpoints.failed, {"outcome": "failed"})
    scope.gauge("checkpoints_in_progress", lambda: checkpoints.in_progress)
    scope.distribution("checkpoint_duration_seconds", checkpoints.figures.duration)
    for part, spent in checkpoints.figures.parts.items():
        scope.distribution("checkpoint_part_seconds", spent, {"part": part})
    scope.gauge("checkpoint_last_id", lambda: last(checkpoints.last_completed))
    scope.gauge(
        "checkpoint_last_completed_timestamp_seconds",
        lambda: last(checkpoints.last_completed_at_ms / 1000),
    )
    size = "checkpoint_size_bytes"
    scope.gauge(size, lambda: last(checkpoints.last_size_bytes), {"kind": "full"})
    scope.gauge(
        size, partial(_of_the_last, checkpoints, lambda r: r.written_bytes), {"kind": "written"}
    )
    for name, read in _OF_THE_LAST.items():
        scope.gauge(name, partial(_of_the_last, checkpoints, read))
    rules = checkpoint_rules(job.spec.checkpoint, job.options)
    scope.gauge(
        "checkpoint_interval_seconds",
        lambda: None if rules.interval_ms is None else rules.interval_ms / 1000,
    )
    scope.gauge("checkpoint_timeout_seconds", lambda: rules.timeout_ms / 1000)
    for node in (node for vertex in job.plan.vertices for node in vertex.nodes):
        state_bytes = partial(_state_bytes, checkpoints, node.name)
        scope.gauge("state_size_bytes", state_bytes, {"operator": node.name})


def _state_bytes(checkpoints: CheckpointDriver, operator: str) -> int | None:
    return checkpoints.figures.state_bytes.get(operator)


_OF_THE_LAST: Final[dict[str, Callable[[CheckpointRecord], int]]] = {
    "checkpoint_processed_bytes": lambda record: record.processed_bytes,
    "checkpoint_in_flight_bytes": lambda record: record.persisted_bytes,
}


def _of_the_last(
    checkpoints: CheckpointDriver, read: Callable[[CheckpointRecord], int]
) -> int | None:
    """A figure of the last checkpoint that this coordinator has seen complete."""
    record = checkpoints.history.last_completed
    return None if record is None else read(record)
