"""A checkpoint store in memory: for tests, and for jobs whose state may die with the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from ...errors import MissingFileError
from .base import CheckpointStore, Created, Existed, FileContent


class MemoryStore(CheckpointStore):
    """Objects in a dict. Stores of the same root in one process see the same objects."""

    creates_are_atomic = True
    _shared: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, root: str, objects: dict[str, bytes] | None = None) -> None:
        """Create a store.

        With `objects` it uses that dict, else one that all stores of `root` share.
        """
        self._root = root
        self._objects = self._shared.setdefault(root, {}) if objects is None else objects

    @classmethod
    def forget(cls, root: str) -> None:
        """Drop all objects of `root`; open stores keep theirs."""
        cls._shared.pop(root, None)

    async def open(self, *, writable: bool = True) -> None:
        """Do nothing; a dict honours every condition."""

    async def close(self) -> None:
        """Do nothing; the objects stay."""

    async def read(self, name: str) -> bytes | None:
        return self._objects.get(name)

    async def put(self, name: str, data: bytes) -> None:
        self._objects[name] = bytes(data)

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        existing = self._objects.setdefault(name, bytes(data))
        return Created() if existing == data else Existed(existing)

    async def delete(self, name: str) -> None:
        self._objects.pop(name, None)

    async def write_file(self, name: str, data: FileContent) -> None:
        if isinstance(data, Path):
            data = await asyncio.to_thread(data.read_bytes)
        self._objects[name] = bytes(data)

    async def read_file(self, name: str) -> bytes:
        data = self._objects.get(name)
        if data is None:
            raise MissingFileError(f"a state file is missing name=`{name}`", where=self.describe())
        return data

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return (await self.read_file(name))[start : start + length]

    async def download(self, name: str, path: Path) -> None:
        await asyncio.to_thread(path.write_bytes, await self.read_file(name))

    async def list_files(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        for name, data in list(self._objects.items()):
            if name.startswith(prefix):
                yield name, len(data)

    async def list_directories(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._objects if "/" in name})

    async def delete_files(self, names: Sequence[str]) -> None:
        for name in names:
            self._objects.pop(name, None)

    async def delete_incomplete(self, prefix: str) -> int:
        """Return 0: nothing is ever incomplete here."""
        return 0

    def describe(self) -> str:
        return f"memory://{self._root}"
