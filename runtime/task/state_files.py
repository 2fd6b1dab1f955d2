"""The asynchronous part of a snapshot: writes the state that the cuts of a subtask describe.

Tables become Parquet, items a msgpack list, local files are uploaded unchanged. Small state is
stored inline in the checkpoint's manifest. Everything has a checksum, verified on each read. In
every outcome, each cut is either made or discarded, once, and each set of local files released.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import pyarrow as pa
import xxhash

from ...state.chain import Chain, ChainPlan, StateKey, Written, extend
from ...state.checked_files import measure_file
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import (
    CollectedFiles,
    FilesCut,
    ItemsCut,
    LocalFile,
    OperatorSnapshot,
    StateHandle,
    StateInfo,
    TableCut,
)
from ..storage.base import CheckpointStore
from .concurrency import all_of, in_thread
from .local_files import LocalCopies, SubtaskDirectory
from .parquet_files import EncodedTable, encode_tables

T = TypeVar("T")

INLINE_ITEMS_BYTES_MAX: Final = 1 << 20
"""Items up to this size, in bytes, are stored inline, so that a change of parallelism need not read
them."""
_log = logging.getLogger("headgate.checkpoint")


@dataclass(slots=True)
class TableWork:
    """A cut of a table, and how it continues the table's chain."""

    key: StateKey
    cut: TableCut
    chain: Chain
    plan: ChainPlan
    begun: bool = False


@dataclass(slots=True)
class FilesWork:
    """A cut in local files, with the handles of those already in the store."""

    key: StateKey
    cut: FilesCut
    known: dict[str, StateHandle]
    canonical: bool
    """Write the content as a table instead of files."""


@dataclass(slots=True)
class ItemsWork:
    """A cut of operator state."""

    key: StateKey
    cut: ItemsCut


Work = TableWork | FilesWork | ItemsWork


@dataclass(slots=True)
class OperatorWork:
    """The work to be done for one operator."""

    operator: str
    states: tuple[StateInfo, ...]
    works: list[Work] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UploadResult:
    """The outcome in the store.

    Attributes:
        snapshots: one per operator.
        written: the base for the next checkpoint.
        written_bytes: the new bytes.
    """

    snapshots: list[OperatorSnapshot]
    written: Written
    written_bytes: int


class FileNames(Protocol):
    """Makes the names of the state files of one subtask and checkpoint."""

    def __call__(self, operator: str, state: str, kind: str, file_id: str) -> str: ...


@dataclass(frozen=True, slots=True)
class SnapshotTarget:
    """The destination of one checkpoint or savepoint.

    Attributes:
        store: None: nothing is kept, only pre-commits are made.
        name_of: makes the names of files.
        inline_bytes_max: tables and metas up to this size are stored in the manifest.
        copies: keeps files on this machine too; None: none are kept.
        checkpoint_id: the checkpoint.
    """

    store: CheckpointStore | None
    name_of: FileNames
    inline_bytes_max: int
    copies: LocalCopies | None = None
    checkpoint_id: int = 0

    async def write(self, name: str, data: bytes | Path, threads: Executor) -> None:
        """Write a file to the store, after keeping a local copy, with no wait in between.

        Raises:
            StorageError: the store refused.
        """
        assert self.store is not None  # otherwise there is nothing to write
        copies = self.copies
        if copies is not None and copies.keeps:
            keep = partial(copies.keep, name, data, self.checkpoint_id)
            await in_thread(threads, keep)
        await self.store.write_file(name, data)


