"""The operators that stand in for the sources and sinks of a job in a harness.

A source reads what the test pushes; a sink collects what is written, and so does a listener at each side
output that the job does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import pyarrow as pa

from ..operators.base import Operator, OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.sink import Guarantee, Sink, SinkWriter
from ..operators.source import Source, SourceReader
from ..state.snapshot import CommitPermit
from .world import SPLITS, Bell, Readers, world_of

# --- sinks -----------------------------------------------------------------------------------------


_ALL: Final = frozenset(Guarantee)


class CollectingSink(Sink):
    """Collects the written records, and makes them visible when the real sink would: at once, or when
    committed.
    """

    guarantees = _ALL

    def __init__(self, token: str, name: str, real: Sink) -> None:
        self.token = token
        self.name = name
        self.guarantee = real.guarantee
        self.needs_columns = real.needs_columns

    def writer(self) -> SinkWriter:
        return _CollectingWriter(self)

    def describe(self) -> str:
        return "harness"


class _CollectingWriter(SinkWriter):
    def __init__(self, sink: CollectingSink) -> None:
        self._world = world_of(sink.token)
        self._box = self._world.sinks[sink.name]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._world.begin_attempt(context.attempt)

    def write(self, batch: Batch) -> None:
        entry = (self._world.next_written(), batch)
        if self._box.transactional:
            self._box.writing.setdefault(self.context.subtask_index, []).append(entry)
        else:
            self._box.visible.append(entry)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        batches = self._box.writing.pop(self.context.subtask_index, [])
        if not batches:
            return None
        committable = f"{self._world.token}/{self._world.next_written()}".encode()
        self._box.rolled[committable] = (self.context.attempt, batches)
        return lambda: [committable]

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        """Commit the batches. A missing one was committed before, or belongs to the world of a
        savepoint.
        """
        for committable in committables:
            _, batches = self._box.rolled.pop(committable, (0, []))
            self._box.visible.extend(batches)


class SideListener(Operator):
    """Collects a side output that no step of the job reads."""

    def __init__(self, token: str, name: str) -> None:
        self._world = world_of(token)
        self._box = self._world.sides[name]

    def process(self, batch: Batch, input_index: int) -> None:
        self._box.visible.append((self._world.next_written(), batch))

    def on_watermark(self, timestamp: int) -> None:
        """Do nothing, as there is no operator behind this one."""

    def on_idle(self, idle: bool) -> None:
        """Do nothing, as there is no operator behind this one."""


# --- sources ---------------------------------------------------------------------------------------


class _Split(msgspec.Struct, tag="headgate.testing"):
    """One log of a source; `position` counts its batches."""

    token: str
    number: int
    position: int = 0


@dataclass(frozen=True)
class PushSource(Source):
    """Stands in for the source with this name."""

    token: str
    name: str
    schema: pa.Schema | None
    row_type: type[Any] | None
    bounded: bool
    rejected_schema: pa.Schema | None

    def splits(self, parallelism: int) -> list[bytes]:
        return [
            msgspec.msgpack.encode(_Split(self.token, number))
            for number in range(max(SPLITS, parallelism))
        ]

    def reader(self) -> SourceReader:
        return _PushReader(self)

    def with_columns(self, columns: Sequence[str]) -> PushSource:
        if self.schema is None:
            return self
        kept = pa.schema([field for field in self.schema if field.name in columns])
        whole = len(kept) == len(self.schema)
        return replace(self, schema=kept, row_type=self.row_type if whole else None)

    def describe(self) -> str:
        return "harness"


class _PushReader(SourceReader):
    def __init__(self, source: PushSource) -> None:
        self._source = source
        self._world = world_of(source.token)
        self._box = self._world.sources[source.name]
        self._positions: dict[int, int] = {}
        self._bell = Bell()

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._world.begin_attempt(context.attempt)
        self._box.readers[context.subtask_index] = Readers(self._positions, self._bell.ring)

    def add_splits(self, splits: Sequence[bytes]) -> None:
        """Add splits. Those from the savepoint of another harness begin from the start; those of a real
        source are lost.
        """
        ours = [split for each in splits if (split := _decode(each)) is not None]
        for split in ours:
            known = split.token == self._source.token
            self._positions[split.number] = split.position if known else 0
        if splits and not ours:
            context = self.context
            numbers = range(context.subtask_index, SPLITS, context.parallelism)
            self._positions.update(dict.fromkeys(numbers, 0))

    def poll(self) -> Batch | None:
        found = self._next_entry()
        if found is None:
            return None
        split, batch = found
        self._positions[split] += 1
        if self._source.schema is None or not isinstance(batch, ColumnBatch):
            return batch
        return ColumnBatch(batch.data.select(self._source.schema.names), batch.timestamps)

    async def wait(self) -> None:
        if self._next_entry() is None and not self.finished:
            await self._bell.wait()

    @property
    def finished(self) -> bool:
        return self._box.ended and not any(
            len(self._box.logs.get(split, ())) > position
            for split, position in self._positions.items()
        )

    def snapshot(self) -> list[bytes]:
        return [
            msgspec.msgpack.encode(_Split(self._source.token, number, position))
            for number, position in sorted(self._positions.items())
        ]

    def _next_entry(self) -> tuple[int, Batch] | None:
        """Return the oldest entry that is released and unread, with its split."""
        entries = (
            (log[position], split)
            for split, log in self._box.logs.items()
            if (position := self._positions.get(split, len(log))) < len(log)
        )
        oldest = min(((place, split, batch) for (place, batch), split in entries), default=None)
        if oldest is None or oldest[0] >= self._world.released:
            return None
        return oldest[1], oldest[2]


def _decode(split: bytes) -> _Split | None:
    try:
        return msgspec.msgpack.decode(split, type=_Split)
    except msgspec.DecodeError:
        return None
