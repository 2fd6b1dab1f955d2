"""Deletes what no checkpoint needs any more: log entries beyond `retain`, and their files."""

from __future__ import annotations

import asyncio

from ..protocol.checkpoints.manifest import unshared_files
from ..storage.base import CheckpointStore
from ..storage.joblog_store import JobLog


class Trimmer:
    """Drops checkpoints beyond `retain`, log entries and files. Files that would not go are kept in
    mind: the log forgets them with its next trim, so they are deleted before that."""

    def __init__(self, log: JobLog, store: CheckpointStore) -> None:
        self._log = log
        self._store = store
        self._doomed: list[str] = []
        self._lock = asyncio.Lock()
        self._wish: tuple[int, int | None] = (0, None)
        self._wishes = 0
        self._fulfilled = 0
        """The number of the newest wish that was done."""

    async def trim(self, retain: int, keep_from: int | None = None) -> None:
        """Keep the newest `retain` checkpoints, and those of id `keep_from` on.

        `keep_from` may be out of date: what a checkpoint builds on never gets older than it was. Of calls
        that wait, since the store is slower than checkpoints are, one does what the newest wants.

        Raises:
            StorageError: something is left over; the next call tries again.
        """
        self._wish = retain, keep_from
        self._wishes += 1
        mine = self._wishes
        async with self._lock:
            if self._fulfilled >= mine:
                return
            (retain, keep_from), newest = self._wish, self._wishes
            await self._delete_doomed()
            subsumed = await self._log.trim(retain, keep_from)
            kept = [logged.manifest for logged in self._log.view.checkpoints]
            self._doomed = unshared_files(subsumed, kept)
            await self._delete_doomed()
            self._fulfilled = newest

    async def _delete_doomed(self) -> None:
        if self._doomed:
            await self._store.delete_files(self._doomed)
            self._doomed = []
