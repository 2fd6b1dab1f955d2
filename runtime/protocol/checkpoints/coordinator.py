"""The checkpoint coordinator as a state machine: events in, decisions out, as values.

A checkpoint is *collecting* until all subtasks acknowledged, then *ready*, then *publishing*: one
at a time, so that entries are written in order of their ids. Only once it is published is it
complete, and only then is that announced. While it is being published nothing can abort it, since
its entry may exist.

A checkpoint may build on the files of an older one, its *base*: the newest that had completed when
it was triggered, in the lineage of this attempt. Before old checkpoints are deleted, `oldest_base`
must be asked.

A *savepoint* goes through the same phases but belongs to the user: it is written in full, it
subsumes nothing and is no base, its failure does not count, and its completion is reported to the
requester only. A job that stops with a savepoint takes its last checkpoint after it.

The shell (`coordinator/checkpointing.py`) carries the decisions out in order.

The effects of unaligned checkpoints, and differences from Flink, are in `settings.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from enum import Enum, unique
from typing import Generic, NewType, TypeAlias, TypeVar, final

import msgspec
from msgspec.structs import replace

from ....errors import check
from ....operators.elements import CheckpointOptions
from ..failures import CheckpointFailure
from ..ids import NO_CHECKPOINT, CheckpointId, SubtaskId
from .settings import CheckpointRules, CheckpointSchedule

Payload = TypeVar("Payload")
"""The content of a subtask's acknowledgement: handles of its state files."""

RequestToken = NewType("RequestToken", str)
"""Identifies a request, so that its answer reaches the requester."""


@final
class StartCheckpoint(msgspec.Struct, frozen=True):
    """Tell all source subtasks to send the barrier of a new checkpoint."""

    checkpoint_id: CheckpointId
    trigger_ms: int
    options: CheckpointOptions


@final
class Publish(msgspec.Struct, Generic[Payload], frozen=True):
    """All subtasks acknowledged: write the checkpoint's entry, or the metadata of the savepoint.

    Then answer `published` or `publish_failed`. Exactly one answer is due, also after the job
    failed.

    Attributes:
        acks: the payload of each subtask, in order of the subtasks.
        final: all data has ended; after this checkpoint the job is finished.
    """

    checkpoint_id: CheckpointId
    trigger_ms: int
    options: CheckpointOptions
    final: bool
    acks: Mapping[SubtaskId, Payload]


@final
class NotifyComplete(msgspec.Struct, frozen=True):
    """Tell all subtasks that the checkpoint is durable: sinks may commit."""

    checkpoint_id: CheckpointId


@final
class NotifyAborted(msgspec.Struct, frozen=True):
    """Tell all subtasks (those that still run) that the checkpoint was aborted."""

    checkpoint_id: CheckpointId
    reason: CheckpointFailure


@final
class Discard(msgspec.Struct, Generic[Payload], frozen=True):
    """Delete the files that were written for this checkpoint only: nothing will ever refer to them.

    Files that it shares with its base stay. A savepoint shares nothing; its metadata is deleted
    first.
    """

    checkpoint_id: CheckpointId
    options: CheckpointOptions
    payloads: tuple[Payload, ...]


@final
class RequestDone(msgspec.Struct, frozen=True):
    """The requested checkpoint is complete.

    For a stop with savepoint the id is that of the last checkpoint, taken after the savepoint.
    """

    token: RequestToken
    checkpoint_id: CheckpointId


@final
class RequestFailed(msgspec.Struct, frozen=True):
    """The requested checkpoint will not be taken, or failed.

    If the job failed while it was being published, a checkpoint may exist all the same; a savepoint
    does not.

    Attributes:
        savepoint_done: for a stop with savepoint: the savepoint is complete, only the last
            checkpoint after it failed.
    """

    token: RequestToken
    reason: CheckpointFailure
    savepoint_done: bool = False


@final
class FailJob(msgspec.Struct, frozen=True):
    """Fail the attempt: it must be restarted from the last completed checkpoint.

    This coordinator has already ended the attempt, as if `job_failed` had been called.
    """

    reason: CheckpointFailure
    message: str
    stopping: bool = False
    """The last checkpoint, or the savepoint before it, failed: the sources are already silent."""


