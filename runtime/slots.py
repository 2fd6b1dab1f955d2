"""The rule that places subtasks on workers. It needs the plan and the workers in their order, and no table.

Slot i of a slot sharing group hosts subtask i of each of its vertices. The workers of an attempt are in
one order everywhere: by group, in the order of the plan, and within a group by their slots. So the position
of a worker in a list determines what it hosts, and coordinator and workers find the same without talking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, final

from .plan import PhysicalPlan


class Slots(Protocol):
    """The sizes of workers; a `JobSpec` knows them."""

    def slots_of(self, group: str) -> int:
        """Return the number of slots of a worker of a slot sharing group."""
        ...


class SlotsByGroup(dict[str, int]):
    """The slots of a worker, by slot sharing group."""

    def slots_of(self, group: str) -> int:
        """Return the number of slots of a worker of a slot sharing group."""
        return self[group]


def worker_groups(plan: PhysicalPlan, slots: Slots) -> list[str]:
    """Return the slot sharing group of each worker that the job needs."""
    return [
        group
        for group, needed in plan.slots_by_group.items()
        for _ in range(-(-needed // slots.slots_of(group)))
    ]


@final
class Placement:
    """Says which worker hosts a subtask. A narrow vertex uses only the first slots of its group."""

    def __init__(self, plan: PhysicalPlan, workers: Sequence[str], slots: Slots) -> None:
        """`workers` are in the order of `worker_groups`."""
        groups = worker_groups(plan, slots)
        self._workers = workers
        self._vertices = [
            (groups.index(vertex.group), slots.slots_of(vertex.group), vertex.parallelism)
            for vertex in plan.vertices
        ]

    def worker_of(self, vertex: int, index: int) -> str:
        """Return the worker of a subtask."""
        first, slots, _ = self._vertices[vertex]
        return self._workers[first + index // slots]

    def subtasks_of(self, worker: str) -> Iterator[tuple[int, int]]:
        """Yield vertex and index of each subtask of a worker."""
        position = self._workers.index(worker)
        for vertex, (first, slots, parallelism) in enumerate(self._vertices):
            if position >= first:
                begin = (position - first) * slots
                yield from (
                    (vertex, index) for index in range(begin, min(begin + slots, parallelism))
                )
