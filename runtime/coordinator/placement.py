"""Which worker hosts which subtask: slot i hosts subtask i of every vertex (slot sharing)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..plan import PhysicalPlan


def workers_needed(plan: PhysicalPlan, slots_per_worker: int) -> int:
    """The number of workers that give the job its slots."""
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


class Seats:
    """Which worker had which slots last, so that the next attempt finds its state where it is.

    Of all slots together those of one worker are a *seat*: worker k of an attempt sits on seat k.
    """

    def __init__(self) -> None:
        self._last: list[tuple[str, str]] = []

    def order(self, workers: Mapping[str, str], count: int) -> list[str]:
        """`count` of the workers, in the order of seats: each where it sat last; on a seat whose worker
        is gone one of the same machine if there is one; on the rest the oldest that are left.

        Args:
            workers: the machine of each worker, the oldest first.
            count: of seats; not more than there are workers.
        """
        last = [*self._last[:count], *[("", "")] * (count - len(self._last))]
        seats = [worker if worker in workers else "" for worker, _ in last]
        # Whoever had no seat, or one that is no more, is free.
        for seat, (_, host) in enumerate(last):
            if not seats[seat] and host:
                near = (free for free in workers if free not in seats and workers[free] == host)
                seats[seat] = next(near, "")
        rest = iter([worker for worker in workers if worker not in seats])
        seats = [worker or next(rest) for worker in seats]
        self._last = [(worker, workers[worker]) for worker in seats]
        return seats
