"""The history of a job's failures: root cause, concurrent failures, consequences and durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final


@final
@dataclass(slots=True)
class RestoreFigures:
    """Times and sizes of the parts of an attempt's deployment.

    Times are in ms, of the slowest subtask where there are several; sizes are in bytes, of all
    together.

    Attributes:
        workers_ms: until all workers were available.
        fetching_ms: until a subtask had read and verified its state.
        opening_ms: until its operators had restored it.
        local_bytes: read from copies on the workers' machines.
        storage_bytes: read from the checkpoint's storage.
        kept_bytes: taken over from memory, and not read.
    """

    workers_ms: int = 0
    fetching_ms: int = 0
    opening_ms: int = 0
    local_bytes: int = 0
    storage_bytes: int = 0
    kept_bytes: int = 0

    def add(
        self,
        fetching_ms: int,
        opening_ms: int,
        local_bytes: int,
        read_bytes: int,
        kept_bytes: int = 0,
    ) -> None:
        """Take in the report of one worker; `read_bytes` is all that it read."""
        self.fetching_ms = max(self.fetching_ms, fetching_ms)
        self.opening_ms = max(self.opening_ms, opening_ms)
        self.local_bytes += local_bytes
        self.storage_bytes += max(0, read_bytes - local_bytes)
        self.kept_bytes += kept_bytes


CONCURRENT_MAX: Final = 16
"""The most failures kept beside a root one; when a worker dies all its subtasks fail."""


@final
@dataclass(frozen=True, slots=True)
class FailureEntry:
    """One failure.

    Attributes:
        time_ms: since the epoch.
        kind: the value of a FailureKind.
        where: the subtask, worker or part of the coordinator.
        worker: the worker it happened on, if it is known.
        text: what happened.
        detail: a traceback, or nothing.
        category: the value of a FailureCategory.
    """

    time_ms: int
    kind: str
    where: str
    worker: str
    text: str
    detail: str = ""
    category: str = ""


@final
@dataclass(slots=True)
class FailureRecord:
    """A root failure and its consequences.

    Attributes:
        root: the failure that ended the attempt.
        attempt: the attempt that it ended.
        labels: the labels of the user's enrichers.
        concurrent: failures of the same attempt that came before everything had stopped.
        concurrent_dropped: the number of further ones.
        outcome: what followed: `restart 3 in 4000 ms`, or why the job failed for good.
        restored: the state that the next attempt began with.
        cancelling_ms: until everything had stopped.
        waiting_ms: the pause of the restart strategy.
        deploying_ms: until all subtasks were ready, restored state included.
        down_ms: from the failure until all subtasks ran again; None: they do not yet.
        silent_ms: for a lost worker, the time since its last sign of life: detection took at most
            that.
        restore: the parts of `deploying_ms`.
        tasks: the tasks that restarted for it, by name.
        tasks_total: the number of tasks of the job.
    """

    root: FailureEntry
    attempt: int
    labels: dict[str, str] = field(default_factory=dict)
    concurrent: list[FailureEntry] = field(default_factory=list)
    concurrent_dropped: int = 0
    outcome: str = ""
    restored: str = ""
    cancelling_ms: int | None = None
    waiting_ms: int | None = None
    deploying_ms: int | None = None
    down_ms: int | None = None
    silent_ms: int | None = None
    restore: RestoreFigures = field(default_factory=RestoreFigures)
    tasks: list[str] = field(default_factory=list)
    tasks_total: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the root failure, and the rest, for clients."""
        found = asdict(self)
        return {**found.pop("root"), **found}


@final
class FailureHistory:
    """The last failures of a job. All times are on one clock, ms."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._records: list[FailureRecord] = []
        self._phase_ms = 0
        self._recovering = False

    def failed(
        self, root: FailureEntry, attempt: int, silent_ms: int | None = None
    ) -> FailureRecord:
        """Begin a record: an attempt failed, or its restart did, which is a failure of its own."""
        record = FailureRecord(root, attempt, silent_ms=silent_ms)
        self._records.append(record)
        del self._records[: -self._kept]
        self._phase_ms = root.time_ms
        self._recovering = True
        return record

    def also(self, entry: FailureEntry) -> None:
        """Add another failure before all subtasks ran again; it is part of the same record."""
        record = self._open()
        if record is None:
            return
        if len(record.concurrent) < CONCURRENT_MAX:
            record.concurrent.append(entry)
        else:
            record.concurrent_dropped += 1

    def cancelled(self, now_ms: int, also: Sequence[FailureEntry] = ()) -> None:
        """Note that everything of the attempt has stopped; `also` failed on the way."""
        if (record := self._open()) is not None:
            for entry in also:
                self.also(entry)
            record.cancelling_ms = self._phase(now_ms)

    def decided(self, outcome: str, tasks: Sequence[str] = (), tasks_total: int = 0) -> None:
        """Note the outcome, and the tasks that it concerns."""
        if (record := self._open()) is not None:
            record.outcome = outcome
            record.tasks, record.tasks_total = list(tasks), tasks_total

    def waited(self, now_ms: int) -> None:
        """Note that the pause is over and the next attempt is deployed."""
        if (record := self._open()) is not None:
            record.waiting_ms = self._phase(now_ms)

    def deployed(self, now_ms: int, restored: str, figures: RestoreFigures | None = None) -> None:
        """Note that all subtasks of the next attempt are ready."""
        if (record := self._open()) is not None:
            record.deploying_ms = self._phase(now_ms)
            record.restored = restored
            record.restore = figures or RestoreFigures()

    def running(self, now_ms: int) -> FailureRecord | None:
        """End the record, as all subtasks run, and return it; None: there was no failure."""
        if (record := self._open()) is not None:
            record.down_ms = max(0, now_ms - record.root.time_ms)
        self._recovering = False
        return record

    @property
    def recovering_since_ms(self) -> int | None:
        """Return when the job failed last, if it does not run again yet."""
        record = self._open()
        return None if record is None else record.root.time_ms

    @property
    def records(self) -> list[FailureRecord]:
        """Return the records, oldest first."""
        return list(self._records)

    def _open(self) -> FailureRecord | None:
        return self._records[-1] if self._recovering and self._records else None

    def _phase(self, now_ms: int) -> int:
        began, self._phase_ms = self._phase_ms, now_ms
        return max(0, now_ms - began)
