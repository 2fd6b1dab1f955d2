"""The spans that a coordinator reports: its checkpoints, restores and starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.checkpoints.statistics import CheckpointRecord, explain

if TYPE_CHECKING:
    from .context import JobContext


def checkpoint_ended(job: JobContext, record: CheckpointRecord) -> None:
    """A checkpoint or savepoint has completed or failed."""
    job.spans.add(
        f"headgate.{record.kind}",
        record.trigger_ms,
        record.end_ms or record.trigger_ms,
        {
            "headgate.checkpoint.id": record.checkpoint_id,
            "headgate.checkpoint.status": record.status.lower(),
            "headgate.checkpoint.written_bytes": record.written_bytes,
            "headgate.checkpoint.state_bytes": record.state_bytes,
            "headgate.checkpoint.in_flight_bytes": record.persisted_bytes,
            "headgate.checkpoint.subtasks": len(record.expected),
            "headgate.checkpoint.subtasks_acknowledged": len(record.parts),
            "headgate.checkpoint.subtasks_unaligned": record.unaligned,
            "headgate.checkpoint.explanation": explain(record),
        },
        failed=record.failure,
    )


def restored(job: JobContext, size_bytes: int) -> None:
    """All state of a deployment has been read and taken over just now."""
    figures, now_ms = job.figures, job.clock.now_ms()
    spent_ms = figures.fetching_ms + figures.opening_ms
    job.spans.add(
        "headgate.restore",
        now_ms - spent_ms,
        now_ms,
        {
            "headgate.checkpoint.id": job.restored_checkpoint,
            "headgate.restore.state_bytes": size_bytes,
            "headgate.restore.local_bytes": figures.local_bytes,
            "headgate.restore.storage_bytes": figures.storage_bytes,
            "headgate.restore.reading_ms": figures.fetching_ms,
            "headgate.restore.opening_ms": figures.opening_ms,
            "headgate.job.attempt": job.attempt,
        },
    )


def started(job: JobContext, before: str, since_ms: int) -> None:
    """All subtasks run; `before` is the state the job was in since `since_ms`."""
    job.spans.add(
        "headgate.job.start",
        since_ms,
        job.clock.now_ms(),
        {
            "headgate.job.state_before": before.lower(),
            "headgate.job.attempt": job.attempt,
            "headgate.job.parallelism": job.parallelism,
            "headgate.checkpoint.id": job.restored_checkpoint,
        },
    )
