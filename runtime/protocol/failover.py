"""Finds the pipelined regions that must restart when a subtask fails.

A *region* is a set of subtasks that stream to each other: a connected component over pipelined
exchanges. A subtask can only be restored together with its whole region, since its senders would
have to send lost records again, and its receivers would get twice the records that it sends again.
Regions without an exchange between them are restored on their own. Three rules decide which (Flink,
"Restart Pipelined Region Failover Strategy"):

1. The region of the failed subtask restarts.
2. If a region that restarts consumes a kept result that is not available any more, the region that
   produces it restarts as well.
3. Every region that consumes a result of one that restarts does, too: the recomputed result may
   differ.

*Kept* results (Flink: blocking) outlive their producer and cut regions. The exchange of this
project keeps none: all its channels are pipelined, so a region is a component of the whole graph,
and rules 2 and 3 add nothing. That holds for data that has ended, too. A finished subtask is no
boundary: it stays to forward barriers, and the records it sent are nowhere but in the state of its
receivers. If one of those fails, it restarts with them; if the restored checkpoint has it as
finished, it reads nothing and sends its end again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NewType, final

import msgspec

from ...errors import check
from .ids import SubtaskId

RegionId = NewType("RegionId", int)
"""The number of a region of a plan: 0, 1, ... in the order of their first subtasks."""


@final
class SubtaskLink(msgspec.Struct, frozen=True):
    """An exchange: every producer sends to every consumer.

    Attributes:
        producers: at least one.
        consumers: at least one.
        kept: each producer's result outlives it, so that a consumer can read it again.
    """

    producers: tuple[SubtaskId, ...]
    consumers: tuple[SubtaskId, ...]
    kept: bool = False


@final
class RegionFailover:
    """The regions of one plan.

    Args:
        subtasks: all of them.
        links: what connects them.
        together: further sets of subtasks that only restart together.
    """

    def __init__(
        self,
        subtasks: Collection[SubtaskId],
        links: Sequence[SubtaskLink],
        together: Iterable[Collection[SubtaskId]] = (),
    ) -> None:
        check(subtasks, "regions of nothing")
        joined = [(*link.producers, *link.consumers) for link in links if not link.kept]
        self.regions: tuple[frozenset[SubtaskId], ...] = _components(subtasks, [*joined, *together])
        """The regions in the order of their first subtasks."""
        self._region_of = {
            subtask: RegionId(number)
            for number, region in enumerate(self.regions)
            for subtask in region
        }
        self._kept = [link for link in links if link.kept]

    @property
    def everything(self) -> frozenset[RegionId]:
        """Return all regions."""
        return frozenset(RegionId(number) for number in range(len(self.regions)))

    def region_of(self, subtask: SubtaskId) -> RegionId:
        """Return the region of a subtask."""
        return self._region_of[subtask]

    def subtasks_of(self, regions: Iterable[RegionId]) -> list[SubtaskId]:
        """Return the subtasks of some regions, in order."""
        return sorted(subtask for region in regions for subtask in self.regions[region])

    def restart(
        self, failed: Iterable[RegionId], gone: Collection[SubtaskId] = ()
    ) -> frozenset[RegionId]:
        """Return the regions to restart.

        Args:
            failed: regions that have failed.
            gone: producers whose kept results are not available any more.
        """
        found: set[RegionId] = set()
        queue = list(failed)
        while queue:
            region = queue.pop()
            if region not in found:
                found.add(region)
                queue += self._required(region, gone)
                queue += self._consumers(region)
        return frozenset(found)

    def _required(self, region: RegionId, gone: Collection[SubtaskId]) -> Iterable[RegionId]:
        for link in self._kept:
            if any(self._region_of[consumer] == region for consumer in link.consumers):
                yield from (self._region_of[p] for p in link.producers if p in gone)

    def _consumers(self, region: RegionId) -> Iterable[RegionId]:
        for link in self._kept:
            if any(self._region_of[producer] == region for producer in link.producers):
                yield from (self._region_of[consumer] for consumer in link.consumers)


def _components(
    subtasks: Collection[SubtaskId], joined: Iterable[Collection[SubtaskId]]
) -> tuple[frozenset[SubtaskId], ...]:
    """Connected components; union-find with path halving."""
    parent = {subtask: subtask for subtask in subtasks}

    def root(subtask: SubtaskId) -> SubtaskId:
        while parent[subtask] != subtask:
            parent[subtask] = parent[parent[subtask]]
            subtask = parent[subtask]
        return subtask

    for group in joined:
        first, *others = group
        for other in others:
            parent[root(other)] = root(first)
    found: dict[SubtaskId, set[SubtaskId]] = {}
    for subtask in sorted(subtasks):
        found.setdefault(root(subtask), set()).add(subtask)
    return tuple(frozenset(members) for members in found.values())
