"""The places of subtasks: the worker that hosts each of them, and the attempt of each region."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, final

from ..control.messages import LoopRoundBack, Messages
from ..exchange.partitioners import Connections
from ..plan import ExchangeEdge, PhysicalPlan, is_pointwise
from ..protocol.failover import RegionFailover, RegionId, SubtaskLink
from ..protocol.ids import SubtaskId
from ..slots import Placement, Slots

NAMES_SHOWN_MAX: Final = 4
"""The number of subtasks that the announcement of a restart names."""


@final
class SlotAffinity:
    """Remembers which worker had which slots last, so that the next attempt finds its state there.

    All slots that one worker has in an attempt are a *place*: worker k of an attempt is in place k.
    """

    def __init__(self) -> None:
        self._last: dict[str, list[tuple[str, str]]] = {}
        """The worker and the machine that each place had last, by slot sharing group."""

    def order(
        self, workers: Mapping[str, str], own: Mapping[str, str], groups: Sequence[str]
    ) -> list[str]:
        """Return one worker of the right group for each place.

        A worker keeps its place. A place whose worker is gone gets a free worker of the same machine if
        there is one, and otherwise the oldest one that is left.

        Args:
            workers: the machine of each worker, the oldest first.
            own: the slot sharing group of each worker.
            groups: the group of each place, with equal ones in a row; each has enough workers.
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
        places = [worker if worker in workers else "" for worker, _ in last]
        # A worker that had no place, or one that does not exist any more, is free.
        for place, (_, host) in enumerate(last):
            if not places[place] and host:
                near = (free for free in workers if free not in places and workers[free] == host)
                places[place] = next(near, "")
        rest = iter([worker for worker in workers if worker not in places])
        places = [worker or next(rest) for worker in places]
        self._last[group] = [(worker, workers[worker]) for worker in places]
        return places


def failover_of(plan: PhysicalPlan, strategy: str) -> RegionFailover:
    """Return the regions of `plan`; the whole job is one if the strategy is `full`."""
    subtasks = [
        SubtaskId(vertex.id, index)
        for vertex in plan.vertices
        for index in range(vertex.parallelism)
    ]
    links = [link for edge in plan.edges for link in _links(plan, edge)]
    # The heads of a loop count its rounds together, and each has its tail in the same slot.
    loops = [
        [SubtaskId(v, i) for v in (loop.head, loop.tail) for i in range(_width(plan, v))]
        for loop in plan.loops
    ]
    return RegionFailover(subtasks, links, [subtasks] if strategy == "full" else loops)


def _width(plan: PhysicalPlan, vertex: int) -> int:
    return plan.vertices[vertex].parallelism


def _links(plan: PhysicalPlan, edge: ExchangeEdge) -> list[SubtaskLink]:
    senders, receivers = _width(plan, edge.source), _width(plan, edge.target)
    if is_pointwise(edge.partitioning):
        return [
            SubtaskLink((SubtaskId(edge.source, sender),), (SubtaskId(edge.target, receiver),))
            for sender, receiver in Connections(edge.partitioning, senders, receivers)
        ]
    everyone = tuple(SubtaskId(edge.source, index) for index in range(senders))
    return [
        SubtaskLink(everyone, tuple(SubtaskId(edge.target, index) for index in range(receivers)))
    ]


@final
class Executions:
    """Has the attempt of each region, and the worker of each subtask; both change by region.

    Args:
        plan: the plan that runs.
        strategy: the value of `jobmanager.execution.failover-strategy`.
    """

    def __init__(self, plan: PhysicalPlan, strategy: str) -> None:
        self.plan: Final = plan
        self.failover: Final = failover_of(plan, strategy)
        self.slots: list[str] = []
        """The ids of the workers, in the order of their slots."""
        self.placement: Mapping[SubtaskId, str] = {}
        """The worker of each subtask."""
        self._attempts: dict[RegionId, int] = {}

    def place(self, workers: Sequence[str], slots: Slots) -> None:
        """Place the subtasks on these workers, in this order."""
        self.slots = list(workers)
        placement = Placement(self.plan, workers, slots)
        self.placement = {
            SubtaskId(vertex.id, index): placement.worker_of(vertex.id, index)
            for vertex in self.plan.vertices
            for index in range(vertex.parallelism)
        }

    def begin(self, regions: Collection[RegionId], attempt: int) -> None:
        """Let only messages of this attempt count for these regions from now on."""
        for region in regions:
            self._attempts[region] = attempt

    @property
    def attempts(self) -> list[int]:
        """The attempts of all regions, each once, the oldest first."""
        return sorted(set(self._attempts.values()))

    def attempt_of(self, subtask: SubtaskId) -> int | None:
        """Return the attempt of a subtask; None before it has one."""
        return self._attempts.get(self.failover.region_of(subtask))

    def is_current(self, message: Messages) -> bool:
        """Return False for a message of an attempt that is over."""
        attempt = getattr(message, "attempt", None)
        vertex, index = getattr(message, "vertex", -1), getattr(message, "index", -1)
        if isinstance(message, LoopRoundBack):
            vertex = next(loop.head for loop in self.plan.loops if loop.name == message.loop)
        region = getattr(message, "region", -1)
        if vertex < 0 and region >= 0:
            return self._attempts.get(RegionId(region)) == attempt
        if vertex >= 0:
            return self.attempt_of(SubtaskId(vertex, index)) == attempt
        return attempt in self._attempts.values()

    def regions_of(self, attempt: int) -> frozenset[RegionId]:
        """Return the regions that run in this attempt; none if it is over."""
        return frozenset(region for region, own in self._attempts.items() if own == attempt)

    def regions_on(self, worker_id: str) -> frozenset[RegionId]:
        """Return the regions that have a subtask on a worker."""
        return frozenset(
            self.failover.region_of(subtask)
            for subtask, owner in self.placement.items()
            if owner == worker_id
        )

    def name(self, subtask: SubtaskId) -> str:
        """Return the name of a subtask, in the usual form `vertex name (1/2)`."""
        vertex = self.plan.vertices[subtask.vertex]
        return f"{vertex.name} ({subtask.index + 1}/{vertex.parallelism})"

    def describe(self, regions: Collection[RegionId]) -> str:
        """Describe what restarts, for a person: `region 2 of 4 (map (2/4)), 1 of 4 tasks`."""
        everyone = sum(map(len, self.failover.regions))
        if len(regions) == len(self.failover.regions):
            return f"all {everyone} tasks" if everyone > 1 else "the only task"
        tasks = self.failover.subtasks_of(regions)
        names = [self.name(task) for task in tasks[:NAMES_SHOWN_MAX]]
        names += [f"{len(tasks) - NAMES_SHOWN_MAX} more"] * (len(tasks) > NAMES_SHOWN_MAX)
        numbers = ", ".join(str(region + 1) for region in sorted(regions))
        word = "region" if len(regions) == 1 else "regions"
        return (
            f"{word} {numbers} of {len(self.failover.regions)} ({', '.join(names)}), "
            f"{len(tasks)} of {everyone} tasks"
        )

    def tasks(self, regions: Iterable[RegionId]) -> list[str]:
        """Return the names of all subtasks of some regions."""
        return [self.name(task) for task in self.failover.subtasks_of(regions)]
