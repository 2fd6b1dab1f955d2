"""Reads the state of a checkpoint or savepoint: own key groups only, and everything verified.

A subtask that owns all key groups of a file reads it whole and compares its checksum. One that owns a
part (after a change of parallelism) reads the footer, then the row groups it needs: the footer's checksum
is in the handle, and those of the row groups are in the footer.

A base and its deltas are merged into one table: of each key the newest row, unless it is deleted.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from ...errors import CorruptError, MissingFileError, StorageError
from ...operators.lazy_modules import pc, pl
from ...state.checked_files import measure_file, tail_bytes
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import (
    DELETED_COLUMN,
    KEY_GROUP_COLUMN,
    MANY,
    ChannelAddress,
    OperatorSnapshot,
    RestoredFiles,
    RestoredState,
    StateHandle,
)
from ..protocol import names
from ..protocol.checkpoints.packs import handle_of_list, is_pack, runs_of
from ..protocol.checkpoints.segments import Extent, extents, is_piece
from ..storage.base import CheckpointStore
from .concurrency import all_of, in_thread
from .local_files import LocalCopies, SubtaskDirectory
from .parquet_files import SPILL_BYTES, PartialFile, read_whole

T = TypeVar("T")
TABLES = ("table", "delta")
RESTORED: Final = "restored"
"""The directory of downloaded files below an operator's own."""
READ_BYTES_MAX: Final = 8 << 20
"""The most bytes that are read at once of small state that lies side by side."""
BLOCK_ROWS: Final = 1 << 20
"""The number of rows merged at a time: rows of different key groups never interact."""


def is_needed(handle: StateHandle, own: KeyGroupRange) -> bool:
    """Return True if a subtask with these key groups has to read `handle`."""
    if handle.kind not in (*TABLES, "file"):
        return True
    return KeyGroupRange(handle.first_key_group, handle.last_key_group).overlaps(own)


class _Reading(msgspec.Struct):
    """Adjacent pieces that are read at once; `left` of them have not been taken."""

    extent: Extent
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    data: bytes | None = None
    left: int = 0


class PackLists:
    """The lists of packs that several subtasks of a worker need: the first of them reads it."""

    def __init__(self) -> None:
        self._lists: dict[tuple[str, int], tuple[asyncio.Lock, list[bytes]]] = {}

    async def get(self, listed: StateHandle, read: Callable[[], Awaitable[object]]) -> bytes:
        """Return a list; `read` reads it from its file.

        Raises:
            HeadgateError: what `read` raises. The next one that needs the list tries again.
        """
        if listed.inline is not None:
            return listed.inline
        assert listed.file is not None  # it lies somewhere
        lock, found = self._lists.setdefault((listed.file, listed.offset), (asyncio.Lock(), []))
        async with lock:
            if not found:
                data = await read()
                assert isinstance(data, bytes)  # it is no table
                found.append(data)
        return found[0]


