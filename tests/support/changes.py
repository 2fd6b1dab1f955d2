"""Changes of tables as tests read them, and a model that they are applied to."""

from __future__ import annotations

from typing import Any

from headgate.operators.source import Source, SourceReader
from headgate.testing.connectors import open_reader, records_of


async def some(reader: SourceReader, batches: int) -> list[Any]:
    """Return the records of the next batches; fewer if the reader has finished."""
    found: list[Any] = []
    while batches and not reader.finished:
        batch = reader.poll()
        if batch is not None:
            found += records_of(batch)
            batches -= 1
        elif not reader.finished:
            await reader.wait()
    return found


async def rest(source: Source, positions: list[bytes]) -> list[Any]:
    """Return all records that follow positions."""
    reader = open_reader(source, positions)
    try:
        return await some(reader, 1_000_000)
    finally:
        reader.close()


def apply(state: dict[Any, Any], records: list[Any]) -> None:
    """Apply changes to a model, which refuses those that would be doubled or lost."""
    for record in records:
        row = {name: value for name, value in record.items() if name != "op"}
        key = row["id"]
        if record["op"] in ("insert", "snapshot"):
            assert key not in state, record
            state[key] = row
        elif record["op"] == "update":
            assert key in state, record
            state[key] = row
        elif record["op"] == "delete":
            assert state.pop(key, None) is not None, record
        else:
            state.clear()
