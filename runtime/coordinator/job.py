"""The coordinator of one job: starts from the store, runs the states, answers to clients.

It holds no truth. Everything it needs to take over lies in the job log, so one that crashed is replaced
by another with the same arguments, and the log fences the old one should it still be alive.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from ...errors import FencedError, HeadgateError, InternalError, JobError, JobNotReady, UsageError
from ...operators.clock import Clock
from ...operators.durations import format_duration
from ..control.cluster import Cluster
from ..control.job_client import Event
from ..control.link import Link
from ..control.messages import CheckpointAcked, Hello, StepStuck
from ..job_spec import JobSpec, checkpoint_rules
from ..listening import Listener, ListenerLimits
from ..observe.figures import StorageFigures
from ..observe.metrics import MetricsRegistry
from ..observe.spans import open_spans
from ..options.monitoring import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from ..options.network import CONTROL_TOKEN_IN_STORAGE
from ..options.recovery import (
    EXCEPTION_HISTORY,
    FAILURE_ENRICHERS,
    FORMER_WATCH,
    HISTORY_RUNS,
    REDUNDANT_WORKERS,
    REGISTRATION_TIMEOUT,
    SAME_FAILURE_MAX,
    SAME_RECORD_MAX,
    START_FAILURES_MAX,
    START_RETRY,
    STORE_PATIENCE,
    TAKEOVERS_MAX,
    TAKEOVERS_WINDOW,
)
from ..options.registry import Options
from ..options.state import CHECKPOINT_HISTORY, PROBE_RACES, PROBE_TIMEOUT
from ..protocol.checkpoints.coordinator import CheckpointCoordinator
from ..protocol.checkpoints.statistics import CheckpointHistory
from ..protocol.failure_history import FailureHistory
from ..protocol.failures import FailureKind
from ..protocol.job_result import JobFailure, JobOutcome
from ..protocol.joblog import GenerationStarted, JobEnded, JobStatus, LogView
from ..protocol.restart import StartFailures, restart_strategy
from ..shipping import ship
from ..storage.base import AddressOpener, CheckpointStore, StoreOpener
from ..storage.joblog_store import JobLog
from ..storage.open_store import counted, open_store_at
from ..storage.probe import probe_races
from ..storage.stored_jobs import publish_token, sweep_orphans, withdraw_token
from .checkpoint_report import report
from .checkpointing import CheckpointDriver
from .clients import Clients
from .context import Failure, JobContext, JobEvent, Tick
from .ended import again, logged_failure, outcome_of_end
from .enrichers import FailureEnrichers, load_enrichers
from .former import already_runs, ask_leader, check_former, is_other_run, this_leader
from .handing_over import REASON, STATUS
from .job_metrics import register_job
from .job_spans import checkpoint_ended
from .leadership import Leadership, check_not_followed, patiently
from .liveness import publish_stuck, watching
from .output import check_output, starts_without_state
from .poison import PoisonJudge
from .replacing import OutputReplacer
from .restored import dispose_claimed
from .server import ControlServer
from .states import End, State, adopting, deploying, ended
from .steady_clock import SteadyClock
from .views import (
    checkpoint_directory,
    describe_config,
    describe_metrics,
    describe_plan,
    describe_subtasks,
)
from .watchdog import Watchdog
from .wishes import dispose_savepoint, savepoint_of_trigger
from .workers import WorkerPool

PROGRESS_S = 1.0


class _OverBefore(Exception):
    """The run of this coordinator has ended, and another has begun since: it must not be disturbed."""

    def __init__(self, end: JobEnded) -> None:
        self.end = end


class JobCoordinator:
    """Runs one job to its end."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        cluster: Cluster,
        clock: Clock,
        open_store: StoreOpener,
        open_at: AddressOpener = open_store_at,
        token: str | None = None,
        metrics: MetricsRegistry | None = None,
        metrics_url: str = "",
        takes_over: bool = False,
    ) -> None:
        """`takes_over`: another coordinator has led this run, and workers may wait for the next."""
        self.spec = spec
        self._clock = clock
        self._steady_clock = SteadyClock(clock)
        self._storage = StorageFigures()
        self._open_store = counted(open_store, self._storage)
        self._open_at = counted(open_at, self._storage)
        self._options = Options(spec.options)
        self._registry = metrics or MetricsRegistry()
        self._metrics = self._registry.group(job_name=spec.name)
        self._metrics_url = metrics_url
        self._spans = open_spans(self._options, spec.name)
        self._takes_over = takes_over
        self._former = ""
        """A text that says what became of the former run; empty: there is nothing to say."""
        self._patience_ms = self._options.get(STORE_PATIENCE) if takes_over else 0
        self._leadership = Leadership()
        self._events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self._context: JobContext | None = None
        self._over: JobOutcome | None = None
        """The end of this run, if it had ended before this coordinator began."""
        self._tick: asyncio.TimerHandle | None = None
        self.on_event: Callable[[Event], None] | None = None
        """Called for every event, for those in the same process."""
        self.on_lead: Callable[[], Awaitable[None]] | None = None
        """Called once the job log says that this coordinator leads, before anything runs."""
        self.server = ControlServer(
            token or secrets.token_hex(16),
            self._on_hello,
            ListenerLimits.of(self._options),
            Listener.control(self._options),
        )
        self.rest_url = ""
        """Where the REST API of this process is, if it has a TCP port."""
        self.rest_addresses: tuple[str, ...] = ()
        """Where clients in other processes find it; told in the job log."""
        self.clients = self._clients()
        self._pool = WorkerPool(
            cluster,
            self.server,
            clock,
            self._events.put_nowait,
            job_name=spec.name,
            name_prefix=f"{spec.name}-{os.getpid()}-{secrets.token_hex(4)}",
            heartbeat_interval_ms=self._options.get(HEARTBEAT_INTERVAL),
            heartbeat_timeout_ms=self._options.get(HEARTBEAT_TIMEOUT),
            watching=watching(self._options),
            on_stuck=self._on_stuck,
            spares=self._options.get(REDUNDANT_WORKERS),
            start_timeout_ms=self._options.get(REGISTRATION_TIMEOUT),
            start_failures=StartFailures(
                self._options.get(START_FAILURES_MAX), self._options.get(START_RETRY)
            ),
            leadership=self._leadership,
        )

    def _clients(self) -> Clients:
        """Return what answers clients: views, and the requests that are the same in every state."""
        return Clients(
            self._events.put_nowait,
            {
                "status": lambda _: self._describe(),
                "checkpoints": lambda given: self._describe_checkpoints(given.get("id")),
                "subtasks": lambda given: describe_subtasks(self._begun(), given["vertex"]),
                "config": lambda _: describe_config(self._begun()),
                "plan": lambda _: describe_plan(self._begun()),
                "metrics": lambda _: describe_metrics(
                    self._registry, self._describe().get("metrics", [])
                ),
            },
            {
                "dispose": lambda given: dispose_savepoint(self._begun(), given.get("path")),
                "savepoint": self._savepoint_before,
            },
        )

    async def _on_hello(self, hello: Hello, link: Link) -> None:
        if hello.role == "worker":
            await self._pool.serve(hello, link)
        elif hello.role == "pulse":
            await self._pool.serve_pulse(hello, link)

    def _on_stuck(self, worker_id: str, stuck: StepStuck) -> None:
        if self._context is not None:
            publish_stuck(self._context, worker_id, stuck)

    def note(self, text: str) -> None:
        """Log and announce what the cluster waits for."""
        if self._context is not None:
            self._context.publish("waiting", text)

    def _describe(self) -> dict[str, Any]:
        if self._context is None:
            found = {"name": self.spec.name, "run": self.spec.run, "status": "INITIALIZING"}
            return {**found, **_ending(self._over), "rest": self.rest_url}
        return {**self._context.describe(), "rest": self.rest_url}

    async def _savepoint_before(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a savepoint that was asked for before; None: it is to be taken."""
        if "trigger" not in given:
            return None
        return await savepoint_of_trigger(self._begun(), given)

    def _begun(self) -> JobContext:
        if self._context is None:
            raise JobNotReady("the job has not begun yet", fix="try again in a moment")
        return self._context

    def _describe_checkpoints(self, checkpoint_id: int | None) -> dict[str, Any]:
        history = (
            CheckpointHistory(0) if self._context is None else self._context.checkpoints.history
        )
        return report(history, checkpoint_id)

    @property
    def generation(self) -> int:
        """The generation that it leads; 0: it does not lead yet, or has no job log."""
        log = self._leadership.log
        return 0 if log is None else log.generation

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The last failures, as the status shows them."""
        records = [] if self._context is None else self._context.failures.records
        return [record.as_json() for record in records]

    async def run(self) -> JobOutcome:
        """Run the job. Returns how it ended; raises only if it could not begin, or was fenced.

        Raises:
            StorageError: the checkpoint store cannot be used.
            FencedError: a newer coordinator owns the job; nothing was written since.
        """
        store: CheckpointStore | None = None
        beat: asyncio.Task[None] | None = None
        progress: asyncio.Task[None] | None = None
        try:
            store, log, view = await patiently(self._open_log, self._clock, self._patience_ms)
            context = self._make_context(store, log, view)
            self._context = context
            register_job(self._metrics, context)
            loop = asyncio.get_running_loop()
            beat = loop.create_task(self._pool.beat(), name="heartbeats")
            progress = loop.create_task(self._progress(context), name="progress")
            state: State | None = _first_state(context, view)
            await self._make_room(context, view)
            while state is not None:
                state = await self._leadership.while_leading(state.run(context))
            outcome = _outcome(context)
            failure = None if context.end is None else logged_failure(context.end.failure)
        except _OverBefore as over:
            outcome = self._over = outcome_of_end(over.end)
            failure = over.end.failure
        except (HeadgateError, asyncio.CancelledError) as error:
            if isinstance(error, FencedError):
                self._leadership.lose(error)
            if isinstance(error, HeadgateError):
                kind = "fenced" if isinstance(error, FencedError) else "refused"
                self.clients.end({"status": "FAILED", "reason": kind}, _failure_of(error))
            raise
        except Exception as error:
            broken = InternalError(f"the coordinator broke: {type(error).__name__}: {error}")
            self.clients.end({"status": "FAILED", "reason": "internal"}, _failure_of(broken))
            raise broken from error
        finally:
            for task in (beat, progress):
                if task is not None:
                    task.cancel()
            if self._tick is not None:
                self._tick.cancel()
            await self._pool.close()
            if self._context is not None:
                await self._context.old_output.close()
                await self._context.enrichers.close()
            self._metrics.close()
            await self._spans.close()
            if store is not None:
                await store.close()
        self.clients.end(outcome.as_json(), failure)
        return outcome

    async def close(self) -> None:
        """Stop listening, once the clients in this process have had their last word."""
        await self.clients.close()
        await self.server.close()

    # -- the start ----------------------------------------------------------------------------------

    async def _open_log(self) -> tuple[CheckpointStore | None, JobLog | None, LogView | None]:
        checkpoint = self.spec.checkpoint
        if checkpoint is None:
            return None, None, None
        store = self._open_store(checkpoint.storage, self.spec.name, self.spec.options)
        self._storage.register(self._metrics.add())
        try:
            await store.open()
            if not self._takes_over:  # whoever led this run before has tried it
                races, timeout_ms = self._options.get(PROBE_RACES), self._options.get(PROBE_TIMEOUT)
                await probe_races(store, random.Random(), races, timeout_ms / 1000)
            log = JobLog(store, secrets.token_hex(16), self._clock)
            before = await self._take_over(log)
            self._leadership.log = log
            self._pool.lead(log.generation)
            in_any = self._options.get(CONTROL_TOKEN_IN_STORAGE)
            token = self.server.token
            await publish_token(store, log.generation, token, in_any_storage=in_any)
            await withdraw_token(store, before.generation)
            if self.on_lead is not None:
                await self.on_lead()
        except BaseException:
            await store.close()
            raise
        return store, log, before

    async def _take_over(self, log: JobLog) -> LogView:
        """Start our generation; returns what the log says in front of its entry."""
        spec = self.spec
        before = await log.load()
        _check_not_over(spec, before)
        takeover = before.run == spec.run
        claimed = before.generation if takeover else await log.last_claim_of(spec.run)
        check_not_followed(spec.run, claimed, before)
        _check_begins_with_something(spec, before)
        self._former = await check_former(
            log,
            spec.run,
            take_over=spec.take_over,
            watch_ms=self._options.get(FORMER_WATCH),
            now_ms=self._clock.now_ms(),
            ask=partial(ask_leader, own=self.server.addresses),
        )
        seen = before.run
        if starts_without_state(spec, before, fresh=_starts_fresh(spec, before)):
            await check_output(spec, spec.graph)

        def follow(view: LogView, started: GenerationStarted) -> GenerationStarted:
            # The coordinator before us may have gone on since we read the log: it may have been
            # rescaled, or have ended the job.
            nonlocal before
            _check_not_over(spec, view)
            check_not_followed(spec.run, claimed, view)
            if view.run != seen and is_other_run(view, spec.run) and not spec.take_over:
                raise already_runs("another run has begun at the same moment")
            before = view
            # Within a run the log knows the parallelism better than what the job once said.
            logged = view.parallelism if view.run == spec.run else 0
            return msgspec.structs.replace(
                started,
                fresh=_starts_fresh(spec, view),
                parallelism=logged or spec.parallelism,
            )

        await log.start_generation(
            run=spec.run,
            job=spec.name,
            ends_kept=self._options.get(HISTORY_RUNS),
            restore_from=spec.restore_from,
            parallelism=spec.parallelism,
            max_parallelism=spec.plan.max_parallelism,
            leader=this_leader(self.server.addresses, self._clock.now_ms(), self.rest_addresses),
            follow=follow,
        )
        return before

    async def _make_room(self, context: JobContext, before: LogView | None) -> None:
        """Let sinks deal with output of earlier runs, if this run begins without state."""
        spec, log = self.spec, context.log
        if _end_of(spec, before) is not None:
            return
        if log is None and self._takes_over:
            return  # what is there was written by this very run, under the coordinator before
        if starts_without_state(spec, None if log is None else log.view, fresh=False):
            if log is None:
                await check_output(spec, spec.graph)
            await context.old_output.begin()

    def _make_context(
        self, store: CheckpointStore | None, log: JobLog | None, before: LogView | None
    ) -> JobContext:
        spec = self.spec
        generation = log.generation if log is not None else 0
        judge = PoisonJudge(self._options.get(SAME_RECORD_MAX), self._options.get(SAME_FAILURE_MAX))
        context = JobContext(
            spec=spec,
            options=self._options,
            clock=self._clock,
            steady_clock=self._steady_clock,
            pool=self._pool,
            events=self._events,
            strategy=restart_strategy(spec.restart, random.Random().uniform),
            log=log,
            store=store,
            checkpoints=self._make_driver(log, store, generation),
            old_output=OutputReplacer(
                spec, log, self._clock, lambda kind, text: context.publish(kind, text)
            ),
            open_at=self._open_at,
            generation=generation,
            plan=spec.plan,
            parallelism=spec.parallelism,
            plan_blob=ship(spec.plan),
            metrics_url=self._metrics_url,
            spans=self._spans,
            status_since_ms=self._clock.now_ms(),
            began_ms=self._clock.now_ms() if log is None else log.view.history.began_ms,
            failures=FailureHistory(self._options.get(EXCEPTION_HISTORY)),
            judge=lambda failure: judge.judged(
                failure, self._clock.now_ms(), context.checkpoints.last_completed
            ),
            enrichers=FailureEnrichers(load_enrichers(self._options.get(FAILURE_ENRICHERS) or "")),
        )
        context.subscribers.append(self.clients.publish)
        if self.on_event is not None:
            context.subscribers.append(self.on_event)
        context.checkpoints.announce = context.publish
        context.checkpoints.on_ended = partial(checkpoint_ended, context)
        if spec.claim:
            context.checkpoints.on_completed = partial(_dispose_claimed, context)
        if log is not None and store is not None:
            _announce_start(context, log, before)
            if self._former:
                context.publish("start", f"job {spec.name}: {self._former}")
            context.checkpoints.sweep(_sweep(store, log))
            if spec.claim and log.view.newest is not None:
                _dispose_claimed(context)
        return context

    def _make_driver(
        self, log: JobLog | None, store: CheckpointStore | None, generation: int
    ) -> CheckpointDriver:
        protocol: CheckpointCoordinator[CheckpointAcked] = CheckpointCoordinator(
            checkpoint_rules(self.spec.checkpoint, self._options)
        )
        checkpoint = self.spec.checkpoint

        def broadcast(message: Any) -> None:
            if self._context is not None:
                self._context.tell(message)

        return CheckpointDriver(
            protocol,
            log=log,
            store=store,
            open_at=self._open_at,
            options=self.spec.options,
            clock=self._steady_clock,
            generation=generation,
            retain=checkpoint.retain if checkpoint is not None else 1,
            history=Options(self.spec.options).get(CHECKPOINT_HISTORY),
            directory=checkpoint_directory(self.spec) if log is not None else "",
            broadcast=broadcast,
            put_event=self._events.put_nowait,
            wake_at=self._wake_at,
        )

    def _wake_at(self, at_ms: int) -> None:
        if self._tick is not None:
            self._tick.cancel()
        delay = max(0, at_ms - self._steady_clock.now_ms()) / 1000
        self._tick = asyncio.get_running_loop().call_later(delay, self._events.put_nowait, Tick())

    async def _progress(self, context: JobContext) -> None:
        watchdog = Watchdog(context, int(1000 * PROGRESS_S))
        while True:
            await asyncio.sleep(PROGRESS_S)
            watchdog.look()
            if context.works:
                context.publish("progress", "", **context.describe())


def _first_state(context: JobContext, before: LogView | None) -> State:
    """Deploying; or the end again, if a coordinator of this run wrote it to the log and then died.

    And the end also if one coordinator after the other dies: something in the job kills them.
    """
    end = _end_of(context.spec, before)
    if end is not None:
        return ended(again(context, end))
    allowed, window_ms = context.options.get(TAKEOVERS_MAX), context.options.get(TAKEOVERS_WINDOW)
    since_ms = context.clock.now_ms() - window_ms
    if context.log is None or context.log.view.takeovers_since(since_ms) <= allowed:
        return deploying() if _nothing_runs(context) else adopting()
    reason = (
        f"the coordinator died {allowed + 1} times within {format_duration(window_ms)}, "
        f"without a checkpoint in between"
    )
    error = JobError(
        reason,
        fix="look into the logs of the cluster: is there too little memory? then run the job again",
    )
    failure = Failure(reason, "coordinator", FailureKind.TAKEOVERS, error)
    context.record(failure)
    return ended(End(JobStatus.FAILED, reason, failure))


def _nothing_runs(context: JobContext) -> bool:
    """True if the log has nothing that an earlier coordinator left running."""
    log = context.log
    return log is None or log.view.deployment is None


def _ending(outcome: JobOutcome | None) -> dict[str, Any]:
    """The status of a run that has ended, as far as its entry in the log tells."""
    if outcome is None:
        return {}
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "restarts": outcome.restarts,
        "last_checkpoint": outcome.checkpoint,
        "began_ms": outcome.began_ms,
    }


