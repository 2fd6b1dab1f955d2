"""A source that follows a file: one JSON line per message, appended while the job runs.

A message is `{"at": <event time, ms>, "add": <name>, "script": <text>}`, `{"at": ..., "remove": <name>}`,
`{"at": ...}` (nothing new before that time), or `{"end": true}`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headgate.operators.elements import ObjectBatch
from headgate.operators.source import Source, SourceReader

LOOK_EVERY_S = 0.05


class Message(msgspec.Struct, frozen=True):
    """A request of an analyst: a query to add or to remove, from an event time on."""

    at: int
    add: str | None = None
    script: str = ""
    remove: str | None = None


def read_messages(lines: Sequence[str]) -> list[Message]:
    """The messages in lines of a query file, as far as its end."""
    found = []
    for line in lines:
        if "end" in json.loads(line):
            break
        found.append(msgspec.json.decode(line, type=Message))
    return found


class QueryFile(Source):
    """The messages of a file; ends at its line `{"end": true}`."""

    bounded = True

    def __init__(self, path: str) -> None:
        self.path = str(Path(path).resolve())

    def splits(self, parallelism: int) -> list[bytes]:
        return [b"0"]

    def reader(self) -> SourceReader:
        return _Reader(self.path)

    def describe(self) -> str:
        return f"queries({self.path})"


class _Reader(SourceReader):
    """Its position is the offset of the next line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset: int | None = None

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for split in splits:
            self._offset = int(split)

    def poll(self) -> ObjectBatch | None:
        if self._offset is None or not Path(self._path).exists():
            return None
        with Path(self._path).open("rb") as file:
            file.seek(self._offset)
            line = file.readline()
        if not line.endswith(b"\n"):
            return None  # nothing, or half a line that is being written
        self._offset += len(line)
        messages = read_messages([line.decode()])
        if not messages:
            self._offset = None
        return ObjectBatch(messages) if messages else None

    async def wait(self) -> None:
        await asyncio.sleep(LOOK_EVERY_S)

    @property
    def finished(self) -> bool:
        return self._offset is None

    def snapshot(self) -> list[bytes]:
        return [] if self._offset is None else [str(self._offset).encode()]