@final
class WakeAt(msgspec.Struct, frozen=True):
    """Call `tick` at this time; replaces the previous request."""

    at_ms: int


CheckpointDecision: TypeAlias = (
    StartCheckpoint
    | Publish[Payload]
    | NotifyComplete
    | NotifyAborted
    | Discard[Payload]
    | RequestDone
    | RequestFailed
    | FailJob
    | WakeAt
)


@unique
class Phase(Enum):
    """The phases of the checkpoints of a job.

        IDLE ──start──> RUNNING ──stop or final checkpoint triggered──> ENDING ──published──> ENDED
          ^                │  ^────────── final checkpoint failed ────────│                     │
          └──job failed────┴───────────────────┴────────────────────────────────────────────────┘

    A stop with savepoint is ENDING from the trigger of the savepoint
    to the publication of the checkpoint after it.
    """

    IDLE = "idle"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@final
class PendingCheckpoint(msgspec.Struct, Generic[Payload]):
    """A checkpoint or savepoint that was triggered and is not complete yet."""

    checkpoint_id: CheckpointId
    trigger_ms: int
    missing: set[SubtaskId]
    token: RequestToken | None = None
    options: CheckpointOptions = CheckpointOptions()
    final: bool = False
    publishing: bool = False
    after_savepoint: bool = False
    """Whether it is the last checkpoint of a job that stops with a savepoint, which is complete."""
    acks: dict[SubtaskId, Payload] = msgspec.field(default_factory=dict)

    @property
    def savepoint(self) -> bool:
        """True if it is a savepoint, not a checkpoint of the job."""
        return bool(self.options.savepoint)

    @property
    def ending(self) -> bool:
        """True if it is the last one of the job, or of this run of it."""
        return self.final or self.options.stop

    def publish(self) -> Publish[Payload]:
        """Return the decision to make it durable, as all subtasks acknowledged."""
        self.publishing = True
        acks = {subtask: self.acks[subtask] for subtask in sorted(self.acks)}
        return Publish(self.checkpoint_id, self.trigger_ms, self.options, self.final, acks)


ABORTED_REMEMBERED_MAX = 16


@final
class AbortedCheckpoints:
    """The last few aborted checkpoints with their options; the oldest is forgotten first.

    Their late acknowledgements are still recognised, so that their files are deleted.
    """

    def __init__(self) -> None:
        self._options: dict[CheckpointId, CheckpointOptions] = {}

    def add(self, checkpoint_id: CheckpointId, options: CheckpointOptions) -> None:
        """Remember an aborted checkpoint."""
        self._options[checkpoint_id] = options
        if len(self._options) > ABORTED_REMEMBERED_MAX:
            del self._options[next(iter(self._options))]

    def options_of(self, checkpoint_id: CheckpointId) -> CheckpointOptions | None:
        """Return the options of an aborted checkpoint; None: it was not aborted, or too long ago."""
        return self._options.get(checkpoint_id)


REQUESTS_WAITING_MAX = 1000


@final
class CheckpointRequests:
    """Requested checkpoints and savepoints that wait for their turn.

    There are two queues, each in order of arrival; savepoints go before checkpoints.
    """

    def __init__(self) -> None:
        self._checkpoints: deque[RequestToken] = deque()
        self._savepoints: deque[tuple[RequestToken, CheckpointOptions]] = deque()

    def __len__(self) -> int:
        return len(self._checkpoints) + len(self._savepoints)

    @property
    def full(self) -> bool:
        """True if no more requests may wait."""
        return len(self) >= REQUESTS_WAITING_MAX

    @property
    def tokens(self) -> tuple[RequestToken, ...]:
        """Return all waiting requests."""
        return (*self._checkpoints, *(token for token, _ in self._savepoints))

    def add_checkpoint(self, token: RequestToken) -> None:
        """Add a request for a checkpoint."""
        self._checkpoints.append(token)

    def add_savepoint(self, token: RequestToken, options: CheckpointOptions) -> None:
        """Add a request for a savepoint."""
        self._savepoints.append((token, options))

    def next_checkpoint(self) -> RequestToken | None:
        """Remove and return the oldest request for a checkpoint."""
        return self._checkpoints.popleft() if self._checkpoints else None

    def next_savepoint(self) -> tuple[RequestToken, CheckpointOptions] | None:
        """Remove and return the oldest request for a savepoint."""
        return self._savepoints.popleft() if self._savepoints else None

    def clear(self) -> None:
        """Remove all requests."""
        self._checkpoints.clear()
        self._savepoints.clear()


