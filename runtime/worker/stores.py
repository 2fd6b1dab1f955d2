"""Stores at other addresses than the job's own, such as savepoints: open while somebody uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..storage.base import CheckpointStore


@dataclass(slots=True)
class _Shared:
    store: CheckpointStore
    users: int = 0
    opened: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class SharedStores:
    """One store per address for all subtasks of a worker."""

    def __init__(
        self,
        open_at: Callable[[str, Mapping[str, str]], CheckpointStore],
        options: Mapping[str, str],
    ) -> None:
        self._open_at = open_at
        self._options = options
        self._shared: dict[tuple[str, bool], _Shared] = {}

    @asynccontextmanager
    async def at(self, address: str, *, writable: bool = True) -> AsyncIterator[CheckpointStore]:
        """The store whose root is `address`; it is closed when nobody is left in such a block.

        Raises:
            StorageError: it cannot be reached.
        """
        key = (address, writable)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(self._open_at(address, self._options))
        shared.users += 1
        try:
            async with shared.opening:
                if not shared.opened:
                    await shared.store.open(writable=writable)
                    shared.opened = True
            yield shared.store
        finally:
            shared.users -= 1
            if not shared.users:
                del self._shared[key]
                await shared.store.close()
