"""The status of a job as JSON, for clients, with what holds event time back and what is slow."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...operators.drops import dropped_text, how_to_keep
from ...operators.elements import WATERMARK_MAX, WATERMARK_MIN
from ...operators.splits import History
from ..control.messages import StepTime, SubtaskStatistics
from ..explain import describe_partitioning
from ..plan import PhysicalPlan, Vertex
from ..protocol.backpressure import (
    Exchange,
    Finding,
    RecentRecords,
    SlowSubtask,
    SubtaskLoad,
    VertexShape,
    explain,
    find_causes,
    level_of,
)
from ..protocol.curves import EdgeSample, VertexSample, rates
from ..protocol.failure_history import FailureRecord
from .attempt import Attempt
from .context import JobContext
from .workers import busy_steps


def describe(job: JobContext) -> dict[str, Any]:
    """Return the status of a job as JSON, for clients."""
    env, attempt, lifecycle, checkpoints = job.env, job.attempt, job.lifecycle, job.checkpoints
    restored_bytes, restore_bytes = attempt.restored_bytes
    failures = job.failures.history.records
    backpressure = []
    if job.works:  # otherwise the last reports are old
        backpressure = describe_backpressure(attempt.plan, attempt.statistics, attempt.recent)
    return {
        "name": env.spec.name,
        "status": lifecycle.status,
        "parallelism": attempt.parallelism,
        "max_parallelism": attempt.plan.max_parallelism,
        "generation": env.generation,
        "run": env.spec.run,
        "pid": os.getpid(),
        "began_ms": lifecycle.began_ms,
        "uptime_ms": lifecycle.time_in("RUNNING")[0],
        "reason": "" if lifecycle.end is None else lifecycle.end.reason,
        "failure": _last_failure(failures),
        "attempt": attempt.number,
        "restarts": lifecycle.restarts,
        "restarted_tasks": lifecycle.restarted_tasks,
        "restored_checkpoint": attempt.restored_checkpoint,
        "restored_from": attempt.restored.text if attempt.restored is not None else "",
        "restored_bytes": restored_bytes,
        "restore_bytes": restore_bytes,
        "last_rescale_ms": lifecycle.rescaled_ms,
        "last_checkpoint": checkpoints.last_completed,
        "checkpoints_completed": checkpoints.completed,
        "checkpoints_failed": checkpoints.failed,
        "last_checkpoint_ms": checkpoints.last_duration_ms,
        "last_checkpoint_at_ms": checkpoints.last_completed_at_ms,
        "last_checkpoint_bytes": checkpoints.last_size_bytes,
        "last_checkpoint_path": checkpoints.path_of(checkpoints.last_completed),
        "checkpoints_failed_in_a_row": checkpoints.failed_in_a_row,
        "checkpoint_failure": checkpoints.last_failure,
        "workers": job.pool.describe(),
        "metrics": metrics_endpoints(job),
        "vertices": [_describe_vertex(job, vertex) for vertex in attempt.plan.vertices],
        "edges": _describe_edges(job),
        "event_time": describe_event_time(attempt.plan, attempt.statistics, env.clock.now_ms()),
        "backpressure": backpressure,
        "dropped": describe_dropped(attempt),
        "busy_steps": busy_steps(job.pool.live.values()),
        "exceptions": [record.as_json() for record in failures],
    }


def describe_dropped(attempt: Attempt) -> list[dict[str, Any]]:
    """Return what steps have dropped, by step and reason."""
    return [
        {
            "step": each.step,
            "kind": each.kind,
            "count": each.count,
            "text": dropped_text(each.kind, each.count),
            "fix": how_to_keep(each.kind),
        }
        for each in attempt.dropped.totals
    ]


def _last_failure(records: Sequence[FailureRecord]) -> str:
    """Return the text of the last failure, also if the job runs again; empty: there was none."""
    if not records:
        return ""
    root = records[-1].root
    return f"{root.where}: {root.text}"


def metrics_endpoints(job: JobContext) -> list[dict[str, str]]:
    """Return every metrics endpoint of the job's processes, the coordinator's first."""
    workers = sorted(job.pool.live.values(), key=lambda worker: worker.worker_id)
    found = [
        ("coordinator", job.env.metrics_url),
        *((w.worker_id, w.metrics_url) for w in workers),
    ]
    return [{"process": process, "url": url} for process, url in found if url]


def _describe_edges(job: JobContext) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for edge in job.attempt.plan.edges:
        records, size = job.curves.edge_rates(edge.id)
        found.append(
            {
                "source": edge.source,
                "target": edge.target,
                "partitioning": describe_partitioning(edge.partitioning),
                "side": edge.side,
                "records_per_second": round(records, 1),
                "bytes_per_second": round(size),
            }
        )
    for loop in job.attempt.plan.loops:
        found.append(
            {
                "source": loop.tail,
                "target": loop.head,
                "partitioning": "forward",
                "side": f"back to the begin of {loop.name}",
                "records_per_second": None,
                "bytes_per_second": None,
            }
        )
    return found


def sample_curves(job: JobContext) -> None:
    """Add the present figures of all vertices and exchanges to the curves."""
    attempt = job.attempt
    if not attempt.statistics:
        return  # nothing has been reported yet, which is not the same as 0
    sent: dict[int, EdgeSample] = {}
    for subtask in attempt.statistics.values():
        for edge, records, size in subtask.sent:
            before = sent.get(edge, EdgeSample(0, 0))
            sent[edge] = EdgeSample(before.records + records, before.bytes + size)
    vertices = {}
    for vertex in attempt.plan.vertices:
        known = _reported(job, vertex)
        vertices[vertex.id] = VertexSample(
            records_in=sum(subtask.records_in for subtask in known),
            records_out=sum(subtask.records_out for subtask in known),
            busy=_mean(subtask.busy_ms_per_second for subtask in known),
            backpressured=_mean(subtask.backpressured_ms_per_second for subtask in known),
            idle=_mean(subtask.idle_ms_per_second for subtask in known),
        )
    job.curves.sample(job.env.clock.now_ms(), vertices, sent)


def describe_curves(job: JobContext, since_ms: int) -> dict[str, Any]:
    """Return the curves of all vertices, as far as their points are later than `since_ms`."""
    curves = job.curves
    at_ms = curves.at_ms
    first = bisect_right(at_ms, since_ms)
    found = []
    for vertex in job.attempt.plan.vertices:
        samples = curves.of(vertex.id)
        taken, given = (
            rates([sample[field] for sample in samples], at_ms)[first:] for field in (0, 1)
        )
        found.append(
            {
                "vertex": vertex.id,
                "name": vertex.name,
                "records_in_per_second": taken,
                "records_out_per_second": given,
                "busy": [sample.busy for sample in samples[first:]],
                "backpressured": [sample.backpressured for sample in samples[first:]],
                "idle": [sample.idle for sample in samples[first:]],
            }
        )
    return {"span_ms": 1000 * curves.samples_max, "at_ms": at_ms[first:], "vertices": found}


def _mean(values: Iterable[int]) -> int:
    found = list(values)
    return round(sum(found) / len(found)) if found else 0


def _reported(job: JobContext, vertex: Vertex) -> list[SubtaskStatistics]:
    """Return the last report of each subtask of a vertex that has reported."""
    statistics = job.attempt.statistics
    found = (statistics.get((vertex.id, index)) for index in range(vertex.parallelism))
    return [subtask for subtask in found if subtask is not None]


def _describe_vertex(job: JobContext, vertex: Vertex) -> dict[str, Any]:
    known = _reported(job, vertex)
    taken, given = job.curves.vertex_rates(vertex.id)
    records_in = sum(subtask.records_in for subtask in known)
    pressure = max((subtask.backpressured_ms_per_second for subtask in known), default=0)
    return {
        "id": vertex.id,
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "records_in": records_in,
        "records_read": records_in if vertex.head.source is not None else 0,
        "records_written": sum(subtask.records_written for subtask in known),
        "records_out": sum(subtask.records_out for subtask in known),
        "busy": max((subtask.busy_ms_per_second for subtask in known), default=0),
        "full": max((subtask.full_ms_per_second for subtask in known), default=0),
        "idle": min((subtask.idle_ms_per_second for subtask in known), default=0),
        "backpressured": pressure,
        "busy_mean": _mean(subtask.busy_ms_per_second for subtask in known),
        "idle_mean": _mean(subtask.idle_ms_per_second for subtask in known),
        "backpressured_mean": _mean(subtask.backpressured_ms_per_second for subtask in known),
        "records_in_per_second": round(taken, 1),
        "records_out_per_second": round(given, 1),
        "backpressure_level": level_of(pressure).value,
        "watermark": min((subtask.watermark for subtask in known), default=None),
        "backlog": any(subtask.history is History.BEING_READ for subtask in known),
    }


def describe_event_time(
    plan: PhysicalPlan, statistics: Mapping[tuple[int, int], SubtaskStatistics], now_ms: int
) -> list[dict[str, Any]]:
    """Return an entry per event-time step: its progress, and which subtask and split hold it back.

    `watermark` (ms since 1970) and `lag_ms` are None before the first watermark, and once the step has
    ended. `held_by` is the slowest subtask that is waited for; None: there is none, all are idle or have
    ended. Its `split` is None if the reader does not report splits.
    """
    found = []
    for vertex in plan.vertices:
        for node in vertex.nodes:
            if node.watermarks is not None:
                times = _times_of(vertex, node.name, statistics)
                found.append(_describe(vertex, node.name, times, now_ms))
    return found


def _times_of(
    vertex: Vertex, step: str, statistics: Mapping[tuple[int, int], SubtaskStatistics]
) -> list[tuple[int, StepTime]]:
    """Return the last reports of a step, each with the number of its subtask."""
    known = ((index, statistics.get((vertex.id, index))) for index in range(vertex.parallelism))
    return [
        (index, time)
        for index, subtask in known
        if subtask is not None
        for time in subtask.times
        if time.step == step
    ]


def _describe(
    vertex: Vertex, step: str, times: list[tuple[int, StepTime]], now_ms: int
) -> dict[str, Any]:
    waited_for = [(index, t) for index, t in times if not t.idle and t.watermark != WATERMARK_MAX]
    # Among equal ones the one that has stood longest: the others wait for it, or got there later.
    slowest = min(waited_for, key=lambda each: (each[1].watermark, -each[1].held_ms), default=None)
    watermark = None if slowest is None else _known(slowest[1].watermark)
    return {
        "step": step,
        "watermark": watermark,
        "lag_ms": None if watermark is None else now_ms - watermark,
        "held_by": None if slowest is None else _holder(vertex, *slowest),
        "idle_subtasks": [index for index, time in times if time.idle],
        "splits": sum(time.splits for _, time in times),
        "idle_splits": sum(time.idle_splits for _, time in times),
        "queued_splits": sum(time.queued_splits for _, time in times),
        "paused_splits": sum(time.paused_splits for _, time in times),
    }


def _holder(vertex: Vertex, index: int, time: StepTime) -> dict[str, Any]:
    return {
        "subtask": index,
        "task": f"{vertex.name} ({index + 1}/{vertex.parallelism})",
        "split": time.split or None,
        "queued": time.queued,
        "for_ms": time.held_ms,
    }


def _known(watermark: int) -> int | None:
    return None if watermark == WATERMARK_MIN else watermark


def describe_backpressure(
    plan: PhysicalPlan,
    statistics: Mapping[tuple[int, int], SubtaskStatistics],
    recent: RecentRecords,
) -> list[dict[str, Any]]:
    """Return an entry per cause: the vertices that wait, what they wait for, and a sentence about it.

    `cause` is None if no subtask downstream is busy; `waiting` then has the subtasks where the search
    ended. The edge that closes a loop takes everything, so it causes no backpressure and is not part of
    the search.
    """
    found = find_causes(
        [VertexShape(vertex.id, vertex.name, vertex.parallelism) for vertex in plan.vertices],
        [Exchange(edge.id, edge.source, edge.target) for edge in plan.edges],
        {key: _load(subtask, recent.of(*key)) for key, subtask in statistics.items()},
        plan.max_parallelism,
    )
    return [_finding(finding) for finding in found]


def _load(subtask: SubtaskStatistics, records: float) -> SubtaskLoad:
    return SubtaskLoad(
        busy=subtask.busy_ms_per_second,
        full=subtask.full_ms_per_second,
        idle=subtask.idle_ms_per_second,
        backpressured=subtask.backpressured_ms_per_second,
        records=records,
        waits_for=subtask.waits_for,
        hot_groups=subtask.hot_groups,
    )


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "sentence": explain(finding),
        "vertices": [
            {
                "vertex": pressed.vertex.name,
                "level": pressed.level.value,
                "backpressured": pressed.backpressured,
            }
            for pressed in finding.pressed
        ],
        "cause": None if finding.cause is None else _suspect(finding.cause),
        "waiting": [_suspect(suspect) for suspect in finding.waiting],
    }


def _suspect(suspect: SlowSubtask) -> dict[str, Any]:
    return {
        "vertex": suspect.vertex.name,
        "subtask": suspect.subtask,
        "parallelism": suspect.vertex.parallelism,
        "busy": suspect.load.busy,
        "full": suspect.load.full,
        "idle": suspect.load.idle,
        "busy_subtasks": suspect.busy_subtasks,
        "records_share": suspect.records_share,
        "key_group": suspect.key_group,
        "key_group_share": suspect.key_group_share,
        "waits_for": suspect.load.waits_for.value or None,
    }
