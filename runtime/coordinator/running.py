"""State: all subtasks run, until the data ends, a client stops the job, or something fails."""

from __future__ import annotations

import asyncio
from typing import Any, final

from ...errors import FencedError, HeadgateError, JobError, JobNotReady, UsageError
from ..control.messages import (
    Adopt,
    Cancelled,
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCompleted,
    CheckpointDeclined,
    Deployed,
    EndSource,
    FinishSources,
    HistoryOver,
    Leaving,
    LoopRoundBack,
    LoopRoundOver,
    Messages,
    RestoreProgress,
    Start,
    Statistics,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskTerminated,
    Terminate,
    WatermarkLimit,
    WatermarkReached,
)
from ..options.recovery import SHUTDOWN_GRACE
from ..plan import PhysicalPlan, Vertex
from ..protocol.adoption import Adopted
from ..protocol.checkpoints.coordinator import RequestDone, RequestFailed
from ..protocol.failover import RegionId
from ..protocol.failures import FailureKind
from ..protocol.ids import SubtaskId
from ..protocol.joblog import JobStatus
from ..protocol.loop_rounds import LoopRounds
from ..protocol.watermark_alignment import Announcement, Member
from ..slots import worker_groups
from .checkpointing import Outcome
from .commands import check_keeps_checkpoints, check_rescale, savepoint_target
from .context import (
    EndOfJob,
    JobContext,
    OngoingRescale,
    ToFailing,
    ToHandingOver,
    ToRescaling,
    Transition,
    end_by,
    ends_at_once,
)
from .deploying import is_progress
from .environment import (
    HAND_OVER,
    AttemptFailed,
    ClientCommand,
    FromWorker,
    GraceOver,
    JobEvent,
    PublishResult,
    RegionsReady,
    RetryFinal,
    Suspected,
    Tick,
    WorkerLost,
    WorkersReady,
)
from .failures import Failure, failure_from, failure_of_subtask, failure_of_worker
from .regional import RegionalRestart
from .reporting import report_recovered
from .sources import alignment_of, ended_splits, quiet_sources, read_histories
from .workers import LiveWorker

FINAL = "final"
STOP = "stop"
RESCALE = "rescale"
LEAVE = "leave"
FINAL_RETRY_S = 0.1
"""A final checkpoint that failed without harm is requested again after this pause."""