class StateReader:
    """Reads state for one subtask."""

    def __init__(
        self,
        store: CheckpointStore | None,
        *,
        subtask: str,
        own: KeyGroupRange,
        threads: Executor,
        transfers: asyncio.Semaphore,
        directory: SubtaskDirectory,
        progress: Callable[[int], None],
        copies: LocalCopies | None = None,
    ) -> None:
        """Create a reader.

        Args:
            store: the store with the files.
            subtask: for error messages.
            own: the key groups to read.
            threads: for blocking work.
            transfers: limits what all subtasks of this worker read at once.
            directory: for downloads.
            progress: called with the number of bytes of the needed handles, as they are read.
            copies: on this machine, for whole files; a part of one is read from the store.
        """
        self._store = store
        self._subtask = subtask
        self._own = own
        self._threads = threads
        self._transfers = transfers
        self._directory = directory
        self._progress = progress
        self._copies = copies
        self._downloads: set[Path] = set()
        self._readings: dict[tuple[str, int], _Reading] = {}
        """By the place of a piece in a file: the extent with which it is read."""

    async def load(self, operator: str, snapshots: Sequence[OperatorSnapshot]) -> RestoredState:
        """Load the state of one operator, from the snapshots of possibly several old subtasks.

        Raises:
            CorruptError: a file is missing, or its bytes are not the ones that were written.
            StorageError: the store does not respond.
        """
        parts = await all_of([self._load_part(operator, i, s) for i, s in enumerate(snapshots)])
        state = RestoredState()
        tables: dict[str, list[pa.Table]] = {}
        for snapshot, part in zip(snapshots, parts, strict=True):
            state.states.update({info.name: info for info in snapshot.states})
            for name, table in part.tables.items():
                tables.setdefault(name, []).append(table)
            for name, items in part.items.items():
                state.items.setdefault(name, []).extend(items)
            for name, files in part.files.items():
                state.files.setdefault(name, []).extend(files)
        for name, found in tables.items():
            state.tables[name] = _joined(found)
        return state

    async def _load_part(
        self, operator: str, number: int, snapshot: OperatorSnapshot
    ) -> RestoredState:
        """Load the state of one old subtask."""
        needed = [handle for handle in snapshot.handles if is_needed(handle, self._own)]
        self._plan_readings(needed)
        read = await all_of([self._read(operator, number, handle) for handle in needed])
        state = RestoredState()
        chains: dict[str, list[pa.Table]] = {}
        files: dict[str, dict[str, Path]] = {}
        metas: dict[str, tuple[StateHandle, bytes]] = {}
        for handle, content in zip(needed, read, strict=True):
            if isinstance(content, pa.Table):
                chains.setdefault(handle.state, []).append(content)
            elif isinstance(content, Path):
                files.setdefault(handle.state, {})[handle.file_id] = content
            elif handle.kind == "meta":
                metas[handle.state] = (handle, content)
            else:
                items = msgspec.msgpack.decode(content, type=list[bytes])
                state.items.setdefault(handle.state, []).extend(items)
        keys = {handle.state: handle.keys for handle in needed}
        for name, chain in chains.items():
            state.tables[name] = await self._in_thread(_merging(chain, keys[name]))
        for name, (meta, content) in metas.items():
            first, last = meta.first_key_group, meta.last_key_group
            restored = RestoredFiles(content, files.get(name, {}), first, last)
            state.files[name] = [restored]
        return state

    def _plan_readings(self, needed: Sequence[StateHandle]) -> None:
        """Plan to read pieces at once that lie side by side and are read as a whole."""
        whole = [h for h in needed if is_piece(h) and (h.kind not in TABLES or self._owns_all(h))]
        self._plan_extents(whole)

    def _plan_extents(self, whole: Sequence[StateHandle]) -> None:
        readings: dict[int, _Reading] = {}
        for place, extent in extents(whole, READ_BYTES_MAX).items():
            reading = readings.setdefault(id(extent), _Reading(extent))
            reading.left += 1
            self._readings[place] = reading

    async def runs_in_flight(
        self,
        handles: Sequence[StateHandle],
        receivers: Callable[[ChannelAddress], Set[int]],
        lists: PackLists,
    ) -> list[StateHandle]:
        """Find the in-flight records that are needed, in order: a handle for the run of each channel.

        Args:
            handles: packs, and runs with a handle of their own.
            receivers: returns, for the pack of a sender, the subtasks whose records are needed.
            lists: of the packs that others read as well.

        Raises:
            CorruptError: a list is missing, or its bytes are not the ones that were written.
            StateError: a newer headgate wrote one.
            StorageError: the store does not respond.
        """
        found = await all_of([self._runs(handle, receivers, lists) for handle in handles])
        return [run for runs in found for run in runs]

    async def _runs(
        self,
        handle: StateHandle,
        receivers: Callable[[ChannelAddress], Set[int]],
        lists: PackLists,
    ) -> Sequence[StateHandle]:
        if handle.channel is None or not is_pack(handle):
            return [handle]
        listed = handle_of_list(handle)
        data = await lists.get(listed, lambda: self._read(_target(handle), 0, listed))
        needed = receivers(handle.channel) if handle.channel.receiver == MANY else None
        return runs_of(handle, data, needed)

    async def load_in_flight(self, runs: Sequence[StateHandle]) -> list[bytes]:
        """Load in-flight records, in order; those that lie side by side are read at once.

        Raises:
            CorruptError: one is missing, or its bytes are not the ones that were written.
            StorageError: the store does not respond.
        """
        self._plan_extents(runs)
        found = await all_of([self._read(_target(handle), 0, handle) for handle in runs])
        return [piece for piece in found if isinstance(piece, bytes)]

    async def delete_downloads(self) -> None:
        """Delete downloads, after the operators have linked the files that they keep."""
        downloads, self._downloads = self._downloads, set()
        for directory in downloads:
            await self._in_thread(partial(shutil.rmtree, directory, ignore_errors=True))

    # -- one handle ---------------------------------------------------------------------------------

    async def _read(
        self, operator: str, number: int, handle: StateHandle
    ) -> pa.Table | Path | bytes:
        async with self._transfers:
            try:
                content = await self._content(operator, number, handle)
            except MissingFileError as error:
                self._fail("is missing", operator, handle, error)
            except (OSError, pa.ArrowException) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise self._refused(operator, handle, error) from error
                self._fail("is corrupt", operator, handle, error)  # reported by the Parquet reader
        return content

    async def _content(
        self, operator: str, number: int, handle: StateHandle
    ) -> pa.Table | Path | bytes:
        if handle.kind == "file":
            directory = self._directory.of_operator(operator) / RESTORED
            directory.mkdir(exist_ok=True)
            self._downloads.add(directory)
            path = directory / names.restored_file(number, handle.state, handle.file_id)
            await self._download(operator, handle, path)
            return path
        if handle.kind not in TABLES:
            return await self._bytes(operator, handle)
        if handle.inline is None and handle.footer is not None and not self._owns_all(handle):
            return await self._part(operator, handle, handle.footer)
        if handle.inline is not None or handle.size_bytes <= SPILL_BYTES:
            data = await self._bytes(operator, handle)
            return await self._in_thread(lambda: read_whole(data, self._own))
        async with self._temporary(operator, handle) as path:
            return await self._in_thread(lambda: read_whole(path, self._own))

    def _owns_all(self, handle: StateHandle) -> bool:
        return handle.first_key_group in self._own and handle.last_key_group in self._own

    async def _bytes(self, operator: str, handle: StateHandle) -> bytes:
        if handle.inline is not None:
            data = handle.inline
        else:
            copy = await self._copied(lambda copies: copies.read(handle))
            if copy is not None:
                self._advance(handle)
                return copy
            store, name = self._where(operator, handle)
            if is_piece(handle) or handle.channel is not None:
                data = await self._piece(store, name, handle)
            else:
                data = await store.read_file(name)
        self._verify(operator, handle, len(data), xxhash.xxh3_64_hexdigest(data))
        self._advance(handle)
        if handle.channel is None and handle.inline is None:
            await self._keep(handle, data)
        return data

    def _advance(self, handle: StateHandle) -> None:
        """Count what was read; lists of packs do not count, as several subtasks share them."""
        if not is_pack(handle):
            self._progress(handle.size_bytes)

    async def _piece(self, store: CheckpointStore, name: str, handle: StateHandle) -> bytes:
        """Read a piece of a file, together with those beside it that are to be read as well."""
        place = (name, handle.offset)
        reading = self._readings.get(place)
        if reading is None:
            return await store.read_range(name, handle.offset, handle.size_bytes)
        async with reading.lock:  # the first one reads; if it fails, the next one tries again
            if reading.data is None:
                extent = reading.extent
                reading.data = await store.read_range(name, extent.start, extent.end - extent.start)
        start = handle.offset - reading.extent.start
        data = reading.data[start : start + handle.size_bytes]
        reading.left -= 1
        if not reading.left:
            reading.data = None
        return data

    async def _part(self, operator: str, handle: StateHandle, footer: tuple[int, str]) -> pa.Table:
        store, name = self._where(operator, handle)
        length, checksum = footer
        size = handle.size_bytes
        tail_length = tail_bytes(size, length)
        begin = handle.offset
        tail = await store.read_range(name, begin + size - tail_length, tail_length)
        if len(tail) != tail_length or xxhash.xxh3_64_hexdigest(tail[-length:]) != checksum:
            self._fail("is corrupt", operator, handle, "its footer is not the one that was written")
        partial = await self._in_thread(lambda: PartialFile(size, tail, self._own))
        start, needed = partial.needed()
        data = await store.read_range(name, begin + start, needed)
        table = await self._in_thread(lambda: partial.read(start, data))
        self._progress(size)  # the rest of the file is not for us
        return table

    async def _download(self, operator: str, handle: StateHandle, path: Path) -> None:
        if await self._copied(lambda copies: copies.link(handle, path)):
            self._progress(handle.size_bytes)
            return
        store, name = self._where(operator, handle)
        if is_piece(handle):
            data = await self._piece(store, name, handle)
            await self._in_thread(lambda: path.write_bytes(data))
        else:
            await store.download(name, path)
        size, checksum = await self._in_thread(lambda: measure_file(path))
        self._verify(operator, handle, size, checksum)
        self._progress(size)
        await self._keep(handle, path)

    async def _copied(self, look: Callable[[LocalCopies], T]) -> T | None:
        """Return what `look` finds among the copies on this machine."""
        copies = self._copies
        return None if copies is None else await self._in_thread(lambda: look(copies))

    async def _keep(self, handle: StateHandle, data: bytes | Path) -> None:
        """Keep a fetched file on this machine for the next restore."""
        copies, name = self._copies, handle.file
        if copies is not None and copies.keeps and name is not None and not is_piece(handle):
            await self._in_thread(lambda: copies.keep(name, data))

    @asynccontextmanager
    async def _temporary(self, operator: str, handle: StateHandle) -> AsyncIterator[Path]:
        path = self._directory.temporary_file()
        try:
            await self._download(operator, handle, path)
            yield path
        finally:
            path.unlink(missing_ok=True)

    # -- errors -------------------------------------------------------------------------------------

    def _where(self, operator: str, handle: StateHandle) -> tuple[CheckpointStore, str]:
        if self._store is None or handle.file is None:
            self._fail("has no readable file", operator, handle, "its location is unknown")
        return self._store, handle.file

    def _refused(self, operator: str, handle: StateHandle, error: OSError) -> StorageError:
        """Return the error for a machine without room, or file descriptors, for downloads."""
        return StorageError(
            f"cannot keep downloaded state operator=`{operator}` state=`{handle.state}` "
            f"subtask=`{self._subtask}`: {error}",
            fix="make room, or name another disk in io.tmp.dirs",
        )

    def _verify(self, operator: str, handle: StateHandle, size: int, checksum: str) -> None:
        if size != handle.size_bytes or checksum != handle.checksum:
            self._fail(
                "is corrupt",
                operator,
                handle,
                f"expected_bytes=`{handle.size_bytes}` bytes=`{size}` "
                f"expected_checksum=`{handle.checksum}` checksum=`{checksum}`",
            )

    def _fail(self, what: str, operator: str, handle: StateHandle, cause: object) -> NoReturn:
        place = "the manifest of the checkpoint"
        if handle.file is not None and self._store is not None:
            place = f"{self._store.describe()}: {handle.file}"
        detail = cause.message if isinstance(cause, MissingFileError) else cause
        raise CorruptError(
            f"state {what} operator=`{operator}` state=`{handle.state}` subtask=`{self._subtask}` "
            f"kind=`{handle.kind}`: {detail}",
            where=place,
            fix="bring the object back from a copy, or restore an older checkpoint or a savepoint",
        )

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await in_thread(self._threads, call)


