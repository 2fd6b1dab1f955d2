"""Files of subtasks on the worker's own disk: their directories, and copies of state files.

The copies are only a cache: a missing or damaged copy is replaced by a read from the storage, and nothing
fails because a copy could not be made. Each worker writes in directories of its own, and also reads
those of the other workers of its job on this machine, including dead ones: the replacement of a
killed worker finds its copies.

A copy is a hard link wherever possible. State files are never written twice, so a link stays valid.

`SnapshotTarget` is where the files of one checkpoint or savepoint go: the storage, with copies here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import xxhash

from ...errors import CorruptError
from ...operators.sizes import format_size
from ...state.checked_files import measure_file
from ...state.snapshot import OperatorSnapshot, StateHandle
from ..protocol import names
from ..protocol.checkpoints.segments import is_piece
from ..storage.base import CheckpointStore
from .concurrency import in_thread

T = TypeVar("T")
TEMPORARY_SUFFIX = ".tmp"
_log = logging.getLogger("headgate.worker")


class SubtaskDirectory:
    """A directory that exists from its first use until `delete`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count()

    def of_operator(self, operator: str) -> Path:
        """Return the private directory of an operator."""
        return self._made(self.path / names.local_dir(operator))

    def temporary_file(self) -> Path:
        """Return an unused path in an existing directory; the caller removes the file.

        For any thread.
        """
        return self._made(self.path / "transfers") / f"{next(self._numbers)}"

    def delete(self) -> None:
        """Remove everything. Blocking; leftovers are swept when a worker starts."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _made(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        return path


class LocalCopies:
    """The copies of one worker. Thread-safe, and blocking except for `begun` and `acked`."""

    def __init__(
        self,
        roots: Sequence[Path],
        siblings: Callable[[], Iterable[Path]],
        *,
        size_max: int,
        keeps: bool = True,
        reads: bool = True,
    ) -> None:
        """Create an empty cache.

        Args:
            roots: existing directories of this worker alone; the first on the disk of a file gets
                its link.
            siblings: directories of other workers of the job.
            size_max: bytes; further files are not kept.
            keeps: False: nothing is kept at all.
            reads: False: nothing is found.
        """
        self._roots = list(roots)
        self._siblings = siblings
        self._size_max = size_max
        self.keeps = keeps and bool(roots)
        self.reads = reads
        self._lock = threading.Lock()
        self._sizes: dict[str, tuple[Path, int]] = {}
        """The sizes of kept files, by the file's name in the storage."""
        self._needed: dict[int, set[str]] = {0: set()}
        """The files here of each checkpoint; 0: the one that is being restored."""
        self._bases: dict[int, int] = {}
        self._newest = 0
        self.bytes_kept = 0
        self.bytes_refused = 0
        """The bytes of files that were not kept: no room, or the disk refused."""
        self._warned_of_room = False
        self.bytes_read = 0
        """The bytes read from copies instead of the storage, since `restoring`."""
        self.damaged = 0
        """The number of damaged copies, since `restoring`."""

    # -- checkpoints --------------------------------------------------------------------------------

    def begun(self, checkpoint_id: int, base: int) -> None:
        """Note that a checkpoint is being written that may share files with the checkpoint `base`."""
        with self._lock:
            self._needed.setdefault(checkpoint_id, set())
            self._bases[checkpoint_id] = base

    def acked(self, checkpoint_id: int, snapshots: Iterable[OperatorSnapshot]) -> None:
        """Note the files of a subtask's part.

        A savepoint, for which `begun` is not called, is not kept.
        """
        with self._lock:
            if checkpoint_id in self._needed:
                self._needed[checkpoint_id].update(
                    handle.file
                    for s in snapshots
                    for handle in s.handles
                    if handle.file is not None
                )

    def completed(self, checkpoint_id: int) -> None:
        """Note that the checkpoint is durable, and drop files that only older ones need."""
        with self._lock:
            if checkpoint_id in self._needed and checkpoint_id > self._newest:
                self._newest = checkpoint_id
                self._prune()

    def aborted(self, checkpoint_id: int) -> None:
        """Note that the checkpoint was aborted, and drop files that only it needs."""
        with self._lock:
            if checkpoint_id > self._newest and self._needed.pop(checkpoint_id, None) is not None:
                self._bases.pop(checkpoint_id, None)
                self._prune()

    def restoring(self) -> None:
        """Note that another attempt begins: any of its subtasks, on any worker, may need any of the
        files."""
        with self._lock:
            self._needed, self._bases, self._newest = {0: set()}, {}, 0
            self.bytes_read = self.damaged = 0

    def restored(self, checkpoint_id: int, handles: Iterable[StateHandle]) -> None:
        """Note that all subtasks of the attempt, on all workers, have their state: keep its files."""
        with self._lock:
            files = {handle.file for handle in handles if handle.file is not None}
            self._needed.setdefault(checkpoint_id, set()).update(files)
            self._newest = max(self._newest, checkpoint_id)
            self._prune()

    def _prune(self) -> None:
        pending = [id_ for id_ in self._needed if id_ > self._newest]
        wanted = {self._newest, *pending, *(self._bases.get(id_, 0) for id_ in pending)}
        self._needed = {id_: files for id_, files in self._needed.items() if id_ in wanted}
        self._bases = {id_: self._bases[id_] for id_ in pending if id_ in self._bases}
        alive = set[str]().union(*self._needed.values())
        for name in [name for name in self._sizes if name not in alive]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        path, size = self._sizes.pop(name)
        self.bytes_kept -= size
        with contextlib.suppress(OSError):
            path.unlink()

    # -- keeping ------------------------------------------------------------------------------------

    def keep(self, name: str, data: bytes | memoryview | Path, checkpoint_id: int = 0) -> None:
        """Keep a copy of a file that is, or will be, in the storage; failures are ignored.

        Args:
            name: of the file in the storage.
            data: its bytes, or a local file that has them.
            checkpoint_id: of the checkpoint that writes it; 0: it was restored.
        """
        if not self.keeps:
            return
        size = 0
        try:
            size = data.stat().st_size if isinstance(data, Path) else len(data)
            with self._lock:
                if name in self._sizes or checkpoint_id not in self._needed:
                    return  # it exists here, or is no longer needed
                self._needed[checkpoint_id].add(name)
                if self.bytes_kept + size > self._size_max:
                    self.bytes_refused += size
                    self._warn_of_room()
                    return
                self._sizes[name] = (self._roots[0] / names.local_copy(name), size)
                self.bytes_kept += size
            self._place(name, data)
        except OSError as error:
            _log.warning("a local copy of state was not kept name=`%s`: %s", name, error)
            with self._lock:
                self.bytes_refused += size
                if name in self._sizes:
                    self._drop(name)

    def _warn_of_room(self) -> None:
        """Log once that copies do not fit: a restore takes longer than the user may expect."""
        if not self._warned_of_room:
            self._warned_of_room = True
            _log.warning(
                "local copies of state take all the room they may: no more are kept, a restore reads "
                "the others from the storage headgate.local-backup.size-max=`%s`",
                format_size(self._size_max),
            )

    def _place(self, name: str, data: bytes | memoryview | Path) -> None:
        """Write a copy so that its name appears only when its content is complete."""
        local = names.local_copy(name)
        if isinstance(data, Path):
            for root in self._roots:
                with contextlib.suppress(OSError):  # on another disk, or links are not supported
                    os.link(data, root / local)
                    self._placed(name, root / local)
                    return
        path = self._roots[int(local[-4:], 16) % len(self._roots)] / local
        temporary = path.with_name(f"{local}{TEMPORARY_SUFFIX}")
        try:
            if isinstance(data, Path):
                shutil.copyfile(data, temporary)
            else:
                temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._placed(name, path)

    def _placed(self, name: str, path: Path) -> None:
        with self._lock:
            if name in self._sizes:
                self._sizes[name] = (path, self._sizes[name][1])
                return
        with contextlib.suppress(OSError):
            path.unlink()  # pruned in the meantime

    # -- reading ------------------------------------------------------------------------------------

    def read(self, handle: StateHandle) -> bytes | None:
        """Return the verified bytes of `handle`; None if no copy has them."""

        def attempt(path: Path) -> bytes | None:
            with path.open("rb") as file:
                file.seek(handle.offset)
                data = file.read(handle.size_bytes)
            return data if xxhash.xxh3_64_hexdigest(data) == handle.checksum else None

        return self._first(handle, attempt)

    def link(self, handle: StateHandle, target: Path) -> bool:
        """Link the verified file of `handle` to the path `target`; return False if no copy has its
        bytes."""

        def attempt(path: Path) -> bool | None:
            whole = False
            try:
                if is_piece(handle):
                    with path.open("rb") as file:
                        file.seek(handle.offset)
                        target.write_bytes(file.read(handle.size_bytes))
                else:
                    try:
                        os.link(path, target)
                    except OSError:
                        shutil.copyfile(path, target)
                whole = measure_file(target) == (handle.size_bytes, handle.checksum)
            finally:
                if not whole:  # so that a write to the path cannot change the copy
                    target.unlink(missing_ok=True)
            return whole or None

        return bool(self._first(handle, attempt))

    def _first(self, handle: StateHandle, attempt: Callable[[Path], T | None]) -> T | None:
        """Return the result of `attempt` for the first copy that is not damaged."""
        name = handle.file
        if not self.reads or name is None:
            return None
        for directory in (*self._roots, *self._siblings()):
            path = directory / names.local_copy(name)
            try:
                found = attempt(path)
            except OSError:
                continue  # there is none, or its worker is pruning at this moment
            if found is not None:
                self._use(name, path, handle.size_bytes)
                return found
            self._damaged(name, path)
        return None

    def _use(self, name: str, path: Path, size: int) -> None:
        with self._lock:
            self.bytes_read += size
            if name in self._sizes and 0 in self._needed:
                self._needed[0].add(name)
        if path.parent not in self._roots:
            self.keep(name, path)  # its worker may be dead, and its directory about to be removed

    def _damaged(self, name: str, path: Path) -> None:
        _log.warning("a local copy of state is damaged name=`%s` path=`%s`", name, path)
        with self._lock:
            self.damaged += 1
            if name in self._sizes and self._sizes[name][0] == path:
                self._drop(name)


class FileNames(Protocol):
    """Makes the names of the state files of one subtask and checkpoint."""

    def __call__(self, operator: str, state: str, kind: str, file_id: str) -> str: ...


class SnapshotTarget(msgspec.Struct, frozen=True):
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

    async def read_piece(self, handle: StateHandle, threads: Executor) -> bytes:
        """Return the verified bytes of a piece of an older checkpoint, from a local copy if there is one.

        Raises:
            StorageError: it cannot be read, or is not what was written.
        """
        assert self.store is not None
        assert handle.file is not None  # it is a piece in this store
        copies = self.copies
        if copies is not None:
            copy = await in_thread(threads, partial(copies.read, handle))
            if copy is not None:
                return copy
        data = await self.store.read_range(handle.file, handle.offset, handle.size_bytes)
        if xxhash.xxh3_64_hexdigest(data) != handle.checksum:
            raise CorruptError(
                f"state is corrupt and cannot be written anew state=`{handle.state}` "
                f"file=`{handle.file}` offset=`{handle.offset}`",
                where=self.store.describe(),
                fix="restore an older checkpoint or a savepoint",
            )
        return data

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
