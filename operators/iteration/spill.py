"""Files for what a loop holds beyond its memory: written front to back, gone with their last reader."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...errors import InternalError, StorageError

FILE_BYTES: Final = 16 * 2**20
"""A file gets no more once it is this large, so that disk space comes back while a loop goes on."""


class SpillFile:
    """A file without a name: its space is free when nobody holds this object any more."""

    def __init__(self, directory: Path) -> None:
        try:
            self._descriptor, path = tempfile.mkstemp(dir=directory)
            os.unlink(path)
        except OSError as error:
            raise StorageError(f"a loop cannot spill to disk: {error}") from error
        self.size_bytes = 0
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes) -> Spilled:
        """Write at the end."""
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
        """Bytes that were written; from any thread."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise InternalError(f"a spilled batch is cut short offset=`{offset}` length=`{length}`")
        return data


class Spilled:
    """Where a batch lies."""

    __slots__ = ("_file", "_length", "_offset")

    def __init__(self, file: SpillFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length

    def read(self) -> bytes:
        """The bytes of the batch."""
        return self._file.read(self._offset, self._length)


class Spill:
    """Where a queue writes; the files live as long as what is in them is wanted."""

    def __init__(self, directory: Callable[[], Path]) -> None:
        self._directory = directory
        self._file: SpillFile | None = None

    def write(self, data: bytes) -> Spilled:
        """Put bytes aside.

        Raises:
            StorageError: the disk does not take them.
        """
        if self._file is None or self._file.size_bytes >= FILE_BYTES:
            self._file = SpillFile(self._directory())
        return self._file.append(data)
