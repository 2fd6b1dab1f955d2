"""Carries out what the checkpoint protocol decides: triggers, log entries, notices, deletions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from ...errors import FencedError, HeadgateError, InternalError
from ...operators.clock import Clock
from ...state.snapshot import OperatorSnapshot
from ..control.messages import (
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCompleted,
    CheckpointDeclined,
    Messages,
    TriggerCheckpoint,
)
from ..plan import PhysicalPlan
from ..protocol.checkpoint_decisions import (
    CheckpointDecision,
    Discard,
    FailJob,
    NotifyAborted,
    NotifyComplete,
    Publish,
    RequestDone,
    RequestFailed,
    RequestToken,
    Trigger,
    WakeAt,
)
from ..protocol.checkpoints import CheckpointCoordinator
from ..protocol.failures import CheckpointFailure
from ..protocol.ids import CheckpointId, SubtaskId
from ..protocol.manifest import Manifest, ManifestOperator, ManifestSubtask, unshared_files
from ..storage.base import CheckpointStore
from ..storage.joblog_store import JobLog

_log = logging.getLogger("headgate.checkpoint")
CHECKPOINT_FAILURES = {reason.value: reason for reason in CheckpointFailure}


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Event: the log entry of a checkpoint was written, or not."""

    checkpoint_id: int
    error: HeadgateError | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the running job must know of the decisions just carried out."""

    fail: FailJob | None = None
    done: tuple[RequestDone, ...] = ()
    refused: tuple[RequestFailed, ...] = ()


class CheckpointDriver:
    """The shell around `CheckpointCoordinator`, one per reign."""

    def __init__(
        self,
        protocol: CheckpointCoordinator[CheckpointAcked],
        *,
        plan: PhysicalPlan,
        log: JobLog,
        store: CheckpointStore,
        clock: Clock,
        generation: int,
        retain: int,
        broadcast: Callable[[Messages], None],
        put_event: Callable[[PublishResult], None],
        wake_at: Callable[[int], None],
        announce: Callable[..., None],
    ) -> None:
        self.protocol = protocol
        self._plan = plan
        self._log = log
        self._store = store
        self._clock = clock
        self._generation = generation
        self._retain = retain
        self._broadcast = broadcast
        self._put_event = put_event
        self._wake_at = wake_at
        self._announce = announce
        self._attempt = 0
        self._publishing: dict[int, asyncio.Task[None]] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self.trimmer = Trimmer(log, store)
        self._unanswered: set[int] = set()
        self._next_id = 0
        newest = log.view.newest
        self.last_completed = newest.checkpoint_id if newest else 0
        self.last_completed_at_ms = newest.manifest.completed_ms if newest else 0
        self.last_duration_ms = newest.manifest.duration_ms if newest else 0
        self.last_size_bytes = size_of(newest.manifest) if newest else 0
        self.completed = 0
        self.failed = 0

    @property
    def publishing(self) -> bool:
        """True while the answer to a log write is due."""
        return bool(self._unanswered)

    @property
    def in_progress(self) -> int:
        """How many checkpoints are under way."""
        return len(self.protocol.pending_ids)

    # -- events in ----------------------------------------------------------------------------------

    def start(self, attempt: int, first_delay_ms: int | None = None) -> Outcome:
        """All subtasks of `attempt` run."""
        self._attempt = attempt
        self._next_id = max(self._next_id, self._log.view.next_checkpoint_id)
        subtasks = [
            SubtaskId(vertex.id, index)
            for vertex in self._plan.vertices
            for index in range(vertex.parallelism)
        ]
        now = self._clock.now_ms()
        decisions = self.protocol.start(
            subtasks, CheckpointId(self._next_id), now, first_delay_ms=first_delay_ms
        )
        return self._carry_out(decisions)

    def tick(self) -> Outcome:
        """Time has passed."""
        return self._carry_out(self.protocol.tick(self._clock.now_ms()))

    def request(self, token: str, *, stop: bool = False, final: bool = False) -> Outcome:
        """Somebody wants a checkpoint."""
        now = self._clock.now_ms()
        return self._carry_out(
            self.protocol.request(now, token=RequestToken(token), stop=stop, final=final)
        )

    def acked(self, message: CheckpointAcked) -> Outcome:
        """A subtask's part is durable."""
        return self._carry_out(
            self.protocol.acked(
                CheckpointId(message.checkpoint_id),
                SubtaskId(message.vertex, message.index),
                message,
                self._clock.now_ms(),
            )
        )

    def declined(self, message: CheckpointDeclined) -> Outcome:
        """A subtask could not take part."""
        task = self._plan.vertices[message.vertex].name
        fields = {"job": self._plan.job_name, "task": task, "subtask": message.index}
        _log.warning(
            "checkpoint declined checkpoint=`%s`: %s",
            message.checkpoint_id,
            message.text,
            extra=fields,
        )
        return self._carry_out(
            self.protocol.declined(
                CheckpointId(message.checkpoint_id),
                SubtaskId(message.vertex, message.index),
                CHECKPOINT_FAILURES[message.reason],
                self._clock.now_ms(),
            )
        )

    def publish_result(self, result: PublishResult) -> Outcome:
        """The log entry is written, or not.

        Raises:
            FencedError: a newer coordinator owns the job.
        """
        checkpoint_id = CheckpointId(result.checkpoint_id)
        self._unanswered.discard(checkpoint_id)
        now = self._clock.now_ms()
        if isinstance(result.error, FencedError):
            raise result.error
        if result.error is not None:
            _log.error("checkpoint %s not published: %s", checkpoint_id, result.error)
            return self._carry_out(self.protocol.publish_failed(checkpoint_id, now, certain=False))
        self.last_completed = result.checkpoint_id
        self.last_completed_at_ms = now
        self.completed += 1
        outcome = self._carry_out(self.protocol.published(checkpoint_id, now))
        self._clean(self._trim())
        return outcome

    def job_failed(self) -> Outcome:
        """The attempt is over."""
        return self._carry_out(self.protocol.job_failed(self._clock.now_ms()))

    async def close(self) -> None:
        """Wait for log writes and deletions under way."""
        await asyncio.gather(*self._publishing.values(), *self._cleaning, return_exceptions=True)

    # -- decisions out ------------------------------------------------------------------------------

    def _carry_out(self, decisions: Sequence[CheckpointDecision[CheckpointAcked]]) -> Outcome:
        fail: FailJob | None = None
        done: list[RequestDone] = []
        refused: list[RequestFailed] = []
        for decision in decisions:
            match decision:
                case Trigger(checkpoint_id, trigger_ms, options):
                    self._trigger(checkpoint_id, trigger_ms, options.stop)
                case Publish():
                    self._publish(decision)
                case NotifyComplete(checkpoint_id):
                    self._broadcast(
                        CheckpointCompleted(
                            attempt=self._attempt,
                            checkpoint_id=checkpoint_id,
                            generation=self._generation,
                        )
                    )
                case NotifyAborted(checkpoint_id, reason):
                    self._aborted(checkpoint_id, reason)
                case Discard(_, payloads):
                    self._clean(self._delete(payloads))
                case WakeAt(at_ms):
                    self._wake_at(at_ms)
                case FailJob():
                    fail = decision
                case RequestDone():
                    done.append(decision)
                case RequestFailed():
                    refused.append(decision)
        return Outcome(fail, tuple(done), tuple(refused))

    def _trigger(self, checkpoint_id: int, trigger_ms: int, stop: bool) -> None:
        self._next_id = checkpoint_id + 1
        self._broadcast(
            TriggerCheckpoint(
                attempt=self._attempt,
                checkpoint_id=checkpoint_id,
                trigger_ms=trigger_ms,
                stop=stop,
            )
        )

    def _aborted(self, checkpoint_id: int, reason: CheckpointFailure) -> None:
        if reason.counts:
            self.failed += 1
            self._announce(
                "checkpoint",
                f"checkpoint {checkpoint_id} failed: {reason.sentence}",
                id=checkpoint_id,
                status="FAILED",
            )
        self._broadcast(CheckpointAborted(attempt=self._attempt, checkpoint_id=checkpoint_id))

    def _publish(self, decision: Publish[CheckpointAcked]) -> None:
        manifest = make_manifest(decision, self._plan, self._clock.now_ms())
        is_final = decision.final or decision.options.stop
        task = asyncio.get_running_loop().create_task(
            self._write_entry(manifest, is_final), name=f"publish {decision.checkpoint_id}"
        )
        self._unanswered.add(decision.checkpoint_id)
        self._publishing[decision.checkpoint_id] = task
        task.add_done_callback(lambda _: self._publishing.pop(decision.checkpoint_id, None))

    async def _write_entry(self, manifest: Manifest, is_final: bool) -> None:
        error: HeadgateError | None = None
        try:
            await self._log.complete_checkpoint(manifest, is_final=is_final)
        except HeadgateError as caught:
            error = caught
        except Exception as caught:
            # An answer is due whatever happens, or the job could never be restarted.
            error = InternalError(f"{type(caught).__name__}: {caught}")
        else:
            self.last_duration_ms = manifest.duration_ms
            self.last_size_bytes = size = size_of(manifest)
            self._announce(
                "checkpoint",
                f"checkpoint {manifest.checkpoint_id} completed in {manifest.duration_ms} ms "
                f"({size:,} bytes)",
                id=manifest.checkpoint_id,
                status="COMPLETED",
                duration_ms=manifest.duration_ms,
                size_bytes=size,
            )
        self._put_event(PublishResult(manifest.checkpoint_id, error))

    # -- deletions ----------------------------------------------------------------------------------

    def _clean(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name="cleanup")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _trim(self) -> None:
        """Drop the checkpoints beyond `retain`; whatever goes wrong here is only untidy."""
        try:
            await self.trimmer.trim(self._retain)
        except HeadgateError as error:
            _log.warning("old checkpoints were not all deleted: %s", error)

    async def _delete(self, payloads: Sequence[CheckpointAcked]) -> None:
        names = sorted(
            handle.file
            for payload in payloads
            for snapshot in payload.snapshots
            for handle in snapshot.handles
            if handle.file is not None
        )
        try:
            await self._store.delete_files(names)
        except HeadgateError as error:
            _log.warning("files of an aborted checkpoint were not deleted: %s", error)


