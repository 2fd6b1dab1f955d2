"""The failures of a job: what came first, what came with it, what followed, and how long that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

from .restore_figures import RestoreFigures

CONCURRENT_MAX: Final = 16
"""Failures kept beside a root one; when a worker dies all its subtasks fail."""


@final
@dataclass(frozen=True, slots=True)
class FailureEntry:
    """One failure.

    Attributes:
        time_ms: since the epoch.
        kind: the value of a FailureKind.
        where: the subtask, worker or part of the coordinator.
        worker: the worker it happened on, if it is known.
        text: what happened.
        detail: a traceback, or nothing.
        category: the value of a FailureCategory.
    """

    time_ms: int
    kind: str
    where: str
    worker: str
    text: str
    detail: str = ""
    category: str = ""


@final
@dataclass(slots=True)
class FailureStory:
    """A root failure and what became of it.

    Attributes:
        root: what ended the attempt.
        attempt: the attempt that it ended.
        labels: what the user's enrichers said of it.
        concurrent: failures of the same attempt that came before everything had stopped.
        concurrent_dropped: how many more there were.
        outcome: what followed: `restart 3 in 4000 ms`, or why the job failed for good.
        restored: what the next attempt began with.
        cancelling_ms: until everything had stopped.
        waiting_ms: the pause that the restart strategy wanted.
        deploying_ms: until all subtasks were ready, restored state included.
        down_ms: from the failure until all subtasks ran again; None: they do not yet.
        silent_ms: of a lost worker, how long nothing had been heard of it: noticing took at most that.
        restore: what `deploying_ms` consists of.
        tasks: what restarted for it, by name.
        tasks_total: how many tasks the job has.
    """

    root: FailureEntry
    attempt: int
    labels: dict[str, str] = field(default_factory=dict)
    concurrent: list[FailureEntry] = field(default_factory=list)
    concurrent_dropped: int = 0
    outcome: str = ""
    restored: str = ""
    cancelling_ms: int | None = None
    waiting_ms: int | None = None
    deploying_ms: int | None = None
    down_ms: int | None = None
    silent_ms: int | None = None
    restore: RestoreFigures = field(default_factory=RestoreFigures)
    tasks: list[str] = field(default_factory=list)
    tasks_total: int = 0

    def as_json(self) -> dict[str, Any]:
        """For clients: the fields of the root failure, and the rest."""
        found = asdict(self)
        return {**found.pop("root"), **found}


@final
class FailureHistory:
    """The last failures of a job. All times are of one clock, ms."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._stories: list[FailureStory] = []
        self._phase_ms = 0
        self._recovering = False

    def failed(
        self, root: FailureEntry, attempt: int, silent_ms: int | None = None
    ) -> FailureStory:
        """An attempt failed; or its restart did, which is a story of its own."""
        story = FailureStory(root, attempt, silent_ms=silent_ms)
        self._stories.append(story)
        del self._stories[: -self._kept]
        self._phase_ms = root.time_ms
        self._recovering = True
        return story

    def also(self, entry: FailureEntry) -> None:
        """Something else failed before all ran again, and is part of the same story."""
        story = self._open()
        if story is None:
            return
        if len(story.concurrent) < CONCURRENT_MAX:
            story.concurrent.append(entry)
        else:
            story.concurrent_dropped += 1

    def cancelled(self, now_ms: int, also: Sequence[FailureEntry] = ()) -> None:
        """Everything of the attempt has stopped; `also` failed on the way."""
        if (story := self._open()) is not None:
            for entry in also:
                self.also(entry)
            story.cancelling_ms = self._phase(now_ms)

    def decided(self, outcome: str, tasks: Sequence[str] = (), tasks_total: int = 0) -> None:
        """What follows, and for which tasks."""
        if (story := self._open()) is not None:
            story.outcome = outcome
            story.tasks, story.tasks_total = list(tasks), tasks_total

    def waited(self, now_ms: int) -> None:
        """The pause is over; the next attempt is deployed."""
        if (story := self._open()) is not None:
            story.waiting_ms = self._phase(now_ms)

    def deployed(self, now_ms: int, restored: str, figures: RestoreFigures | None = None) -> None:
        """All subtasks of the next attempt are ready."""
        if (story := self._open()) is not None:
            story.deploying_ms = self._phase(now_ms)
            story.restored = restored
            story.restore = figures or RestoreFigures()

    def running(self, now_ms: int) -> FailureStory | None:
        """They run: the story is over. Returns it; None: there was no failure."""
        if (story := self._open()) is not None:
            story.down_ms = max(0, now_ms - story.root.time_ms)
        self._recovering = False
        return story

    @property
    def recovering_since_ms(self) -> int | None:
        """When the job failed last, if it does not run again yet."""
        story = self._open()
        return None if story is None else story.root.time_ms

    @property
    def stories(self) -> list[FailureStory]:
        """Oldest first."""
        return list(self._stories)

    def _open(self) -> FailureStory | None:
        return self._stories[-1] if self._recovering and self._stories else None

    def _phase(self, now_ms: int) -> int:
        began, self._phase_ms = self._phase_ms, now_ms
        return max(0, now_ms - began)