def _target(handle: StateHandle) -> str:
    return "" if handle.channel is None else handle.channel.target


def _merging(chain: list[pa.Table], keys: tuple[str, ...]) -> Callable[[], pa.Table]:
    return lambda: merge_chain(chain, keys)


def _joined(tables: list[pa.Table]) -> pa.Table:
    """Concatenate tables of different old subtasks, whose key groups are disjoint, sorted by key group."""
    if len(tables) == 1:
        return tables[0]
    filled = [table for table in tables if table.num_rows] or tables[:1]
    filled.sort(key=lambda table: table.column(0)[0].as_py() if table.num_rows else 0)
    return pa.concat_tables(filled, promote_options="permissive")


def merge_chain(parts: Sequence[pa.Table], keys: Sequence[str]) -> pa.Table:
    """Merge a chain, base first; every part is sorted by key group, and so is the result.

    Columns go by name: what a part lacks (an aggregate added later) is null in its rows. Blocking.
    """
    if len(parts) == 1 and DELETED_COLUMN not in parts[0].column_names:
        return parts[0]
    # The newest part defines the columns and their order.
    schema = parts[-1].schema
    if DELETED_COLUMN in schema.names:
        schema = schema.remove(schema.get_field_index(DELETED_COLUMN))
    blocks = [_merge_block(block, keys, schema) for block in _blocks(parts)]
    return pa.concat_tables([schema.empty_table(), *blocks], promote_options="permissive")


