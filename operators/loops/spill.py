"""Spill files of a loop: written sequentially, deleted with their last reader."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...errors import InternalError, StorageError

FILE_BYTES: Final = 16 * 2**20
"""A file is closed to writes at this size, so that disk space is freed while a loop runs."""


class SpillFile:
    """A file without a name: its space is freed once this object is no longer referenced."""

    def __init__(self, directory: Path) -> None:
        try:
            self._descriptor, path = tempfile.mkstemp(dir=directory)
            os.unlink(path)
        except OSError as error:
            raise StorageError(f"a loop cannot spill to disk: {error}") from error
        self.size_bytes = 0
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes) -> Spilled:
        """Append data."""
        view, offset = memoryview(data), self.size_bytes
        try:
            while view:
                written = os.pwrite(self._descriptor, view, self.size_bytes)
                self.size_bytes += written
                view = view[written:]
        except OSError as error:
            raise StorageError(
                f"a loop cannot spill to disk: {error}",
                fix="make room in io.tmp.dirs, or give the loop more memory",
            ) from error
        return Spilled(self, offset, len(data))

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes that were written; from any thread."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise InternalError(f"a spilled batch is truncated offset=`{offset}` length=`{length}`")
        return data


class Spilled:
    """The place of a batch on disk."""

    __slots__ = ("_file", "_length", "_offset")

    def __init__(self, file: SpillFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length

    def read(self) -> bytes:
        """Return the bytes of the batch."""
        return self._file.read(self._offset, self._length)


class Spill:
    """The files of a queue; they live as long as their contents are needed."""

    def __init__(self, directory: Callable[[], Path]) -> None:
        self._directory = directory
        self._file: SpillFile | None = None

    def write(self, data: bytes) -> Spilled:
        """Write bytes.

        Raises:
            StorageError: the disk refuses them.
        """
        if self._file is None or self._file.size_bytes >= FILE_BYTES:
            self._file = SpillFile(self._directory())
        return self._file.append(data)
