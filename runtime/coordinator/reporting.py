"""A coordinator's reports to those who operate its job: metrics, restores and restarts.

Metrics are read from another thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final

from ...operators.durations import format_duration
from ..job_settings import checkpoint_rules
from ..observe.catalogue import STATUSES
from ..observe.metrics import MetricsGroup, Scope
from ..protocol.checkpoints.statistics import CheckpointRecord
from ..protocol.failover import RegionId
from ..protocol.failure_history import FailureRecord
from ..protocol.failures import FailureCategory
from ..protocol.restart import Restart
from .checkpointing import CheckpointDriver
from .context import JobContext

_INVALID: Final = re.compile(r"[^a-zA-Z0-9_]")


def register_job(group: MetricsGroup, job: JobContext) -> None:
    """Register the metrics of a job."""
    scope = group.add()
    scope.gauge("job_info", lambda: 1, _info(job.env.spec.labels))
    scope.count("job_restarts", lambda: job.lifecycle.restarts)
    scope.count("job_restarted_tasks", lambda: job.lifecycle.restarted_tasks)
    scope.count("job_stale_messages", lambda: job.attempt.late_messages)
    scope.gauge("job_uptime_seconds", lambda: job.lifecycle.time_in("RUNNING")[0] / 1000)
    scope.gauge("job_downtime_seconds", lambda: _downtime_ms(job) / 1000)
    scope.gauge("job_state_since_timestamp_seconds", lambda: job.lifecycle.since_ms / 1000)
    scope.gauge("job_parallelism", lambda: job.attempt.parallelism)
    scope.gauge("job_workers", lambda: len(job.pool.live))
    scope.gauge(
        "job_slots",
        lambda: sum(job.env.spec.slots_of(worker.group) for worker in job.pool.live.values()),
    )
    scope.gauge("coordinator_generation", lambda: job.env.generation)
    scope.gauge(
        "coordinator_orphaned_seconds", lambda: _seconds(job.lifecycle.adopted_after_ms, none=-1)
    )
    scope.gauge("restore_timestamp_seconds", lambda: _seconds(job.lifecycle.restored_at_ms))
    for status in STATUSES:
        _register_status(scope, job, status)
    _register_figures(scope, job)
    if job.env.keeps_checkpoints:
        _register_checkpoints(scope, job)
    _register_global_commits(group, job)


def _register_global_commits(group: MetricsGroup, job: JobContext) -> None:
    """Register the commits that this coordinator makes for all subtasks of a sink."""
    for vertex in job.attempt.plan.vertices:
        for node in vertex.nodes:
            figures = job.commits.figures.get(node.name)
            if figures is not None:
                scope = group.operator(vertex.name, node.name, 0, labelled=False)
                scope.count("sink_commits", partial(getattr, figures, "commits"))
                scope.count("sink_commit_errors", partial(getattr, figures, "errors"))
                scope.distribution("sink_commit_seconds", figures.seconds)


def _info(labels: dict[str, str]) -> dict[str, str]:
    """Return the labels of a job as those of a metric: `a.org/team` becomes `label_a_org_team`."""
    return {f"label_{_INVALID.sub('_', name)}": value for name, value in labels.items()}


def _register_status(scope: Scope, job: JobContext, status: str) -> None:
    labels = {"state": status.lower()}
    scope.gauge("job_state", lambda: job.lifecycle.status == status, labels)
    scope.count("job_state_seconds", lambda: job.lifecycle.time_in(status)[1] / 1000, labels)


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
    """Return the time since the failure that the job recovers from."""
    failed_ms = job.failures.history.recovering_since_ms
    return 0 if failed_ms is None else max(0, job.env.clock.now_ms() - failed_ms)


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
        size,
        partial(_of_last_checkpoint, checkpoints, lambda r: r.written_bytes),
        {"kind": "written"},
    )
    for name, read in _LAST_CHECKPOINT.items():
        scope.gauge(name, partial(_of_last_checkpoint, checkpoints, read))
    rules = checkpoint_rules(job.env.spec.checkpoint, job.env.options)
    scope.gauge(
        "checkpoint_interval_seconds",
        lambda: None if rules.interval_ms is None else rules.interval_ms / 1000,
    )
    scope.gauge("checkpoint_timeout_seconds", lambda: rules.timeout_ms / 1000)
    for node in (node for vertex in job.attempt.plan.vertices for node in vertex.nodes):
        state_bytes = partial(_state_bytes, checkpoints, node.name)
        scope.gauge("state_size_bytes", state_bytes, {"operator": node.name})


def _state_bytes(checkpoints: CheckpointDriver, operator: str) -> int | None:
    return checkpoints.figures.state_bytes.get(operator)


_LAST_CHECKPOINT: Final[dict[str, Callable[[CheckpointRecord], int]]] = {
    "checkpoint_processed_bytes": lambda record: record.processed_bytes,
    "checkpoint_in_flight_bytes": lambda record: record.persisted_bytes,
}


def _of_last_checkpoint(
    checkpoints: CheckpointDriver, read: Callable[[CheckpointRecord], int]
) -> int | None:
    """Return a figure of the last checkpoint that this coordinator has seen complete."""
    record = checkpoints.history.last_completed
    return None if record is None else read(record)


def announce_restart(
    job: JobContext, restart: Restart, regions: frozenset[RegionId], why: str = ""
) -> tuple[int, int]:
    """Publish that some regions, or all, restart; return the pause before it, in ms, and the tasks.

    `why` is the reason why the whole job restarts and not only a part of it, if it has parts.
    """
    executions = job.attempt.executions
    tasks, total = executions.tasks(regions), sum(map(len, executions.failover.regions))
    delay_ms = max(0, restart.at_ms - job.env.steady_clock.now_ms())
    delay = format_duration(round(delay_ms, -1))
    text = f"restart {restart.number} in {delay}: {executions.describe(regions)}"
    text += f", since {why}" if why else ""
    job.failures.history.decided(text, tasks, total)
    job.set_status("RESTARTING")
    job.env.publish(
        "restart",
        text,
        number=restart.number,
        delay_ms=delay_ms,
        tasks=len(tasks),
        tasks_total=total,
    )
    return delay_ms, len(tasks)


def report_restored(job: JobContext) -> None:
    """Report that everything that was deployed is ready: as an event, as a span, and in metrics."""
    env, attempt = job.env, job.attempt
    restored, figures, now_ms = attempt.restored, attempt.figures, env.clock.now_ms()
    job.failures.history.deployed(now_ms, restored.text if restored is not None else "", figures)
    if restored is None:
        return
    job.lifecycle.restored_at_ms = now_ms
    spent_ms = figures.fetching_ms + figures.opening_ms
    size = restored.manifest.size_bytes
    job.observed.restored(spent_ms, figures.local_bytes, figures.storage_bytes)
    env.spans.add(
        "headgate.restore",
        now_ms - spent_ms,
        now_ms,
        {
            "headgate.checkpoint.id": attempt.restored_checkpoint,
            "headgate.restore.state_bytes": size,
            "headgate.restore.local_bytes": figures.local_bytes,
            "headgate.restore.storage_bytes": figures.storage_bytes,
            "headgate.restore.kept_bytes": figures.kept_bytes,
            "headgate.restore.reading_ms": figures.fetching_ms,
            "headgate.restore.opening_ms": figures.opening_ms,
            "headgate.job.attempt": attempt.number,
        },
    )
    env.publish(
        "restored",
        f"restored {restored.text} ({size:,} bytes)",
        checkpoint=attempt.restored_checkpoint,
        size_bytes=size,
        attempt=attempt.number,
    )


_BODY: Final[dict[str, Callable[[FailureRecord], int | None]]] = {
    "lastRestartDuration": lambda record: record.down_ms,
    "lastRestartSilence": lambda record: record.silent_ms,
    "lastRestartCancelDuration": lambda record: record.cancelling_ms,
    "lastRestartDelay": lambda record: record.waiting_ms,
    "lastRestartDeployDuration": lambda record: record.deploying_ms,
    "lastRestartWorkersDuration": lambda record: record.restore.workers_ms,
    "lastRestartDownloadStateDuration": lambda record: record.restore.fetching_ms,
    "lastRestartInitializeStateDuration": lambda record: record.restore.opening_ms,
    "lastRestartLocalStateSize": lambda record: record.restore.local_bytes,
    "lastRestartRemoteStateSize": lambda record: record.restore.storage_bytes,
    "lastRestartKeptStateSize": lambda record: record.restore.kept_bytes,
}


def report_recovered(job: JobContext) -> None:
    """Report that all subtasks run again, and how long each phase of the restart took.

    Nothing is reported when they run for the first time.
    """
    record = job.failures.history.running(job.env.clock.now_ms())
    if record is None:
        return
    restore = record.restore
    job.observed.restarted(
        record.down_ms or 0,
        {
            "silence": record.silent_ms,
            "cancel": record.cancelling_ms,
            "delay": record.waiting_ms,
            "deploy": record.deploying_ms,
            "workers": restore.workers_ms,
            "download": restore.fetching_ms,
            "initialize": restore.opening_ms,
        },
    )
    body = {name: read(record) for name, read in _BODY.items()}
    job.env.publish("recovered", describe_restart(record), attempt=job.attempt.number, **body)


def describe_restart(record: FailureRecord) -> str:
    """Describe a restart in a sentence. A phase without a time was not needed."""
    restore = record.restore
    phases = [
        ("silent before", record.silent_ms),
        ("stopping", record.cancelling_ms),
        ("waiting", record.waiting_ms),
        ("deploying", record.deploying_ms),
    ]
    within = [
        ("workers", restore.workers_ms),
        ("reading state", restore.fetching_ms),
        ("opening state", restore.opening_ms),
    ]
    text = ", ".join(f"{name} {format_duration(ms)}" for name, ms in phases if ms is not None)
    of_it = ", ".join(f"{name} {format_duration(ms)}" for name, ms in within)
    kept = f", {restore.kept_bytes:,} kept in memory" if restore.kept_bytes else ""
    return (
        f"running again after {format_duration(record.down_ms or 0)}: {text} ({of_it}; state: "
        f"{restore.local_bytes:,} bytes from workers' disks, {restore.storage_bytes:,} from storage"
        f"{kept})"
    )
