"""The job log: the single linearizable source of truth of a job. Decisions only; I/O is
elsewhere.

The log is a dense sequence of records 1, 2, 3, ..., each made by create-if-absent: of two
coordinators that want a slot exactly one gets it. A coordinator first *claims* a generation (a
second dense sequence, `GenerationRecord`), then reads the log to its tail and appends
`GenerationStarted`. From then on it knows its next slot; finding another entry there means that a
newer coordinator has started: it is fenced. So an old leader's checkpoint is either before the new
leader's start entry, and the new leader has seen it, or it never completes.

Trimming must never free a slot again. Three rules ensure it:

1. `GenerationStarted` entries are never deleted. The next slot of a fenced leader is always one of
   them, so however late it wakes up, the slot is taken.
2. Before entries below a new *head* are deleted, the head is published in the leader's own generation
   record. No other process writes that record, so a late zombie cannot move the head back; the
   head of the log is the maximum over the records.
3. A reader that finds a slot empty, and a coordinator that has just appended its start entry, read
   the head again: if it is beyond the slot, the slot was trimmed, and their action is void.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias, final

import msgspec
from msgspec.structs import replace

from ...errors import CorruptError, check
from ...state.sealed import Record, SealedFormat
from .checkpoints.manifest import Manifest
from .job_result import JobFailure
from .old_output import NO_OLD_OUTPUT, OldOutput


@final
class RunHistory(Record, frozen=True, kw_only=True):
    """The facts about its run, and the runs before it, that an entry of the job log repeats.

    The end of a run is an entry of the job log (`JobEnded`), and there is no other record of it.
    Entries that no checkpoint needs are trimmed, so the history is a list of the ends that trimming
    keeps. Each entry repeats that list, because the entry before it may have been trimmed.
    """

    job: str = ""
    """The name of the job; empty in entries of before it was recorded."""
    began_ms: int = 0
    """When the run began, in ms since the epoch; 0: unknown."""
    restarts: int = 0
    """The restarts of tasks in this run under all its coordinators.

    Those between the last entry of a coordinator that died and its death are missing.
    """
    ends: tuple[int, ...] = ()
    """Sequences of the `JobEnded` entries that are kept, the oldest first."""

    def next_run(self, job: str, now_ms: int, kept: int) -> RunHistory:
        """Return the history of a run that begins now, with the newest `kept` ends of former runs."""
        return RunHistory(job=job, began_ms=now_ms, ends=self._newest(kept))

    def taken_over(self, job: str, now_ms: int, kept: int) -> RunHistory:
        """Return the history of the same run under another coordinator."""
        return replace(self, job=job, began_ms=self.began_ms or now_ms, ends=self._newest(kept))

    def ended(self, sequence: int, instead: int = 0) -> RunHistory:
        """Return the history with the end in the entry `sequence` added, replacing that in `instead`."""
        ends = tuple(each for each in self.ends if each != instead)
        return replace(self, ends=(*ends, sequence))

    def restarted(self, restarts: int) -> RunHistory:
        """Return the history with restarts of the present coordinator added."""
        return replace(self, restarts=self.restarts + restarts)

    def _newest(self, kept: int) -> tuple[int, ...]:
        return self.ends[max(0, len(self.ends) - kept) :]


NO_HISTORY: Final = RunHistory()
"""The history in entries that were written before it existed."""


class JobStatus(enum.Enum):
    """The ways in which a job ends."""

    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def status_name(self) -> str:
        """The name that users see, as in Flink."""
        return "SUSPENDED" if self is JobStatus.STOPPED else self.value


class DeploymentRecord(Record, frozen=True, kw_only=True):
    """A deployed attempt: enough for another coordinator to find it, and to check that nothing else
    runs."""

    attempt: int
    workers: tuple[str, ...]
    """Ids of the workers that host it."""
    plan: str
    """Fingerprint of the physical plan."""
    parallelism: int
    max_parallelism: int
    restored_checkpoint: int = 0
    """The checkpoint that the attempt restored; 0: none."""
    in_parts: bool = False
    """Whether some of its regions have restarted since, as other attempts, perhaps on other
    workers."""


class GenerationStarted(Record, frozen=True, kw_only=True, tag_field="entry", tag=True):
    """A coordinator took over. Entries of older generations cannot follow."""

    generation: int
    writer: str
    started_ms: int
    job_fingerprint: str
    parallelism: int
    max_parallelism: int
    host: str = ""
    pid: int = 0
    run: str = ""
    """Identifies the run: a coordinator that takes over continues the run of the one before."""
    fresh: bool = False
    """Checkpoints before this entry are not restored: a new run starts without them."""
    restore_from: str = ""
    """Address of the savepoint, or checkpoint, that the run begins with."""
    history: RunHistory = NO_HISTORY


class CheckpointEntry(
    Record, frozen=True, kw_only=True, tag_field="entry", tag="CheckpointCompleted"
):
    """A checkpoint is durable: from here on its commits are allowed."""

    generation: int
    writer: str
    checkpoint_id: int
    manifest: Manifest
    completed_ms: int
    is_final: bool = False
    """The job takes no records after it: stop with savepoint, or the end of all data."""
    run: str = ""
    parallelism: int = 0
    """The parallelism at which the run continues: with the last checkpoint before a rescale, the
    new one.

    0 in entries of before rescaling existed: unchanged.
    """
    deployment: DeploymentRecord | None = None
    """The running deployment, repeated because its own entry may have been trimmed."""
    history: RunHistory = NO_HISTORY
    old_output: OldOutput = NO_OLD_OUTPUT
    """The output of earlier runs that is still to be deleted after this checkpoint."""


class OutputListed(Record, frozen=True, kw_only=True, tag_field="entry", tag=True):
    """The run replaces these files of earlier runs; a later list of the run supersedes this one."""

    generation: int
    writer: str
    files: dict[str, bytes]
    """The result of `old_output.pack` by sink; only sinks with files."""


class AttemptDeployed(Record, frozen=True, kw_only=True, tag_field="entry", tag=True):
    """The workers were told to prepare an attempt; none is told to begin before this entry is there.

    It is written while they prepare, so they need not be ready. A coordinator that takes over
    after it, and finds that the attempt has not begun everywhere, restarts the job, as if there
    were no entry.
    """

    generation: int
    writer: str
    deployment: DeploymentRecord


class JobEnded(Record, frozen=True, kw_only=True, tag_field="entry", tag=True):
    """The job is over. A later generation may start it again."""

    generation: int
    writer: str
    status: JobStatus
    reason: str
    ended_ms: int
    last_checkpoint_id: int = 0
    """Highest id of a completed checkpoint: ids continue from it when all checkpoints are dropped.
    """
    run: str = ""
    """The run that ended; in entries of before it was recorded: that of the newest start in view.
    """
    checkpoint: int = 0
    """The newest checkpoint that it could have continued from; 0: none, or not recorded."""
    failure: JobFailure | None = None
    history: RunHistory = NO_HISTORY
    """The history of this run; `ends` are those of the runs before it."""


LogEntry: TypeAlias = (
    GenerationStarted | OutputListed | AttemptDeployed | CheckpointEntry | JobEnded
)


class Leader(Record, frozen=True, kw_only=True):
    """The process that claimed a generation: enough to find out whether it is still alive."""

    host: str
    pid: int
    started_ms: int
    addresses: tuple[str, ...] = ()
    """Where it listens for control connections."""
    rest: tuple[str, ...] = ()
    """Where its REST API listens, as far as it did when the generation was claimed."""


class GenerationRecord(Record, frozen=True, kw_only=True):
    """Claims a generation (create-if-absent), then records where its owner trimmed the log to.

    Only its owner replaces it, and `head` only grows.
    """

    generation: int
    writer: str
    head: int = 0
    """Lowest sequence still needed; that entry exists. 0: not published yet."""
    settled: int = 0
    """Leaders of older generations can never publish a head above this one."""
    swept: int = 1
    """Entries from here up to the head may still exist, and files of their checkpoints with them."""
    run: str = ""
    """The run it was claimed for; empty: not recorded."""
    leader: Leader | None = None
    """The leader; None: not recorded."""


ENTRIES: Final[SealedFormat[LogEntry]] = SealedFormat("job log entry", LogEntry, compressed=True)
RECORDS: Final = SealedFormat[GenerationRecord]("generation record", GenerationRecord)


@final
class LoggedCheckpoint(msgspec.Struct, frozen=True):
    """A completed checkpoint and the log entry that completed it."""

    sequence: int
    generation: int
    manifest: Manifest
    is_final: bool = False

    @property
    def checkpoint_id(self) -> int:
        return self.manifest.checkpoint_id


@final
class LogView(msgspec.Struct, frozen=True):
    """The meaning of the entries `head` to `tail`. Immutable; `fold` makes the next view."""

    head: int = 1
    tail: int = 0
    generation: int = 0
    writer: str = ""
    started: GenerationStarted | None = None
    """Start entry of the current generation; None if the view begins after it."""
    starts: tuple[int, ...] = ()
    """Sequences of all start entries in view, which trimming keeps."""
    checkpoints: tuple[LoggedCheckpoint, ...] = ()
    """Retained completed checkpoints, newest last."""
    last_checkpoint_id: int = 0
    last_end: JobEnded | None = None
    end_sequence: int = 0
    run: str = ""
    """The run of the newest start or checkpoint."""
    parallelism: int = 0
    """The parallelism at which that run continues, whatever the job originally had."""
    fresh_from: int = 0
    """Sequence of the newest fresh start in view: nothing before it is restored."""
    restore_from: str = ""
    """The savepoint that the newest run restored, until it has a checkpoint of its own."""
    takeovers_ms: tuple[int, ...] = ()
    """When coordinators took this run over since it last completed a checkpoint, or began, in ms.
    """
    deployment: DeploymentRecord | None = None
    """The newest deployment; it may be long over."""
    deployed_run: str = ""
    """The run it belongs to."""
    deployment_completed: int = 0
    """The newest checkpoint that this deployment completed; 0: none."""
    history: RunHistory = NO_HISTORY
    """The history of the newest run; its `ends` are not trimmed, and may be before `head`."""
    old_output: OldOutput = NO_OLD_OUTPUT
    """The output of earlier runs that is still to be deleted; its entry is not trimmed either."""

    @staticmethod
    def beginning_at(head: int) -> LogView:
        """Return the view before the entry `head` is read."""
        return LogView(head=head, tail=head - 1)

    @property
    def empty(self) -> bool:
        """True if no coordinator ever started this job."""
        return self.tail == 0

    @property
    def restorable(self) -> tuple[LoggedCheckpoint, ...]:
        """Return the retained checkpoints since the last fresh start, newest last."""
        return tuple(c for c in self.checkpoints if c.sequence >= self.fresh_from)

    @property
    def files(self) -> set[str]:
        """Return the names of the state files that retained checkpoints need."""
        return {file for logged in self.checkpoints for file in logged.manifest.files()}

    @property
    def newest(self) -> LoggedCheckpoint | None:
        """Return the newest completed checkpoint since the last fresh start, which a restart
        restores."""
        restorable = self.restorable
        return restorable[-1] if restorable else None

    @property
    def next_checkpoint_id(self) -> int:
        """Return the lowest id that no completed checkpoint has."""
        return self.last_checkpoint_id + 1

    @property
    def ended(self) -> JobEnded | None:
        """Return the end of the job; None if it never ended, or was started again since."""
        if self.last_end is None or self.last_end.generation != self.generation:
            return None
        return self.last_end

    @property
    def settled(self) -> int:
        """The highest sequence up to which the log could be trimmed with this view."""
        newest = self.checkpoints[-1].sequence if self.checkpoints else 0
        return max(newest, self.end_sequence)

    def takeovers_since(self, since_ms: int) -> int:
        """Return the number of takeovers of this run since then without a checkpoint in between."""
        return sum(at_ms >= since_ms for at_ms in self.takeovers_ms)

    def owned_by(self, writer: str, generation: int) -> bool:
        """Return True if `writer` started the current generation, and it is `generation`."""
        return self.generation == generation and self.writer == writer


def fold(view: LogView, entry: LogEntry) -> LogView:
    """Return the view with the entry after its tail added.

    Raises:
        CorruptError: the entry cannot follow: something other than headgate wrote or removed
            records.
    """
    sequence = view.tail + 1
    known = view.tail >= view.head
    if known:
        _check_order(view, entry, sequence)
    base = replace(view, tail=sequence, generation=entry.generation, writer=entry.writer)
    if isinstance(entry, GenerationStarted):
        fresh_from = sequence if entry.fresh else view.fresh_from
        takeover = known and entry.run == view.run
        return replace(
            base,
            restore_from=view.restore_from if takeover else entry.restore_from,
            takeovers_ms=(*view.takeovers_ms, entry.started_ms) if takeover else (),
            started=entry,
            starts=(*view.starts, sequence),
            run=entry.run,
            parallelism=entry.parallelism,
            fresh_from=fresh_from,
            history=entry.history,
            # A run that continues from a checkpoint of this log replaces the output of that
            # checkpoint's run.
            old_output=view.old_output if takeover or _resumes(view, entry) else NO_OLD_OUTPUT,
        )
    if isinstance(entry, CheckpointEntry):
        logged = LoggedCheckpoint(sequence, entry.generation, entry.manifest, entry.is_final)
        return replace(
            base,
            checkpoints=(*view.checkpoints, logged),
            last_checkpoint_id=entry.checkpoint_id,
            restore_from="",
            takeovers_ms=(),
            run=entry.run,
            parallelism=entry.parallelism or view.parallelism,
            deployment=entry.deployment,
            deployed_run=entry.run,
            deployment_completed=entry.checkpoint_id,
            history=entry.history,
            old_output=entry.old_output,
        )
    if isinstance(entry, OutputListed):
        return replace(base, old_output=view.old_output.listed(view.run, sequence, entry.files))
    if isinstance(entry, AttemptDeployed):
        deployment = entry.deployment
        return replace(base, deployment=deployment, deployed_run=view.run, deployment_completed=0)
    # A run whose coordinator died after its end is ended again by the next one.
    last = view.last_end
    again = view.end_sequence if last is not None and last.run == entry.run != "" else 0
    return replace(
        base,
        deployment=None,
        last_end=entry,
        end_sequence=sequence,
        run=entry.run or view.run,
        last_checkpoint_id=max(view.last_checkpoint_id, entry.last_checkpoint_id),
        history=entry.history.ended(sequence, instead=again),
        old_output=NO_OLD_OUTPUT if entry.status is JobStatus.FINISHED else view.old_output,
    )


def _resumes(view: LogView, started: GenerationStarted) -> bool:
    """Return True if a new run continues from the newest checkpoint of the log."""
    return not (started.fresh or started.restore_from) and view.newest is not None


def _check_order(view: LogView, entry: LogEntry, sequence: int) -> None:
    problem = ""
    if isinstance(entry, GenerationStarted):
        if entry.generation <= view.generation:
            problem = "a generation starts after a newer one"
    elif not view.owned_by(entry.writer, entry.generation):
        problem = "an entry is not of the coordinator that started its generation"
    elif view.ended is not None:
        problem = "an entry follows the end of the job in one generation"
    elif isinstance(entry, CheckpointEntry) and entry.checkpoint_id <= view.last_checkpoint_id:
        problem = "checkpoint ids do not grow"
    if problem:
        raise CorruptError(
            f"the job log is damaged: {problem} sequence=`{sequence}` "
            f"generation=`{entry.generation}` writer=`{entry.writer}`",
            fix="do two jobs share one checkpoint directory? each needs its own name",
        )


# Outcomes of an attempt to append.


@final
class Appended(msgspec.Struct, frozen=True):
    """The slot was free; the entry is in the log. `view` includes it."""

    view: LogView


@final
class AlreadyAppended(msgspec.Struct, frozen=True):
    """An earlier try, whose answer was lost, had succeeded. `view` includes the entry."""

    view: LogView


@final
class Fenced(msgspec.Struct, frozen=True):
    """A newer coordinator owns the job; ours must stop."""

    by: LogEntry


@final
class RetryAfterTail(msgspec.Struct, frozen=True):
    """An older coordinator took the slot before we started: read on, then try after the tail."""

    view: LogView


AppendDecision: TypeAlias = Appended | AlreadyAppended | Fenced | RetryAfterTail


def decide_append(view: LogView, proposal: LogEntry, existing: LogEntry | None) -> AppendDecision:
    """Decide what follows from trying to create `proposal` in slot `view.tail + 1`.

    Args:
        view: the view on which the proposal was based.
        proposal: our entry.
        existing: the earlier entry in the slot; None if we created it.
    """
    starting = isinstance(proposal, GenerationStarted)
    check(
        starting or view.owned_by(proposal.writer, proposal.generation),
        "only the coordinator that started a generation appends to it",
        generation=proposal.generation,
        current=view.generation,
    )
    if existing is None:
        return Appended(fold(view, proposal))
    if existing == proposal:
        return AlreadyAppended(fold(view, proposal))
    if not starting or existing.generation >= proposal.generation:
        return Fenced(existing)
    return RetryAfterTail(fold(view, existing))


# The beginning of the log, and trimming.


@final
class LogHead(msgspec.Struct, frozen=True):
    """The beginning of the log for a reader.

    `sequence` 1 with `published` False: it was never trimmed.
    """

    sequence: int = 1
    swept: int = 1
    published: bool = False


def merge_head(head: LogHead, record: GenerationRecord) -> LogHead:
    """Merge one more generation record into the known head; order does not matter."""
    if record.head == 0:
        return head
    if record.head == head.sequence and head.published:
        return replace(head, swept=min(head.swept, record.swept))
    if record.head < head.sequence:
        return head
    return LogHead(record.head, record.swept, published=True)


def older_heads_matter(record: GenerationRecord) -> bool:
    """Return False if no older generation can have trimmed, or ever trim, beyond `record.head`."""
    return record.head == 0 or record.head < record.settled


def reader_was_overtaken(view: LogView, head: LogHead) -> bool:
    """Return True if the head, read after the first empty slot, shows that `view` may lack entries."""
    return head.published and head.sequence > view.tail


@final
class Doomed(msgspec.Struct, frozen=True):
    """A log entry below the head, to be deleted after the files of its checkpoint, if it has one."""

    sequence: int
    manifest: Manifest | None


@final
class TrimPlan(msgspec.Struct, frozen=True):
    """The new head, and the entries to delete (lowest first)."""

    head: int
    doomed: tuple[Doomed, ...]


def plan_trim(view: LogView, retain: int, keep_from: int | None = None) -> TrimPlan:
    """Plan to keep the newest `retain` checkpoints; 0 only for a job that has ended.

    Checkpoints from id `keep_from` on stay too: one in progress builds on the files of that one.
    The start entries stay for ever: they hold the slots of fenced coordinators. The ends of runs
    stay as long as the history has them, and the list of old output until all of it is deleted.
    """
    check(retain >= 1 or view.ended is not None, "a running job keeps its newest checkpoint")
    if keep_from is not None:
        needed = sum(logged.checkpoint_id >= keep_from for logged in view.checkpoints)
        retain = max(retain, needed)
    if retain == 0:
        head = view.end_sequence
    elif len(view.checkpoints) > retain:
        head = view.checkpoints[-retain].sequence
    else:
        head = view.head
    manifests = {logged.sequence: logged.manifest for logged in view.checkpoints}
    kept = {*view.starts, *view.history.ends, view.old_output.sequence}
    doomed = tuple(
        Doomed(sequence, manifests.get(sequence))
        for sequence in range(view.head, head)
        if sequence not in kept
    )
    return TrimPlan(head, doomed)


def apply_trim(view: LogView, head: int) -> LogView:
    """Return the view after the log was trimmed to `head`."""
    return replace(
        view,
        head=head,
        starts=tuple(sequence for sequence in view.starts if sequence >= head),
        checkpoints=tuple(logged for logged in view.checkpoints if logged.sequence >= head),
    )