@final
class Running:
    """The state in which one attempt is at work."""

    def __init__(
        self, job: JobContext, workers: list[LiveWorker], adopted: Adopted | None = None
    ) -> None:
        self._job = job
        self._env = job.env
        self._attempt = job.attempt
        self._checkpoints = job.checkpoints
        self._workers = workers
        self._adopted = adopted
        self._regional = RegionalRestart(job)
        self._first_attempt = job.attempt.number
        plan = job.attempt.plan
        self._unfinished = {(v.id, i) for v in plan.vertices for i in range(v.parallelism)}
        """The subtasks, by vertex and index, that have not seen the end of their data."""
        self._unterminated = set(self._unfinished)
        """The subtasks that have not left in good order."""
        self._loops = {loop.name: self._loop_rounds(loop.head) for loop in plan.loops}
        self._alignment = alignment_of(plan)
        self._commands: dict[str, ClientCommand] = {}
        """The commands that wait for a checkpoint or savepoint, by the token of its request."""
        self._addresses: dict[str, str] = {}
        """The addresses of the savepoints that clients have requested, by token."""
        self._tokens = 0
        self._draining = False
        self._ended_sources: set[int] = set()
        """The vertices of sources whose end was announced."""
        self._getting_workers: asyncio.Task[list[LiveWorker]] | None = None
        """Gets the workers for another parallelism, before anything stops."""
        self._rescale_to = 0
        self._ending: Transition | None = None
        """What follows when all subtasks have left in good order."""
        self._leaving: ClientCommand | None = None
        """The command to hand the run over, which happens as soon as a checkpoint is complete."""

    async def run(self) -> Transition:
        adopted = self._adopted
        if adopted is None:
            start = Start(attempt=self._attempt.number, orphaned_ms=self._attempt.orphaned_ms)
            for worker in self._workers:
                worker.send(start)
        else:
            self._unfinished -= adopted.finished
            self._lead_adopted(adopted)
        self._job.set_status("RUNNING")
        self._job.pool.refill()
        report_recovered(self._job)
        self._job.restore_points.forget_unreadable()
        self._answer_rescale()
        try:
            following = self._start_checkpoints()
            self._job.discovery.start(
                self._attempt.plan, self._job.workers.broadcast, self._ended_splits
            )
            while following is None:
                following = self._handle(await self._env.events.get())
            # A process that has to leave does not begin again, even if something failed meanwhile.
            return following if self._leaving is None else ToHandingOver(self._leaving)
        finally:
            await self._job.discovery.stop()
            await self._regional.close()
            if self._getting_workers is not None:
                self._getting_workers.cancel()
                await asyncio.gather(self._getting_workers, return_exceptions=True)
            if isinstance(self._ending, EndOfJob) and self._ending.command is not None:
                self._commands[STOP] = self._ending.command  # stopped, but not in good order
            if RESCALE in self._commands:
                self._job.lifecycle.rescale = None
            for token, command in self._commands.items():
                what = "savepoint" if token in self._addresses else "checkpoint"
                command.refuse(JobError(f"the job failed before the {what} was complete"))

    def _lead_adopted(self, adopted: Adopted) -> None:
        """Tell the workers of an adopted attempt that this coordinator leads, and how checkpoints ended."""
        attempt = self._attempt.number
        messages: list[Messages] = [Adopt(attempt=attempt)]
        if adopted.completed:
            messages.append(self._completed(adopted.completed))
        for checkpoint_id in adopted.aborted:
            messages.append(CheckpointAborted(attempt=attempt, checkpoint_id=checkpoint_id))
        for worker in self._workers:
            for message in messages:
                worker.send(message)

    def _completed(self, checkpoint_id: int) -> CheckpointCompleted:
        return CheckpointCompleted(
            attempt=self._attempt.number,
            checkpoint_id=checkpoint_id,
            generation=self._env.generation,
        )

    def _start_checkpoints(self) -> Transition | None:
        """Begin or resume checkpoints, as all subtasks run."""
        used, base = self._attempt.checkpoints_before(self._adopted)
        committed = self._attempt.committed_before(self._adopted)
        self._adopted = None  # after a restart of regions, what they restored is the base
        started = self._checkpoints.start(
            self._attempt.number, self._attempt.plan, used=used, base=base, committed=committed
        )
        following = self._apply(started)
        self._apply(self._look_at_histories())
        if following is None and not self._unfinished:
            return self._all_finished()
        return following

    def _look_at_histories(self) -> Outcome:
        """Let sources go live whose history is over, and note whether there is a backlog."""
        backlog, over = read_histories(self._attempt.plan, self._attempt.statistics)
        for vertex in over:
            self._job.workers.broadcast(HistoryOver(attempt=self._attempt.number, vertex=vertex))
        return self._checkpoints.backlog(backlog)

    def _ended_splits(self, vertex: Vertex) -> frozenset[str]:
        return ended_splits(vertex, self._attempt.statistics)

    def _end_quiet_sources(self) -> None:
        """Let sources end for which nothing has come for long enough."""
        for vertex in quiet_sources(self._attempt.plan, self._attempt.statistics):
            self._job.workers.broadcast(EndSource(attempt=self._attempt.number, vertex=vertex.id))
            if vertex.id not in self._ended_sources:
                self._ended_sources.add(vertex.id)
                name = vertex.head.name
                text = f"{name}: no record has come for long enough, so the source ends"
                self._env.publish("source", text, source=name)

    def _handle(self, event: JobEvent) -> Transition | None:
        if isinstance(event, FromWorker) and self._attempt.deployment_events is not None:
            self._attempt.deployment_events += is_progress(self._attempt, event)
        match event:
            case FromWorker(worker_id, Cancelled() | Deployed() as answer):
                self._regional.answered(worker_id, answer)
            case FromWorker(worker_id, Leaving()):
                return self._move_from(worker_id)
            case FromWorker(worker_id, message):
                if self._attempt.executions.is_current(message):
                    return self._handle_message(message, worker_id)
                self._regional.late(message, worker_id, self._first_attempt)
            case WorkerLost(worker_id, reason):
                self._regional.changed(worker_id)
                if regions := self._attempt.executions.regions_on(worker_id):
                    return self._failed(failure_of_worker(worker_id, reason), regions)
            case AttemptFailed(attempt, failure) if attempt == self._attempt.number:
                everything = self._attempt.executions.failover.everything
                return self._failed(failure, self._attempt.restarting or everything)
            case Suspected(failure, attempt, regions):
                if regions := regions & self._attempt.executions.regions_of(attempt):
                    return self._failed(failure, regions)
            case RegionsReady(attempt) if attempt == self._attempt.number:
                return self._regions_ready()
            case PublishResult():
                return self._published(event)
            case Tick():
                return self._apply(self._checkpoints.tick())
            case WorkersReady(attempt) if attempt == self._attempt.number:
                return self._workers_ready()
            case GraceOver(attempt) if attempt == self._first_attempt and self._leaving is not None:
                return ToHandingOver(self._leaving)
            case RetryFinal(attempt) if attempt == self._attempt.number:
                return self._apply(self._checkpoints.request(FINAL, final=True))
            case ClientCommand():
                return self._handle_command(event)
        return None

    def _handle_message(self, message: Messages, worker_id: str) -> Transition | None:
        checkpoints = self._job.checkpoints
        match message:
            case RestoreProgress(region=region):
                self._attempt.restoring[worker_id, region] = (
                    message.done_bytes,
                    message.total_bytes,
                )
            case Statistics(attempt=attempt, subtasks=subtasks):
                self._attempt.report(attempt, subtasks)
                self._job.old_output.look(
                    self._attempt.plan, self._attempt.statistics, self._job.commits.committed
                )
                self._end_quiet_sources()
                return self._apply(self._look_at_histories())
            case WatermarkReached(group=group, watermark=watermark):
                member = Member(SubtaskId(message.vertex, message.index), message.step)
                now_ms = self._monotonic_ms()
                self._announce(self._alignment.report(group, member, watermark, now_ms))
            case LoopRoundBack():
                self._loop_round(message)
            case CheckpointAcked():
                return self._apply(checkpoints.acked(message))
            case CheckpointDeclined():
                return self._apply(checkpoints.declined(message))
            case SubtaskFailed():
                regions = self._regional.regions_of(message)
                everything = self._attempt.executions.failover.everything
                if regions == everything or not self._regional.suspect(message, worker_id):
                    return self._failed(failure_of_subtask(message, worker_id), regions)
            case SubtaskFinished(vertex=vertex, index=index):
                self._unfinished.discard((vertex, index))
                left = self._alignment.leave(SubtaskId(vertex, index), self._monotonic_ms())
                self._announce(left)
                if not self._unfinished:
                    return self._all_finished()
            case SubtaskTerminated(vertex=vertex, index=index):
                self._unterminated.discard((vertex, index))
                if not self._unterminated and self._ending is not None:
                    ending, self._ending = self._ending, None
                    if isinstance(ending, EndOfJob):
                        self._job.old_output.all_committed()
                    return ending
        return None

    # -- failures -----------------------------------------------------------------------------------

    def _failed(self, failure: Failure, regions: frozenset[RegionId]) -> Transition | None:
        """Restart the regions that failed beside the others, or the whole job."""
        leaving = self._stopping or self._draining or self._ending is not None
        whole = "the job was stopping" if leaving else ""
        restart = self._regional.decide(failure, regions, whole)
        if isinstance(restart, ToFailing):
            return restart
        if not self._attempt.restarting:
            self._apply(self._checkpoints.job_failed())
        new = restart.regions - self._attempt.restarting
        self._regional.begin(restart)
        self._forget(new)
        return None

    def _forget(self, regions: frozenset[RegionId]) -> None:
        """Forget the reports of subtasks that begin again."""
        for subtask in self._attempt.executions.failover.subtasks_of(regions):
            self._unfinished.add((subtask.vertex, subtask.index))
            self._unterminated.add((subtask.vertex, subtask.index))
            self._announce(self._alignment.leave(subtask, self._monotonic_ms()))
        for loop in self._attempt.plan.loops:
            if self._attempt.executions.failover.region_of(SubtaskId(loop.head, 0)) in regions:
                self._loops[loop.name] = self._loop_rounds(loop.head)

    def _loop_rounds(self, head: int) -> LoopRounds:
        return LoopRounds(self._attempt.plan.vertices[head].parallelism)

    def _published(self, result: PublishResult) -> Transition | None:
        following = self._apply(self._checkpoints.publish_result(result))
        if self._attempt.restarting:
            if result.error is None and not result.savepoint:
                # Only its entry was missing when a region failed: subtasks that run may commit.
                self._job.workers.broadcast(self._completed(result.checkpoint_id))
            self._regional.changed()
        return following

    def _regions_ready(self) -> Transition | None:
        """Start the regions that are deployed again; checkpoints go on."""
        regions = self._attempt.restarting
        try:
            self._workers = self._regional.ready()
        except FencedError:
            raise  # another coordinator leads: nothing here may fail or restart
        except HeadgateError as error:
            return self._failed(failure_from(error, "deployment"), regions)
        for worker in self._workers:
            worker.send(Start(attempt=self._attempt.number))
        self._announce(self._alignment.announced())
        self._job.discovery.look_now()
        self._job.set_status("RUNNING")
        self._job.pool.refill()
        report_recovered(self._job)
        return self._start_checkpoints()

    def _announce(self, announcements: list[Announcement]) -> None:
        """Tell the sources how far they may read."""
        for group, limit in announcements:
            self._job.workers.broadcast(
                WatermarkLimit(attempt=self._attempt.number, group=group, limit=limit)
            )

    def _loop_round(self, back: LoopRoundBack) -> None:
        """Tell all heads of a loop, once all have their probes back, whether records are still in it."""
        loop, number = back.loop, back.number
        total = self._loops[loop].report(back.index, number, back.records)
        if total is not None:
            self._job.workers.broadcast(
                LoopRoundOver(attempt=back.attempt, loop=loop, number=number, records=total)
            )

    # -- ends ---------------------------------------------------------------------------------------

    def _all_finished(self) -> Transition | None:
        """Take one more checkpoint, as all data has ended: it commits the tail of the sinks."""
        if self._draining and STOP in self._commands:
            return self._request_stop(self._commands[STOP])
        if self._ending is not None or self._stopping:
            return None
        if not self._env.keeps_checkpoints:
            self._terminate(EndOfJob(JobStatus.FINISHED))
            return None
        return self._apply(self._checkpoints.request(FINAL, final=True))

    @property
    def _stopping(self) -> bool:
        return STOP in self._commands or RESCALE in self._commands or self._leaving is not None

    def _terminate(self, ending: Transition) -> None:
        """Let the subtasks leave: everything is durable, and they know what to commit."""
        self._ending = ending
        self._job.workers.broadcast(Terminate(attempt=self._attempt.number))

    # -- checkpoints --------------------------------------------------------------------------------

    def _apply(self, outcome: Outcome) -> Transition | None:
        """Carry out what the decisions of the checkpoint protocol mean for the job."""
        for done in outcome.done:
            self._done(done)
        for refused in outcome.refused:
            self._refused(refused, failed=outcome.fail is not None)
        if outcome.fail is None:
            return None
        message = outcome.fail.message
        kind = FailureKind.STOP if outcome.fail.stopping else FailureKind.CHECKPOINTS
        declined = self._checkpoints.last_declined
        error = JobError(message, where=declined)
        text = f"{message}: {declined}" if declined else message
        several = len(self._attempt.executions.failover.regions) > 1
        why = "checkpoints are of all regions" if several else ""
        return ToFailing(Failure(text, "checkpoint coordinator", kind, error), why=why)

    def _done(self, done: RequestDone) -> None:
        command = self._commands.pop(done.token, None)
        address = self._addresses.pop(done.token, "")
        manifest = self._checkpoints.savepoints.pop(address, None)
        if done.token == FINAL:
            self._terminate(EndOfJob(JobStatus.FINISHED))
        elif done.token == STOP:
            kept = [f"savepoint {address}"] * bool(address)
            kept += [f"checkpoint {done.checkpoint_id}"] * self._env.keeps_checkpoints
            what = f"stopped with {' and '.join(kept)}"
            reason = what if kept else "stopped; the job keeps no checkpoints"
            size = 0 if manifest is None else manifest.size_bytes
            end = EndOfJob(JobStatus.STOPPED, reason, None, command, address, size)
            self._terminate(end)
        elif done.token == LEAVE and self._leaving is not None:
            self._terminate(ToHandingOver(self._leaving))
        elif done.token == RESCALE and self._job.lifecycle.rescale is not None:
            self._terminate(ToRescaling())
        elif command is not None and manifest is not None:
            command.done(
                savepoint=address,
                checkpoint=done.checkpoint_id,
                duration_ms=manifest.duration_ms,
                size_bytes=manifest.size_bytes,
            )
        elif command is not None:
            command.done(
                checkpoint=done.checkpoint_id,
                duration_ms=self._checkpoints.last_duration_ms,
                size_bytes=self._checkpoints.last_size_bytes,
                path=self._checkpoints.path_of(done.checkpoint_id),
            )

    def _refused(self, refused: RequestFailed, *, failed: bool) -> None:
        command = self._commands.pop(refused.token, None)
        address = self._addresses.pop(refused.token, "")
        # The savepoint is complete if only the last checkpoint after it failed.
        self._checkpoints.savepoints.pop(address, None)
        if refused.token == LEAVE:
            self._env.events.put_nowait(GraceOver(self._first_attempt))
        if refused.token == RESCALE:
            self._job.lifecycle.rescale = None
            self._job.pool.retire(self._workers)
        if command is not None:
            what = "savepoint" if address else "checkpoint"
            text = f"no {what} was taken: {refused.reason.sentence}"
            if refused.savepoint_done:
                text = (
                    f"the job did not stop: its last checkpoint failed: {refused.reason.sentence}; "
                    f"the savepoint is complete path=`{address}`"
                )
            command.refuse(JobError(text))
        elif refused.token == FINAL and not failed:
            loop = asyncio.get_running_loop()
            loop.call_later(
                FINAL_RETRY_S, self._env.events.put_nowait, RetryFinal(self._attempt.number)
            )

    # -- clients ------------------------------------------------------------------------------------

    def _handle_command(self, command: ClientCommand) -> Transition | None:
        if self._attempt.restarting:
            if ends_at_once(command):
                return end_by(command)
            command.refuse(JobNotReady("a part of the job restarts", fix="try again in a moment"))
            return None
        try:
            match command.verb:
                case "cancel":
                    return EndOfJob(JobStatus.CANCELED, "cancelled by a client", command=command)
                case "stop":
                    return self._stop(command)
                case verb if verb == HAND_OVER:
                    return self._hand_over(command)
                case "savepoint":
                    return self._savepoint(command)
                case "rescale":
                    return self._rescale(command)
                case _:
                    return self._checkpoint(command)
        except UsageError as error:
            command.refuse(error)
            return None

    def _new_token(self, command: ClientCommand, address: str = "") -> str:
        self._tokens += 1
        token = f"request-{self._tokens}"
        self._commands[token] = command
        if address:
            self._addresses[token] = address
        return token

    def _checkpoint(self, command: ClientCommand) -> Transition | None:
        check_keeps_checkpoints(self._env)
        return self._apply(self._checkpoints.request(self._new_token(command)))

    def _savepoint(self, command: ClientCommand) -> Transition | None:
        address = savepoint_target(self._env, command)
        token = self._new_token(command, address)
        native = bool(command.arguments.get("native"))
        return self._apply(self._checkpoints.request(token, savepoint=address, native=native))

    def _stop(self, command: ClientCommand) -> Transition | None:
        if self._ending is not None or self._stopping:
            raise UsageError("the job is stopping already")
        drain = bool(command.arguments.get("drain"))
        address = savepoint_target(self._env, command) if "savepoint" in command.arguments else ""
        if not (self._env.keeps_checkpoints or address or drain):
            reason = "stopped; the job keeps no checkpoints"
            return EndOfJob(JobStatus.STOPPED, reason, command=command)
        if drain and not self._unfinished:
            raise UsageError("the job's data has ended; it is finishing")
        self._commands[STOP] = command
        if address:
            self._addresses[STOP] = address
        behind = f"a savepoint in {address}" if address else "a final checkpoint"
        self._env.publish("stopping", f"{'draining, then ' * drain}stopping with {behind}")
        if not drain:
            return self._request_stop(command)
        self._draining = True
        self._job.workers.broadcast(FinishSources(attempt=self._attempt.number))
        return None

    def _hand_over(self, command: ClientCommand) -> Transition | None:
        """Take a checkpoint after which the sources are silent, and leave; or leave when time is up.

        A job without checkpoints has no state to keep, so this process leaves at once.
        """
        if self._ending is not None or self._stopping:
            raise UsageError("the job is stopping already")
        if not self._env.keeps_checkpoints:
            return ToHandingOver(command)
        self._leaving = command
        self._env.publish("stopping", "handing the run over with a checkpoint")
        grace_s = self._env.options.get(SHUTDOWN_GRACE) / 1000
        over = GraceOver(self._first_attempt)
        asyncio.get_running_loop().call_later(grace_s, self._env.events.put_nowait, over)
        return self._apply(
            self._checkpoints.request(LEAVE, stop=True, next_parallelism=self._attempt.parallelism),
        )

    def _request_stop(self, command: ClientCommand) -> Transition | None:
        native = bool(command.arguments.get("native"))
        address = self._addresses.get(STOP, "")
        return self._apply(
            self._checkpoints.request(STOP, stop=True, savepoint=address, native=native)
        )

    def _rescale(self, command: ClientCommand) -> Transition | None:
        check_keeps_checkpoints(self._env)
        if self._ending is not None or self._stopping:
            raise UsageError("the job is stopping already")
        wanted = command.arguments.get("parallelism")
        if "trigger" in command.arguments and wanted == self._attempt.parallelism:
            # The coordinator before may have done it, so a repeated command is done already.
            last = self._checkpoints.last_completed
            command.done(parallelism=wanted, checkpoint=last, pause_ms=0)
            return None
        after, plan = check_rescale(self._attempt, self._env.spec, wanted)
        self._env.publish(
            "rescaling", f"rescaling from parallelism {self._attempt.parallelism} to {after}"
        )
        self._begin_move(command, after, plan)
        return None

    def _move_from(self, worker_id: str) -> Transition | None:
        """Go on from a checkpoint without a worker whose process is about to end, as after a rescale.

        Nothing is done while something else is under way: then the job restarts when the worker is lost.
        """
        busy = (
            self._ending is not None or self._stopping or self._draining or self._attempt.restarting
        )
        if (
            busy
            or not self._env.keeps_checkpoints
            or not self._attempt.executions.regions_on(worker_id)
        ):
            return None
        self._env.publish("leaving", f"{worker_id} has to leave; its tasks go to another worker")
        self._begin_move(self._own_command(), self._attempt.parallelism, self._attempt.plan)
        return None

    def _begin_move(self, command: ClientCommand, parallelism: int, plan: PhysicalPlan) -> None:
        """Get all workers that the plan needs; `_workers_ready` goes on from there."""
        self._commands[RESCALE] = command
        self._rescale_to = parallelism
        # The job runs on until all workers are available, since the cluster may have no room for them.
        self._getting_workers = asyncio.get_running_loop().create_task(
            self._job.pool.ensure(worker_groups(plan, self._env.spec)), name="make room"
        )
        ready = WorkersReady(self._attempt.number)
        self._getting_workers.add_done_callback(lambda _: self._env.events.put_nowait(ready))

    def _workers_ready(self) -> Transition | None:
        """Stop the sources to go on with all workers; without new workers, go on as before."""
        getting, self._getting_workers = self._getting_workers, None
        command = self._commands.get(RESCALE)
        if getting is None or command is None:
            return None
        after, error = self._rescale_to, getting.exception()
        if error is None:
            self._job.lifecycle.rescale = OngoingRescale(
                command, self._attempt.parallelism, after, self._env.clock.monotonic()
            )
            return self._apply(
                self._checkpoints.request(RESCALE, stop=True, next_parallelism=after)
            )
        del self._commands[RESCALE]
        self._job.pool.retire(self._workers)
        command.refuse(
            JobError(
                f"the cluster gives no workers for parallelism {after}: {error}",
                fix=f"the job goes on at {self._attempt.parallelism}; add machines, or choose fewer",
            )
        )
        return None if self._unfinished else self._all_finished()

    def _answer_rescale(self) -> None:
        """Answer the command to rescale, as all subtasks run at the new parallelism."""
        lifecycle, attempt = self._job.lifecycle, self._attempt
        rescale, lifecycle.rescale = lifecycle.rescale, None
        if rescale is None:
            return
        pause_ms = lifecycle.rescaled_ms = int(1000 * (self._env.clock.monotonic() - rescale.began))
        self._job.observed.rescale.observe(pause_ms / 1000)
        done = f"rescaled from parallelism {rescale.before} to {attempt.parallelism}"
        if rescale.before == attempt.parallelism:
            done = "tasks were moved to other workers"
        self._env.publish(
            "rescaled",
            f"{done}; the job paused for {pause_ms} ms",
            before=rescale.before,
            after=attempt.parallelism,
            pause_ms=pause_ms,
        )
        rescale.command.done(
            parallelism=attempt.parallelism,
            pause_ms=pause_ms,
            checkpoint=attempt.restored_checkpoint,
        )

    def _own_command(self) -> ClientCommand:
        """Return a command of the coordinator itself; if it fails, that is published."""

        def answered(answer: asyncio.Future[dict[str, Any]]) -> None:
            if not answer.cancelled() and (error := answer.exception()) is not None:
                self._env.publish("leaving", f"tasks were not moved: {error}")

        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(answered)
        return ClientCommand("rescale", answer)

    def _monotonic_ms(self) -> int:
        return round(1000 * self._env.clock.monotonic())
