"""Which worker hosts which subtask: slot i of a group hosts subtask i of each of its vertices.

The workers of an attempt are in one order everywhere: by slot sharing group, in the order in which the plan
has them, and within a group by the slots they give it. So a list of workers says what each one is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..plan import PhysicalPlan


class Slots(Protocol):
    """The sizes of workers; a `JobSpec` knows them."""

    def slots_of(self, group: str) -> int:
        """Slots of a worker of a slot sharing group."""
        ...


def worker_groups(plan: PhysicalPlan, slots: Slots) -> list[str]:
    """The slot sharing group of each worker that the job needs."""
    return [
        group
        for group, needed in plan.slots_by_group.items()
        for _ in range(-(-needed // slots.slots_of(group)))
    ]


def place(plan: PhysicalPlan, workers: Sequence[str], slots: Slots) -> dict[tuple[int, int], str]:
    """Worker of each (vertex, index). A narrow vertex uses the first slots of its group only."""
    groups = worker_groups(plan, slots)
    return {
        (vertex.id, index): workers[
            groups.index(vertex.group) + index // slots.slots_of(vertex.group)
        ]
        for vertex in plan.vertices
        for index in range(vertex.parallelism)
    }


class Seats:
    """Which worker had which slots last, so that the next attempt finds its state where it is.

    Of all slots together those of one worker are a *seat*: worker k of an attempt sits on seat k.
    """

    def __init__(self) -> None:
        self._last: dict[str, list[tuple[str, str]]] = {}

    def order(
        self, workers: Mapping[str, str], own: Mapping[str, str], groups: Sequence[str]
    ) -> list[str]:
        """One worker of its group for each seat: each where it sat last; on a seat whose worker is gone
        one of the same machine if there is one; on the rest the oldest that are left.

        Args:
            workers: the machine of each worker, the oldest first.
            own: the slot sharing group of each worker.
            groups: of the seats, those of a group side by side; no more than there are workers of it.
        """
        return [
            worker
            for group in dict.fromkeys(groups)
            for worker in self._order(
                group,
                {id_: host for id_, host in workers.items() if own[id_] == group},
                groups.count(group),
            )
        ]

    def _order(self, group: str, workers: Mapping[str, str], count: int) -> list[str]:
        known = self._last.get(group, [])[:count]
        last = [*known, *[("", "")] * (count - len(known))]
        seats = [worker if worker in workers else "" for worker, _ in last]
        # Whoever had no seat, or one that is no more, is free.
        for seat, (_, host) in enumerate(last):
            if not seats[seat] and host:
                near = (free for free in workers if free not in seats and workers[free] == host)
                seats[seat] = next(near, "")
        rest = iter([worker for worker in workers if worker not in seats])
        seats = [worker or next(rest) for worker in seats]
        self._last[group] = [(worker, workers[worker]) for worker in seats]
        return seats