class Trimmer:
    """Drops checkpoints beyond `retain`, log entries and files. Files that would not go are kept in
    mind: the log forgets them with its next trim, so they are deleted before that."""

    def __init__(self, log: JobLog, store: CheckpointStore) -> None:
        self._log = log
        self._store = store
        self._doomed: list[str] = []
        self._lock = asyncio.Lock()

    async def trim(self, retain: int) -> None:
        """Keep the newest `retain` checkpoints.

        Raises:
            StorageError: something is left over; the next call tries again.
        """
        async with self._lock:
            await self._delete_doomed()
            subsumed = await self._log.trim(retain)
            kept = [logged.manifest for logged in self._log.view.checkpoints]
            self._doomed = unshared_files(subsumed, kept)
            await self._delete_doomed()

    async def _delete_doomed(self) -> None:
        if self._doomed:
            await self._store.delete_files(self._doomed)
            self._doomed = []


def make_manifest(decision: Publish[CheckpointAcked], plan: PhysicalPlan, now_ms: int) -> Manifest:
    """All acknowledgements as one manifest, by operator name."""
    operators: list[ManifestOperator] = []
    for vertex in plan.vertices:
        acks = [decision.acks[SubtaskId(vertex.id, index)] for index in range(vertex.parallelism)]
        for node in vertex.nodes:
            subtasks = tuple(
                ManifestSubtask(
                    subtask=ack.index,
                    snapshots=tuple(s for s in ack.snapshots if _holds(s, node.name)),
                    finished=ack.finished,
                )
                for ack in acks
            )
            operators.append(
                ManifestOperator(name=node.name, parallelism=vertex.parallelism, subtasks=subtasks)
            )
    return Manifest(
        checkpoint_id=decision.checkpoint_id,
        trigger_ms=decision.trigger_ms,
        completed_ms=now_ms,
        duration_ms=now_ms - decision.trigger_ms,
        max_parallelism=plan.max_parallelism,
        operators=tuple(operators),
    )


def size_of(manifest: Manifest) -> int:
    """Bytes of state in a checkpoint."""
    return sum(
        handle.size_bytes
        for operator in manifest.operators
        for subtask in operator.subtasks
        for snapshot in subtask.snapshots
        for handle in snapshot.handles
    )


def _holds(snapshot: OperatorSnapshot, name: str) -> bool:
    return snapshot.operator == name and bool(snapshot.handles)
