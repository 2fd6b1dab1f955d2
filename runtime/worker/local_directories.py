"""The directories of a worker on its own machine: for local state, and for copies of state files.

    <io.tmp.dirs>/headgate-local-<user id>/<worker>-<random>/<attempt>/<vertex>-<subtask>/...
    <local-backup.dirs>/headgate-copies-<user id>/<job>/<worker>-<random>/<file>

Each worker holds a lock on its directories as long as it lives; the system takes it back however the worker
dies. So a worker that gets the lock of another directory may delete it: this is how a new worker sweeps up
after dead ones of the same machine.

All workers of a job on a machine find each other's copies. A worker that is dismissed, since the job is
over, deletes its copies. Those of a worker that was killed, or that lost its coordinator, stay until the
next attempt of the job has started: by then its successors have linked all that they need. Copies of a job
that never came back are swept by workers of other jobs, an hour later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ...errors import StorageError
from ...operators.clock import Clock
from ...operators.private_directory import LOCK_FILE, private_directory, take_lock
from ...state.snapshot import StateHandle
from ..options.recovery import FROM_LOCAL, LOCAL_BACKUP, LOCAL_BACKUP_DIRS, LOCAL_BACKUP_SIZE
from ..options.registry import Options
from ..options.state import LOCAL_DIRS
from ..protocol import names
from ..task.local_files import LocalCopies, SubtaskDirectory

ABANDONED_S: Final = 3600.0
"""A job whose directory was not touched for this time does not come back for it."""
_log = logging.getLogger("headgate.worker")


class LocalDirectories:
    """One worker's directories, one below each of `io.tmp.dirs`. Blocking: use it in a thread."""

    def __init__(self, bases: Sequence[Path], worker_id: str) -> None:
        """Make and lock them, and sweep up after dead workers.

        Raises:
            StorageError: a directory cannot be made, or belongs to another user.
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
        """Delete everything, and release the locks."""
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
        OSError: it cannot be made, or `parent` belongs to another user.
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
        assert lock is not None  # no other process knows the directory
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
        try:
            if not directory.is_dir() or directory.stat().st_mtime >= before:
                continue
            lock = take_lock(directory / LOCK_FILE, wait=False)
        except FileNotFoundError:
            continue  # its worker has just left, and taken it along
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def local_dirs(options: Options) -> tuple[Path, ...]:
    """Directories on this machine, at least one."""
    return _paths(options.get(LOCAL_DIRS) or "") or (Path(tempfile.gettempdir()),)


def backup_dirs(options: Options) -> tuple[Path, ...]:
    """Directories on this machine for copies of state files, at least one."""
    return _paths(options.get(LOCAL_BACKUP_DIRS) or "") or local_dirs(options)


class Backups:
    """One worker's copies, of one job after the other. Blocking: use it in a thread."""

    def __init__(self, worker_id: str, clock: Clock) -> None:
        self._worker_id = worker_id
        self._clock = clock
        self._parents: Sequence[Path] = ()
        self._roots: list[Path] = []
        self._locks: list[int] = []
        self._copies: LocalCopies | None = None

    def open(
        self, settings: dict[str, str], job_name: str, storage: str, *, afresh: bool = True
    ) -> LocalCopies | None:
        """Return the copies for another attempt; None: the job wants none, or no directory can be made.

        `afresh` says that everything that ran here is over. Else a part runs on, and needs its copies.
        """
        options = Options(settings)
        keeps, reads = options.get(LOCAL_BACKUP), options.get(FROM_LOCAL)
        if not storage or not (keeps or reads):
            return None
        if self._copies is None:
            above = [base / f"headgate-copies-{os.getuid()}" for base in backup_dirs(options)]
            self._parents = [each / names.local_job_dir(job_name, storage) for each in above]
            try:
                for parent in self._parents if keeps else ():
                    root, lock = claim(parent, self._worker_id, sweeping=False)
                    self._roots.append(root)
                    self._locks.append(lock)
                for each in above:
                    self._sweep_abandoned(each)
            except OSError as error:
                _log.warning("no local copies of state are kept: %s", error)
            self._copies = LocalCopies(
                self._roots,
                self._siblings,
                size_max=options.get(LOCAL_BACKUP_SIZE),
                keeps=keeps,
                reads=reads,
            )
        if afresh:
            self._copies.restoring()
        return self._copies

    def _siblings(self) -> list[Path]:
        """Directories of the job's other workers on this machine, dead or alive."""
        found: list[Path] = []
        for parent in self._parents:
            with contextlib.suppress(OSError):
                found += sorted(path for path in parent.iterdir() if path.is_dir())
        return [path for path in found if path not in self._roots]

    def drop_needless(self, checkpoint_id: int, handles: Iterable[StateHandle]) -> None:
        """Drop the copies that no subtask of the attempt needs, now that all have their state.

        Args:
            checkpoint_id: the restored one; 0: none.
            handles: what it consists of here.
        """
        if self._copies is not None:
            self._copies.restored(checkpoint_id, handles)
            self._sweep()

    def close(self, *, forget: bool) -> None:
        """Release the directories, and delete them if the job is over."""
        if forget:
            for root in self._roots:
                shutil.rmtree(root, ignore_errors=True)
            self._sweep()
            for parent in self._parents:
                _remove_if_empty(parent)
        self.unlock()

    def unlock(self) -> None:
        """Release the directories without deleting them, as the system does for a process that dies."""
        for lock in self._locks:
            os.close(lock)
        self._roots, self._locks, self._copies = [], [], None

    def _sweep(self) -> None:
        for parent in self._parents:
            with contextlib.suppress(OSError):
                sweep(parent)

    def _sweep_abandoned(self, above: Path) -> None:
        """Delete what dead workers of other jobs left long ago."""
        before = self._clock.now_ms() / 1000 - ABANDONED_S
        for job in above.iterdir() if above.is_dir() else ():
            if job not in self._parents:
                with contextlib.suppress(OSError):
                    sweep(job, before=before)
                    if job.stat().st_mtime < before:
                        _remove_if_empty(job)


def _remove_if_empty(parent: Path) -> None:
    """A worker that comes at this moment goes on without copies, at worst."""
    with contextlib.suppress(OSError):
        if all(path.name == LOCK_FILE for path in parent.iterdir()):
            (parent / LOCK_FILE).unlink(missing_ok=True)
            parent.rmdir()


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part.strip()).expanduser() for part in text.split(",") if part.strip())
