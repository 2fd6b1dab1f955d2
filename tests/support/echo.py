"""A source that emits a record only once the one before has arrived at the sink of its job."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence

from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.source import Source, SourceReader

ROUNDS = 20
PATIENCE_S = 60.0
ARRIVED: queue.SimpleQueue[int] = queue.SimpleQueue()
"""The records that the sink has seen and the source has not heard of."""


def arrive(record: int) -> None:
    ARRIVED.put(record)


class Echo(Source[int]):
    """Emits 0, 1, 2, ..., each once the one before has arrived at the sink."""

    bounded = True

    def splits(self, parallelism: int) -> list[bytes]:
        return [b"all"]

    def reader(self) -> SourceReader:
        return EchoReader()


class EchoReader(SourceReader):
    def __init__(self) -> None:
        self._next = 0
        self._reads = False
        self._arrived = -1

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self._reads = bool(splits)

    def poll(self) -> Batch | None:
        if self.finished or self._arrived < self._next - 1:
            return None
        self._next += 1
        return ObjectBatch([self._next - 1])

    async def wait(self) -> None:
        if not self._reads:
            await asyncio.Event().wait()
        async with asyncio.timeout(PATIENCE_S):
            while ARRIVED.empty():  # noqa: ASYNC110  the sink may be in another event loop
                await asyncio.sleep(0.001)
        self._arrived = ARRIVED.get()

    @property
    def finished(self) -> bool:
        return not self._reads or self._next >= ROUNDS

    def snapshot(self) -> list[bytes]:
        return []
