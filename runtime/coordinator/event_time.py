"""Finds the subtasks that hold event time back, and for how long, from the reports of all subtasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...operators.elements import WATERMARK_MAX, WATERMARK_MIN
from ..control.messages import StepTime, SubtaskStatistics
from ..plan import PhysicalPlan, Vertex


def describe_event_time(
    plan: PhysicalPlan, statistics: Mapping[tuple[int, int], SubtaskStatistics], now_ms: int
) -> list[dict[str, Any]]:
    """One entry per event-time step, as JSON: how far it is, and which subtask and split hold it there.

    `watermark` (ms since 1970) and `lag_ms` are None before the first watermark, and once the step has
    ended. `held_by` is the slowest subtask that is waited for; None: there is none, all are idle or have
    ended. Its `split` is None if the reader does not tell of splits.
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
    """The last report of a step, with the number of the subtask."""
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
    # Of equals the one that has stood longest: the others wait for it, or came there behind it.
    slowest = min(waited_for, key=lambda each: (each[1].watermark, -each[1].held_ms), default=None)
    watermark = None if slowest is None else _shown(slowest[1].watermark)
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


def _shown(watermark: int) -> int | None:
    return None if watermark == WATERMARK_MIN else watermark
