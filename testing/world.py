"""The world outside a job in a harness: the records put into its sources and those from its sinks.

Like the real world it survives crashes of the job. Sources, sinks and steps travel to the workers in
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
"""The number of splits of every source. Each subtask has some at any parallelism up to this."""


@dataclass(frozen=True, slots=True)
class Push:
    """An event: one batch was put into a source, as entry `index` of `split`."""

    source: str
    split: int
    index: int


@dataclass(frozen=True, slots=True)
class Advance:
    """An event: the event time of a source was declared to have reached `timestamp`, in ms."""

    source: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class EndOfRecords:
    """An event: a source has no more records."""

    source: str


HistoryEntry = Push | Advance | EndOfRecords


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
    """True once the readers of this attempt know that the source has ended."""
    closed: bool = False
    """True once the test can put nothing more in."""
    pushes: int = 0
    watermark: int | None = None

    def next_split(self) -> int:
        """Return the split for the next push, which goes to one subtask after the other."""
        subtasks = sorted(index for index, each in self.readers.items() if each.positions)
        if not subtasks:
            raise InternalError(f"a source without readers source=`{self.name}`")
        reader = self.readers[subtasks[self.pushes % len(subtasks)]]
        self.pushes += 1
        return min(reader.positions)

    def is_unread(self, push: Push) -> bool:
        """Return True if the present reader of the split has not reached this batch."""
        for reader in self.readers.values():
            if push.split in reader.positions:
                return reader.positions[push.split] <= push.index
        return False

    def wake(self) -> None:
        """Wake the readers, as there may be something to read."""
        for index in sorted(self.readers):
            self.readers[index].wake()


@dataclass(slots=True)
class SinkBox:
    """One sink, or an unused side output: the visible batches, and those that wait for their checkpoint."""

    name: str
    schema: pa.Schema | None
    row_type: type[Any] | None
    transactional: bool
    visible: list[tuple[int, Batch]] = field(default_factory=list)
    rolled: dict[bytes, tuple[int, list[tuple[int, Batch]]]] = field(default_factory=dict)
    """The attempt that wrote them, and the batches, by committable."""
    writing: dict[int, list[tuple[int, Batch]]] = field(default_factory=dict)
    """The batches written in this attempt since the last barrier, by subtask."""

    def pending(self, attempt: int) -> Iterator[tuple[int, Batch]]:
        """Yield the batches that this attempt wrote and no checkpoint has committed."""
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
    """Run the timers that are due by now."""


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
    """The event-time steps by name and subtask."""
    written: int = 0

    def begin_attempt(self, attempt: int) -> None:
        """Forget the parts of the previous attempt, as the first part of a new one has opened."""
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
        """Return all subtasks of these steps, in a fixed order."""
        return [step for name in names for _, step in sorted(self.steps.get(name, {}).items())]

    def next_written(self) -> int:
        """Return the next number for a written batch, by which batches are returned in order."""
        self.written += 1
        return self.written


_worlds: WeakValueDictionary[str, World] = WeakValueDictionary()


def new_world() -> World:
    """Return a new world that parts of a job can find by its token."""
    world = World()
    _worlds[world.token] = world
    return world


def world_of(token: str) -> World:
    """Return the world with this token, which a harness keeps alive."""
    world = _worlds.get(token)
    if world is None:
        raise InternalError("a part of a harness outlived it")
    return world


class Bell:
    """An event that may be rung while the loop stands still."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake all waiting tasks."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until the bell rings next."""
        self._event.clear()
        await self._event.wait()
