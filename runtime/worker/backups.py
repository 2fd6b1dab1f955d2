"""The directories in which workers keep copies of state files on their machine, and their deletion.

    <local-backup.dirs>/headgate-copies-<user id>/<job>/<worker>-<random>/<file>

All workers of a job on a machine find each other's copies there. Each holds a lock on its own directory as
long as it lives. One that is dismissed, since the job is over, deletes its directory; that of one that was
killed, or lost its coordinator, stays until the next attempt of the job has started: all that its
successors need they have linked away by then. What a job left that never came back is swept by workers of
others, an hour later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ...operators.clock import Clock
from ...state.snapshot import StateHandle
from ..options.recovery import FROM_LOCAL, LOCAL_BACKUP, LOCAL_BACKUP_SIZE
from ..options.registry import Options
from ..protocol import names
from ..task.local_copies import LocalCopies
from .local_directories import LOCK_FILE, claim, sweep
from .settings import backup_dirs

ABANDONED_S: Final = 3600.0
"""A job whose directory nobody has touched for so long does not come back for it."""
_log = logging.getLogger("headgate.worker")


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
        """The copies for another attempt; None: the job wants none, or no directory can be made.

        `afresh`: all that ran here is over. Else a part of it runs on, and goes on to need its copies.
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

    def settle(self, checkpoint_id: int, handles: Iterable[StateHandle]) -> None:
        """All subtasks of the attempt have their state: let go of what they do not need.

        Args:
            checkpoint_id: the restored one; 0: none.
            handles: what it consists of here.
        """
        if self._copies is not None:
            self._copies.restored(checkpoint_id, handles)
            self._sweep()

    def close(self, *, forget: bool) -> None:
        """Let go of the directories, and delete them if the job is over."""
        if forget:
            for root in self._roots:
                shutil.rmtree(root, ignore_errors=True)
            self._sweep()
            for parent in self._parents:
                _remove_if_empty(parent)
        self.unlock()

    def unlock(self) -> None:
        """Let go of the directories as they are: that much the system does for a process that dies."""
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
