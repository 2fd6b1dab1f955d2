"""Views of a job as JSON that are not part of its status.

They show its subtasks, configuration, plan, metrics and checkpoints; the names of the statistics of
checkpoints are those of Flink's REST API.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec

from ...errors import UsageError
from ...operators.elements import WATERMARK_MIN
from ..control.messages import SubtaskStatistics
from ..explain import describe_partitioning, explain_plan
from ..observe.metrics import MetricsRegistry
from ..observe.recent_logs import RecentLogs
from ..plan import JobSpec, PhysicalPlan, Vertex
from ..protocol import names
from ..protocol.backpressure import HotKeyGroup, hot_key_groups
from ..protocol.checkpoints.statistics import (
    CheckpointHistory,
    CheckpointRecord,
    SubtaskPart,
    explain,
)
from ..protocol.ids import SubtaskId
from ..storage.open_store import join_address
from .attempt import Attempt
from .environment import JobEnvironment

HOT_SHOWN_MAX: Final = 10
"""The hot key groups of a vertex that are shown."""
MASKED: Final = "******"
_SECRET_KEY = re.compile(
    r"password|secret|(?<!-)token$|access-?key|api-?key|account\.key|credential"
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def describe_subtasks(attempt: Attempt, vertex_id: int) -> dict[str, Any]:
    """Return the last report of each subtask of a vertex, and where it runs.

    Raises:
        UsageError: the plan has no such vertex.
    """
    vertex = next((each for each in attempt.plan.vertices if each.id == vertex_id), None)
    if vertex is None:
        known = ", ".join(str(each.id) for each in attempt.plan.vertices)
        raise UsageError(f"no such vertex id=`{vertex_id}`", fix=f"the job has {known}")
    return {
        "vertex": vertex.id,
        "name": vertex.name,
        "subtasks": [_subtask(attempt, vertex, index) for index in range(vertex.parallelism)],
        "hot_key_groups": [
            msgspec.structs.asdict(each) for each in _hot_key_groups(attempt, vertex)
        ],
    }


def _hot_key_groups(attempt: Attempt, vertex: Vertex) -> list[HotKeyGroup]:
    inputs = {edge.id for edge in attempt.plan.edges if edge.target == vertex.id}
    told = (hot for said in attempt.statistics.values() for hot in said.hot_groups)
    samples = (hot for hot in told if hot.edge in inputs)
    return hot_key_groups(samples, vertex.parallelism, attempt.plan.max_parallelism)[:HOT_SHOWN_MAX]


def _subtask(attempt: Attempt, vertex: Vertex, index: int) -> dict[str, Any]:
    subtask = SubtaskId(vertex.id, index)
    said = attempt.statistics.get((vertex.id, index))
    return {
        "index": index,
        "worker": attempt.executions.placement.get(subtask),
        "attempt": attempt.executions.attempt_of(subtask),
        "reported": said is not None,
        **({} if said is None else _figures(said)),
    }


def _figures(said: SubtaskStatistics) -> dict[str, Any]:
    return {
        "records_in": said.records_in,
        "records_out": said.records_out,
        "records_written": said.records_written,
        "busy": said.busy_ms_per_second,
        "idle": said.idle_ms_per_second,
        "backpressured": said.backpressured_ms_per_second,
        "full": said.full_ms_per_second,
        "watermark": None if said.watermark == WATERMARK_MIN else said.watermark,
        "queued": said.queued,
        "timers": said.timers,
    }


def describe_config(env: JobEnvironment) -> dict[str, Any]:
    """Return all options in effect, and those that the user set; values of secrets are masked."""
    explicit = env.options.explicit()
    checkpoint = env.spec.checkpoint
    return {
        "options": {
            key: {"value": masked(key, value), "explicit": key in explicit}
            for key, value in sorted(env.options.effective().items())
        },
        "checkpoint_storage": None if checkpoint is None else masked("", checkpoint.storage),
        "checkpoint_interval_ms": None if checkpoint is None else checkpoint.every_ms,
        "checkpoints_retained": None if checkpoint is None else checkpoint.retain,
    }


def masked(key: str, value: str) -> str:
    """Return `value`, but mask it if `key` names a secret, and mask credentials in addresses."""
    return MASKED if _SECRET_KEY.search(key) else _USERINFO.sub(MASKED, value)


def checkpoint_directory(spec: JobSpec) -> str:
    """Return the address of a job's checkpoints, without credentials; empty: it keeps none."""
    if spec.checkpoint is None:
        return ""
    return masked("", join_address(spec.checkpoint.storage, names.job_dir(spec.name)))