def _end_of(spec: JobSpec, before: LogView | None) -> JobEnded | None:
    """The end of this very run, none of which may run again; None if it has not ended."""
    # Also if it is not the last entry: another coordinator may have taken over there, and died too.
    end = before.last_end if before is not None else None
    return end if end is not None and end.run == spec.run else None


def _check_not_over(spec: JobSpec, before: LogView) -> None:
    end = _end_of(spec, before)
    if end is not None and before.run != spec.run:
        raise _OverBefore(end)


def _check_begins_with_something(spec: JobSpec, before: LogView) -> None:
    """Raise UsageError if a new run would start empty only because the one before got nowhere.

    That one was to begin with a savepoint, and ended without a checkpoint of its own.
    """
    new = not before.empty and before.run != spec.run
    if new and before.restore_from and not (spec.fresh or spec.restore_from or _finished(before)):
        raise UsageError(
            f"the last run began with {before.restore_from} and completed no checkpoint",
            fix=f"say again what to begin with: --from {before.restore_from}, or --fresh",
        )


def _starts_fresh(spec: JobSpec, before: LogView) -> bool:
    """True for a new run that is not to restore anything: as asked, or since the last one finished."""
    if before.empty or before.run == spec.run:
        return False  # nothing to leave behind, or a takeover within the run
    return spec.fresh or bool(spec.restore_from) or _finished(before)


