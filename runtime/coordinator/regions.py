"""The regions of a physical plan, and which attempt of each one runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

from ..control.messages import LoopRoundBack
from ..exchange.partitioners import connections
from ..plan import ExchangeEdge, PhysicalPlan, is_pointwise
from ..protocol.failover import Link, RegionFailover, RegionId
from ..protocol.ids import SubtaskId
from .placement import Slots, place

NAMES_SHOWN_MAX: Final = 4
"""Subtasks that are named where a restart is announced."""


def failover_of(plan: PhysicalPlan, strategy: str) -> RegionFailover:
    """The regions of `plan`; one of everything if the strategy is `full`."""
    subtasks = [
        SubtaskId(vertex.id, index)
        for vertex in plan.vertices
        for index in range(vertex.parallelism)
    ]
    links = [link for edge in plan.edges for link in _links(plan, edge)]
    # Heads of a loop count its rounds together, and each has its tail in the same slot.
    loops = [
        [SubtaskId(v, i) for v in (loop.head, loop.tail) for i in range(_width(plan, v))]
        for loop in plan.loops
    ]
    return RegionFailover(subtasks, links, [subtasks] if strategy == "full" else loops)


def _width(plan: PhysicalPlan, vertex: int) -> int:
    return plan.vertices[vertex].parallelism


def _links(plan: PhysicalPlan, edge: ExchangeEdge) -> list[Link]:
    senders, receivers = _width(plan, edge.source), _width(plan, edge.target)
    if is_pointwise(edge.partitioning):
        return [
            Link((SubtaskId(edge.source, sender),), (SubtaskId(edge.target, receiver),))
            for sender, receiver in connections(edge.partitioning, senders, receivers)
        ]
    everyone = tuple(SubtaskId(edge.source, index) for index in range(senders))
    return [Link(everyone, tuple(SubtaskId(edge.target, index) for index in range(receivers)))]


@final
class Executions:
    """Each region runs on its own: with an attempt of its own, on workers that may change beside others.

    Args:
        plan: what runs.
        strategy: the value of `jobmanager.execution.failover-strategy`.
    """

    def __init__(self, plan: PhysicalPlan, strategy: str) -> None:
        self.plan: Final = plan
        self.failover: Final = failover_of(plan, strategy)
        self.slots: list[str] = []
        """The workers, in the order in which they give the job its slots."""
        self.placement: Mapping[SubtaskId, str] = {}
        """The worker of each subtask."""
        self._attempts: dict[RegionId, int] = {}

    def place(self, workers: Sequence[str], slots: Slots) -> None:
        """Take these workers, in this order."""
        self.slots = list(workers)
        placed = place(self.plan, workers, slots)
        self.placement = {SubtaskId(*subtask): owner for subtask, owner in placed.items()}

    def begin(self, regions: Collection[RegionId], attempt: int) -> None:
        """From now on only messages of this attempt count for these regions."""
        for region in regions:
            self._attempts[region] = attempt

    @property
    def attempts(self) -> list[int]:
        """The attempts of all regions, each once, the oldest first."""
        return sorted(set(self._attempts.values()))

    def attempt_of(self, subtask: SubtaskId) -> int | None:
        """The attempt of a subtask; None before it has one."""
        return self._attempts.get(self.failover.region_of(subtask))

    def is_current(self, message: Any) -> bool:
        """False if what a worker says is of an attempt that is over."""
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
        """The regions that run in this attempt; none if it is over."""
        return frozenset(region for region, own in self._attempts.items() if own == attempt)

    def regions_on(self, worker_id: str) -> frozenset[RegionId]:
        """The regions that have a subtask on a worker."""
        return frozenset(
            self.failover.region_of(subtask)
            for subtask, owner in self.placement.items()
            if owner == worker_id
        )

    def name(self, subtask: SubtaskId) -> str:
        """`vertex name (1/2)`, as everywhere."""
        vertex = self.plan.vertices[subtask.vertex]
        return f"{vertex.name} ({subtask.index + 1}/{vertex.parallelism})"

    def describe(self, regions: Collection[RegionId]) -> str:
        """`region 2 of 4 (map (2/4)), 1 of 4 tasks`: what restarts, for a person."""
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
        """The names of all subtasks of some regions."""
        return [self.name(task) for task in self.failover.subtasks_of(regions)]