def describe_plan(spec: JobSpec, attempt: Attempt) -> dict[str, Any]:
    """Return the physical plan that runs now, and the text that `headgate explain` prints."""
    present = replace(spec, plan=attempt.plan, parallelism=attempt.parallelism)
    return {
        "parallelism": attempt.parallelism,
        "max_parallelism": attempt.plan.max_parallelism,
        "vertices": [_vertex(vertex) for vertex in attempt.plan.vertices],
        "edges": list(_edges(attempt.plan)),
        "text": _USERINFO.sub(MASKED, explain_plan(present)),
    }


def _vertex(vertex: Vertex) -> dict[str, Any]:
    operators = [
        {
            "name": node.name,
            "kind": node.kind,
            "detail": _USERINFO.sub(MASKED, node.detail),
            "stateful": node.stateful,
        }
        for node in vertex.nodes
    ]
    return {
        "id": vertex.id,
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "slot_sharing_group": vertex.group,
        "operators": operators,
    }


def _edges(plan: PhysicalPlan) -> Iterable[dict[str, Any]]:
    for edge in plan.edges:
        yield {
            "source": edge.source,
            "target": edge.target,
            "partitioning": describe_partitioning(edge.partitioning),
            "side": edge.side or None,
        }
    for loop in plan.loops:
        yield {
            "source": loop.tail,
            "target": loop.head,
            "partitioning": "forward",
            "side": f"back to the begin of {loop.name}",
        }


def describe_metrics(registry: MetricsRegistry, endpoints: list[dict[str, str]]) -> dict[str, Any]:
    """Return the metrics of the coordinator's process, and the Prometheus endpoints of all processes."""
    samples = [
        {
            "name": sample.name,
            "labels": dict(sample.labels),
            "value": float(sample.value) if math.isfinite(sample.value) else None,
        }
        for family in registry.collect()
        for sample in family.samples
    ]
    return {"endpoints": endpoints, "samples": samples}


def describe_lost(attempt: Attempt) -> list[dict[str, Any]]:
    """Return samples of dropped records, by step and reason; credentials in addresses are masked."""
    return [
        {
            "step": lost.step,
            "kind": lost.kind,
            "at_ms": at_ms,
            "subtask": subtask,
            "event_time": lost.event_time,
            "watermark": lost.watermark,
            "position": masked("", lost.position),
            "error": masked("", lost.error),
            "value": None if lost.value is None else masked("", lost.value),
        }
        for at_ms, subtask, lost in attempt.lost.all()
    ]


def describe_logs(logs: RecentLogs, after: int, level: str) -> dict[str, Any]:
    """Return the lines behind the number `after`, of this level and more severe ones.

    Credentials in addresses are masked.
    """
    return {
        "lines": [
            {
                "number": number,
                "process": process,
                "at_ms": line.at_ms,
                "level": line.level,
                "logger": line.logger,
                "message": masked("", line.message),
                "fields": line.fields,
                "detail": masked("", line.detail),
            }
            for number, process, line in logs.since(after, level)
        ],
        "skipped": logs.skipped,
        "kept": logs.lines_max,
    }


QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


def describe_checkpoints(
    history: CheckpointHistory, checkpoint_id: int | None = None
) -> dict[str, Any]:
    """Return all remembered checkpoints, oldest first, and a summary; or one, with all its subtasks."""
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
        "slowest": _slowest(record),
    }


def _slowest(record: CheckpointRecord) -> dict[str, Any] | None:
    """Return the phases of the subtask that acknowledged last; None if none has."""
    last = record.last
    if last is None:
        return None
    publishing_ms = 0 if record.duration_ms is None else record.duration_ms - last.ack_ms
    return {
        "task": last.task,
        "index": last.index,
        "start_delay": round(last.start_delay_ms),
        "alignment": round(last.alignment_ms),
        "sync": round(last.sync_ms),
        "async": round(last.async_ms),
        "publishing": max(0, round(publishing_ms)) if record.status == "COMPLETED" else 0,
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
    """Return the nearest-rank quantiles."""
    found = sorted(values)
    if not found:
        return {}
    at = {name: found[math.ceil(q * len(found)) - 1] for name, q in QUANTILES.items()}
    return {"min": found[0], "avg": sum(found) / len(found), "max": found[-1], **at}