class StateWriter:
    """Writes all states of one subtask for one checkpoint or savepoint."""

    def __init__(
        self,
        works: Sequence[OperatorWork],
        *,
        threads: Executor,
        transfers: asyncio.Semaphore,
        directory: SubtaskDirectory,
        key_groups: KeyGroupRange,
    ) -> None:
        """Create a writer.

        Args:
            works: the states to write.
            threads: for blocking work.
            transfers: limits what all subtasks of this worker encode and upload at once.
            directory: for large tables to be uploaded.
            key_groups: of this subtask.
        """
        self._works = works
        self._threads = threads
        self._transfers = transfers
        self._directory = directory
        self._key_groups = key_groups
        self._closed = False
        self.begun: list[str] = []
        """The names of the files that were, or may have been, written."""

    async def write(self, target: SnapshotTarget, base: int) -> UploadResult:
        """Write all states, some of them concurrently.

        Raises:
            HeadgateError: the store refused, or a sink's pre-commit failed.
            Exception: whatever a cut raised.
        """
        written = Written(base)
        new_bytes = [0]
        jobs = [self._write(w, target, written, new_bytes) for o in self._works for w in o.works]
        parts = iter(await all_of(jobs))
        snapshots = [
            OperatorSnapshot(
                operator=work.operator,
                handles=tuple(handle for _ in work.works for handle in next(parts)),
                states=work.states,
            )
            for work in self._works
        ]
        return UploadResult(snapshots, written, new_bytes[0])

    async def close(self) -> None:
        """Discard cuts that were not made, and release collected ones.

        Call it once, in every outcome.
        """
        if self._closed:
            return
        self._closed = True
        endings: list[Callable[[], None]] = []
        for operator in self._works:
            for work in operator.works:
                if isinstance(work, FilesWork):
                    endings.append(work.cut.release)
                elif isinstance(work, TableWork) and not work.begun and work.cut.discard:
                    endings.append(work.cut.discard)
        if endings:
            await self._in_thread(lambda: _call_all(endings))

    # -- one state ----------------------------------------------------------------------------------

    async def _write(
        self, work: Work, target: SnapshotTarget, written: Written, new_bytes: list[int]
    ) -> tuple[StateHandle, ...]:
        """Return the handles of one state, old and new."""
        match work:
            case ItemsWork():
                handles, new = await self._items(work, target)
            case TableWork():
                handles, new = await self._table(work, target, written)
            case FilesWork() if work.canonical:
                handles, new = await self._canonical(work, target)
            case FilesWork():
                handles, new = await self._files(work, target, written)
        new_bytes[0] += sum(handle.size_bytes for handle in new)
        return tuple(handles)

    async def _items(
        self, work: ItemsWork, target: SnapshotTarget
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        made = work.cut.items
        values = await self._in_thread(made) if callable(made) else made
        if not values or target.store is None:
            return [], []
        data = msgspec.msgpack.encode(values)
        handle = await self._store_bytes(
            work.key, "items", data, target, INLINE_ITEMS_BYTES_MAX, rows=len(values)
        )
        handle = msgspec.structs.replace(handle, redistribution=work.cut.redistribution)
        return [handle], [handle]

    async def _table(
        self, work: TableWork, target: SnapshotTarget, written: Written
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        if target.store is None:
            return [], []
        cut, since = work.cut, work.plan.since
        async with self._transfers:
            work.begun = True
            kind = "table" if since is None else "delta"
            async with self._encoded(lambda: [cut.make(since)]) as encoded:
                handle = await self._store_table(work.key, kind, encoded, target, cut.keys)
        chain = extend(work.chain, work.plan, handle, cut.epoch)
        written.chains[work.key] = chain
        return list(chain.handles), [handle] if handle is not None else []

    async def _canonical(
        self, work: FilesWork, target: SnapshotTarget
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        cut = work.cut
        async with self._transfers, self._encoded(cut.tables) as encoded:
            handle = await self._store_table(work.key, "table", encoded, target, cut.keys)
        handles = [handle] if handle is not None else []
        return handles, handles

    async def _files(
        self, work: FilesWork, target: SnapshotTarget, written: Written
    ) -> tuple[list[StateHandle], list[StateHandle]]:
        if target.store is None:
            return [], []
        collected: CollectedFiles = await self._in_thread(work.cut.collect)
        missing = [file for file in collected.files if file.id not in work.known]
        uploaded = await all_of([self._upload(work.key, file, target) for file in missing])
        known = work.known | {handle.file_id: handle for handle in uploaded}
        written.files[work.key] = {file.id: known[file.id] for file in collected.files}
        meta = await self._store_bytes(
            work.key, "meta", collected.meta, target, target.inline_bytes_max
        )
        own = self._key_groups
        meta = msgspec.structs.replace(meta, first_key_group=own.first, last_key_group=own.last)
        return [meta, *written.files[work.key].values()], [meta, *uploaded]

    @asynccontextmanager
    async def _encoded(
        self, tables: Callable[[], Iterable[pa.Table]]
    ) -> AsyncIterator[EncodedTable | None]:
        """Yield the tables as one file, which is removed afterwards, even if it was not used."""
        large: list[Path] = []

        def path_for_large() -> Path:
            large.append(self._directory.temporary_file())
            return large[-1]

        try:
            yield await self._in_thread(lambda: encode_tables(tables(), path_for_large))
        finally:
            for path in large:
                path.unlink(missing_ok=True)

    # -- into the store -----------------------------------------------------------------------------

    async def _store_table(
        self,
        key: StateKey,
        kind: str,
        encoded: EncodedTable | None,
        target: SnapshotTarget,
        keys: tuple[str, ...],
    ) -> StateHandle | None:
        if encoded is None:
            return None
        handle = StateHandle(
            state=key[1],
            kind=kind,
            size_bytes=encoded.size_bytes,
            checksum=encoded.checksum,
            rows=encoded.rows,
            first_key_group=encoded.first_key_group,
            last_key_group=encoded.last_key_group,
            keys=keys,
        )
        if isinstance(encoded.data, bytes) and encoded.size_bytes <= target.inline_bytes_max:
            return msgspec.structs.replace(handle, inline=encoded.data)
        name = await self._put(target, key, kind, "", encoded.data)
        return msgspec.structs.replace(handle, file=name, footer=encoded.footer)

    async def _store_bytes(
        self,
        key: StateKey,
        kind: str,
        data: bytes,
        target: SnapshotTarget,
        inline_bytes_max: int,
        rows: int = 0,
    ) -> StateHandle:
        handle = StateHandle(
            state=key[1],
            kind=kind,
            size_bytes=len(data),
            checksum=xxhash.xxh3_64_hexdigest(data),
            rows=rows,
        )
        if len(data) <= inline_bytes_max:
            return msgspec.structs.replace(handle, inline=data)
        async with self._transfers:
            name = await self._put(target, key, kind, "", data)
        return msgspec.structs.replace(handle, file=name)

    async def _upload(self, key: StateKey, file: LocalFile, target: SnapshotTarget) -> StateHandle:
        async with self._transfers:
            size, checksum = await self._in_thread(lambda: measure_file(file.path))
            name = await self._put(target, key, "file", file.id, file.path)
        return StateHandle(
            state=key[1],
            kind="file",
            size_bytes=size,
            checksum=checksum,
            rows=file.rows,
            file=name,
            first_key_group=file.first_key_group,
            last_key_group=file.last_key_group,
            file_id=file.id,
        )

    async def _put(
        self, target: SnapshotTarget, key: StateKey, kind: str, file_id: str, data: bytes | Path
    ) -> str:
        name = target.name_of(*key, kind, file_id)
        self.begun.append(name)
        await target.write(name, data, self._threads)
        return name

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await in_thread(self._threads, call)


def _call_all(endings: Iterable[Callable[[], None]]) -> None:
    for ending in endings:
        try:
            ending()
        except Exception as error:
            _log.warning("a cut could not be discarded: %s: %s", type(error).__name__, error)