RECENT_EVENTS_MAX = 64


@final
class CheckpointCoordinator(Generic[Payload]):
    """Decides when checkpoints start, complete and fail. One instance per coordinator of a job.

    `now_ms` must come from one clock that does not go back; if it does, time stands still. Messages
    of subtasks of earlier attempts must not be passed in, except late acknowledgements, whose files
    are then deleted.
    """

    def __init__(self, settings: CheckpointRules) -> None:
        self._settings = settings
        self._phase = Phase.IDLE
        self._now_ms = 0
        self._subtasks: frozenset[SubtaskId] = frozenset()
        self._next_id = CheckpointId(1)
        self._pending: dict[CheckpointId, PendingCheckpoint[Payload]] = {}
        self._requests = CheckpointRequests()
        self._aborted = AbortedCheckpoints()
        self._base = NO_CHECKPOINT
        self._last_completed = NO_CHECKPOINT
        self._last_failed = NO_CHECKPOINT
        self._failures_in_a_row = 0
        self._schedule = CheckpointSchedule(settings)
        self._wake_ms: int | None = None
        self._out: list[CheckpointDecision[Payload]] = []
        self._recent_events: deque[tuple[object, ...]] = deque(maxlen=RECENT_EVENTS_MAX)

    @property
    def phase(self) -> Phase:
        """The phase of the coordinator."""
        return self._phase

    @property
    def pending_ids(self) -> tuple[CheckpointId, ...]:
        """The checkpoints in progress, oldest first."""
        return tuple(sorted(self._pending))

    @property
    def oldest_base(self) -> CheckpointId | None:
        """The oldest checkpoint that must not be deleted, nor any newer one: one in progress builds
        on it; None: there is none."""
        bases = [p.options.base for p in self._pending.values() if p.options.base]
        return CheckpointId(min(bases)) if bases else None

    # -- events: the job ----------------------------------------------------------------------------

    def start(
        self,
        subtasks: Collection[SubtaskId],
        next_checkpoint_id: CheckpointId,
        now_ms: int,
        *,
        base: CheckpointId = NO_CHECKPOINT,
    ) -> list[CheckpointDecision[Payload]]:
        """Start an attempt: all its subtasks run.

        Every `Publish` of the one before must have been answered.

        Args:
            subtasks: all of them; each takes part in every checkpoint, finished or not.
            next_checkpoint_id: above every id the job log or an earlier attempt has used.
            now_ms: the time.
            base: the checkpoint this attempt was restored from, if new ones may build on its files.
        """
        self._event("start", now_ms, next_checkpoint_id, len(subtasks))
        self._check(self._phase is Phase.IDLE and not self._pending, "start of a job that runs")
        self._check(subtasks, "start of a job without subtasks")
        self._check(next_checkpoint_id >= self._next_id, "a checkpoint id would be used twice")
        self._phase = Phase.RUNNING
        self._subtasks = frozenset(subtasks)
        self._next_id = next_checkpoint_id
        self._base = base
        self._schedule.begin(self._now_ms)
        return self._decisions()

    def job_failed(self, now_ms: int) -> list[CheckpointDecision[Payload]]:
        """End the attempt: every checkpoint that is not being published is aborted."""
        self._event("job_failed", now_ms)
        self._end_attempt(CheckpointFailure.JOB_FAILED)
        return self._decisions()

    # -- events: time and requests ------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[CheckpointDecision[Payload]]:
        """Let time pass. Always safe to call, also too early."""
        self._event("tick", now_ms)
        self._wake_ms = None
        for pending in self._by_age():
            expires_ms = pending.trigger_ms + self._settings.timeout_ms
            # Failing one can end the attempt, and with it the others.
            if pending.missing and expires_ms <= self._now_ms and self._is_pending(pending):
                self._fail(pending, CheckpointFailure.EXPIRED)
        return self._decisions()

    def backlog(self, now_ms: int, reads: bool) -> list[CheckpointDecision[Payload]]:
        """Note whether sources read a backlog; may be repeated."""
        if reads == self._schedule.backlog:
            return []
        self._event("backlog", now_ms, reads)
        self._schedule.backlog = reads
        return self._decisions()

    def request(
        self,
        now_ms: int,
        *,
        token: RequestToken,
        stop: bool = False,
        final: bool = False,
        savepoint: str = "",
        native: bool = False,
    ) -> list[CheckpointDecision[Payload]]:
        """Request a checkpoint; exactly one `RequestDone` or `RequestFailed` answers it.

        Args:
            now_ms: the time.
            token: returned with the answer.
            stop: sources emit nothing after the barrier; if it fails the job fails over.
            final: all subtasks have reached the end of their data. If it fails, request it again.
            savepoint: address of the directory to write a savepoint to. With `stop` it is followed
                by the job's last checkpoint, and both must succeed.
            native: the savepoint shall consist of the backend's own files.
        """
        self._event("request", now_ms, token, *["stop"] * stop, *["final"] * final, savepoint)
        options = CheckpointOptions(stop=stop, savepoint=savepoint, native=native)
        if self._phase in (Phase.ENDING, Phase.ENDED):
            self._out.append(RequestFailed(token, CheckpointFailure.STOPPING))
        elif self._phase is not Phase.RUNNING:
            self._out.append(RequestFailed(token, CheckpointFailure.NOT_ALL_RUNNING))
        elif stop or final:
            self._refuse_requests(CheckpointFailure.STOPPING)
            if self._settings.unaligned:
                self._subsume_older_than(self._next_id)
            self._trigger(token, options, final=final)
        elif self._requests.full:
            self._out.append(RequestFailed(token, CheckpointFailure.TOO_MANY_REQUESTS))
        elif savepoint:
            self._requests.add_savepoint(token, options)
        else:
            self._requests.add_checkpoint(token)
        return self._decisions()

    # -- events: subtasks ---------------------------------------------------------------------------

    def acked(
        self, checkpoint_id: CheckpointId, acks: Mapping[SubtaskId, Payload], now_ms: int
    ) -> list[CheckpointDecision[Payload]]:
        """Handle acknowledgements: the snapshots of some subtasks are durable.

        Repeated and late ones are expected.
        """
        self._event("acked", now_ms, checkpoint_id, *acks)
        pending = self._pending.get(checkpoint_id)
        if pending is None:
            # Not if the id is merely unknown: it may be complete, and the files in use.
            if (options := self._aborted.options_of(checkpoint_id)) is not None:
                self._out.append(Discard(checkpoint_id, options, tuple(acks.values())))
            return self._decisions()
        for subtask, payload in acks.items():
            if subtask in pending.missing:
                pending.missing.remove(subtask)
                pending.acks[subtask] = payload
            else:
                self._check(subtask in pending.acks, "ack of an unknown subtask", subtask=subtask)
        # While one is missing, nothing has become possible.
        return [] if pending.missing else self._decisions()

    def declined(
        self,
        checkpoint_id: CheckpointId,
        subtask: SubtaskId,
        reason: CheckpointFailure,
        now_ms: int,
    ) -> list[CheckpointDecision[Payload]]:
        """Handle a decline: a subtask will not, or could not, take its snapshot."""
        self._event("declined", now_ms, checkpoint_id, subtask, reason)
        pending = self._pending.get(checkpoint_id)
        # One that has acknowledged before repeats or contradicts itself; its files are safe.
        if pending is not None and subtask in pending.missing:
            self._fail(pending, reason)
        return self._decisions()

    # -- events: publication ------------------------------------------------------------------------

    def published(
        self, checkpoint_id: CheckpointId, now_ms: int
    ) -> list[CheckpointDecision[Payload]]:
        """Handle a success of `Publish`: a checkpoint is complete, and subsumes all older ones."""
        self._event("published", now_ms, checkpoint_id)
        pending = self._publishing(checkpoint_id)
        del self._pending[checkpoint_id]
        if pending.savepoint:
            self._savepoint_published(pending)
        else:
            self._checkpoint_published(pending)
        return self._decisions()

    def _checkpoint_published(self, pending: PendingCheckpoint[Payload]) -> None:
        checkpoint_id = pending.checkpoint_id
        self._last_completed = checkpoint_id
        if checkpoint_id > self._last_failed:
            self._failures_in_a_row = 0
        if self._phase not in (Phase.RUNNING, Phase.ENDING):
            return
        self._base = checkpoint_id
        self._schedule.completed(self._now_ms)
        self._out.append(NotifyComplete(checkpoint_id))
        if pending.token is not None:
            self._out.append(RequestDone(pending.token, checkpoint_id))
        self._subsume_older_than(checkpoint_id)
        if pending.ending:
            self._phase = Phase.ENDED

    def _savepoint_published(self, pending: PendingCheckpoint[Payload]) -> None:
        if pending.token is None:
            # The requester was told that it failed, so it must not be found later.
            self._discard(pending)
        elif pending.options.stop:
            self._trigger(pending.token, CheckpointOptions(stop=True), after_savepoint=True)
        else:
            self._out.append(RequestDone(pending.token, pending.checkpoint_id))

    def publish_failed(
        self, checkpoint_id: CheckpointId, now_ms: int
    ) -> list[CheckpointDecision[Payload]]:
        """Handle a failure of `Publish`.

        The log entry of a checkpoint may exist nevertheless (a lost answer). So its files are never
        deleted, since a restore may find it. A savepoint is deleted, its metadata first.
        """
        self._event("publish_failed", now_ms, checkpoint_id)
        pending = self._publishing(checkpoint_id)
        if self._phase in (Phase.RUNNING, Phase.ENDING):
            self._fail(pending, CheckpointFailure.FINALIZE_FAILURE)
        else:
            self._abort(pending, CheckpointFailure.FINALIZE_FAILURE)
        return self._decisions()

    # -- transitions --------------------------------------------------------------------------------

    def _trigger(
        self,
        token: RequestToken | None,
        options: CheckpointOptions,
        *,
        final: bool = False,
        after_savepoint: bool = False,
    ) -> None:
        checkpoint_id = self._next_id
        self._next_id = CheckpointId(checkpoint_id + 1)
        if self._settings.incremental and not options.savepoint:
            options = replace(options, base=self._base)
        pending: PendingCheckpoint[Payload] = PendingCheckpoint(
            checkpoint_id,
            self._now_ms,
            set(self._subtasks),
            token=token,
            options=options,
            final=final,
            after_savepoint=after_savepoint,
        )
        self._pending[checkpoint_id] = pending
        if pending.ending:
            self._phase = Phase.ENDING
        self._out.append(StartCheckpoint(checkpoint_id, self._now_ms, pending.options))

    def _fail(self, pending: PendingCheckpoint[Payload], reason: CheckpointFailure) -> None:
        """Abort a checkpoint for its own failure, and apply the consequences for the job."""
        self._abort(pending, reason)
        what = f"{reason.sentence} checkpoint_id=`{pending.checkpoint_id}`"
        if pending.options.stop:
            # Its sources stay silent after the barrier: only a restart makes them emit again.
            what = f"the last checkpoint of a stopping job failed: {what}"
            self._fail_job(FailJob(reason, what, stopping=True))
            return
        if pending.final:
            self._phase = Phase.RUNNING
        if not reason.counts or pending.savepoint:
            return
        self._failures_in_a_row += 1
        self._last_failed = max(self._last_failed, pending.checkpoint_id)
        tolerable = self._settings.tolerable_failures
        if self._failures_in_a_row > tolerable:
            what = f"too many checkpoints failed: {what} tolerable=`{tolerable}`"
            self._fail_job(FailJob(reason, what))

    def _fail_job(self, decision: FailJob) -> None:
        self._failures_in_a_row = 0
        self._out.append(decision)
        self._end_attempt(CheckpointFailure.JOB_FAILED)

    def _end_attempt(self, reason: CheckpointFailure) -> None:
        """Abort everything but the checkpoint being published, whose entry may exist by now."""
        for pending in self._by_age():
            if not pending.publishing:
                self._abort(pending, reason)
            else:
                self._refuse(pending, reason)
        self._refuse_requests(reason)
        self._schedule.end()
        self._phase = Phase.IDLE

    def _subsume_older_than(self, checkpoint_id: CheckpointId) -> None:
        for older in self._by_age():
            if older.checkpoint_id < checkpoint_id and not (older.savepoint or older.publishing):
                self._abort(older, CheckpointFailure.SUBSUMED)

    def _abort(self, pending: PendingCheckpoint[Payload], reason: CheckpointFailure) -> None:
        del self._pending[pending.checkpoint_id]
        # Once the entry of a checkpoint may exist, its files may be in use, whatever we believe.
        if pending.savepoint or not pending.publishing:
            self._discard(pending)
        self._out.append(NotifyAborted(pending.checkpoint_id, reason))
        self._refuse(pending, reason)

    def _discard(self, pending: PendingCheckpoint[Payload]) -> None:
        self._aborted.add(pending.checkpoint_id, pending.options)
        if pending.acks:
            payloads = tuple(pending.acks[subtask] for subtask in sorted(pending.acks))
            self._out.append(Discard(pending.checkpoint_id, pending.options, payloads))

    def _refuse(self, pending: PendingCheckpoint[Payload], reason: CheckpointFailure) -> None:
        if pending.token is not None:
            refused = RequestFailed(pending.token, reason, savepoint_done=pending.after_savepoint)
            self._out.append(refused)
            pending.token = None

    def _refuse_requests(self, reason: CheckpointFailure) -> None:
        self._out.extend(RequestFailed(token, reason) for token in self._requests.tokens)
        self._requests.clear()

    # -- after every event --------------------------------------------------------------------------

    def _decisions(self) -> list[CheckpointDecision[Payload]]:
        """Carry out what has become possible, and return all decisions since the event."""
        self._publish_next()
        self._trigger_due()
        wake_ms = self._next_wake_ms()
        if wake_ms is not None and wake_ms != self._wake_ms:
            self._out.append(WakeAt(wake_ms))
        self._wake_ms = wake_ms
        decisions, self._out = self._out, []
        return decisions

    def _publish_next(self) -> None:
        by_age = self._by_age()
        busy = any(pending.publishing and not pending.savepoint for pending in by_age)
        for pending in by_age:
            if pending.missing or pending.publishing or (busy and not pending.savepoint):
                continue
            busy = busy or not pending.savepoint
            self._out.append(pending.publish())

    def _trigger_due(self) -> None:
        plain = self._settings.plain_options
        if self._may_trigger_savepoint() and (asked := self._requests.next_savepoint()):
            self._trigger(*asked)
        while self._may_trigger() and (token := self._requests.next_checkpoint()) is not None:
            self._trigger(token, plain)
        due_ms = self._periodic_due_ms()
        if due_ms is not None and due_ms <= self._now_ms:
            self._schedule.triggered(self._now_ms)
            self._trigger(None, plain)

    def _may_trigger_savepoint(self) -> bool:
        alone = self._settings.unaligned
        return not any(pending.savepoint or alone for pending in self._pending.values())

    def _may_trigger(self) -> bool:
        savepoints = sum(pending.savepoint for pending in self._pending.values())
        if savepoints and self._settings.unaligned:
            return False
        under_way = len(self._pending) - savepoints
        concurrent = self._settings.effective_max_concurrent
        return self._phase is Phase.RUNNING and under_way < concurrent

    def _periodic_due_ms(self) -> int | None:
        """Return when the next periodic trigger may happen; None while another event must come first."""
        return self._schedule.due_ms if self._may_trigger() else None

    def _next_wake_ms(self) -> int | None:
        deadlines = [
            pending.trigger_ms + self._settings.timeout_ms
            for pending in self._pending.values()
            if pending.missing
        ]
        due_ms = self._periodic_due_ms()
        if due_ms is not None:
            deadlines.append(due_ms)
        return min(deadlines, default=None)

    # -- helpers ------------------------------------------------------------------------------------

    def _by_age(self) -> list[PendingCheckpoint[Payload]]:
        return [self._pending[checkpoint_id] for checkpoint_id in sorted(self._pending)]

    def _is_pending(self, pending: PendingCheckpoint[Payload]) -> bool:
        return self._pending.get(pending.checkpoint_id) is pending

    def _publishing(self, checkpoint_id: CheckpointId) -> PendingCheckpoint[Payload]:
        pending = self._pending.get(checkpoint_id)
        known = pending is not None and pending.publishing
        self._check(known, "an answer to no Publish decision", checkpoint_id=checkpoint_id)
        return self._pending[checkpoint_id]

    def _event(self, name: str, now_ms: int, *details: object) -> None:
        self._now_ms = max(self._now_ms, now_ms)
        self._recent_events.append((f"{now_ms}ms", name, *details))

    def _check(self, condition: object, message: str, **context: object) -> None:
        """Check a condition as `errors.check` does; the error contains the history of events."""
        if not condition:
            check(
                False,
                message,
                **context,
                phase=self._phase.value,
                events="; ".join(" ".join(map(str, event)) for event in self._recent_events),
            )

    def validate(self) -> None:
        """Check all invariants; for tests, after every event."""
        for pending in self._pending.values():
            id_ = pending.checkpoint_id
            oldest = NO_CHECKPOINT if pending.savepoint else self._last_completed
            self._check(oldest < id_ < self._next_id, "pending id", checkpoint_id=id_)
            self._check(not pending.missing & pending.acks.keys(), "acked and missing", id=id_)
            everyone = pending.missing | pending.acks.keys()
            self._check(everyone == self._subtasks, "a subtask is unaccounted for", id=id_)
            self._check(not (pending.publishing and pending.missing), "published early", id=id_)
            self._check(self._aborted.options_of(id_) is None, "both pending and aborted", id=id_)
            base = pending.options.base
            plain = not (pending.savepoint or pending.ending)
            overtakes = plain and self._settings.unaligned
            self._check(pending.options.may_overtake == overtakes, "wrong kind of barrier", id=id_)
            self._check(base <= self._base and base < id_, "a base that is not complete", id=id_)
        checkpoints = [p for p in self._pending.values() if not p.savepoint]
        savepoints = [p for p in self._pending.values() if p.savepoint]
        publishing = [p for p in checkpoints if p.publishing]
        ready = [p for p in checkpoints if not p.missing]
        ending = [p.checkpoint_id for p in self._pending.values() if p.ending]
        self._check(len(publishing) == min(1, len(ready)), "not exactly one ready one publishing")
        idle = [p for p in savepoints if p.publishing == bool(p.missing)]
        self._check(not idle, "a savepoint waits for nothing")
        self._check(not self._aborted.options_of(self._last_completed), "completed and aborted")
        if self._phase is Phase.IDLE:
            left = [p for p in self._pending.values() if not p.publishing]
            self._check(not left, "pending without a running job")
        else:
            self._check((self._phase is Phase.ENDING) == bool(ending), "ending without its reason")
            newest = self._next_id - 1
            self._check(all(id_ == newest for id_ in ending), "the last one is not the newest")
            limit = self._settings.effective_max_concurrent + len(ending)
            self._check(len(checkpoints) <= limit, "too many checkpoints at once")
            self._check(len(savepoints) <= 1 + len(ending), "too many savepoints at once")
        if self._phase is not Phase.RUNNING:
            self._check(not self._requests, "requests wait for nothing")
        elif self._settings.unaligned:
            self._check(not (checkpoints and savepoints), "a barrier may overtake a savepoint's")
        tolerable = self._settings.tolerable_failures
        self._check(self._failures_in_a_row <= tolerable, "failures beyond what is tolerable")
        self._check(not self._out, "decisions were left behind")
