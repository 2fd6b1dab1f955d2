"""Which worker hosts which subtask: slot i hosts subtask i of every vertex (slot sharing)."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import PhysicalPlan


def workers_needed(plan: PhysicalPlan, slots_per_worker: int) -> int:
    """How many workers give the job its slots."""
    return -(-plan.slots // slots_per_worker)


def place(
    plan: PhysicalPlan, workers: Sequence[str], slots_per_worker: int
) -> dict[tuple[int, int], str]:
    """Worker of each (vertex, index). A narrow vertex uses the first slots only."""
    return {
        (vertex.id, index): workers[index // slots_per_worker]
        for vertex in plan.vertices
        for index in range(vertex.parallelism)
    }
