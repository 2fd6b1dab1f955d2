"""The directory of a worker on its own machine, below `io.tmp.dirs`.

    <io.tmp.dirs>/headgate-local-<user id>/<worker>-<random>/<attempt>/<vertex>-<subtask>/...

Each worker holds a lock on its directory as long as it lives; the system takes it back however the worker
dies. So a worker that gets the lock of another directory may delete it: this is how a new worker sweeps up
after dead ones of the same machine.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...errors import StorageError
from ...operators.private_directory import private_directory
from ..protocol import names
from ..task.local_directory import SubtaskDirectory

LOCK_FILE = "lock"


class LocalDirectories:
    """One worker's directories, one below each of `io.tmp.dirs`. Blocking: use it in a thread."""

    def __init__(self, bases: Sequence[Path], worker_id: str) -> None:
        """Make and lock them, and sweep up after dead workers.

        Raises:
            StorageError: a directory cannot be made, or belongs to somebody else.
        """
        self._locks: list[int] = []
        self._roots: list[Path] = []
        for base in bases:
            try:
                parent = base / f"headgate-local-{os.getuid()}"
                root, lock = claim(parent, worker_id)
                self._roots.append(root)
                self._locks.append(lock)
            except OSError as error:
                self.close()
                raise StorageError(
                    f"cannot use a local directory path=`{base}` cause=`{error.strerror or error}`",
                    fix="set io.tmp.dirs to directories of this machine that can be written",
                ) from error

    def subtask(self, attempt: int, vertex: int, index: int) -> SubtaskDirectory:
        """The directory of one subtask, spread over `io.tmp.dirs`; not made yet."""
        root = self._roots[index % len(self._roots)]
        return SubtaskDirectory(root / f"{attempt}" / f"{vertex}-{index}")

    def close(self) -> None:
        """Delete everything, and let go."""
        for root in self._roots:
            shutil.rmtree(root, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)
        self._roots, self._locks = [], []


def claim(parent: Path, worker_id: str, *, sweeping: bool = True) -> tuple[Path, int]:
    """Make a directory of this worker's own below `parent`, and lock it; returns it and the lock.

    Args:
        parent: made if it is not there.
        worker_id: what its name begins with.
        sweeping: delete what dead workers left below `parent` first.

    Raises:
        OSError: it cannot be made, or `parent` belongs to somebody else.
    """
    private_directory(parent)
    # While this is held, no sweeper takes the new directory for one of a dead worker.
    gate = take_lock(parent / LOCK_FILE, wait=True)
    assert gate is not None  # it was waited for
    try:
        if sweeping:
            sweep(parent)
        root = Path(tempfile.mkdtemp(prefix=f"{names.local_dir(worker_id)}-", dir=parent))
        lock = take_lock(root / LOCK_FILE, wait=True)
        assert lock is not None  # nobody else knows the directory
        return root, lock
    finally:
        os.close(gate)


def sweep(parent: Path, *, before: float = math.inf) -> None:
    """Delete the directories of dead workers below `parent`.

    Args:
        parent: of the directories.
        before: only those that were last changed before that, s since 1970.

    Raises:
        OSError: `parent` cannot be read.
    """
    for directory in parent.iterdir():
        if not directory.is_dir() or directory.stat().st_mtime >= before:
            continue
        try:
            lock = take_lock(directory / LOCK_FILE, wait=False)
        except FileNotFoundError:
            continue  # its worker has just left, and taken it along
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def take_lock(path: Path, *, wait: bool) -> int | None:
    """The lock on `path` as a file descriptor; None if somebody else has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle
