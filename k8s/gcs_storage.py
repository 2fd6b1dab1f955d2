"""Ray's control store on a volume: the content of its directory, and the time when it may be opened.

A head that starts again finds the former nodes and actors there. Ray opens it with an embedded
RocksDB, and aborts if another process has it open.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ..errors import JobError

LOCK: Final = "LOCK"
"""RocksDB locks the file of this name while it has a database open."""
FREE_S: Final = 90.0
"""A replaced head has ended by then, because its pod has less time to end."""
LOOK_S: Final = 0.2


def environment(directory: Path) -> dict[str, str]:
    """Return the variables with which Ray's head keeps its control store in this directory."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory)}


async def prepare(volume: Path, run_id: str, within_s: float = FREE_S) -> Path:
    """Make the directory of a run and delete all others, once no other process has the store open.

    Args:
        volume: the path at which the volume is mounted.
        run_id: the run. Each run begins with an empty store, because nodes and actors of another one no
            longer exist.
        within_s: the longest time to wait, in seconds.

    Raises:
        JobError: another process still has it open.
    """
    own = volume / run_id
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while await asyncio.to_thread(_is_open, volume):
        if loop.time() >= until:
            raise JobError(
                f"another process has Ray's control store open volume=`{volume}`",
                fix="does the pod of the former head still exist? this pod tries again",
            )
        await asyncio.sleep(LOOK_S)
    await asyncio.to_thread(_keep_only, volume, own)
    return own


def _is_open(volume: Path) -> bool:
    return any(map(_is_locked, volume.rglob(LOCK)))


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


def _keep_only(volume: Path, own: Path) -> None:
    own.mkdir(exist_ok=True)
    for each in _others(volume, own):
        shutil.rmtree(each, ignore_errors=True)


def _others(volume: Path, own: Path) -> Iterable[Path]:
    """Return the directories of other runs; a file system may have one of its own beside them."""
    return [each for each in volume.iterdir() if each != own and each.name != "lost+found"]
