"""The statistics of a job's checkpoints, in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from headgate.runtime.control.job_client import JobClient

REMEMBERED = 1_000
"""Checkpoints; more than any of these jobs takes."""


def quantile(values: Iterable[float], share: float) -> float:
    """The nearest rank; 0 of nothing."""
    found = sorted(values)
    return found[math.ceil(share * len(found)) - 1] if found else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of the checkpoints behind the warm-up: times in ms, medians unless their names
    differ.
    """

    count: int
    end_to_end: float
    end_to_end_p99: float
    end_to_end_max: float
    start_delay: float
    """The longest of any subtask."""
    alignment: float
    """The longest of any subtask."""
    path_alignment: float
    """The longest of each step, added up along the job."""
    async_part: float
    """The longest of any subtask."""
    in_flight_bytes: float
    new_bytes: float
    state_bytes: float


async def figures(client: JobClient, since_ms: float) -> Figures:
    """Return the figures of all complete checkpoints triggered since then."""
    history = (await client.request("checkpoints"))["history"]
    rows = [
        await client.request("checkpoints", id=row["id"])
        for row in history
        if row["status"] == "COMPLETED" and row["trigger_timestamp"] >= since_ms
    ]
    return summary(rows)


def summary(rows: list[dict[str, Any]]) -> Figures:
    """Return the figures of checkpoints with all their subtasks, as the coordinator describes them."""

    def middle(values: Iterable[float]) -> float:
        found = list(values)
        return median(found) if found else 0.0

    def longest(row: dict[str, Any], key: str) -> float:
        return max(part[key] for part in row["subtasks"])

    durations = [row["end_to_end_duration"] for row in rows]
    return Figures(
        count=len(rows),
        end_to_end=middle(durations),
        end_to_end_p99=quantile(durations, 0.99),
        end_to_end_max=max(durations, default=0.0),
        start_delay=middle(longest(row, "start_delay") for row in rows),
        alignment=middle(
            max(part["alignment"]["duration"] for part in row["subtasks"]) for row in rows
        ),
        path_alignment=middle(_along_the_path(row) for row in rows),
        async_part=middle(longest(row, "async_duration") for row in rows),
        in_flight_bytes=middle(row["persisted_data"] for row in rows),
        new_bytes=middle(row["checkpointed_size"] for row in rows),
        state_bytes=middle(row["state_size"] for row in rows),
    )


def _along_the_path(row: dict[str, Any]) -> float:
    longest: dict[str, float] = {}
    for part in row["subtasks"]:
        task = part["task"]
        longest[task] = max(longest.get(task, 0.0), part["alignment"]["duration"])
    return sum(longest.values())
