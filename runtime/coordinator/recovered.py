"""Reports the duration of a restart, phase by phase: in the log, as an event, and in histograms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ...operators.durations import format_duration
from ..protocol.failure_history import FailureRecord

if TYPE_CHECKING:
    from .context import JobContext

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
}


def publish_recovered(job: JobContext, record: FailureRecord | None) -> None:
    """All subtasks run again; None: they run for the first time."""
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
    job.publish("recovered", describe(record), attempt=job.attempt, **body)


def describe(record: FailureRecord) -> str:
    """The restart in a sentence. What has no time of its own was not needed."""
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
    return (
        f"running again after {format_duration(record.down_ms or 0)}: {text} ({of_it}; state: "
        f"{restore.local_bytes:,} bytes from workers' disks, {restore.storage_bytes:,} from storage)"
    )
