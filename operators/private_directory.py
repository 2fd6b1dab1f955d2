"""Directories in a place that all users of the machine share, such as /tmp, and their locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

LOCK_FILE: Final = "lock"
"""The file of a directory that its process holds a lock on for as long as it lives."""


def private_directory(path: Path) -> Path:
    """Make sure that `path` is a directory which only this user can enter, and return it.

    Files in it need no modes of their own, since others cannot reach them. A directory of this user
    that is open to others is closed to them. It may also be a link of this user to such a
    directory.

    Raises:
        OSError: it cannot be made, or it belongs to another user, who may have put it there to read
            our files.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if not path.lstat().st_uid == found.st_uid == os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def keep_newest(directory: Path, pattern: str, count: int) -> None:
    """Delete the files that match a pattern, but the newest `count`; other processes may do the same."""
    found: list[tuple[float, Path]] = []
    for path in directory.glob(pattern):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[: max(0, len(found) - count)]:
        path.unlink(missing_ok=True)


def take_lock(path: Path, *, wait: bool) -> int | None:
    """Return the lock on `path` as a file descriptor; None if another process has it."""
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


@contextmanager
def own_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory below `parent` for the time of the block. Blocking.

    It goes however the process dies, because it has a lock that the system takes back with the process: a
    process that makes a directory of the same kind later deletes those whose lock is free. A directory gets
    its name only when it is locked, so that no process takes one that begins for one that is left.
    """
    _sweep(parent, prefix)
    new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock = take_lock(new / LOCK_FILE, wait=True)
    assert lock is not None  # no other process knows the directory
    directory = new.rename(parent / new.name.removeprefix("."))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    for directory in parent.glob(f"{prefix}*"):
        # Others may delete it at the same moment, and some are other users'.
        with suppress(OSError):
            if directory.lstat().st_uid != os.getuid() or not (directory / LOCK_FILE).exists():
                continue
            lock = take_lock(directory / LOCK_FILE, wait=False)
            if lock is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)
