"""Statistics of checkpoints: the duration of each phase in each subtask, and the outcome.

A checkpoint has these phases in each subtask: the *start delay* (from the trigger until its first
barrier arrives), the *alignment* (until the last one), the *synchronous* part (in which the subtask
processes nothing) and the *asynchronous* part (until its state is in the store); then the
coordinator *publishes* it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, final

import msgspec

from ....operators.durations import format_duration

Status: TypeAlias = Literal["IN_PROGRESS", "COMPLETED", "FAILED"]
SnapshotPhase: TypeAlias = Literal["start delay", "alignment", "sync", "async", "publishing"]
MISSING_NAMED: Final = 3
"""The number of subtasks that are named, among those that a failed checkpoint waited for."""


@final
class SubtaskPart(msgspec.Struct, frozen=True):
    """One subtask's part of a checkpoint. Times in ms.

    Attributes:
        task: name of its vertex.
        index: of the subtask, from 0.
        ack_ms: from the trigger to its acknowledgement, by the coordinator's clock.
        start_delay_ms: from the trigger to its first barrier.
        alignment_ms: from its first barrier to its last.
        sync_ms: the synchronous part, in which it processed nothing.
        async_ms: the asynchronous part, beside its work.
        written_bytes: bytes new in the store.
        state_bytes: bytes of all its state, including shared files of older checkpoints.
        processed_bytes: bytes of records processed during the alignment.
        persisted_bytes: bytes of in-flight records that became part of the checkpoint.
        unaligned: its barriers overtook records.
        finished: it had reached the end of its data.
    """

    task: str
    index: int
    ack_ms: float
    start_delay_ms: float
    alignment_ms: float
    sync_ms: float
    async_ms: float
    written_bytes: int
    state_bytes: int
    processed_bytes: int = 0
    persisted_bytes: int = 0
    unaligned: bool = False
    finished: bool = False

    @property
    def name(self) -> str:
        """The name for a person."""
        return f"`{self.task}` ({self.index})"

    def longest(self) -> tuple[SnapshotPhase, float]:
        """Return the phase that took most of the time."""
        phases: list[tuple[SnapshotPhase, float]] = [
            ("start delay", self.start_delay_ms),
            ("alignment", self.alignment_ms),
            ("sync", self.sync_ms),
            ("async", self.async_ms),
        ]
        return max(phases, key=lambda phase: phase[1])


@final
@dataclass(slots=True)
class CheckpointRecord:
    """One checkpoint or savepoint.

    Attributes:
        checkpoint_id: its number.
        kind: `checkpoint` or `savepoint`.
        trigger_ms: when it was triggered, ms since the epoch.
        expected: all subtasks, as (task, index), each vertex after those it reads from.
        status: its status.
        parts: the parts of subtasks that have acknowledged, in this order.
        end_ms: when it completed or failed.
        failure: why it failed; empty otherwise.
        path: the path by which a run can start from it, once it is complete.
    """

    checkpoint_id: int
    kind: str
    trigger_ms: int
    expected: Sequence[tuple[str, int]]
    status: Status = "IN_PROGRESS"
    parts: list[SubtaskPart] = field(default_factory=list)
    end_ms: int | None = None
    failure: str = ""
    path: str = ""
    _awaited: set[tuple[str, int]] = field(init=False, repr=False)
    """The subtasks that have not acknowledged. A set, since each of them asks for itself."""

    def __post_init__(self) -> None:
        self._awaited = {*self.expected} - {(part.task, part.index) for part in self.parts}

    def acknowledged(self, part: SubtaskPart) -> bool:
        """Add a part; return False for one that is not awaited, which is ignored."""
        subtask = part.task, part.index
        if subtask not in self._awaited:
            return False
        self._awaited.discard(subtask)
        self.parts.append(part)
        return True

    @property
    def duration_ms(self) -> int | None:
        """The time from the trigger to the end; None: it is in progress."""
        return None if self.end_ms is None else max(0, self.end_ms - self.trigger_ms)

    @property
    def last(self) -> SubtaskPart | None:
        """The last part to be acknowledged."""
        return max(self.parts, key=lambda part: part.ack_ms, default=None)

    @property
    def written_bytes(self) -> int:
        """The bytes new in the store."""
        return sum(part.written_bytes for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """The bytes of all state, including files shared with older checkpoints."""
        return sum(part.state_bytes for part in self.parts)

    @property
    def processed_bytes(self) -> int:
        """The bytes of records processed while barriers were aligned."""
        return sum(part.processed_bytes for part in self.parts)

    @property
    def persisted_bytes(self) -> int:
        """The bytes of in-flight records that became part of it."""
        return sum(part.persisted_bytes for part in self.parts)

    @property
    def unaligned(self) -> int:
        """The number of subtasks in which barriers overtook records."""
        return sum(part.unaligned for part in self.parts)

    @property
    def missing(self) -> list[tuple[str, int]]:
        """The subtasks that have not acknowledged."""
        return [subtask for subtask in self.expected if subtask in self._awaited]


def explain(record: CheckpointRecord) -> str:
    """Explain in one sentence which subtask and phase took the time, or made the checkpoint fail."""
    if record.status == "COMPLETED":
        return _explain_completed(record)
    waiting = _waiting(record)
    if record.status == "IN_PROGRESS":
        return f"in progress; {waiting}" if waiting else "in progress; it is being published"
    return f"failed: {record.failure}" + (f"; {waiting}" if waiting else "")


def _explain_completed(record: CheckpointRecord) -> str:
    last, duration_ms = record.last, record.duration_ms or 0
    if last is None:
        return f"took {_time(duration_ms)}"
    phase, time_ms = last.longest()
    publishing_ms = duration_ms - last.ack_ms
    if publishing_ms > time_ms:
        return f"took {_time(duration_ms)}, of which {_time(publishing_ms)} went into publishing it"
    reason = {
        "start delay": f"its first barrier came after {_time(time_ms)}, behind the records queued before "
        "it and in the subtasks upstream",
        "alignment": f"it waited {_time(time_ms)} for the barriers of its other inputs",
        "sync": f"its synchronous part took {_time(time_ms)}",
        "async": f"writing its {last.written_bytes:,} bytes took {_time(time_ms)}",
    }[phase]
    return f"took {_time(duration_ms)}; {last.name} was last: {reason}"


def _waiting(record: CheckpointRecord) -> str:
    missing = record.missing
    if not missing:
        return ""
    named = ", ".join(f"`{task}` ({index})" for task, index in missing[:MISSING_NAMED])
    more = f" and {len(missing) - MISSING_NAMED} more" if len(missing) > MISSING_NAMED else ""
    text = f"{len(missing)} of {len(record.expected)} subtasks had not acknowledged: {named}{more}"
    # Barriers flow downstream, so they got stuck at the first missing subtask in the order of the
    # job.
    return f"{text}; look at the first of them" if len(missing) > 1 else text


def _time(ms: float) -> str:
    return format_duration(round(ms))


@final
class CheckpointHistory:
    """The checkpoints in progress, and the last ones that ended."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._records: dict[int, CheckpointRecord] = {}

    def started(self, record: CheckpointRecord) -> None:
        """Add a checkpoint that was triggered."""
        self._records[record.checkpoint_id] = record

    def acknowledged(self, checkpoint_id: int, part: SubtaskPart) -> bool:
        """Add a subtask's part that is durable; return False for late and repeated ones, which are
        ignored."""
        record = self._records.get(checkpoint_id)
        if record is None or record.status != "IN_PROGRESS":
            return False
        return record.acknowledged(part)

    def completed(self, checkpoint_id: int, now_ms: int, path: str = "") -> CheckpointRecord | None:
        """Note that it is published; return its record, or None if it had ended before, or is unknown."""
        return self._end(checkpoint_id, "COMPLETED", now_ms, path=path)

    def failed(self, checkpoint_id: int, now_ms: int, failure: str) -> CheckpointRecord | None:
        """Note that it failed; return its record, or None if it had ended before, or is unknown."""
        return self._end(checkpoint_id, "FAILED", now_ms, failure=failure)

    def _end(
        self,
        checkpoint_id: int,
        status: Status,
        now_ms: int,
        *,
        failure: str = "",
        path: str = "",
    ) -> CheckpointRecord | None:
        record = self._records.get(checkpoint_id)
        if record is None or record.status != "IN_PROGRESS":
            return None
        record.status, record.end_ms = status, now_ms
        record.failure, record.path = failure, path
        ended = [each for each in self.records if each.status != "IN_PROGRESS"]
        for old in ended[: max(0, len(ended) - self._kept)]:
            del self._records[old.checkpoint_id]
        return record

    @property
    def records(self) -> list[CheckpointRecord]:
        """Return the records, oldest first."""
        return [self._records[checkpoint_id] for checkpoint_id in sorted(self._records)]

    def record(self, checkpoint_id: int) -> CheckpointRecord | None:
        """Return one checkpoint, if it is remembered."""
        return self._records.get(checkpoint_id)

    @property
    def last_completed(self) -> CheckpointRecord | None:
        """Return the newest complete checkpoint that is no savepoint."""
        done = (r for r in reversed(self.records) if r.status == "COMPLETED")
        return next((record for record in done if record.kind == "checkpoint"), None)
