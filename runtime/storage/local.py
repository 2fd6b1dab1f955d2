"""A checkpoint store in a directory: local, or shared by all machines of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ...errors import MissingFileError, StorageError, check
from ...state.durable_files import make_directories, sync
from ..observe.figures import Operation, StorageFigures
from .base import CheckpointStore, Created, Existed, FileContent
from .probe import probe_conditional_create

T = TypeVar("T")

IO_THREADS_MAX = 4
"""The number of threads of one store; more calls wait."""
DIRECTORY_ATTEMPTS_MAX = 100
"""The number of times that a writer recreates its directory because another process removed it."""
WRITE_CHUNK_BYTES = 4 << 20
"""The number of bytes after which a cancelled write stops at the latest."""
TEMPORARY_PREFIX = ".tmp-"
"""The prefix of incomplete files. A crash may leave some; delete them when no job runs."""


class LocalStore(CheckpointStore):
    """Files below one root. A name appears only when its content is complete and on disk."""

    creates_are_atomic = True

    def __init__(self, root: Path, rng: random.Random | None = None) -> None:
        self._root = root.absolute()
        self._rng = rng if rng is not None else random.Random()
        self._threads = ThreadPoolExecutor(IO_THREADS_MAX, thread_name_prefix="headgate-storage")
        self.figures = StorageFigures()

    async def open(self, *, writable: bool = True) -> None:
        if not writable:
            return
        await self._run(self._check_writable, "write", self._root, verb="use")
        await probe_conditional_create(self, self._rng)

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def read(self, name: str) -> bytes | None:
        path = self._path(name)
        data = await self._run(lambda: _read(path), "read", path)
        self.figures.read_bytes += len(data or b"")
        return data

    async def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        await self._run(lambda: self._replace(path, data), "write", path)
        self.figures.written_bytes += len(data)

    async def put_private(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        await self._run(lambda: self._replace(path, data, mode=0o600), "write", path)
        self.figures.written_bytes += len(data)
        return True

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        path = self._path(name)
        made = await self._run(lambda: self._link(path, data), "create", path)
        if isinstance(made, Created):
            self.figures.written_bytes += len(data)
        return made

    async def delete(self, name: str) -> None:
        path = self._path(name)
        await self._run(lambda: self._delete(path), "delete", path)

    async def write_file(self, name: str, data: FileContent) -> None:
        """Write a file as in the base class.

        Cancellation leaves nothing, or at the very last moment all of it.
        """
        path = self._path(name)
        abandoned = threading.Event()
        try:
            size = await self._run(lambda: self._replace(path, data, abandoned), "write", path)
        except asyncio.CancelledError:
            abandoned.set()
            raise
        self.figures.written_bytes += size

    async def read_file(self, name: str) -> bytes:
        data = await self.read(name)
        if data is None:
            raise self._missing(name)
        return data

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        path = self._path(name)
        data = await self._run(lambda: _read_range(path, start, length), "read", path)
        if data is None:
            raise self._missing(name)
        self.figures.read_bytes += len(data)
        return data

    async def download(self, name: str, path: Path) -> None:
        source = self._path(name)
        size = await self._run(lambda: _copy(source, path), "read", source, verb="copy")
        if size is None:
            raise self._missing(name)
        self.figures.read_bytes += size

    async def list_files(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        for name, size in await self._run(lambda: self._list(prefix), "list", self._root):
            yield name, size

    async def list_directories(self) -> list[str]:
        return await self._run(self._list_directories, "list", self._root)

    async def delete_files(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        await self._run(
            lambda: self._delete_all(paths), "delete", self._root, verb="delete files in"
        )

    async def delete_incomplete(self, prefix: str) -> int:
        directory = self._path(prefix) if prefix else self._root
        return await self._run(
            lambda: self._delete_temporaries(directory),
            "delete",
            directory,
            verb="delete temporary files in",
        )

    def describe(self) -> str:
        return str(self._root)

    def _missing(self, name: str) -> MissingFileError:
        return MissingFileError(f"a state file is missing name=`{name}`", where=self.describe())

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        check(
            not any(part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) for part in parts),
            "object names are relative and plain",
            name=name,
        )
        return self._root.joinpath(*parts)

    async def _run(
        self, work: Callable[[], T], operation: Operation, path: Path, verb: str = ""
    ) -> T:
        """The result of work in a thread; `verb` is what an error says that cannot be done."""
        loop = asyncio.get_running_loop()
        try:
            with self.figures.request(operation):
                return await loop.run_in_executor(self._threads, work)
        except OSError as error:
            cause = error.strerror or error
            raise StorageError(
                f"cannot {verb or operation} a checkpoint path path=`{path}` cause=`{cause}`",
                where=self.describe(),
                fix="check that the directory exists, is writable, has space, and supports hard links",
            ) from error

    # Below: in threads.

    def _check_writable(self) -> None:
        make_directories(self._root)
        os.unlink(self._write_temporary(self._root, b""))

    def _list(self, prefix: str) -> list[tuple[str, int]]:
        found = []
        top = self._root.joinpath(*prefix.split("/")[:-1])
        for path in _files_below(top):
            name = path.relative_to(self._root).as_posix()
            if name.startswith(prefix) and not path.name.startswith(TEMPORARY_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, path.stat().st_size))
        return found

    def _list_directories(self) -> list[str]:
        try:
            return sorted(path.name for path in self._root.iterdir() if path.is_dir())
        except FileNotFoundError:
            return []

    def _replace(
        self,
        path: Path,
        data: FileContent,
        abandoned: threading.Event | None = None,
        mode: int = 0o666,
    ) -> int:
        """Put a file in place; returns its size in bytes."""
        temporary = self._write_temporary(path.parent, data, abandoned, mode)
        try:
            size = temporary.stat().st_size
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        _sync_directory(path.parent)
        return size

    def _link(self, path: Path, data: bytes) -> Created | Existed:
        # A hard link, unlike a rename, refuses to replace; unlike O_EXCL, its content is complete
        # at once.
        temporary = self._write_temporary(path.parent, data)
        try:
            existing: bytes | None = None
            while existing is None:
                try:
                    os.link(temporary, path)
                    existing = data
                except FileExistsError:
                    existing = _read(path)
        finally:
            os.unlink(temporary)
        # Also when it existed: its creator may have died before its own fsync of the directory.
        _sync_directory(path.parent)
        return Created() if existing == data else Existed(existing)

    def _write_temporary(
        self,
        directory: Path,
        data: FileContent,
        abandoned: threading.Event | None = None,
        mode: int = 0o666,
    ) -> Path:
        """Return a complete, fsynced file in the directory of its destination."""
        handle, temporary = self._open_temporary(directory, mode)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                for chunk in _chunks(data):
                    offset = 0
                    while offset < len(chunk):
                        _check_wanted(abandoned)
                        offset += file.write(chunk[offset:])
                os.fsync(file.fileno())
            _check_wanted(abandoned)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def _open_temporary(self, directory: Path, mode: int) -> tuple[int, Path]:
        for _ in range(DIRECTORY_ATTEMPTS_MAX):
            path = directory / f"{TEMPORARY_PREFIX}{self._rng.getrandbits(64):016x}"
            # In between, `_prune` may remove the empty directory again.
            with contextlib.suppress(FileNotFoundError):
                make_directories(directory)
                with contextlib.suppress(FileExistsError):
                    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), path
        raise FileNotFoundError(errno.ENOENT, "the directory does not stay", str(directory))

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._prune({path.parent})

    def _delete_all(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        self._prune({path.parent for path in paths})
        with contextlib.suppress(OSError):  # the directory of a deleted savepoint
            self._root.rmdir()

    def _delete_temporaries(self, top: Path) -> int:
        count = 0
        directories = {top}
        for path in _files_below(top):
            directories.add(path.parent)
            if path.name.startswith(TEMPORARY_PREFIX):
                path.unlink(missing_ok=True)
                count += 1
        self._prune(directories)
        return count

    def _prune(self, directories: set[Path]) -> None:
        """Remove directories that are empty, and parents that become empty, up to the root.

        It needs no lock: only an empty directory can be removed, and writers recreate theirs.
        """
        for directory in sorted(directories, reverse=True):  # subdirectories come first
            with contextlib.suppress(OSError):
                while directory != self._root:
                    directory.rmdir()
                    directory = directory.parent


class _AbandonedError(Exception):
    """The caller of a write was cancelled; never leaves this module."""


def _check_wanted(abandoned: threading.Event | None) -> None:
    if abandoned is not None and abandoned.is_set():
        raise _AbandonedError


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read_range(path: Path, start: int, length: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(length)
    except FileNotFoundError:
        return None


def _copy(source: Path, target: Path) -> int | None:
    """Copy a file; returns its size in bytes, or None if there is none."""
    if not source.exists():
        return None
    try:
        shutil.copyfile(source, target)
        return target.stat().st_size
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _chunks(data: FileContent) -> Iterator[memoryview]:
    if isinstance(data, Path):
        with data.open("rb", buffering=0) as file:
            while chunk := file.read(WRITE_CHUNK_BYTES):
                yield memoryview(chunk)
        return
    view = memoryview(data).cast("B")
    for offset in range(0, len(view), WRITE_CHUNK_BYTES):
        yield view[offset : offset + WRITE_CHUNK_BYTES]


def _files_below(top: Path) -> Iterator[Path]:
    for directory, _, files in os.walk(top):
        for name in files:
            yield Path(directory, name)


def _sync_directory(directory: Path) -> None:
    # Another process may have deleted its contents, and then the directory.
    with contextlib.suppress(FileNotFoundError):
        sync(directory)
