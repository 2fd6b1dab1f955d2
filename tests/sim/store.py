"""The store of a simulation: slow, failing before or after the effect, and watched."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headgate.errors import StorageError
from headgate.runtime.protocol import names
from headgate.runtime.storage.base import CheckpointStore, Created, Existed, FileContent
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import join_address

from .process import check_alive

T = TypeVar("T")
Observer = Callable[[str, str, str], None]
SLOWEST_S = 20.0
"""One that takes a minute is a recovery that stands still: it fails, and is right to."""


@dataclass(slots=True)
class StoreFaults:
    """The quality of the storage: a mean time, and probabilities per call."""

    latency_s: float = 0.002
    slow_rate: float = 0.0
    """Calls that take a hundred times as long."""
    fail_before_rate: float = 0.0
    fail_after_rate: float = 0.0
    """The call had its effect, but its answer is lost."""
    late_rate: float = 0.0
    """The call fails, and has its effect seconds later: creations of records only."""

    def heal(self) -> None:
        """From now on every call succeeds."""
        self.slow_rate = self.fail_before_rate = self.fail_after_rate = self.late_rate = 0.0


class Storage:
    """All the stores of a simulation, by address."""

    def __init__(self, rng: random.Random, observe: Observer) -> None:
        self.rng = rng
        self.faults = StoreFaults()
        self.failures = 0
        """Calls that have failed so far."""
        self.observe = observe
        """A function that is called with every effect: the operation, the root, the name."""
        self.roots: dict[str, dict[str, bytes]] = {}

    def open(self, uri: str, job_name: str, options: Mapping[str, str]) -> CheckpointStore:
        """A store opener."""
        return self.open_at(join_address(uri, names.job_dir(job_name)), options)

    def open_at(self, address: str, options: Mapping[str, str]) -> CheckpointStore:
        """The store whose root is `address`."""
        root = address.removeprefix("memory://")
        return SimStore(root, self.roots.setdefault(root, {}), self)


class SimStore(MemoryStore):
    """One process's view of a store."""

    def __init__(self, root: str, objects: dict[str, bytes], storage: Storage) -> None:
        super().__init__(root, objects)
        self._storage = storage

    async def _call(self, kind: str, name: str, effect: Callable[[], T]) -> T:
        faults, rng = self._storage.faults, self._storage.rng
        check_alive()
        await self._wait()
        check_alive()
        if rng.random() < faults.fail_before_rate:
            raise self._failure("before", kind, name)
        if kind == "create" and rng.random() < faults.late_rate:
            loop = asyncio.get_running_loop()
            loop.call_later(rng.uniform(0, 5), self._effect, kind, name, effect)
            raise self._failure("and happens late", kind, name)
        result = self._effect(kind, name, effect)
        await self._wait()
        check_alive()
        if rng.random() < faults.fail_after_rate:
            raise self._failure("after", kind, name)
        return result

    def _failure(self, when: str, kind: str, name: str) -> StorageError:
        self._storage.failures += 1
        return StorageError(f"injected {when} kind=`{kind}` name=`{name}`")

    def _effect(self, kind: str, name: str, effect: Callable[[], T]) -> T:
        result = effect()
        if isinstance(result, Existed):
            kind = "existed"
        self._storage.observe(kind, self._root, name)
        return result

    async def _wait(self) -> None:
        faults, rng = self._storage.faults, self._storage.rng
        factor = 100 if rng.random() < faults.slow_rate else 1
        await asyncio.sleep(min(SLOWEST_S, rng.expovariate(1 / faults.latency_s) * factor))

    async def read(self, name: str) -> bytes | None:
        return await self._call("read", name, lambda: self._objects.get(name))

    async def put(self, name: str, data: bytes) -> None:
        await self._call("put", name, lambda: self._objects.__setitem__(name, bytes(data)))

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        def create() -> Created | Existed:
            existing = self._objects.setdefault(name, bytes(data))
            return Created() if existing == data else Existed(existing)

        return await self._call("create", name, create)

    async def delete(self, name: str) -> None:
        await self._call("delete", name, lambda: self._objects.pop(name, None))

    async def write_file(self, name: str, data: FileContent) -> None:
        content = data.read_bytes() if isinstance(data, Path) else bytes(data)
        await self._call("write", name, lambda: self._objects.__setitem__(name, content))

    async def read_file(self, name: str) -> bytes:
        await self._call("load", name, lambda: None)
        return await super().read_file(name)

    async def download(self, name: str, path: Path) -> None:
        path.write_bytes(await self.read_file(name))

    async def list_files(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        await self._call("list", prefix, lambda: None)
        for name in sorted(self._objects):
            if name.startswith(prefix) and name in self._objects:
                yield name, len(self._objects[name])

    async def delete_files(self, names: Sequence[str]) -> None:
        for name in names:
            await self.delete(name)
