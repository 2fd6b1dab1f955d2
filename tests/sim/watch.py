"""Looks on while a job is simulated: what it does to its storage, and a hash of all that happened."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from headgate.runtime.protocol import joblog
from headgate.runtime.protocol.joblog import (
    AttemptDeployed,
    CheckpointEntry,
    GenerationStarted,
    JobEnded,
)

from .invariants import check_conserved
from .process import current
from .saving import Savepoints

if TYPE_CHECKING:
    from .loop import SimLoop
    from .outside import World
    from .store import Storage

JOB_ROOT = "sim/sim"


class Watch:
    """Checks the storage of a job with each change, and writes the diary."""

    def __init__(self, world: World, loop: SimLoop, *, conserves: bool, keep: bool) -> None:
        """`conserves`: the job makes one record of one; `keep` a diary."""
        self._world = world
        self._loop = loop
        self._conserves = conserves
        self._hash = hashlib.blake2b(digest_size=16)
        self.diary: list[str] | None = [] if keep else None
        self.seen: Counter[str] = Counter()
        """The number of events of each kind."""
        self.storage: Storage
        self.saved: Savepoints | None = None
        """The savepoints, of jobs whose savepoints are checked."""
        self.leader = ""
        """The name of the process of the newest coordinator."""
        self._entries: set[str] = set()
        """Log entries there ever were: one that is written again, or late, says nothing new."""
        self._needed: frozenset[str] = frozenset()
        """Files of the newest checkpoint."""
        self._ended: JobEnded | None = None
        self._failures_before = 0
        self._run, self._parallelism = "", 0
        """The newest run in the log, and what it goes on at."""
        self._owner = ""
        """The coordinator that leads by the log: all older ones were replaced."""

    @property
    def digest(self) -> str:
        """Equal for runs in which the same things happened at the same times."""
        return self._hash.hexdigest()

    def note(self, text: str) -> None:
        """Something happened."""
        process = current()
        line = f"{self._loop.time():10.4f} {process.name if process else '-':>14} {text}"
        self._hash.update(line.encode())
        if self.diary is not None:
            self.diary.append(line)

    def stored(self, kind: str, root: str, name: str) -> None:
        """A store did something."""
        self.note(f"{kind} {name}")
        self.seen[f"store {kind}"] += 1
        if root != JOB_ROOT:
            process = current()
            leads = process is not None and process.name == self.leader
            if kind == "create" and self.saved is not None:
                owns = process is not None and process.name == self._owner
                complete = self.saved.published(root, name, leads=leads, owns=owns)
                self.seen["savepoint complete"] += complete
            return
        if kind == "create" and name.startswith("log/0") and name not in self._entries:
            self._entries.add(name)
            self._logged(name)
        elif kind == "put" and name.startswith("log/0"):
            self._world.violated(f"a log entry is written once and stays: {name}")
        elif kind == "delete" and self._ended is None and name in self._needed:
            self._world.violated(f"deleted, though the newest checkpoint needs it: {name}")

    def _logged(self, name: str) -> None:
        entry = joblog.ENTRIES.decode(self.storage.roots[JOB_ROOT][name], name)
        if isinstance(entry, GenerationStarted):
            if self._ended is not None and self._ended.run != entry.run:
                self._ended = None  # one of the same run only tidies up
            self._check_parallelism("takeover", entry.run, entry.parallelism)
            self._run, self._parallelism = entry.run, entry.parallelism
            process = current()
            self._owner = "" if process is None else process.name
        elif isinstance(entry, AttemptDeployed):
            self.seen["deployment"] += 1
            self._check_parallelism("deployment", self._run, entry.deployment.parallelism)
        elif isinstance(entry, JobEnded):
            said = self._ended
            if said is not None and _result(said) != _result(entry):
                self._world.violated(f"a run ended twice: {_result(said)}, {_result(entry)}")
            self._ended = entry
            self._run = ""  # the next leader only tidies up
            self._failures_before = self.storage.failures
        else:
            self._completed(entry)

    def _check_parallelism(self, what: str, run: str, parallelism: int) -> None:
        """A run goes on at what its last checkpoint says: a rescale that completed holds for ever."""
        if run == self._run and parallelism != self._parallelism:
            self._world.violated(f"a {what} at {parallelism}, the log says {self._parallelism}")

    def _completed(self, entry: CheckpointEntry) -> None:
        id_, world = entry.checkpoint_id, self._world
        self._parallelism = entry.parallelism or self._parallelism
        if world.completed and id_ <= max(world.completed):
            world.violated(f"checkpoint ids do not grow: {id_} behind {max(world.completed)}")
        world.completed.add(id_)
        self._needed = entry.manifest.files()
        missing = self._needed - self.storage.roots[JOB_ROOT].keys()
        if missing:
            world.violated(f"checkpoint {id_} completed without its files: {sorted(missing)}")
        elif self._conserves:
            root = self.storage.roots[JOB_ROOT]
            check_conserved(entry.manifest, world, lambda handle: root[handle.file or ""])
        self.seen["checkpoint"] += 1
        if any(handle.channel is not None for handle in entry.manifest.handles()):
            self.seen["checkpoint with records on their way"] += 1

    def check_storage_at_end(self) -> None:
        """Nothing is left of a finished job's checkpoints, if the storage let it clean up."""
        if self.storage.failures > self._failures_before:
            return
        left = [name for name in self.storage.roots[JOB_ROOT] if name.startswith("chk/")]
        if left:
            self._world.violated(f"orphans: {sorted(left)[:5]} and {max(0, len(left) - 5)} more")


def _result(end: JobEnded) -> tuple[object, ...]:
    return end.status, end.reason, end.checkpoint, end.failure
