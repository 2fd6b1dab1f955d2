"""Small runs of sources, sinks and jobs, for the tests of connectors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa

from headgate.operators.elements import ColumnBatch
from headgate.operators.source import Source
from headgate.testing.connectors import make_context, read_all


def read_ids(source: Source) -> list[int]:
    """Return the ids of all records of a bounded source."""
    return [row["id"] for row in asyncio.run(read_all(source))]


def write(sink: Any, data: pa.RecordBatch, attempt: int = 1) -> None:
    """Write some rows before one checkpoint, at least once."""

    async def run() -> None:
        writer = sink.writer()
        writer.open(make_context(attempt=attempt))
        await asyncio.to_thread(writer.prepare)
        writer.write(ColumnBatch(data))
        await asyncio.to_thread(writer.roll(1))
        await asyncio.to_thread(writer.close)

    asyncio.run(asyncio.wait_for(run(), 120))


class Fails:
    """Lets records pass, and raises at some of them, once each.

    Args:
        marks: a directory for the notes of where it has failed.
        at: the ids of these records.
    """

    def __init__(self, marks: Path, at: tuple[int, ...]) -> None:
        self._marks, self._at = marks, at

    def __call__(self, record: Any) -> Any:
        number = record if isinstance(record, int) else record.id
        mark = self._marks / str(number)
        if number in self._at and not mark.exists():
            mark.touch()
            raise RuntimeError("planted")
        return record
