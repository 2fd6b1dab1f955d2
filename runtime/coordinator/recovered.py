"""Reports the duration of a restart, phase by phase: in the log, as an event, and in histograms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ...operators.durations import format_duration
from ..protocol.failure_history import FailureStory

if TYPE_CHECKING:
    from .context import JobContext

_BODY: Final[dict[str, Callable[[FailureStory], int | None]]] = {
    "lastRestartDuration": lambda story: story.down_ms,
    "lastRestartSilence": lambda story: story.silent_ms,
    "lastRestartCancelDuration": lambda story: story.cancelling_ms,
    "lastRestartDelay": lambda story: story.waiting_ms,
    "lastRestartDeployDuration": lambda story: story.deploying_ms,
    "lastRestartWorkersDuration": lambda story: story.restore.workers_ms,
    "lastRestartDownloadStateDuration": lambda story: story.restore.fetching_ms,
    "lastRestartInitializeStateDuration": lambda story: story.restore.opening_ms,
    "lastRestartLocalStateSize": lambda story: story.restore.local_bytes,
    "lastRestartRemoteStateSize": lambda story: story.restore.storage_bytes,
}


def publish_recovered(job: JobContext, story: FailureStory | None) -> None:
    """All subtasks run again; None: they run for the first time."""
    if story is None:
        return
    restore = story.restore
    job.observed.restarted(
        story.down_ms or 0,
        {
            "silence": story.silent_ms,
            "cancel": story.cancelling_ms,
            "delay": story.waiting_ms,
            "deploy": story.deploying_ms,
            "workers": restore.workers_ms,
            "download": restore.fetching_ms,
            "initialize": restore.opening_ms,
        },
    )
    body = {name: read(story) for name, read in _BODY.items()}
    job.publish("recovered", describe(story), attempt=job.attempt, **body)


def describe(story: FailureStory) -> str:
    """The restart in a sentence. What has no time of its own was not needed."""
    restore = story.restore
    phases = [
        ("silent before", story.silent_ms),
        ("stopping", story.cancelling_ms),
        ("waiting", story.waiting_ms),
        ("deploying", story.deploying_ms),
    ]
    within = [
        ("workers", restore.workers_ms),
        ("reading state", restore.fetching_ms),
        ("opening state", restore.opening_ms),
    ]
    text = ", ".join(f"{name} {format_duration(ms)}" for name, ms in phases if ms is not None)
    of_it = ", ".join(f"{name} {format_duration(ms)}" for name, ms in within)
    return (
        f"running again after {format_duration(story.down_ms or 0)}: {text} ({of_it}; state: "
        f"{restore.local_bytes:,} bytes from workers' disks, {restore.storage_bytes:,} from storage)"
    )
