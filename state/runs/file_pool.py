"""Run files that nobody needs any more, to be written over.

Pages of a new file must be had from the system first; those of a file that was read or written lately are
there already. Overwriting is some twenty times faster on virtual machines whose memory comes late.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from threading import RLock


class FilePool:
    """Up to `bytes_max` of unused files in a directory; those below `file_bytes_min` are not worth it.

    Thread-safe. Files are offered by `RunFile`, once it is certain that nobody can read them any more.
    """

    def __init__(self, directory: Path, bytes_max: int, file_bytes_min: int) -> None:
        self._directory = directory
        self._bytes_max, self._file_bytes_min = bytes_max, file_bytes_min
        self._names = itertools.count()
        self._free: list[tuple[Path, int]] = []  # the last one is the most likely to be in memory
        self._waiting: set[Path] = set()
        self._closed = False
        self._lock = RLock()  # a garbage collection in the midst of it may offer another file

    @property
    def nbytes(self) -> int:
        """Size of the files that wait here."""
        with self._lock:
            return sum(size for _, size in self._free)

    def expect(self, path: Path) -> None:
        """Note a file that will be offered once its last mapping ends."""
        with self._lock:
            if not self._closed:
                self._waiting.add(path)
                return
        path.unlink(missing_ok=True)

    def offer(self, path: Path) -> None:
        """Keep the file for later, or delete it; one that has another name too is not kept."""
        with self._lock:
            self._waiting.discard(path)
        try:
            found = os.stat(path)
        except FileNotFoundError:  # `close` came first
            return
        if found.st_nlink == 1 and found.st_size >= self._file_bytes_min:
            with self._lock:
                if not self._closed and self.nbytes + found.st_size <= self._bytes_max:
                    kept = self._directory / f"{next(self._names)}.free"
                    os.rename(path, kept)
                    self._free.append((kept, found.st_size))
                    return
        path.unlink(missing_ok=True)

    def take(self, path: Path) -> bool:
        """Give an unused file this name; its content means nothing. False if there is none."""
        with self._lock:
            if not self._free:
                return False
            kept, _ = self._free.pop()
        os.rename(kept, path)
        return True

    def close(self) -> None:
        """Delete all files, those still mapped too; what is given up later is deleted at once."""
        with self._lock:
            unused = [*(path for path, _ in self._free), *self._waiting]
            self._free, self._waiting, self._closed = [], set(), True
        for path in unused:
            path.unlink(missing_ok=True)
