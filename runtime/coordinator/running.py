"""State: all subtasks run. Checkpoints are taken until the data ends, somebody stops it, or it fails."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import FencedError, HeadgateError, JobError, JobNotReady, UsageError
from ..control.messages import (
    Cancelled,
    CheckpointAcked,
    CheckpointCompleted,
    CheckpointDeclined,
    Deployed,
    FinishSources,
    Leaving,
    LoopRoundBack,
    LoopRoundOver,
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
from ..plan import PhysicalPlan
from ..protocol.adoption import Adopted
from ..protocol.checkpoints.decisions import RequestDone, RequestFailed
from ..protocol.failover import RegionId
from ..protocol.failures import FailureKind
from ..protocol.ids import SubtaskId
from ..protocol.joblog import JobStatus
from ..protocol.loop_rounds import LoopRounds
from ..protocol.watermark_alignment import Announcement, Member, WatermarkAlignment
from .adopting import go_on, ids_before
from .alignment import alignment_of
from .checkpointing import Outcome, PublishResult
from .context import (
    AttemptFailed,
    ClientWish,
    Failure,
    FinalAgain,
    GraceOver,
    JobContext,
    RegionsReady,
    Rescale,
    RoomMade,
    Suspected,
    Tick,
)
from .deploying import failure_from, failure_of_subtask, failure_of_worker, moves
from .histories import look_at_histories
from .manifests import size_of
from .placement import worker_groups
from .recovered import publish_recovered
from .regional import RegionalRestart, regions_of, suspect
from .states import (
    End,
    State,
    ended,
    ended_by_wish,
    ends_at_once,
    failing,
    handing_over,
    rescaling,
)
from .wishes import check_keeps_checkpoints, check_rescale, savepoint_target
from .workers import FromWorker, Worker, WorkerLost

FINAL = "final"
STOP = "stop"
RESCALE = "rescale"
LEAVE = "leave"
FINAL_RETRY_S = 0.1
"""A final checkpoint that failed without harm is asked for again after this pause."""


class Running(State):
    """One attempt at work."""

    def __init__(self, workers: list[Worker], adopted: Adopted | None = None) -> None:
        self._workers = workers
        self._adopted = adopted
        self._regional = RegionalRestart()
        self._first_attempt = 0
        self._unfinished: set[tuple[int, int]] = set()
        self._unterminated: set[tuple[int, int]] = set()
        self._loops: dict[str, LoopRounds] = {}
        self._wishes: dict[str, ClientWish] = {}
        self._addresses: dict[str, str] = {}
        """Addresses of the savepoints that clients have asked for, by token."""
        self._tokens = 0
        self._draining = False
        self._room: asyncio.Task[list[Worker]] | None = None
        """Gets the workers for a higher parallelism, before anything stops."""
        self._rescale_to = 0
        self._ending: End | Rescale | State | None = None
        """The end or state that follows when all subtasks have left in good order."""
        self._leaving: ClientWish | None = None
        """This coordinator hands the run over, as soon as a checkpoint is complete."""
        self._alignment = WatermarkAlignment({})

    async def run(self, job: JobContext) -> State:
        self._first_attempt = job.attempt
        self._unfinished = {(v.id, i) for v in job.plan.vertices for i in range(v.parallelism)}
        self._unterminated = set(self._unfinished)
        self._loops = {
            loop.name: LoopRounds(job.plan.vertices[loop.head].parallelism)
            for loop in job.plan.loops
        }
        self._alignment = alignment_of(job.plan)
        adopted = self._adopted
        if adopted is None:
            for worker in self._workers:
                worker.send(Start(attempt=job.attempt, orphaned_ms=job.orphaned_ms))
        else:
            self._unfinished -= adopted.finished
            go_on(job, self._workers, adopted)
        job.set_status("RUNNING")
        job.pool.refill()
        publish_recovered(job, job.failures.running(job.clock.now_ms()))
        job.unreadable.clear()
        self._answer_rescale(job)
        try:
            state = self._start_checkpoints(job)
            while state is None:
                state = self._handle(job, await job.events.get())
            # Whatever failed meanwhile: a process that has to leave does not begin again.
            return state if self._leaving is None else handing_over(self._leaving)
        finally:
            await self._regional.close(job)
            if self._room is not None:
                self._room.cancel()
                await asyncio.gather(self._room, return_exceptions=True)
            if isinstance(self._ending, End) and self._ending.wish is not None:
                self._wishes[STOP] = self._ending.wish  # stopped, but not in good order
            if RESCALE in self._wishes:
                job.rescale = None
            for token, wish in self._wishes.items():
                what = "savepoint" if token in self._addresses else "checkpoint"
                wish.refuse(JobError(f"the job failed before the {what} was complete"))

    def _start_checkpoints(self, job: JobContext) -> State | None:
        """All subtasks run: checkpoints begin, or go on."""
        used, base = ids_before(job, self._adopted)
        self._adopted = None  # after a restart of regions all goes on from what they restored
        started = job.checkpoints.start(job.attempt, job.plan, used=used, base=base)
        state = self._settle(job, started)
        self._settle(job, look_at_histories(job))
        return self._all_finished(job) if state is None and not self._unfinished else state

    def _handle(self, job: JobContext, event: Any) -> State | None:
        if isinstance(event, FromWorker) and job.deployment_events is not None:
            job.deployment_events += moves(job, event)  # of regions that restart
        match event:
            case FromWorker(worker_id, Cancelled() | Deployed() as answer):
                self._regional.answered(job, worker_id, answer)
            case FromWorker(worker_id, Leaving()):
                return self._move_from(job, worker_id)
            case FromWorker(worker_id, message):
                if job.executions.is_current(message):
                    return self._handle_message(job, message, worker_id)
                self._regional.late(job, message, worker_id, self._first_attempt)
            case WorkerLost(worker_id, reason):
                self._regional.heard_of(worker_id)
                if regions := job.executions.regions_on(worker_id):
                    return self._failed(job, failure_of_worker(worker_id, reason), regions)
            case AttemptFailed(attempt, failure) if attempt == job.attempt:
                everything = job.executions.failover.everything
                return self._failed(job, failure, job.restarting or everything)
            case Suspected(failure, attempt, regions):
                if regions := regions & job.executions.regions_of(attempt):
                    return self._failed(job, failure, regions)
            case RegionsReady(attempt) if attempt == job.attempt:
                return self._regions_ready(job)
            case PublishResult():
                return self._published(job, event)
            case Tick():
                return self._settle(job, job.checkpoints.tick())
            case RoomMade(attempt) if attempt == job.attempt:
                return self._room_made(job)
            case GraceOver(attempt) if attempt == self._first_attempt and self._leaving is not None:
                return handing_over(self._leaving)
            case FinalAgain(attempt) if attempt == job.attempt:
                return self._settle(job, job.checkpoints.request(FINAL, final=True))
            case ClientWish():
                return self._handle_wish(job, event)
        return None

    def _handle_message(self, job: JobContext, message: Any, worker_id: str) -> State | None:
        checkpoints = job.checkpoints
        match message:
            case RestoreProgress(region=region):
                job.restoring[worker_id, region] = (message.done_bytes, message.total_bytes)
            case Statistics(attempt=attempt, subtasks=subtasks):
                job.report(attempt, subtasks)
                job.old_output.look(job.plan, job.statistics)
                return self._settle(job, look_at_histories(job))
            case WatermarkReached(group=group, watermark=watermark):
                member = Member(SubtaskId(message.vertex, message.index), message.step)
                now_ms = _monotonic_ms(job)
                self._announce(job, self._alignment.report(group, member, watermark, now_ms))
            case LoopRoundBack():
                self._loop_round(job, message)
            case CheckpointAcked():
                return self._settle(job, checkpoints.acked(message))
            case CheckpointDeclined():
                return self._settle(job, checkpoints.declined(message))
            case SubtaskFailed():
                regions = regions_of(job, message)
                if regions == job.executions.failover.everything:
                    return self._failed(job, failure_of_subtask(message, worker_id), regions)
                if not suspect(job, message, worker_id):
                    return self._failed(job, failure_of_subtask(message, worker_id), regions)
            case SubtaskFinished(vertex=vertex, index=index):
                self._unfinished.discard((vertex, index))
                left = self._alignment.leave(SubtaskId(vertex, index), _monotonic_ms(job))
                self._announce(job, left)
                if not self._unfinished:
                    return self._all_finished(job)
            case SubtaskTerminated(vertex=vertex, index=index):
                self._unterminated.discard((vertex, index))
                if not self._unterminated and self._ending is not None:
                    ending, self._ending = self._ending, None
                    if isinstance(ending, End):
                        job.old_output.all_committed()
                    if isinstance(ending, State):
                        return ending
                    return ended(ending) if isinstance(ending, End) else rescaling()
        return None

    # -- failures -----------------------------------------------------------------------------------

    def _failed(
        self, job: JobContext, failure: Failure, regions: frozenset[RegionId]
    ) -> State | None:
        """Some regions have failed: they restart beside the others, or all of the job does."""
        leaving = self._stopping or self._draining or self._ending is not None
        whole = "the job was stopping" if leaving else ""
        decided = self._regional.decide(job, failure, regions, whole)
        if isinstance(decided, State):
            return decided
        if not job.restarting:
            self._settle(job, job.checkpoints.job_failed())
        new = decided.regions - job.restarting
        self._regional.begin(job, decided)
        self._forget(job, new)
        return None

    def _forget(self, job: JobContext, regions: frozenset[RegionId]) -> None:
        """Forget what subtasks that begin again had reported."""
        for subtask in job.executions.failover.subtasks_of(regions):
            self._unfinished.add((subtask.vertex, subtask.index))
            self._unterminated.add((subtask.vertex, subtask.index))
            self._announce(job, self._alignment.leave(subtask, _monotonic_ms(job)))
        for loop in job.plan.loops:
            if job.executions.failover.region_of(SubtaskId(loop.head, 0)) in regions:
                self._loops[loop.name] = LoopRounds(job.plan.vertices[loop.head].parallelism)

    def _published(self, job: JobContext, result: PublishResult) -> State | None:
        state = self._settle(job, job.checkpoints.publish_result(result))
        if job.restarting:
            if result.error is None and not result.savepoint:
                # It was complete but for its entry when a region failed: those that run may commit.
                job.tell(
                    CheckpointCompleted(
                        attempt=job.attempt,
                        checkpoint_id=result.checkpoint_id,
                        generation=job.generation,
                    )
                )
            self._regional.heard_of()
        return state

    def _regions_ready(self, job: JobContext) -> State | None:
        """All that had to restart is deployed: it begins, and checkpoints go on."""
        regions = job.restarting
        try:
            self._workers = self._regional.ready(job)
        except FencedError:
            raise  # another coordinator leads: nothing here is to fail, or to restart
        except HeadgateError as error:
            return self._failed(job, failure_from(error, "deployment"), regions)
        for worker in self._workers:
            worker.send(Start(attempt=job.attempt))
        self._announce(job, self._alignment.announced())
        job.set_status("RUNNING")
        job.pool.refill()
        publish_recovered(job, job.failures.running(job.clock.now_ms()))
        return self._start_checkpoints(job)

    def _announce(self, job: JobContext, announcements: list[Announcement]) -> None:
        """Tell the sources how far they may read."""
        for group, limit in announcements:
            job.tell(WatermarkLimit(attempt=job.attempt, group=group, limit=limit))

    def _loop_round(self, job: JobContext, back: LoopRoundBack) -> None:
        """Tell all heads of a loop, once the last has its probe back, if anything is still under way."""
        loop, number = back.loop, back.number
        total = self._loops[loop].report(back.index, number, back.records)
        if total is not None:
            job.tell(LoopRoundOver(attempt=back.attempt, loop=loop, number=number, records=total))

    # -- ends ---------------------------------------------------------------------------------------

    def _all_finished(self, job: JobContext) -> State | None:
        """All data is through: one more checkpoint commits the sinks' tail (CKP-17)."""
        if self._draining and STOP in self._wishes:
            return self._request_stop(job, self._wishes[STOP])
        if self._ending is not None or self._stopping:
            return None
        if not job.keeps_checkpoints:
            self._terminate(job, End(JobStatus.FINISHED))
            return None
        return self._settle(job, job.checkpoints.request(FINAL, final=True))

    @property
    def _stopping(self) -> bool:
        return STOP in self._wishes or RESCALE in self._wishes or self._leaving is not None

    def _terminate(self, job: JobContext, ending: End | Rescale | State) -> None:
        """Everything is durable and the commit notices are out: let the subtasks leave."""
        self._ending = ending
        job.tell(Terminate(attempt=job.attempt))

    # -- checkpoints --------------------------------------------------------------------------------

    def _settle(self, job: JobContext, outcome: Outcome) -> State | None:
        """Draw the consequences of what the checkpoint protocol decided."""
        for done in outcome.done:
            self._done(job, done)
        for refused in outcome.refused:
            self._refused(job, refused, failed=outcome.fail is not None)
        if outcome.fail is None:
            return None
        message = outcome.fail.message
        kind = FailureKind.STOP if outcome.fail.stopping else FailureKind.CHECKPOINTS
        declined = job.checkpoints.last_declined
        error = JobError(message, where=declined)
        text = f"{message}: {declined}" if declined else message
        several = len(job.executions.failover.regions) > 1
        why = "checkpoints are of all regions" if several else ""
        return failing(Failure(text, "checkpoint coordinator", kind, error), why=why)

    def _done(self, job: JobContext, done: RequestDone) -> None:
        wish = self._wishes.pop(done.token, None)
        address = self._addresses.pop(done.token, "")
        manifest = job.checkpoints.savepoints.pop(address, None)
        if done.token == FINAL:
            self._terminate(job, End(JobStatus.FINISHED))
        elif done.token == STOP:
            kept = [f"savepoint {address}"] * bool(address)
            kept += [f"checkpoint {done.checkpoint_id}"] * job.keeps_checkpoints
            what = f"stopped with {' and '.join(kept)}"
            reason = what if kept else "stopped; the job keeps no checkpoints"
            size = 0 if manifest is None else size_of(manifest)
            end = End(JobStatus.STOPPED, reason, None, wish, address, size)
            self._terminate(job, end)
        elif done.token == LEAVE and self._leaving is not None:
            self._terminate(job, handing_over(self._leaving))
        elif done.token == RESCALE and job.rescale is not None:
            self._terminate(job, job.rescale)
        elif wish is not None and manifest is not None:
            wish.done(
                savepoint=address,
                checkpoint=done.checkpoint_id,
                duration_ms=manifest.duration_ms,
                size_bytes=size_of(manifest),
            )
        elif wish is not None:
            wish.done(
                checkpoint=done.checkpoint_id,
                duration_ms=job.checkpoints.last_duration_ms,
                size_bytes=job.checkpoints.last_size_bytes,
                path=job.checkpoints.path_of(done.checkpoint_id),
            )

    def _refused(self, job: JobContext, refused: RequestFailed, *, failed: bool) -> None:
        wish = self._wishes.pop(refused.token, None)
        address = self._addresses.pop(refused.token, "")
        job.checkpoints.savepoints.pop(
            address, None
        )  # complete, if only what came behind it failed
        if refused.token == LEAVE:
            job.events.put_nowait(GraceOver(self._first_attempt))
        if refused.token == RESCALE:
            job.rescale = None
            job.pool.retire(self._workers)
        if wish is not None:
            what = "savepoint" if address else "checkpoint"
            text = f"no {what} was taken: {refused.reason.sentence}"
            if refused.savepoint_done:
                text = (
                    f"the job did not stop: its last checkpoint failed: {refused.reason.sentence}; "
                    f"the savepoint is complete path=`{address}`"
                )
            wish.refuse(JobError(text))
        elif refused.token == FINAL and not failed:
            loop = asyncio.get_running_loop()
            loop.call_later(FINAL_RETRY_S, job.events.put_nowait, FinalAgain(job.attempt))

    # -- clients ------------------------------------------------------------------------------------

    def _handle_wish(self, job: JobContext, wish: ClientWish) -> State | None:
        if job.restarting:
            if ends_at_once(wish):
                return ended_by_wish(wish)
            wish.refuse(JobNotReady("a part of the job restarts", fix="try again in a moment"))
            return None
        try:
            match wish.verb:
                case "cancel":
                    return ended(End(JobStatus.CANCELED, "cancelled by a client", wish=wish))
                case "stop":
                    return self._stop(job, wish)
                case "hand-over":
                    return self._hand_over(job, wish)
                case "savepoint":
                    return self._savepoint(job, wish)
                case "rescale":
                    return self._rescale(job, wish)
                case _:
                    return self._checkpoint(job, wish)
        except UsageError as error:
            wish.refuse(error)
            return None

    def _new_token(self, wish: ClientWish, address: str = "") -> str:
        self._tokens += 1
        token = f"request-{self._tokens}"
        self._wishes[token] = wish
        if address:
            self._addresses[token] = address
        return token

    def _checkpoint(self, job: JobContext, wish: ClientWish) -> State | None:
        check_keeps_checkpoints(job)
        return self._settle(job, job.checkpoints.request(self._new_token(wish)))

    def _savepoint(self, job: JobContext, wish: ClientWish) -> State | None:
        address = savepoint_target(job, wish)
        token = self._new_token(wish, address)
        native = bool(wish.arguments.get("native"))
        return self._settle(job, job.checkpoints.request(token, savepoint=address, native=native))

    def _stop(self, job: JobContext, wish: ClientWish) -> State | None:
        if self._ending is not None or self._stopping:
            raise UsageError("the job is stopping already")
        drain = bool(wish.arguments.get("drain"))
        address = savepoint_target(job, wish) if "savepoint" in wish.arguments else ""
        if not (job.keeps_checkpoints or address or drain):
            reason = "stopped; the job keeps no checkpoints"
            return ended(End(JobStatus.STOPPED, reason, wish=wish))
        if drain and not self._unfinished:
            raise UsageError("the job's data has ended; it is finishing")
        self._wishes[STOP] = wish
        if address:
            self._addresses[STOP] = address
        behind = f"a savepoint in {address}" if address else "a final checkpoint"
        job.publish("stopping", f"{'draining, then ' * drain}stopping with {behind}")
        if not drain:
            return self._request_stop(job, wish)
        self._draining = True
        job.tell(FinishSources(attempt=job.attempt))
        return None

    def _hand_over(self, job: JobContext, wish: ClientWish) -> State | None:
        """Take a checkpoint behind which the sources are silent, and leave; or leave when time is up.

        A job without checkpoints has nothing to keep, so this process leaves at once.
        """
        if self._ending is not None or self._stopping:
            raise UsageError("the job is stopping already")
        if not job.keeps_checkpoints:
            return handing_over(wish)
        self._leaving = wish
        job.publish("stopping", "handing the run over with a checkpoint")
        grace_s = job.options.get(SHUTDOWN_GRACE) / 1000
        over = GraceOver(self._first_attempt)
        asyncio.get_running_loop().call_later(grace_s, job.events.put_nowait, over)
        return self._settle(
            job, job.checkpoints.request(LEAVE, stop=True, next_parallelism=job.parallelism)
        )

    def _request_stop(self, job: JobContext, wish: ClientWish) -> State | None:
        native = bool(wish.arguments.get("native"))
        address = self._addresses.get(STOP, "")
        return self._settle(
            job, job.checkpoints.request(STOP, stop=True, savepoint=address, native=native)
        )

    def _rescale(self, job: JobContext, wish: ClientWish) -> State | None:
        check_keeps_checkpoints(job)
        if self._ending is not None or self._stopping:
            raise UsageError("the job is stopping already")
        wanted = wish.arguments.get("parallelism")
        if "trigger" in wish.arguments and wanted == job.parallelism:
            # The coordinator before may have done it: what is asked for again is done.
            last = job.checkpoints.last_completed
            wish.done(parallelism=wanted, checkpoint=last, pause_ms=0)
            return None
        after, plan = check_rescale(job, wanted)
        job.publish("rescaling", f"rescaling from parallelism {job.parallelism} to {after}")
        self._begin_move(job, wish, after, plan)
        return None

    def _move_from(self, job: JobContext, worker_id: str) -> State | None:
        """A worker's process is about to end: go on from a checkpoint without it, as after a rescale.

        While something else is under way nothing is done: then the job restarts when the worker is gone.
        """
        busy = self._ending is not None or self._stopping or self._draining or job.restarting
        if busy or not job.keeps_checkpoints or not job.executions.regions_on(worker_id):
            return None
        job.publish("leaving", f"{worker_id} has to leave; its tasks go to another worker")
        self._begin_move(job, _nobody(job), job.parallelism, job.plan)
        return None

    def _begin_move(
        self, job: JobContext, wish: ClientWish, parallelism: int, plan: PhysicalPlan
    ) -> None:
        """Get all workers that the plan needs; `_room_made` goes on from there."""
        self._wishes[RESCALE] = wish
        self._rescale_to = parallelism
        # The job works on until all workers are there: it may turn out that there is no room for them.
        self._room = asyncio.get_running_loop().create_task(
            job.pool.ensure(worker_groups(plan, job.spec)), name="make room"
        )
        made = RoomMade(job.attempt)
        self._room.add_done_callback(lambda _: job.events.put_nowait(made))

    def _room_made(self, job: JobContext) -> State | None:
        """Stop the sources, to go on with all workers; or go on as before without new ones."""
        room, self._room = self._room, None
        wish = self._wishes.get(RESCALE)
        if room is None or wish is None:
            return None
        after, error = self._rescale_to, room.exception()
        if error is None:
            job.rescale = Rescale(wish, job.parallelism, after, job.clock.monotonic())
            return self._settle(
                job, job.checkpoints.request(RESCALE, stop=True, next_parallelism=after)
            )
        del self._wishes[RESCALE]
        job.pool.retire(self._workers)
        wish.refuse(
            JobError(
                f"the cluster gives no workers for parallelism {after}: {error}",
                fix=f"the job goes on at {job.parallelism}; add machines, or choose fewer",
            )
        )
        return None if self._unfinished else self._all_finished(job)

    def _answer_rescale(self, job: JobContext) -> None:
        """All subtasks of the first attempt at the new parallelism run."""
        rescale, job.rescale = job.rescale, None
        if rescale is None:
            return
        job.rescaled_ms = int(1000 * (job.clock.monotonic() - rescale.began))
        job.observed.rescale.observe(job.rescaled_ms / 1000)
        moved = rescale.before == job.parallelism
        job.publish(
            "rescaled",
            f"tasks were moved to other workers; the job paused for {job.rescaled_ms} ms"
            if moved
            else f"rescaled from parallelism {rescale.before} to {job.parallelism}; "
            f"the job paused for {job.rescaled_ms} ms",
            before=rescale.before,
            after=job.parallelism,
            pause_ms=job.rescaled_ms,
        )
        rescale.wish.done(
            parallelism=job.parallelism,
            pause_ms=job.rescaled_ms,
            checkpoint=job.restored_checkpoint,
        )


def _nobody(job: JobContext) -> ClientWish:
    """A wish of the coordinator's own: how it goes is seen in what is published."""

    def heard(answer: asyncio.Future[dict[str, Any]]) -> None:
        if not answer.cancelled() and (error := answer.exception()) is not None:
            job.publish("leaving", f"tasks were not moved: {error}")

    answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    answer.add_done_callback(heard)
    return ClientWish("rescale", answer)


def _monotonic_ms(job: JobContext) -> int:
    return round(1000 * job.clock.monotonic())
