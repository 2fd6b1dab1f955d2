"""Finds the step that makes the job slow, from the reports of all subtasks, for the status of the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..control.messages import SubtaskStatistics
from ..plan import PhysicalPlan
from ..protocol.backpressure import (
    Exchange,
    Finding,
    RecentRecords,
    SubtaskLoad,
    Suspect,
    VertexShape,
    explain,
    find_causes,
)


def describe_backpressure(
    plan: PhysicalPlan,
    statistics: Mapping[tuple[int, int], SubtaskStatistics],
    recent: RecentRecords,
) -> list[dict[str, Any]]:
    """One entry per cause, as JSON: who waits, for whom, and the sentence about it.

    `cause` is None if nobody downstream is busy; `waiting` then has the subtasks where the search ended.
    The edge that closes a loop takes everything, so nobody waits there, and it is no part of the search.
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


def _suspect(suspect: Suspect) -> dict[str, Any]:
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
