"""Private directories in a place that all users of the machine share, such as /tmp."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


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
