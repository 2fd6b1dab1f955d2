"""Carries out the decisions of the checkpoint protocol: triggers, log entries, notices, deletions.

A job without checkpoint storage has a driver too: it takes savepoints, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, final

import msgspec

from ...errors import FencedError, HeadgateError, InternalError
from ...operators.elements import CheckpointOptions
from ...state.snapshot import OperatorSnapshot
from ..control.messages import (
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCompleted,
    CheckpointDeclined,
    Messages,
    SubtaskAck,
    TriggerCheckpoint,
)
from ..observe.figures import CheckpointFigures
from ..options.state import CHECKPOINT_HISTORY
from ..plan import PhysicalPlan
from ..protocol.checkpoints.coordinator import (
    CheckpointCoordinator,
    CheckpointDecision,
    Discard,
    FailJob,
    NotifyAborted,
    NotifyComplete,
    Publish,
    RequestDone,
    RequestFailed,
    RequestToken,
    StartCheckpoint,
    WakeAt,
)
from ..protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
    files_written_by,
    unshared_files,
)
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
from ..storage.base import CheckpointStore
from ..storage.joblog_store import JobLog
from .environment import JobEnvironment, PublishResult
from .global_commit import GlobalCommitter

_log = logging.getLogger("headgate.checkpoint")
WITHDRAW_S = 10.0
"""A coordinator that was replaced waits for at most this time for savepoints that it publishes."""
CHECKPOINT_FAILURES = {reason.value: reason for reason in CheckpointFailure}


class Outcome(msgspec.Struct, frozen=True):
    """The consequences, for the running job, of the decisions that were just carried out."""

    fail: FailJob | None = None
    done: tuple[RequestDone, ...] = ()
    refused: tuple[RequestFailed, ...] = ()


class Broadcaster(Protocol):
    """Reaches all workers of the present attempt; `AttemptWorkers` is one."""

    def broadcast(self, message: Messages) -> None:
        """Send a message to all workers."""
        ...


class CheckpointHost(Protocol):
    """The part of a job that the checkpoint driver needs; `JobContext` is one."""

    def wake_at(self, at_ms: int) -> None:
        """Arrange a call of `tick` at this time; replaces the one before."""
        ...

    def checkpoint_completed(self) -> None:
        """Note that a checkpoint of the job, not a savepoint, is complete."""
        ...


@final
class CheckpointDriver:
    """The shell around `CheckpointCoordinator`: one for each generation of a job."""

    def __init__(
        self,
        protocol: CheckpointCoordinator[SubtaskAck],
        env: JobEnvironment,
        workers: Broadcaster,
        host: CheckpointHost,
        commits: GlobalCommitter,
    ) -> None:
        checkpoint = env.spec.checkpoint
        self.protocol = protocol
        self._env = env
        self._workers = workers
        self._host = host
        self._commits = commits
        self._log = log = env.log
        self._store = store = env.store
        self._clock = env.steady_clock
        self._retain = checkpoint.retain if checkpoint is not None else 1
        self._attempt = 0
        self._plan: PhysicalPlan | None = None
        self._tasks: tuple[str, ...] = ()
        """The names of the vertices of the plan."""
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
        """The reason that the first subtask to decline gave, by checkpoint under way."""
        self.last_declined = ""
        """The reason that a subtask gave for the last failed checkpoint; empty if none declined."""
        self.savepoints: dict[str, Manifest] = {}
        """Complete savepoints by their address, until their requests are answered."""
        newest = log.view.newest if log is not None else None
        self.last_completed = newest.checkpoint_id if newest else 0
        self.last_completed_at_ms = newest.manifest.completed_ms if newest else 0
        self.last_duration_ms = newest.manifest.duration_ms if newest else 0
        self.last_size_bytes = newest.manifest.size_bytes if newest else 0
        self.committed = 0
        """The checkpoint that the state of all subtasks follows; 0: none.

        It is the newest complete one, or the one that was restored, if that is older. It is no savepoint,
        unless one was restored.
        """
        self.completed = 0
        self.failed = 0
        self.failed_in_a_row = 0
        """The number of checkpoints that failed since the last one completed; restarts do not reset it."""
        self.last_failure = ""
        """The reason why the last of these failed; empty if the last checkpoint completed."""
        self.history = CheckpointHistory(env.options.get(CHECKPOINT_HISTORY))
        self.figures = CheckpointFigures()

    @property
    def publishing(self) -> bool:
        """True while the answer to a log write is due."""
        return bool(self._unanswered)

    def path_of(self, checkpoint_id: int) -> str:
        """Return the path by which a run can start from this checkpoint; empty if the job keeps none."""
        directory = self._env.checkpoint_directory
        return f"{directory}@{checkpoint_id}" if directory and checkpoint_id else ""

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

    def start(
        self, attempt: int, plan: PhysicalPlan, *, used: int, base: int, committed: int
    ) -> Outcome:
        """Begin with the checkpoints of an attempt: all its subtasks run.

        Args:
            attempt: its number.
            plan: its plan.
            used: the id up to which no id may be given to a checkpoint again.
            base: the checkpoint of this job that the next one may build on; 0: none.
            committed: see the attribute.
        """
        self._attempt = attempt
        self._plan = plan
        self._tasks = tuple(vertex.name for vertex in plan.vertices)
        self.committed = committed
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
        """Let time pass."""
        return self._carry_out(self.protocol.tick(self._clock.now_ms()))

    def backlog(self, reads: bool) -> Outcome:
        """Note whether sources read a backlog; may be repeated."""
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
        """Request a checkpoint, or a savepoint in the directory `savepoint`.

        Args:
            token: identifies the request in the outcome.
            stop: sources emit nothing after its barrier.
            final: all data has ended.
            savepoint: the address of the savepoint's directory.
            native: the savepoint consists of the state backend's own files.
            next_parallelism: the job stops with this checkpoint and goes on at this parallelism. The
                log entry has it, so another coordinator would go on in the same way.
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
        """Handle the acknowledgements of a worker: the parts of these subtasks are durable."""
        now_ms = self._clock.now_ms()
        record = self.history.record(message.checkpoint_id)
        if record is not None:
            since_ms = now_ms - record.trigger_ms
            for ack in message.subtasks:
                part = part_of(ack, self._tasks[ack.vertex], since_ms - ack.held_ms)
                if self.history.acknowledged(message.checkpoint_id, part):
                    self._observe(part)
        acks = {SubtaskId(ack.vertex, ack.index): ack for ack in message.subtasks}
        return self._carry_out(
            self.protocol.acked(CheckpointId(message.checkpoint_id), acks, now_ms)
        )

    def _observe(self, part: SubtaskPart) -> None:
        parts = self.figures.parts
        parts["start_delay"].observe(part.start_delay_ms / 1000)
        parts["alignment"].observe(part.alignment_ms / 1000)
        parts["sync"].observe(part.sync_ms / 1000)
        parts["async"].observe(part.async_ms / 1000)

    def declined(self, message: CheckpointDeclined) -> Outcome:
        """Handle a decline: a subtask could not take part."""
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
        """Handle the result of a publication: the log entry is written, or it is not.

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
            self._report(ended)
        outcome = self._carry_out(self.protocol.published(checkpoint_id, now))
        if result.savepoint:
            self._savepoint_published(checkpoint_id, result.savepoint)
        elif self._log is not None:
            self.last_completed = result.checkpoint_id
            self.last_completed_at_ms = now
            self.completed += 1
            self.failed_in_a_row, self.last_failure = 0, ""
            self._host.checkpoint_completed()
            # Before it is trimmed, other checkpoints may begin, and build on this one.
            self.clean_up(self._trim(self.protocol.oldest_base or checkpoint_id))
        return outcome

    def _report(self, record: CheckpointRecord) -> None:
        """Add the span of a checkpoint or savepoint that completed or failed."""
        self._env.spans.add(
            f"headgate.{record.kind}",
            record.trigger_ms,
            record.end_ms or record.trigger_ms,
            {
                "headgate.checkpoint.id": record.checkpoint_id,
                "headgate.checkpoint.status": record.status.lower(),
                "headgate.checkpoint.written_bytes": record.written_bytes,
                "headgate.checkpoint.state_bytes": record.state_bytes,
                "headgate.checkpoint.in_flight_bytes": record.persisted_bytes,
                "headgate.checkpoint.subtasks": len(record.expected),
                "headgate.checkpoint.subtasks_acknowledged": len(record.parts),
                "headgate.checkpoint.subtasks_unaligned": record.unaligned,
                "headgate.checkpoint.explanation": explain(record),
            },
            failed=record.failure,
        )

    def _savepoint_published(self, checkpoint_id: int, address: str) -> None:
        self._savepoint_ids.discard(checkpoint_id)
        manifest = self.savepoints.get(address)
        if manifest is not None:  # otherwise it came too late, and is being deleted
            self._announce_complete("savepoint", manifest, manifest.size_bytes, path=address)

    def job_failed(self) -> Outcome:
        """Abort the checkpoints of the attempt, which is over."""
        self._commits.give_up()
        return self._carry_out(self.protocol.job_failed(self._clock.now_ms()))

    async def withdraw(self) -> None:
        """Wait, as a coordinator that was replaced, until savepoints under way are deleted, for a while."""
        if self._publishing:
            await asyncio.wait(list(self._publishing.values()), timeout=WITHDRAW_S)

    async def close(self) -> None:
        """Wait for log writes and deletions under way."""
        tasks = [*self._publishing.values(), *self._cleaning]
        if self._sweeping is not None:
            tasks.append(self._sweeping)
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- decisions out ------------------------------------------------------------------------------

    def _carry_out(self, decisions: Sequence[CheckpointDecision[SubtaskAck]]) -> Outcome:
        fail: FailJob | None = None
        done: list[RequestDone] = []
        refused: list[RequestFailed] = []
        for decision in decisions:
            match decision:
                case StartCheckpoint(checkpoint_id, trigger_ms, options):
                    self._trigger(checkpoint_id, trigger_ms, options)
                case Publish():
                    self._publish(decision)
                case NotifyComplete(checkpoint_id):
                    self.committed = checkpoint_id
                    self._workers.broadcast(
                        CheckpointCompleted(
                            attempt=self._attempt,
                            checkpoint_id=checkpoint_id,
                            generation=self._env.generation,
                        )
                    )
                case NotifyAborted(checkpoint_id, reason):
                    self._aborted(checkpoint_id, reason)
                case Discard():
                    self.savepoints.pop(decision.options.savepoint, None)
                    self.clean_up(self._delete(decision))
                case WakeAt(at_ms):
                    self._host.wake_at(at_ms)
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
        everyone = [
            (task, index)
            for task, vertex in zip(self._tasks, vertices, strict=True)
            for index in range(vertex.parallelism)
        ]
        self.history.started(CheckpointRecord(checkpoint_id, kind, trigger_ms, everyone))
        self._workers.broadcast(
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
            self._report(ended)
        if reason.counts:
            self.last_declined = declined
            if kind == "checkpoint":
                self.failed += 1
                self.failed_in_a_row += 1
                self.last_failure = text
            record = self.history.record(checkpoint_id)
            why = f"failed: {text}" if record is None or declined else explain(record)
            self._env.publish(
                kind,
                f"{kind} {checkpoint_id} {why}",
                id=checkpoint_id,
                status="FAILED",
            )
        self._workers.broadcast(
            CheckpointAborted(attempt=self._attempt, checkpoint_id=checkpoint_id)
        )

    def _publish(self, decision: Publish[SubtaskAck]) -> None:
        checkpoint_id, options = decision.checkpoint_id, decision.options
        manifest = make_manifest(decision, self.plan, self._clock.now_ms())
        if options.savepoint:
            writing = self._write_savepoint(manifest, options)
        else:
            # Only the entry of the checkpoint that stops the job has it, not that of an older one.
            parallelism = self._next_parallelism if options.stop else 0
            is_final = decision.final or (options.stop and not parallelism)
            wrote = {name for ack in decision.acks.values() for name in ack.wrote}
            writing = self._write_entry(
                manifest, is_final=is_final, parallelism=parallelism, wrote=wrote
            )
            if decision.final or options.stop:
                writing = self._write_last_entry(writing)
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
            # Whatever happens, an answer is due: without it the job could never be restarted.
            error = as_headgate_error(caught, f"checkpoint {checkpoint_id} was not published")
        self._env.events.put_nowait(PublishResult(checkpoint_id, error, savepoint))

    async def _write_entry(
        self, manifest: Manifest, *, is_final: bool, parallelism: int, wrote: set[str]
    ) -> None:
        if self._log is None:  # a stop with savepoint ends: sinks commit, and nothing is stored
            self._commits.begin(manifest)
            return
        async with self._commits.before_entry():
            await self._log.complete_checkpoint(
                manifest, is_final=is_final, parallelism=parallelism, wrote=wrote
            )
            self._commits.begin(manifest)
        self.last_duration_ms = manifest.duration_ms
        self.figures.duration.observe(manifest.duration_ms / 1000)
        self.figures.state_bytes = by_operator = manifest.state_bytes()
        self.last_size_bytes = sum(by_operator.values())
        self._announce_complete("checkpoint", manifest, self.last_size_bytes)

    async def _write_last_entry(self, writing: Coroutine[Any, Any, None]) -> None:
        """Write the entry of the last checkpoint of an attempt, which ends with all output visible."""
        await writing
        await self._commits.before_end()

    async def _write_savepoint(self, manifest: Manifest, options: CheckpointOptions) -> None:
        savepoint = savepoint_of(manifest, self.plan.job_name, native=options.native)
        address = options.savepoint
        # Workers forget what is being committed, so the savepoint may not have it.
        await self._commits.all_committed()
        async with savepoints.opened(self._env.open_at, address, self._env.spec.options) as store:
            await savepoints.publish(store, savepoint)
            if self._log is not None:
                await self._keep_if_leading(self._log, store, manifest)
        self.savepoints[address] = manifest

    async def _keep_if_leading(
        self, log: JobLog, store: CheckpointStore, manifest: Manifest
    ) -> None:
        """Delete a savepoint again that was published behind the start of the next coordinator.

        That one knows nothing of it, and the requester is not told of it.

        Raises:
            FencedError: a newer coordinator owns the job.
            StorageError: that is unknown.
        """
        try:
            await log.confirm()
        except FencedError:
            await savepoints.delete(store, sorted(manifest.files()))
            raise

    def _announce_complete(
        self, kind: str, manifest: Manifest, size_bytes: int, **body: Any
    ) -> None:
        record = self.history.record(manifest.checkpoint_id)
        where = f" in {body['path']}" if "path" in body else ""
        self._env.publish(
            kind,
            f"{kind} {manifest.checkpoint_id} completed in {manifest.duration_ms} ms "
            f"({size_bytes:,} bytes){where}",
            id=manifest.checkpoint_id,
            status="COMPLETED",
            generation=self._env.generation,
            duration_ms=manifest.duration_ms,
            size_bytes=size_bytes,
            persisted_data=0 if record is None else record.persisted_bytes,
            **body,
        )

    # -- deletions ----------------------------------------------------------------------------------

    def clean_up(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Delete something in the background. If it fails, only a warning is logged."""
        task = asyncio.get_running_loop().create_task(_warn_only(coroutine), name="cleanup")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    def sweep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Delete what older coordinators left behind, while the workers start."""
        self._sweeping = asyncio.get_running_loop().create_task(_warn_only(coroutine), name="sweep")

    async def swept(self) -> None:
        """Wait for the sweep: half-written files of workers look like those that dead ones left behind."""
        if self._sweeping is not None:
            await asyncio.shield(self._sweeping)

    async def _trim(self, keep_from: int | None) -> None:
        """Drop checkpoints beyond `retain`, except those that one under way builds on."""
        if self.trimmer is not None:
            await self.trimmer.trim(self._retain, keep_from)

    async def _delete(self, discard: Discard[SubtaskAck]) -> None:
        """Delete the files that were written for this checkpoint only."""
        address = discard.options.savepoint
        snapshots = [snapshot for ack in discard.payloads for snapshot in ack.snapshots]
        if address:
            files = sorted({h.file for s in snapshots for h in s.handles if h.file is not None})
            async with savepoints.opened(
                self._env.open_at, address, self._env.spec.options
            ) as store:
                await savepoints.delete(store, files)
        elif self._store is not None:
            written = files_written_by(snapshots, self._env.generation, discard.checkpoint_id)
            await self._store.delete_files(written)


async def _warn_only(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        await coroutine
    except HeadgateError as error:
        _log.warning("something was left over: %s", error)


def make_manifest(decision: Publish[SubtaskAck], plan: PhysicalPlan, now_ms: int) -> Manifest:
    """Return all acknowledgements as one manifest, by operator name."""
    operators: list[ManifestOperator] = []
    for vertex in plan.vertices:
        acks = [decision.acks[SubtaskId(vertex.id, index)] for index in range(vertex.parallelism)]
        for node in vertex.nodes:
            subtasks = tuple(
                ManifestSubtask(
                    subtask=ack.index,
                    snapshots=tuple(s for s in ack.snapshots if _belongs(s, node.name)),
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


def _belongs(snapshot: OperatorSnapshot, name: str) -> bool:
    """Return True if it is not empty and belongs to the operator `name`."""
    return snapshot.operator == name and bool(snapshot.handles or snapshot.states)


@final
class Trimmer:
    """Drops checkpoints beyond `retain`: their log entries, then the files that no other one needs.

    Files whose deletion failed are remembered. The log forgets them with its next trim, so they are
    deleted before that.
    """

    def __init__(self, log: JobLog, store: CheckpointStore) -> None:
        self._log = log
        self._store = store
        self._doomed: list[str] = []
        self._lock = asyncio.Lock()
        self._wanted: tuple[int, int | None] = (0, None)
        self._calls = 0
        self._carried_out = 0
        """The number of the newest call that was carried out."""

    async def trim(self, retain: int, keep_from: int | None = None) -> None:
        """Keep the newest `retain` checkpoints, and all from the id `keep_from` on.

        `keep_from` may be out of date, because the base of a checkpoint never gets older. If several
        calls wait, since the store is slower than checkpoints are, one of them does what the newest
        wants.

        Raises:
            StorageError: something is left over; the next call tries again.
        """
        self._wanted = retain, keep_from
        self._calls += 1
        own = self._calls
        async with self._lock:
            if self._carried_out >= own:
                return
            (retain, keep_from), newest = self._wanted, self._calls
            await self._delete_doomed()
            subsumed = await self._log.trim(retain, keep_from)
            kept = [logged.manifest for logged in self._log.view.checkpoints]
            self._doomed = unshared_files(subsumed, kept)
            await self._delete_doomed()
            self._carried_out = newest

    async def _delete_doomed(self) -> None:
        if self._doomed:
            await self._store.delete_files(self._doomed)
            self._doomed = []


def part_of(ack: SubtaskAck, task: str, ack_ms: float) -> SubtaskPart:
    """Return the statistics of an acknowledgement."""
    handles = [handle for snapshot in ack.snapshots for handle in snapshot.handles]
    return SubtaskPart(
        task=task,
        index=ack.index,
        ack_ms=max(0.0, ack_ms),
        start_delay_ms=ack.start_delay_ms,
        alignment_ms=ack.alignment_ms,
        sync_ms=ack.sync_ms,
        async_ms=ack.async_ms,
        written_bytes=ack.written_bytes,
        state_bytes=sum(handle.size_bytes for handle in handles),
        processed_bytes=ack.processed_bytes,
        persisted_bytes=ack.in_flight_bytes,
        unaligned=ack.unaligned,
        finished=ack.finished,
    )
