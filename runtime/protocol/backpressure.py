"""Finds the causes of backpressure from the time use of all subtasks.

A vertex is *backpressured* if one of its subtasks waits for room downstream for more than a tenth
of the time. From there the search goes downstream, through all vertices that are backpressured as
well, to the first that are not. Those of them that are busy are the cause; if none is, there is no
finding of a cause. `explain` puts a finding into words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, final

import msgspec

OK_MAX_MS: Final = 100
"""Up to this many ms per second of waiting are no backpressure (levels as in Flink's UI)."""
LOW_MAX_MS: Final = 500
BUSY_MIN_MS: Final = 500
"""A subtask that works fewer ms per second than this is not a cause."""
BUSY_ALIKE_MS: Final = 50
"""Among subtasks that are equally busy the one with the most records is the hottest."""
SKEW_MIN: Final = 1.5
"""From this multiple of the mean on, records count as skewed."""
GROUP_SHARE_MIN: Final = 0.25
"""A key group with a smaller share of its subtask's records is not reported, nor is ..."""
GROUP_EXCESS_MIN: Final = 2.0
"""... one with less than this multiple of its even share."""
KEPT: Final = 0.98
"""The decay of the weight of a record per second: shares cover about the last minute."""


class Level(StrEnum):
    """A level of backpressure of a vertex."""

    OK = "OK"
    LOW = "LOW"
    HIGH = "HIGH"


def level_of(backpressured_ms: int) -> Level:
    """Return the level of a number of ms per second."""
    if backpressured_ms <= OK_MAX_MS:
        return Level.OK
    return Level.LOW if backpressured_ms <= LOW_MAX_MS else Level.HIGH


class WaitsFor(StrEnum):
    """The reasons, besides its own work, why a subtask does not proceed."""

    NOTHING = ""
    CALLS = "calls"
    """It has as many asynchronous calls in flight as allowed."""
    BARRIERS = "barriers"
    """It reads nothing from channels whose barrier has arrived, until all have."""


class HotGroup(NamedTuple):
    """The key group with the most records of a sender's sample, on one exchange.

    Attributes:
        edge: the exchange.
        subtask: the owner of the key group.
        group: the key group.
        records: its records in the sample.
        of_subtask: the records in the sample of all the key groups that `subtask` owns.
        of_all: all records in the sample.
    """

    edge: int
    subtask: int
    group: int
    records: int
    of_subtask: int
    of_all: int

    def is_hot(self, receivers: int, key_groups: int) -> bool:
        """Return True if it has far more of its subtask's records than an even share.

        Args:
            receivers: the number of subtasks behind the exchange.
            key_groups: the number of key groups.
        """
        return is_hot(self.records / max(1, self.of_subtask), receivers, key_groups)


def is_hot(share: float, receivers: int, key_groups: int) -> bool:
    """Return True if a key group with this share of its subtask's records is to be reported."""
    even = min(1.0, receivers / key_groups)
    return share >= max(GROUP_SHARE_MIN, GROUP_EXCESS_MIN * even)


@final
class HotKeyGroup(msgspec.Struct, frozen=True):
    """A key group that gets far more records than others of its subtask.

    Attributes:
        key_group: its number.
        subtask: the subtask that has it.
        records_share: its share of all records of the vertex, 0 to 1.
        subtask_share: its share of the records of its subtask.
    """

    key_group: int
    subtask: int
    records_share: float
    subtask_share: float


@final
class VertexShape(msgspec.Struct, frozen=True):
    """A vertex of the plan."""

    id: int
    name: str
    parallelism: int


@final
class Exchange(msgspec.Struct, frozen=True):
    """An edge of the plan, from vertex to vertex."""

    id: int
    source: int
    target: int


@final
class SubtaskLoad(msgspec.Struct, frozen=True):
    """The time use of a subtask, in ms per second, and its recent records.

    `records` may be in any unit that is the same for all subtasks of a vertex. `full` is the time
    in which it took nothing, since it had the most calls in flight: others wait for that as for its
    work.
    """

    busy: int
    idle: int
    backpressured: int
    records: float = 0.0
    waits_for: WaitsFor = WaitsFor.NOTHING
    hot_groups: tuple[HotGroup, ...] = ()
    full: int = 0

    @property
    def occupied(self) -> int:
        """The time in which others may have to wait for it."""
        return self.busy + self.full


@final
class BackpressuredVertex(msgspec.Struct, frozen=True):
    """A backpressured vertex."""

    vertex: VertexShape
    backpressured: int

    @property
    def level(self) -> Level:
        """The level of the subtask that waits most."""
        return level_of(self.backpressured)


@final
class SlowSubtask(msgspec.Struct, frozen=True):
    """A subtask that others wait for.

    Attributes:
        vertex: its vertex.
        subtask: the hottest one, from 0.
        load: of the subtask.
        busy_subtasks: the number of busy subtasks of the vertex.
        records_share: its share of the vertex's records, 0 to 1, as sampled by the senders, or else
            of the recent records; None: unknown, or there is only one subtask.
        key_group: one that makes up much of the subtask's records, or None.
        key_group_share: of the subtask's records, as sampled by the senders.
    """

    vertex: VertexShape
    subtask: int
    load: SubtaskLoad
    busy_subtasks: int
    records_share: float | None = None
    key_group: int | None = None
    key_group_share: float | None = None

    @property
    def name(self) -> str:
        """The name for a person."""
        return f"`{self.vertex.name}` ({self.subtask + 1}/{self.vertex.parallelism})"

    @property
    def is_skewed(self) -> bool:
        """True if the subtask gets far more than the mean."""
        share = self.records_share
        return share is not None and share * self.vertex.parallelism >= SKEW_MIN


@final
class Finding(msgspec.Struct, frozen=True):
    """Backpressured vertices that wait for the same one.

    `cause` is None if no vertex downstream is busy; `waiting` are then those where the search
    ended.
    """

    pressed: tuple[BackpressuredVertex, ...]
    cause: SlowSubtask | None
    waiting: tuple[SlowSubtask, ...] = ()


def find_causes(
    vertices: Sequence[VertexShape],
    edges: Sequence[Exchange],
    loads: Mapping[tuple[int, int], SubtaskLoad],
    key_groups: int,
) -> list[Finding]:
    """Return one finding per cause, in the order of the vertices that wait.

    Args:
        vertices: of the plan.
        edges: of the plan; they may form circles.
        loads: by vertex and subtask; subtasks that have not reported yet are missing.
        key_groups: the number of key groups.
    """
    return _Walk(vertices, edges, loads, key_groups).findings()


@final
class _Walk:
    def __init__(
        self,
        vertices: Sequence[VertexShape],
        edges: Sequence[Exchange],
        loads: Mapping[tuple[int, int], SubtaskLoad],
        key_groups: int,
    ) -> None:
        self._vertices = {vertex.id: vertex for vertex in vertices}
        self._edges = edges
        self._key_groups = key_groups
        self._loads: dict[int, dict[int, SubtaskLoad]] = {vertex.id: {} for vertex in vertices}
        for (vertex, index), load in sorted(loads.items()):
            self._loads[vertex][index] = load
        self._pressure = {
            vertex: max((load.backpressured for load in known.values()), default=0)
            for vertex, known in self._loads.items()
        }

    def findings(self) -> list[Finding]:
        blamed: dict[int, list[BackpressuredVertex]] = {}
        unblamed: dict[tuple[int, ...], list[BackpressuredVertex]] = {}
        for vertex in self._vertices.values():
            pressed = BackpressuredVertex(vertex, self._pressure[vertex.id])
            if pressed.level is Level.OK:
                continue
            passed, ends = self._downstream(vertex.id)
            # A vertex that is busy between waits counts only if none after it is busy all the time.
            causes = self._busy(ends) or self._busy(passed)
            for cause in causes:
                blamed.setdefault(cause, []).append(pressed)
            if not causes:
                unblamed.setdefault(tuple(ends), []).append(pressed)
        findings = [Finding(tuple(each), self._suspect(cause)) for cause, each in blamed.items()]
        for ends_, each in unblamed.items():
            waiting = tuple(self._suspect(end) for end in ends_ if self._loads[end])
            findings.append(Finding(tuple(each), None, waiting))
        return findings

    def _downstream(self, start: int) -> tuple[list[int], list[int]]:
        """Return the backpressured vertices downstream of `start`, and those where the search ends."""
        passed: list[int] = []
        ends: list[int] = []
        front, seen = [start], {start}
        while front:
            here = front.pop(0)
            for edge in self._edges:
                if edge.source != here or edge.target in seen:
                    continue
                seen.add(edge.target)
                if level_of(self._pressure[edge.target]) is Level.OK:
                    ends.append(edge.target)
                else:
                    passed.append(edge.target)
                    front.append(edge.target)
        return passed, ends

    def _busy(self, vertices: Iterable[int]) -> list[int]:
        return [vertex for vertex in vertices if self._busy_subtasks(vertex)]

    def _busy_subtasks(self, vertex: int) -> int:
        return sum(load.occupied > BUSY_MIN_MS for load in self._loads[vertex].values())

    def _suspect(self, vertex: int) -> SlowSubtask:
        shape, loads = self._vertices[vertex], self._loads[vertex]
        busiest = max(load.occupied for load in loads.values())
        alike = [i for i, load in loads.items() if load.occupied >= busiest - BUSY_ALIKE_MS]
        hottest = max(alike, key=lambda index: loads[index].records)
        busy = self._busy_subtasks(vertex)
        samples = self._samples(vertex, hottest)
        if not samples:
            total = sum(load.records for load in loads.values())
            known = shape.parallelism > 1 and total > 0
            share = loads[hottest].records / total if known else None
            return SlowSubtask(shape, hottest, loads[hottest], busy, share)
        # More precise than recent records, which show a hot subtask only after many buffers.
        share = sum(each.of_subtask for each in samples) / sum(each.of_all for each in samples)
        group, of_subtask = _hottest(samples)
        if not is_hot(of_subtask, shape.parallelism, self._key_groups):
            return SlowSubtask(shape, hottest, loads[hottest], busy, share)
        return SlowSubtask(shape, hottest, loads[hottest], busy, share, group, of_subtask)

    def _samples(self, vertex: int, subtask: int) -> list[HotGroup]:
        """Return the samples of senders whose hottest key group is the subtask's."""
        inputs = {edge.id for edge in self._edges if edge.target == vertex}
        return [
            hot
            for loads in self._loads.values()
            for load in loads.values()
            for hot in load.hot_groups
            if hot.edge in inputs and hot.subtask == subtask
        ]


def _hottest(samples: Sequence[HotGroup]) -> tuple[int, float]:
    """Return the key group with most records, and its share of its subtask's records."""
    records: dict[int, int] = {}
    for each in samples:
        records[each.group] = records.get(each.group, 0) + each.records
    group = max(records, key=lambda each: records[each])
    return group, records[group] / sum(each.of_subtask for each in samples)


def hot_key_groups(
    samples: Iterable[HotGroup], parallelism: int, key_groups: int
) -> list[HotKeyGroup]:
    """Return the hot key groups of a vertex, that with the most records first.

    Each sender tells only the one that it has most of, so shares of the vertex are at least these.

    Args:
        samples: of all senders, on all exchanges to the vertex.
        parallelism: of the vertex.
        key_groups: the number of key groups.
    """
    total = 0
    own: dict[int, list[HotGroup]] = {}
    for each in samples:
        total += each.of_all
        own.setdefault(each.group, []).append(each)
    found = []
    for group, parts in own.items():
        records = sum(each.records for each in parts)
        of_subtask = records / max(1, sum(each.of_subtask for each in parts))
        if is_hot(of_subtask, parallelism, key_groups):
            subtask = parts[0].subtask
            found.append(HotKeyGroup(group, subtask, records / max(1, total), of_subtask))
    return sorted(found, key=lambda each: (-each.records_share, each.key_group))


@final
class RecentRecords:
    """The recent records of each subtask; older ones count less."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], int] = {}
        self._recent: dict[tuple[int, int], float] = {}

    def report(self, vertex: int, index: int, records: int) -> None:
        """Take in a counter, about once a second."""
        subtask = vertex, index
        new = records - self._seen.get(subtask, 0)
        self._seen[subtask] = records
        self._recent[subtask] = KEPT * self._recent.get(subtask, 0.0) + new

    def of(self, vertex: int, index: int) -> float:
        """Return the records of a subtask, weighted by their age; 0 if it has not reported."""
        return self._recent.get((vertex, index), 0.0)

    def forget(self, vertex: int, index: int) -> None:
        """Reset the counter of a subtask."""
        self._seen.pop((vertex, index), None)
        self._recent.pop((vertex, index), None)

    def clear(self) -> None:
        """Reset all counters."""
        self._seen.clear()
        self._recent.clear()


NAMED_MAX: Final = 3
"""The number of vertices that are named, among those that wait for the same one."""


def explain(finding: Finding) -> str:
    """Name the vertices that wait, and the cause; or the state downstream, if none of it is busy."""
    pressed = _pressed(finding.pressed)
    if finding.cause is not None:
        return f"{pressed} because of {_blamed(finding.cause)}"
    if not finding.waiting:
        return f"{pressed}; nothing is known yet about what is downstream"
    seen = "; ".join(_waiting(suspect) for suspect in finding.waiting)
    return f"{pressed}, but nobody downstream is busy: {seen}"


def _pressed(pressed: Sequence[BackpressuredVertex]) -> str:
    named = [f"`{each.vertex.name}`" for each in pressed[:NAMED_MAX]]
    worst = max(pressed, key=lambda each: each.backpressured)
    level = f"{worst.level}, {_percent(worst.backpressured / 1000)}"
    if len(pressed) == 1:
        return f"{named[0]} is backpressured ({level})"
    left = len(pressed) - len(named)
    if left:
        named.append(f"{left} more")
    return f"{', '.join(named[:-1])} and {named[-1]} are backpressured (up to {level})"


def _blamed(cause: SlowSubtask) -> str:
    text = f"{cause.name}, {_time(cause.load)}"
    if cause.load.waits_for is WaitsFor.CALLS:
        text += " with the most calls in flight that it may have"
    share = cause.records_share
    if share is not None and (cause.is_skewed or cause.key_group is not None):
        return f"{text}: it gets {_percent(share)} of the records{_in_group(cause)}"
    if cause.busy_subtasks == cause.vertex.parallelism > 1:
        return f"{text}: all its subtasks are busy"
    return text


def _in_group(cause: SlowSubtask) -> str:
    if cause.key_group is None or cause.key_group_share is None:
        return ""
    return f", {_percent(cause.key_group_share)} of them in key group {cause.key_group}"


def _waiting(suspect: SlowSubtask) -> str:
    text = f"{suspect.name}, {_time(suspect.load)}"
    match suspect.load.waits_for:
        case WaitsFor.CALLS:
            return f"{text}, has the most calls in flight that it may have"
        case WaitsFor.BARRIERS:
            return f"{text}, waits for the other barriers of a checkpoint"
        case WaitsFor.NOTHING:
            return text


def _time(load: SubtaskLoad) -> str:
    """Return the time use, as far as others wait for it."""
    parts = {"busy": load.busy, "full": load.full}
    said = [f"{what} {_percent(ms / 1000)}" for what, ms in parts.items() if ms > OK_MAX_MS]
    return ", ".join(said) or f"busy {_percent(load.busy / 1000)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
