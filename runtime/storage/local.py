"""A checkpoint store in a directory: of this machine, or one that all machines of the cluster share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ...errors import StorageError, check
from .base import CheckpointStore, Created, Existed
from .probe import probe_conditional_create

T = TypeVar("T")

IO_THREADS_MAX = 4
"""Threads of one store; more calls wait."""
WRITE_CHUNK_BYTES = 4 << 20
"""A cancelled write stops after at most this much more."""
TEMPORARY_PREFIX = ".tmp-"
"""Of files not complete yet; left behind by a crash, they may be deleted when no job runs."""


class LocalStore(CheckpointStore):
    """Files below one root. A name appears only when its content is whole and on disk."""

    def __init__(self, root: Path, rng: random.Random | None = None) -> None:
        self._root = root.absolute()
        self._rng = rng if rng is not None else random.Random()
        self._threads = ThreadPoolExecutor(IO_THREADS_MAX, thread_name_prefix="headgate-storage")

    async def open(self) -> None:
        await self._run(self._check_writable, "use", self._root)
        await probe_conditional_create(self, self._rng)

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def read(self, name: str) -> bytes | None:
        path = self._path(name)
        return await self._run(lambda: _read(path), "read", path)

    async def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        await self._run(lambda: self._replace(path, data), "write", path)

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        path = self._path(name)
        return await self._run(lambda: self._link(path, data), "create", path)

    async def delete(self, name: str) -> None:
        path = self._path(name)
        await self._run(lambda: path.unlink(missing_ok=True), "delete", path)

    async def write_file(self, name: str, data: bytes | memoryview) -> None:
        """As in the base class. Cancellation leaves nothing, or at the very last moment the whole."""
        path = self._path(name)
        abandoned = threading.Event()
        try:
            await self._run(lambda: self._replace(path, data, abandoned), "write", path)
        except asyncio.CancelledError:
            abandoned.set()
            raise

    async def read_file(self, name: str) -> bytes:
        data = await self.read(name)
        if data is None:
            raise StorageError(f"a state file is missing name=`{name}`", where=self.describe())
        return data

    async def delete_files(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        await self._run(lambda: self._delete_all(paths), "delete files in", self._root)

    def describe(self) -> str:
        return str(self._root)

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        check(
            not any(part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) for part in parts),
            "object names are relative and plain",
            name=name,
        )
        return self._root.joinpath(*parts)

    async def _run(self, work: Callable[[], T], verb: str, path: Path) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, work)
        except OSError as error:
            raise StorageError(
                f"cannot {verb} a checkpoint path path=`{path}` cause=`{error.strerror or error}`",
                where=self.describe(),
                fix="check that the directory exists, is writable, has space, and supports hard links",
            ) from error

    # Below: in threads.

    def _check_writable(self) -> None:
        _make_directory(self._root)
        os.unlink(self._write_temporary(self._root, b""))

    def _replace(
        self, path: Path, data: bytes | memoryview, abandoned: threading.Event | None = None
    ) -> None:
        temporary = self._write_temporary(path.parent, data, abandoned)
        try:
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        _sync_directory(path.parent)

    def _link(self, path: Path, data: bytes) -> Created | Existed:
        # A hard link, unlike a rename, refuses to replace; unlike O_EXCL, its content is there at once.
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
        self, directory: Path, data: bytes | memoryview, abandoned: threading.Event | None = None
    ) -> Path:
        """A complete, fsynced file beside its future place."""
        handle, temporary = self._open_temporary(directory)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                view = memoryview(data).cast("B")
                offset = 0
                while offset < len(view):
                    _check_wanted(abandoned)
                    offset += file.write(view[offset : offset + WRITE_CHUNK_BYTES])
                os.fsync(file.fileno())
            _check_wanted(abandoned)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def _open_temporary(self, directory: Path) -> tuple[int, Path]:
        while True:
            _make_directory(directory)
            path = directory / f"{TEMPORARY_PREFIX}{self._rng.getrandbits(64):016x}"
            # Between the two calls `_delete_all` may remove the empty directory again.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), path

    def _delete_all(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
        for directory in sorted({path.parent for path in paths} - {self._root}):
            with contextlib.suppress(OSError):
                directory.rmdir()


class _AbandonedError(Exception):
    """The caller of a write was cancelled; nobody sees this."""


def _check_wanted(abandoned: threading.Event | None) -> None:
    if abandoned is not None and abandoned.is_set():
        raise _AbandonedError


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _make_directory(directory: Path) -> None:
    """Create it and its parents, each durable in its own parent."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