def _blocks(parts: Sequence[pa.Table]) -> Iterator[list[pa.Table]]:
    """Yield the rows of all parts, some key groups at a time."""
    groups = [part.column(KEY_GROUP_COLUMN).to_numpy() for part in parts]
    everything = np.concatenate(groups)
    present, counts = np.unique(everything, return_counts=True)
    block_of = np.cumsum(counts) // BLOCK_ROWS
    starts = present[np.flatnonzero(np.diff(block_of, prepend=-1))]
    cuts = [np.append(np.searchsorted(own, starts), len(own)) for own in groups]
    for block in range(len(starts)):
        yield [
            part.slice(cut[block], cut[block + 1] - cut[block])
            for part, cut in zip(parts, cuts, strict=True)
        ]


def _merge_block(parts: Sequence[pa.Table], keys: Sequence[str], schema: pa.Schema) -> pa.Table:
    table = pa.concat_tables([schema.empty_table(), *parts], promote_options="permissive")
    row = "row_" + "".join(keys)  # no key has this name
    frame = pl.from_arrow(table.select(list(keys)))
    assert isinstance(frame, pl.DataFrame)  # a table, never a Series
    newest = frame.with_row_index(row).unique(keys, keep="last").get_column(row).to_numpy()
    kept = np.sort(newest)
    if DELETED_COLUMN in table.column_names:
        gone = pc.fill_null(table.column(DELETED_COLUMN), False).to_numpy()
        kept = kept[~gone[kept]]
        table = table.drop_columns([DELETED_COLUMN])
    groups = table.column(KEY_GROUP_COLUMN).to_numpy()[kept]
    return table.take(pa.array(kept[np.argsort(groups, kind="stable")]))
