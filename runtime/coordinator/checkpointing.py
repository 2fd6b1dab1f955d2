"""Carries out what the checkpoint protocol decides: triggers, log entries, notices, deletions.

A job without checkpoint storage has a driver too: it takes savepoints, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import FencedError, HeadgateError, InternalError
from ...operators.clock import Clock
from ...operators.elements import CheckpointOptions
from ..control.messages import (
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCompleted,
    CheckpointDeclined,
    Messages,
    TriggerCheckpoint,
)
from ..observe.figures import CheckpointFigures
from ..plan import PhysicalPlan
from ..protocol.checkpoints.coordinator import CheckpointCoordinator
from ..protocol.checkpoints.decisions import (
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
from ..protocol.checkpoints.manifest import Manifest, files_written_by
from ..protocol.checkpoints.statistics import (
    CheckpointHistory,
    CheckpointRecord,
    SubtaskPart,
    explain,
)
from ..protocol.failures import CheckpointFailure, as_headgate_error
from ..protocol.ids import CheckpointId, SubtaskId
from ..savepoint import store as savepoints
from ..savepoint.store import savepoint_of
from ..storage.base import AddressOpener, CheckpointStore
from ..storage.joblog_store import JobLog
from .checkpoint_report import part_of
from .manifests import make_manifest, size_of, state_bytes_of
from .trimmer import Trimmer

_log = logging.getLogger("headgate.checkpoint")
CHECKPOINT_FAILURES = {reason.value: reason for reason in CheckpointFailure}


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Event: the log entry of a checkpoint, or the metadata of a savepoint, was written, or not."""

    checkpoint_id: int
    error: HeadgateError | None
    savepoint: str = ""
    """Its address, if it is one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The consequences, for the running job, of the decisions that were just carried out."""

    fail: FailJob | None = None
    done: tuple[RequestDone, ...] = ()
    refused: tuple[RequestFailed, ...] = ()


