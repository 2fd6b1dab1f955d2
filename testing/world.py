"""The world outside a job in a harness: what was put into its sources and what came out of its sinks.

Like the real outside it survives crashes of the job. Sources, sinks and steps travel to the workers in
the job's plan; they carry the token of their world and find it here, in the same process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

import pyarrow as pa

from ..errors import InternalError
from ..operators.elements import Batch

SPLITS: Final = 128
"""Splits of every source: each subtask has some at any parallelism up to this."""


@dataclass(frozen=True, slots=True)
class Push:
    """One batch put into a source: entry `index` of `split`."""

    source: str
    split: int
    index: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Event time of a source declared to have come to `timestamp`, in ms."""

    source: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class End:
    """No more records from a source."""

    source: str


HistoryEntry = Push | Advance | End


@dataclass(slots=True)
class Readers:
    """The reader of one subtask, as the world sees it: positions by split, and a way to wake it."""

    positions: dict[int, int]
    wake: Callable[[], None]


@dataclass(slots=True)
class SourceBox:
    """One source: the batches put into each split, with their place in history."""

    name: str
    schema: pa.Schema | None
    row_type: type[Any] | None
    event_time_steps: tuple[str, ...]
    logs: dict[int, list[tuple[int, Batch]]] = field(default_factory=dict)
    readers: dict[int, Readers] = field(default_factory=dict)
    ended: bool = False
    """For the readers of this attempt: they have been told."""
    closed: bool = False
    """For the test: nothing more can be put in."""
    pushes: int = 0
    watermark: int | None = None

    def next_split(self) -> int:
        """Where the next push goes: to one subtask after the other."""
        subtasks = sorted(index for index, each in self.readers.items() if each.positions)
        if not subtasks:
            raise InternalError(f"a source without readers source=`{self.name}`")
        reader = self.readers[subtasks[self.pushes % len(subtasks)]]
        self.pushes += 1
        return min(reader.positions)

    def is_unread(self, push: Push) -> bool:
        """True if the subtask that has the split now has not come to this batch."""
        for reader in self.readers.values():
            if push.split in reader.positions:
                return reader.positions[push.split] <= push.index
        return False

    def wake(self) -> None:
        """There may be something to read."""
        for index in sorted(self.readers):
            self.readers[index].wake()


@dataclass(slots=True)
class SinkBox:
    """One sink, or a side output nobody reads: what is visible, and what waits for its checkpoint."""

    name: str
    schema: pa.Schema | None
    row_type: type[Any] | None
    transactional: bool
    visible: list[tuple[int, Batch]] = field(default_factory=list)
    rolled: dict[bytes, tuple[int, list[tuple[int, Batch]]]] = field(default_factory=dict)
    """By committable: the attempt that wrote it, and the batches."""
    writing: dict[int, list[tuple[int, Batch]]] = field(default_factory=dict)
    """By subtask: what was written since its last barrier, in this attempt."""

    def pending(self, attempt: int) -> Iterator[tuple[int, Batch]]:
        """What this attempt wrote and no checkpoint has committed."""
        for written_by, batches in self.rolled.values():
            if written_by == attempt:
                yield from batches
        for batches in self.writing.values():
            yield from batches


@dataclass(frozen=True, slots=True)
class EventTimeStep:
    """One subtask of a step that makes watermarks. Both take effect when the job runs next."""

    declare: Callable[[int], None]
    """Send this watermark."""
    catch_up: Callable[[], None]
    """Do what was due by now."""


@dataclass(slots=True, weakref_slot=True)
class World:
    """Everything outside one job."""

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    history: list[HistoryEntry] = field(default_factory=list)
    released: int = 0
    """Readers see entries of the history below this number only."""
    attempt: int = 0
    sources: dict[str, SourceBox] = field(default_factory=dict)
    sinks: dict[str, SinkBox] = field(default_factory=dict)
    sides: dict[str, SinkBox] = field(default_factory=dict)
    steps: dict[str, dict[int, EventTimeStep]] = field(default_factory=dict)
    """By name and subtask."""
    written: int = 0

    def begin_attempt(self, attempt: int) -> None:
        """The first part of a new attempt has opened: forget those of the attempt before."""
        if attempt <= self.attempt:
            return
        self.attempt = attempt
        self.released = 0
        self.steps.clear()
        for source in self.sources.values():
            source.readers.clear()
            source.ended = False
        for sink in self.sinks.values():
            sink.writing.clear()

    def event_time_steps(self, names: Iterable[str]) -> list[EventTimeStep]:
        """All subtasks of these steps, in a fixed order."""
        return [step for name in names for _, step in sorted(self.steps.get(name, {}).items())]

    def next_written(self) -> int:
        """Numbers what is written, so that it can be given back in that order."""
        self.written += 1
        return self.written


_worlds: WeakValueDictionary[str, World] = WeakValueDictionary()


def new_world() -> World:
    """A world that parts of a job can find by its token."""
    world = World()
    _worlds[world.token] = world
    return world


def world_of(token: str) -> World:
    """The world with this token; a harness keeps it alive."""
    world = _worlds.get(token)
    if world is None:
        raise InternalError("a part of a harness outlived it")
    return world


class Bell:
    """An event that may be rung while the loop stands still."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake whoever waits."""
        self._event.set()

    async def wait(self) -> None:
        """Until the bell rings next."""
        self._event.clear()
        await self._event.wait()
