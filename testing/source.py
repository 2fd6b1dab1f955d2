"""The source that stands in for each source of a job in a harness: it reads what the test pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pyarrow as pa

from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.source import Source, SourceReader
from .world import SPLITS, Bell, Readers, world_of


class _Split(msgspec.Struct, tag="headgate.testing"):
    """One log of a source; `position` counts its batches."""

    token: str
    number: int
    position: int = 0


@dataclass(frozen=True)
class PushSource(Source):
    """Stands in for the source of this name."""

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
        """Splits of a savepoint that another harness took begin anew; those of a real source are lost."""
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
        """The oldest entry that is released and unread, with its split."""
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
