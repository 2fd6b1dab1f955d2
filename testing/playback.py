"""Lets the job of a harness live through the history of its world, and again after a crash."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..operators.elements import Batch
from .run import VirtualRun
from .world import Advance, End, HistoryEntry, Push, SourceBox, World


class Playback:
    """Adds to the history of a world, one entry at a time; the job comes to rest after each."""

    def __init__(self, world: World, run: VirtualRun) -> None:
        self._world = world
        self._run = run

    def push(self, box: SourceBox, batches: Sequence[Batch]) -> None:
        """A source brings these batches, all in one subtask."""
        if batches:
            split = box.next_split()
            log = box.logs.setdefault(split, [])
            for batch in batches:
                self._world.history.append(Push(box.name, split, len(log)))
                log.append((len(self._world.history) - 1, batch))
        self._release(len(self._world.history))

    def advance(self, box: SourceBox, timestamp: int) -> None:
        """Event time of a source has come so far."""
        box.watermark = timestamp
        self._world.history.append(Advance(box.name, timestamp))
        self._declare(box, timestamp)

    def end(self, box: SourceBox) -> None:
        """A source has no more data."""
        box.closed = box.ended = True
        self._world.history.append(End(box.name))
        self._release(len(self._world.history))

    def catch_up(self) -> None:
        """Time has passed: what was due by now and put off is done."""
        for step in self._world.event_time_steps(sorted(self._world.steps)):
            self._run.soon(step.catch_up)
        self._run.settle()

    def replay(self) -> None:
        """Have a new attempt live through what it does not remember, in the order it happened."""
        declared: dict[str, int] = {}
        for place, entry in enumerate(self._world.history):
            if isinstance(entry, Advance):
                declared[entry.source] = entry.timestamp  # the last before a record says it all
            elif self._is_news(entry):
                self._declare_all(declared)
                if isinstance(entry, End):
                    self._world.sources[entry.source].ended = True
                self._release(place + 1)
        self._declare_all(declared)
        self._release(len(self._world.history))

    def _is_news(self, entry: HistoryEntry) -> bool:
        if isinstance(entry, Push):
            return self._world.sources[entry.source].is_unread(entry)
        return isinstance(entry, End)

    def _release(self, until: int) -> None:
        """Let the readers see history up to entry `until`."""
        self._world.released = until
        for box in self._world.sources.values():
            box.wake()
        self._run.settle()

    def _declare(self, box: SourceBox, timestamp: int) -> None:
        for step in self._world.event_time_steps(box.event_time_steps):
            self._run.soon(partial(step.declare, timestamp))
        self._run.settle()

    def _declare_all(self, declared: dict[str, int]) -> None:
        for source, timestamp in declared.items():
            self._declare(self._world.sources[source], timestamp)
        declared.clear()