class CheckpointDriver:
    """The shell around `CheckpointCoordinator`, one per reign."""

    def __init__(
        self,
        protocol: CheckpointCoordinator[CheckpointAcked],
        *,
        log: JobLog | None,
        store: CheckpointStore | None,
        open_at: AddressOpener,
        options: Mapping[str, str],
        clock: Clock,
        generation: int,
        retain: int,
        history: int,
        directory: str,
        broadcast: Callable[[Messages], None],
        put_event: Callable[[PublishResult], None],
        wake_at: Callable[[int], None],
    ) -> None:
        self.protocol = protocol
        self._log = log
        self._store = store
        self._open_at = open_at
        self._options = options
        self._clock = clock
        self._generation = generation
        self._retain = retain
        self._directory = directory
        self._broadcast = broadcast
        self._put_event = put_event
        self._wake_at = wake_at
        self.announce: Callable[..., None] = _no_announcement
        """Called with the kind, text and details of each event that clients should see."""
        self.on_ended: Callable[[CheckpointRecord], None] = _nobody_asks
        """Called with the record of each checkpoint or savepoint that completed or failed."""
        self.on_completed: Callable[[], None] | None = None
        """Called when a checkpoint has completed."""
        self._attempt = 0
        self._plan: PhysicalPlan | None = None
        self._next_parallelism = 0
        self._publishing: dict[int, asyncio.Task[None]] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self.trimmer = None if log is None or store is None else Trimmer(log, store)
        self._unanswered: set[int] = set()
        self._savepoint_ids: set[int] = set()
        """Ids of the savepoints under way."""
        self._next_id = 0
        self._declined: dict[int, str] = {}
        """By checkpoint under way, the reason that the first subtask to decline it gave."""
        self.last_declined = ""
        """The reason that a subtask gave for the last failed checkpoint; empty if none declined."""
        self.savepoints: dict[str, Manifest] = {}
        """Complete savepoints by their address, until whoever asked for one takes it out."""
        newest = log.view.newest if log is not None else None
        self.last_completed = newest.checkpoint_id if newest else 0
        self.last_completed_at_ms = newest.manifest.completed_ms if newest else 0
        self.last_duration_ms = newest.manifest.duration_ms if newest else 0
        self.last_size_bytes = size_of(newest.manifest) if newest else 0
        self.completed = 0
        self.failed = 0
        self.failed_in_a_row = 0
        """Checkpoints that failed since the last one completed. A restart of the job does not reset it."""
        self.last_failure = ""
        """Why the last of these failed; empty if the last checkpoint completed."""
        self.history = CheckpointHistory(history)
        self.figures = CheckpointFigures()

    @property
    def publishing(self) -> bool:
        """True while the answer to a log write is due."""
        return bool(self._unanswered)

    def path_of(self, checkpoint_id: int) -> str:
        """What a run names to begin with this checkpoint; empty if the job keeps none."""
        return f"{self._directory}@{checkpoint_id}" if self._directory and checkpoint_id else ""

    @property
    def in_progress(self) -> int:
        """The number of checkpoints under way."""
        return len(self.protocol.pending_ids)

    # -- events in ----------------------------------------------------------------------------------

    @property
    def plan(self) -> PhysicalPlan:
        """The plan that the attempt runs."""
        if self._plan is None:
            raise InternalError("no attempt has started")
        return self._plan

    def start(self, attempt: int, plan: PhysicalPlan, *, used: int, base: int) -> Outcome:
        """All subtasks of `attempt` run.

        Args:
            attempt: its number.
            plan: what it runs.
            used: no id up to this one may be given to a checkpoint again.
            base: the checkpoint of this job that the next one may build on; 0: none.
        """
        self._attempt = attempt
        self._plan = plan
        self._next_parallelism = 0
        logged = self._log.view.next_checkpoint_id if self._log is not None else 1
        self._next_id = max(self._next_id, logged, used + 1)
        subtasks = [
            SubtaskId(vertex.id, index)
            for vertex in plan.vertices
            for index in range(vertex.parallelism)
        ]
        decisions = self.protocol.start(
            subtasks, CheckpointId(self._next_id), self._clock.now_ms(), base=CheckpointId(base)
        )
        return self._carry_out(decisions)

    def tick(self) -> Outcome:
        """Time has passed."""
        return self._carry_out(self.protocol.tick(self._clock.now_ms()))

    def backlog(self, reads: bool) -> Outcome:
        """Sources read a backlog, or none does; said as often as you like."""
        return self._carry_out(self.protocol.backlog(self._clock.now_ms(), reads))

    def request(
        self,
        token: str,
        *,
        stop: bool = False,
        final: bool = False,
        savepoint: str = "",
        native: bool = False,
        next_parallelism: int = 0,
    ) -> Outcome:
        """Somebody wants a checkpoint, or a savepoint in the directory `savepoint`.

        Args:
            token: names the request in the outcome.
            stop: sources emit nothing behind it.
            final: all data has ended.
            savepoint: address of its directory.
            native: the savepoint is to keep the files of the state backend.
            next_parallelism: with this one the job stops, to go on at another parallelism; the log
                entry says so, and whoever continues the job obeys it.
        """
        if stop:
            self._next_parallelism = next_parallelism
        decisions = self.protocol.request(
            self._clock.now_ms(),
            token=RequestToken(token),
            stop=stop,
            final=final,
            savepoint=savepoint,
            native=native,
        )
        return self._carry_out(decisions)

    def acked(self, message: CheckpointAcked) -> Outcome:
        """A subtask's part is durable."""
        record = self.history.record(message.checkpoint_id)
        if record is not None:
            task = self.plan.vertices[message.vertex].name
            part = part_of(message, task, self._clock.now_ms() - record.trigger_ms)
            if self.history.acknowledged(message.checkpoint_id, part):
                self._observe(part)
        return self._carry_out(
            self.protocol.acked(
                CheckpointId(message.checkpoint_id),
                SubtaskId(message.vertex, message.index),
                message,
                self._clock.now_ms(),
            )
        )

    def _observe(self, part: SubtaskPart) -> None:
        parts = self.figures.parts
        parts["start_delay"].observe(part.start_delay_ms / 1000)
        parts["alignment"].observe(part.alignment_ms / 1000)
        parts["sync"].observe(part.sync_ms / 1000)
        parts["async"].observe(part.async_ms / 1000)

    def declined(self, message: CheckpointDeclined) -> Outcome:
        """A subtask could not take part."""
        task = self.plan.vertices[message.vertex].name
        fields = {"job": self.plan.job_name, "task": task, "subtask": message.index}
        _log.warning(
            "checkpoint declined checkpoint=`%s`: %s",
            message.checkpoint_id,
            message.text,
            extra=fields,
        )
        if message.checkpoint_id in self.protocol.pending_ids:
            said = f"{task} ({message.index}): {message.text}"
            self._declined.setdefault(message.checkpoint_id, said)
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
            return self._carry_out(self.protocol.publish_failed(checkpoint_id, now))
        path = result.savepoint or self.path_of(checkpoint_id)
        ended = self.history.completed(checkpoint_id, now, path)
        if ended is not None:
            self.on_ended(ended)
        outcome = self._carry_out(self.protocol.published(checkpoint_id, now))
        if result.savepoint:
            self._savepoint_published(checkpoint_id, result.savepoint)
        elif self._log is not None:
            self.last_completed = result.checkpoint_id
            self.last_completed_at_ms = now
            self.completed += 1
            self.failed_in_a_row, self.last_failure = 0, ""
            if self.on_completed is not None:
                self.on_completed()
            # Until the trim has its turn others may begin, and build on this one.
            self.tidy(self._trim(self.protocol.oldest_base or checkpoint_id))
        return outcome

    def _savepoint_published(self, checkpoint_id: int, address: str) -> None:
        self._savepoint_ids.discard(checkpoint_id)
        manifest = self.savepoints.get(address)
        if manifest is not None:  # else it came too late, and is being deleted
            self._announce_complete("savepoint", "COMPLETED", manifest, path=address)

    def job_failed(self) -> Outcome:
        """The attempt is over."""
        return self._carry_out(self.protocol.job_failed(self._clock.now_ms()))

    async def close(self) -> None:
        """Wait for log writes and deletions under way."""
        tasks = [*self._publishing.values(), *self._cleaning]
        if self._sweeping is not None:
            tasks.append(self._sweeping)
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- decisions out ------------------------------------------------------------------------------

    def _carry_out(self, decisions: Sequence[CheckpointDecision[CheckpointAcked]]) -> Outcome:
        fail: FailJob | None = None
        done: list[RequestDone] = []
        refused: list[RequestFailed] = []
        for decision in decisions:
            match decision:
                case Trigger(checkpoint_id, trigger_ms, options):
                    self._trigger(checkpoint_id, trigger_ms, options)
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
                case Discard():
                    self.savepoints.pop(decision.options.savepoint, None)
                    self.tidy(self._delete(decision))
                case WakeAt(at_ms):
                    self._wake_at(at_ms)
                case FailJob():
                    fail = decision
                case RequestDone():
                    done.append(decision)
                case RequestFailed():
                    refused.append(decision)
        return Outcome(fail, tuple(done), tuple(refused))

    def _trigger(self, checkpoint_id: int, trigger_ms: int, options: CheckpointOptions) -> None:
        self._next_id = checkpoint_id + 1
        if options.savepoint:
            self._savepoint_ids.add(checkpoint_id)
        kind = "savepoint" if options.savepoint else "checkpoint"
        vertices = self.plan.vertices
        everyone = [(v.name, index) for v in vertices for index in range(v.parallelism)]
        self.history.started(CheckpointRecord(checkpoint_id, kind, trigger_ms, everyone))
        self._broadcast(
            TriggerCheckpoint(
                attempt=self._attempt,
                checkpoint_id=checkpoint_id,
                trigger_ms=trigger_ms,
                options=options,
            )
        )

    def _aborted(self, checkpoint_id: int, reason: CheckpointFailure) -> None:
        kind = "savepoint" if checkpoint_id in self._savepoint_ids else "checkpoint"
        self._savepoint_ids.discard(checkpoint_id)
        declined = self._declined.pop(checkpoint_id, "")
        text = f"{reason.sentence}{declined and f': {declined}'}"
        ended = self.history.failed(checkpoint_id, self._clock.now_ms(), text)
        if ended is not None:
            self.on_ended(ended)
        if reason.counts:
            self.last_declined = declined
            if kind == "checkpoint":
                self.failed += 1
                self.failed_in_a_row += 1
                self.last_failure = text
            record = self.history.record(checkpoint_id)
            why = f"failed: {text}" if record is None or declined else explain(record)
            self.announce(
                kind,
                f"{kind} {checkpoint_id} {why}",
                id=checkpoint_id,
                status="FAILED",
            )
        self._broadcast(CheckpointAborted(attempt=self._attempt, checkpoint_id=checkpoint_id))

    def _publish(self, decision: Publish[CheckpointAcked]) -> None:
        checkpoint_id, options = decision.checkpoint_id, decision.options
        manifest = make_manifest(decision, self.plan, self._clock.now_ms())
        if options.savepoint:
            writing = self._write_savepoint(manifest, options)
        else:
            # The log says it with the checkpoint that stops the job, not with an older one.
            parallelism = self._next_parallelism if options.stop else 0
            is_final = decision.final or (options.stop and not parallelism)
            wrote = {name for ack in decision.acks.values() for name in ack.wrote}
            writing = self._write_entry(
                manifest, is_final=is_final, parallelism=parallelism, wrote=wrote
            )
        task = asyncio.get_running_loop().create_task(
            self._answer(writing, checkpoint_id, options.savepoint),
            name=f"publish {checkpoint_id}",
        )
        self._unanswered.add(checkpoint_id)
        self._publishing[checkpoint_id] = task
        task.add_done_callback(lambda _: self._publishing.pop(checkpoint_id, None))

    async def _answer(
        self, writing: Coroutine[Any, Any, None], checkpoint_id: int, savepoint: str
    ) -> None:
        error: HeadgateError | None = None
        try:
            await writing
        except Exception as caught:
            # An answer is due whatever happens, or the job could never be restarted.
            error = as_headgate_error(caught, f"checkpoint {checkpoint_id} was not published")
        self._put_event(PublishResult(checkpoint_id, error, savepoint))

    async def _write_entry(
        self, manifest: Manifest, *, is_final: bool, parallelism: int, wrote: set[str]
    ) -> None:
        if self._log is None:
            return  # the end of a stop with savepoint: sinks commit, and nothing is kept
        await self._log.complete_checkpoint(
            manifest, is_final=is_final, parallelism=parallelism, wrote=wrote
        )
        self.last_duration_ms = manifest.duration_ms
        self.last_size_bytes = size_of(manifest)
        self.figures.duration.observe(manifest.duration_ms / 1000)
        self.figures.state_bytes = state_bytes_of(manifest)
        self._announce_complete("checkpoint", "COMPLETED", manifest)

    async def _write_savepoint(self, manifest: Manifest, options: CheckpointOptions) -> None:
        savepoint = savepoint_of(manifest, self.plan.job_name, native=options.native)
        address = options.savepoint
        async with savepoints.opened(self._open_at, address, self._options) as store:
            await savepoints.publish(store, savepoint)
        self.savepoints[address] = manifest

    def _announce_complete(self, kind: str, status: str, manifest: Manifest, **body: Any) -> None:
        size = size_of(manifest)
        record = self.history.record(manifest.checkpoint_id)
        where = f" in {body['path']}" if "path" in body else ""
        self.announce(
            kind,
            f"{kind} {manifest.checkpoint_id} completed in {manifest.duration_ms} ms "
            f"({size:,} bytes){where}",
            id=manifest.checkpoint_id,
            status=status,
            generation=self._generation,
            duration_ms=manifest.duration_ms,
            size_bytes=size,
            persisted_data=0 if record is None else record.persisted_bytes,
            **body,
        )

    # -- deletions ----------------------------------------------------------------------------------

    def tidy(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something in the background that makes room. Whatever goes wrong is only untidy."""
        task = asyncio.get_running_loop().create_task(_forgiven(coroutine), name="cleanup")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    def sweep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Clean up behind older coordinators, beside the start of the workers."""
        self._sweeping = asyncio.get_running_loop().create_task(_forgiven(coroutine), name="sweep")

    async def swept(self) -> None:
        """Wait for the sweep: what workers have half written looks like what dead ones left behind."""
        if self._sweeping is not None:
            await asyncio.shield(self._sweeping)

    async def _trim(self, keep_from: int | None) -> None:
        """Drop the checkpoints beyond `retain` that none under way builds on."""
        if self.trimmer is not None:
            await self.trimmer.trim(self._retain, keep_from)

    async def _delete(self, discard: Discard[CheckpointAcked]) -> None:
        """Delete what was written for this checkpoint only."""
        address = discard.options.savepoint
        snapshots = [snapshot for ack in discard.payloads for snapshot in ack.snapshots]
        if address:
            files = sorted({h.file for s in snapshots for h in s.handles if h.file is not None})
            async with savepoints.opened(self._open_at, address, self._options) as store:
                await savepoints.delete(store, files)
        elif self._store is not None:
            written = files_written_by(snapshots, self._generation, discard.checkpoint_id)
            await self._store.delete_files(written)


def _nobody_asks(record: CheckpointRecord) -> None:
    """No spans are wanted."""


def _no_announcement(kind: str, text: str, **details: Any) -> None:
    """Drop the event: no client listens yet."""


async def _forgiven(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        await coroutine
    except HeadgateError as error:
        _log.warning("something was left over: %s", error)
