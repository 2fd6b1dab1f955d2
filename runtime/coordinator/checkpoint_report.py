"""The statistics of checkpoints as JSON, for `headgate checkpoints`; names as in Flink's REST API."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from ..control.messages import CheckpointAcked
from ..protocol.checkpoints.statistics import (
    CheckpointHistory,
    CheckpointRecord,
    SubtaskPart,
    explain,
)

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


def report(history: CheckpointHistory, checkpoint_id: int | None = None) -> dict[str, Any]:
    """All remembered checkpoints, oldest first, and a summary; or one, with all its subtasks."""
    if checkpoint_id is not None:
        record = history.record(checkpoint_id)
        if record is None:
            return {}
        return {**_row(record), "subtasks": [_part(part) for part in record.parts]}
    records = history.records
    completed = [r for r in records if r.status == "COMPLETED" and r.kind == "checkpoint"]
    return {
        "history": [_row(record) for record in records],
        "summary": {
            "end_to_end_duration": _spread(r.duration_ms or 0 for r in completed),
            "checkpointed_size": _spread(r.written_bytes for r in completed),
            "state_size": _spread(r.state_bytes for r in completed),
            "processed_data": _spread(r.processed_bytes for r in completed),
            "persisted_data": _spread(r.persisted_bytes for r in completed),
        },
    }


def _row(record: CheckpointRecord) -> dict[str, Any]:
    last = record.last
    return {
        "id": record.checkpoint_id,
        "status": record.status,
        "is_savepoint": record.kind == "savepoint",
        "trigger_timestamp": record.trigger_ms,
        "latest_ack_timestamp": None if last is None else record.trigger_ms + round(last.ack_ms),
        "end_to_end_duration": record.duration_ms,
        "checkpointed_size": record.written_bytes,
        "state_size": record.state_bytes,
        "processed_data": record.processed_bytes,
        "persisted_data": record.persisted_bytes,
        "num_subtasks": len(record.expected),
        "num_acknowledged_subtasks": len(record.parts),
        "unaligned_subtasks": record.unaligned,
        "external_path": record.path,
        "failure": record.failure,
        "explanation": explain(record),
    }


def _part(part: SubtaskPart) -> dict[str, Any]:
    return {
        "task": part.task,
        "index": part.index,
        "end_to_end_duration": round(part.ack_ms),
        "start_delay": round(part.start_delay_ms),
        "sync_duration": round(part.sync_ms),
        "async_duration": round(part.async_ms),
        "alignment": {
            "duration": round(part.alignment_ms),
            "processed": part.processed_bytes,
            "persisted": part.persisted_bytes,
        },
        "checkpointed_size": part.written_bytes,
        "state_size": part.state_bytes,
        "unaligned_checkpoint": part.unaligned,
        "finished": part.finished,
    }


def _spread(values: Iterable[int]) -> dict[str, float]:
    """Nearest-rank quantiles."""
    found = sorted(values)
    if not found:
        return {}
    at = {name: found[math.ceil(q * len(found)) - 1] for name, q in QUANTILES.items()}
    return {"min": found[0], "avg": sum(found) / len(found), "max": found[-1], **at}


def part_of(message: CheckpointAcked, task: str, ack_ms: float) -> SubtaskPart:
    """An acknowledgement as a line of statistics."""
    handles = [handle for snapshot in message.snapshots for handle in snapshot.handles]
    return SubtaskPart(
        task=task,
        index=message.index,
        ack_ms=max(0.0, ack_ms),
        start_delay_ms=message.start_delay_ms,
        alignment_ms=message.alignment_ms,
        sync_ms=message.sync_ms,
        async_ms=message.async_ms,
        written_bytes=message.written_bytes,
        state_bytes=sum(handle.size_bytes for handle in handles),
        processed_bytes=message.processed_bytes,
        persisted_bytes=message.in_flight_bytes,
        unaligned=message.unaligned,
        finished=message.finished,
    )
