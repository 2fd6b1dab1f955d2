"""Watermark alignment: sources that wait for each other. Reports in, limits out.

Every member of a group reports its event time regularly. The least of them, plus the drift that the
user allows, is the limit: splits whose watermark is above it are paused. A limit is always above
the report of the slowest member, and members keep reporting while they wait: so the slowest may
always read, and those that wait for it learn of its progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, final

from ...errors import check
from ...operators.elements import WATERMARK_MAX
from .ids import SubtaskId

NO_LIMIT = WATERMARK_MAX


@final
class Member(NamedTuple):
    """One aligned step in one subtask of a source."""

    subtask: SubtaskId
    step: str


@final
class Announcement(NamedTuple):
    """Tell all members of `group` to pause splits above `limit` (ms)."""

    group: str
    limit: int


@final
class AlignmentGroup:
    """The active members of one group, and the last announcement.

    Members that have not reported yet, are idle or have finished are not waited for.
    """

    def __init__(self, max_drift_ms: int, every_ms: int) -> None:
        check(max_drift_ms >= 0, "a drift below 0", max_drift_ms=max_drift_ms)
        self._max_drift_ms = max_drift_ms
        # Reports come every `every_ms` by clocks of their own, so a timely report must never be too
        # early.
        self._pause_ms = every_ms // 2
        self._reached: dict[Member, int] = {}
        self._announced = NO_LIMIT
        self._announced_ms: int | None = None

    @property
    def announced(self) -> int:
        """The limit that members were told last; NO_LIMIT before the first."""
        return self._announced

    @property
    def limit(self) -> int:
        """The limit of splits; NO_LIMIT: no member is waited for."""
        slowest = min(self._reached.values(), default=None)
        return NO_LIMIT if slowest is None else min(slowest + self._max_drift_ms, NO_LIMIT)

    def report(self, member: Member, watermark: int | None, now_ms: int) -> int | None:
        """Note a member's watermark; None: it is idle. Return a limit to announce."""
        if watermark is None:
            self._reached.pop(member, None)
        else:
            self._reached[member] = watermark
        return self._announce(now_ms)

    def leave(self, subtask: SubtaskId, now_ms: int) -> int | None:
        """Note that a subtask has finished. Return a limit to announce."""
        for member in [member for member in self._reached if member.subtask == subtask]:
            del self._reached[member]
        return self._announce(now_ms)

    def _announce(self, now_ms: int) -> int | None:
        early = self._announced_ms is not None and now_ms - self._announced_ms < self._pause_ms
        if early or self.limit == self._announced:
            return None  # if it is early, the members that wait will report again
        self._announced, self._announced_ms = self.limit, now_ms
        return self._announced


GroupSettings: TypeAlias = tuple[int, int]
"""The largest drift and the time between reports, both in ms."""


@final
class WatermarkAlignment:
    """All groups of one attempt."""

    def __init__(self, groups: Mapping[str, GroupSettings]) -> None:
        self._groups = {name: AlignmentGroup(*settings) for name, settings in groups.items()}

    def report(
        self, group: str, member: Member, watermark: int | None, now_ms: int
    ) -> list[Announcement]:
        """Note a member's progress; see `AlignmentGroup.report`."""
        check(group in self._groups, "a report to an unknown alignment group", group=group)
        limit = self._groups[group].report(member, watermark, now_ms)
        return [] if limit is None else [Announcement(group, limit)]

    def announced(self) -> list[Announcement]:
        """Return the last announcements, for members that missed them; only of groups with a limit."""
        limits = {name: group.announced for name, group in self._groups.items()}
        return [Announcement(name, each) for name, each in limits.items() if each != NO_LIMIT]

    def leave(self, subtask: SubtaskId, now_ms: int) -> list[Announcement]:
        """Note that a subtask has finished, or restarts: no group waits for it."""
        limits = {name: each.leave(subtask, now_ms) for name, each in self._groups.items()}
        return [Announcement(name, limit) for name, limit in limits.items() if limit is not None]
