"""Temporary directories that go with the process that made them, however it dies.

Each has a lock, which the system takes back with the process. Whoever makes a directory of the same kind
later deletes those whose lock is free. A directory gets its name only when it is locked, so that nobody
takes one that begins for one that is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..worker.local_directories import LOCK_FILE, take_lock


@contextlib.contextmanager
def own_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory below `parent` for the time of the block. Blocking.

    Deletes what dead processes of this user have left there under the same prefix.
    """
    _sweep(parent, prefix)
    new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock = take_lock(new / LOCK_FILE, wait=True)
    assert lock is not None  # nobody else knows the directory
    directory = new.rename(parent / new.name.removeprefix("."))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    for directory in parent.glob(f"{prefix}*"):
        # Others may delete it at the same moment, and some are other users'.
        with contextlib.suppress(OSError):
            if directory.lstat().st_uid != os.getuid() or not (directory / LOCK_FILE).exists():
                continue
            lock = take_lock(directory / LOCK_FILE, wait=False)
            if lock is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)
