"""A checkpoint store in memory: for tests, and for jobs whose state may die with the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ...errors import StorageError
from .base import CheckpointStore, Created, Existed


class MemoryStore(CheckpointStore):
    """Objects in a dict. Stores of the same root in one process see the same objects."""

    _shared: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, root: str, objects: dict[str, bytes] | None = None) -> None:
        """With `objects` the store lives in that dict, else in one all stores of `root` share."""
        self._root = root
        self._objects = self._shared.setdefault(root, {}) if objects is None else objects

    @classmethod
    def forget(cls, root: str) -> None:
        """Drop all objects of `root`; open stores keep theirs."""
        cls._shared.pop(root, None)

    async def open(self) -> None:
        """Nothing to connect; a dict honours every condition."""

    async def close(self) -> None:
        """Nothing to release; the objects stay."""

    async def read(self, name: str) -> bytes | None:
        return self._objects.get(name)

    async def put(self, name: str, data: bytes) -> None:
        self._objects[name] = bytes(data)

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        existing = self._objects.setdefault(name, bytes(data))
        return Created() if existing == data else Existed(existing)

    async def delete(self, name: str) -> None:
        self._objects.pop(name, None)

    async def write_file(self, name: str, data: bytes | memoryview) -> None:
        self._objects[name] = bytes(data)

    async def read_file(self, name: str) -> bytes:
        data = self._objects.get(name)
        if data is None:
            raise StorageError(f"a state file is missing name=`{name}`", where=self.describe())
        return data

    async def delete_files(self, names: Sequence[str]) -> None:
        for name in names:
            self._objects.pop(name, None)

    def describe(self) -> str:
        return f"memory://{self._root}"