async def _sweep(store: CheckpointStore, log: JobLog) -> None:
    """Delete what older coordinators wrote and no retained checkpoint needs."""
    await sweep_orphans(store, log.view.files, log.generation)


def _dispose_claimed(context: JobContext) -> None:
    """A checkpoint of this run is durable: what it began with is needed no more, if it may go."""
    context.checkpoints.on_completed = None
    context.checkpoints.tidy(dispose_claimed(context))


def _finished(before: LogView) -> bool:
    return before.ended is not None and before.ended.status is JobStatus.FINISHED


def _announce_start(context: JobContext, log: JobLog, before: LogView | None) -> None:
    """Say where the job starts from."""
    name = context.spec.name
    newest = log.view.newest
    left = before.newest if before is not None else None
    if _end_of(context.spec, before) is not None:
        context.publish(
            "start", f"job {name} had ended, but its coordinator died before it said so"
        )
    elif not _nothing_runs(context):
        text = f"job {name} has a new coordinator, generation {context.generation}"
        context.publish("start", text)
    elif newest is not None:
        text = f"job {name} resumes from checkpoint {newest.checkpoint_id}"
        context.publish("start", text, checkpoint=newest.checkpoint_id)
    elif context.spec.restore_from:
        context.publish("start", f"job {name} is a new run from {context.spec.restore_from}")
    elif before is not None and _finished(before):
        context.publish("start", f"job {name} had finished; this is a new run")
    elif left is not None:
        text = f"job {name} starts fresh, as asked; checkpoint {left.checkpoint_id} is ignored"
        context.publish("start", text)
    else:
        context.publish("start", f"job {name} starts fresh: no checkpoint in its storage")


def _failure_of(error: HeadgateError) -> JobFailure:
    """The failure of a coordinator that does not lead its job to an end."""
    return JobFailure.of(FailureKind.of(error).value, error.message, "coordinator", error)


def _outcome(context: JobContext) -> JobOutcome:
    end = context.end
    if context.handed_over:
        restarts = context.restarts
        if context.log is not None:
            restarts = context.log.view.history.restarts
        return JobOutcome(
            STATUS,
            REASON,
            checkpoint=context.checkpoints.last_completed,
            dropped=context.dropped.totals,
            run=context.spec.run,
            began_ms=context.began_ms,
            restarts=restarts,
        )
    if end is None:
        raise HeadgateError("the job ended without an end")
    logged = None if context.log is None else context.log.view.last_end
    error = end.failure.error if end.failure is not None else None
    return JobOutcome(
        context.status,
        end.reason,
        error,
        context.checkpoints.last_completed,
        context.dropped.totals,
        run=context.spec.run,
        began_ms=context.began_ms,
        ended_ms=context.ended_ms,
        restarts=context.restarts if logged is None else logged.history.restarts,
    )
