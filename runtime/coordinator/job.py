"""The coordinator of one job: it starts from the store, runs the states of the job, and answers clients.

It holds no state of its own. Everything that another coordinator needs to take over is in the job log, so
one that crashed is replaced by another with the same arguments. If it is still alive, the log fences it.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from ...errors import FencedError, HeadgateError, InternalError, JobError, JobNotReady, UsageError
from ...operators.clock import Clock
from ...operators.durations import format_duration
from ..control.cluster import Cluster
from ..control.job_client import EventListener
from ..control.link import ControlLink, ControlServer
from ..control.messages import Hello, StepStuck
from ..listening import Listener, ListenerLimits
from ..observe.figures import StorageFigures
from ..observe.metrics import MetricsRegistry
from ..observe.recent_logs import LogLine, RecentLogs
from ..observe.spans import open_spans
from ..options.network import (
    CONTROL_TOKEN_IN_STORAGE,
    REST_LOG_LINES,
    REST_LOST_RECORDS,
    REST_LOST_VALUES,
)
from ..options.recovery import (
    FORMER_WATCH,
    HISTORY_RUNS,
    STORE_PATIENCE,
    TAKEOVERS_MAX,
    TAKEOVERS_WINDOW,
)
from ..options.registry import Options
from ..options.state import PROBE_RACES, PROBE_TIMEOUT
from ..plan import JobSpec
from ..protocol.checkpoints.statistics import CheckpointHistory
from ..protocol.failures import FailureKind
from ..protocol.job_result import JobFailure, JobOutcome
from ..protocol.joblog import GenerationStarted, JobEnded, JobStatus, LogView
from ..storage.base import AddressOpener, CheckpointStore, StoreOpener
from ..storage.joblog_store import JobLog
from ..storage.open_store import counted, open_store_at
from ..storage.probe import probe_races
from ..storage.stored_jobs import publish_token, sweep_orphans, withdraw_token
from .adopting import Adopting
from .changes import find_changes
from .clients import Clients
from .commands import dispose_savepoint, savepoint_of_trigger
from .context import (
    EndOfJob,
    JobContext,
    ToAdopting,
    ToDeploying,
    ToFailing,
    ToHandingOver,
    ToRescaling,
    ToRunning,
    Transition,
)
from .deploying import Deploying
from .ending import (
    REASON,
    STATUS,
    Ended,
    HandingOver,
    end_from_log,
    logged_failure,
    outcome_of_end,
)
from .environment import EventQueue, JobEnvironment
from .failures import Failure
from .former import already_runs, ask_leader, check_former, is_other_run, this_leader
from .leadership import Leadership, check_not_followed, patiently
from .output import check_output, starts_without_state
from .owners import describe_owners
from .profiles import take_profile
from .queries import describe_states, query_keys, query_state
from .reporting import register_job
from .restarting import Failing, Rescaling
from .running import Running
from .scans import OpenScans, scan_state
from .status import describe, describe_curves, describe_dropped, sample_curves
from .views import (
    checkpoint_directory,
    describe_checkpoints,
    describe_config,
    describe_logs,
    describe_lost,
    describe_metrics,
    describe_plan,
    describe_subtasks,
)
from .watchdog import Watchdog, publish_stuck
from .workers import PoolSettings, WorkerPool

COORDINATOR = "coordinator"
"""The name of the process of the coordinator among those whose lines are kept."""
PROGRESS_S = 1.0


class CoordinatorState(Protocol):
    """A state of a job, which does one thing."""

    async def run(self) -> Transition | None:
        """Do it, and return what follows; None: this coordinator is done."""
        ...


def state_after(transition: Transition, job: JobContext) -> CoordinatorState:
    """Return the state that a transition leads to."""
    match transition:
        case ToAdopting():
            return Adopting(job)
        case ToDeploying():
            return Deploying(job)
        case ToRunning(workers, adopted):
            return Running(job, workers, adopted)
        case ToFailing():
            return Failing(job, transition)
        case ToRescaling():
            return Rescaling(job)
        case ToHandingOver(command):
            return HandingOver(job, command)
        case EndOfJob():
            return Ended(job, transition)


class _OverBefore(Exception):
    """The run of this coordinator has ended, and another has begun since, which must not be disturbed."""

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
        takes_over: bool = False,
    ) -> None:
        """`takes_over`: another coordinator has led this run, and workers may wait for the next one."""
        self.spec = spec
        self._clock = clock
        self._storage = StorageFigures()
        self._open_store = counted(open_store, self._storage)
        self._open_at = counted(open_at, self._storage)
        self._options = Options(spec.options)
        self._registry = metrics or MetricsRegistry()
        self._metrics = self._registry.group(job_name=spec.name)
        self.metrics_url = ""
        """The Prometheus endpoint of this process, if it has one."""
        self._spans = open_spans(self._options, spec.name)
        self._logs = RecentLogs(self._options.get(REST_LOG_LINES))
        self._takes_over = takes_over
        self._former = ""
        """A text about the end of the former run; empty: there was none."""
        self._patience_ms = self._options.get(STORE_PATIENCE) if takes_over else 0
        self._leadership = Leadership()
        self._events = EventQueue()
        self._scans = OpenScans()
        self._context: JobContext | None = None
        self._over: JobOutcome | None = None
        """The end of this run, if it had ended before this coordinator began."""
        self.on_event: EventListener | None = None
        """A listener in the same process, which gets every event."""
        self.on_lead: Callable[[], Awaitable[None]] | None = None
        """Called once the job log says that this coordinator leads, before anything runs."""
        self.server = ControlServer(
            token or secrets.token_hex(16),
            self._on_hello,
            ListenerLimits.of(self._options),
            Listener.control(self._options),
        )
        self.rest_url = ""
        """The address of the REST API of this process, if it has a TCP port."""
        self.rest_addresses: tuple[str, ...] = ()
        """The addresses at which clients in other processes find it; the job log has them."""
        self.clients = self._clients()
        self._pool = WorkerPool(
            cluster,
            self.server,
            clock,
            PoolSettings.of(
                spec.name, f"{spec.name}-{os.getpid()}-{secrets.token_hex(4)}", self._options
            ),
            self._events.put_nowait,
            on_stuck=self._on_stuck,
            logs=self._logs,
            leadership=self._leadership,
        )

    def keep_line(self, line: LogLine) -> None:
        """Keep a line of this process's log, unless it is of another job. Any thread may call."""
        if line.fields.get("job", self.spec.name) == self.spec.name:
            self._logs.add(line.fields.get("worker", COORDINATOR), (line,))

    def _clients(self) -> Clients:
        """Return the clients, with the views and requests that are the same in every state."""
        return Clients(
            self._events.put_nowait,
            {
                "status": lambda _: self._describe(),
                "checkpoints": lambda given: self._describe_checkpoints(given.get("id")),
                "subtasks": lambda given: describe_subtasks(self._begun().attempt, given["vertex"]),
                "config": lambda _: describe_config(self._begun().env),
                "curves": lambda given: describe_curves(self._begun(), given["since_ms"]),
                "plan": lambda _: describe_plan(self.spec, self._begun().attempt),
                "lost": lambda _: self._describe_lost(),
                "logs": lambda given: describe_logs(self._logs, **given),
                "states": lambda _: describe_states(self._begun().attempt.plan),
                "metrics": lambda _: describe_metrics(
                    self._registry, self._describe().get("metrics", [])
                ),
            },
            {
                "dispose": lambda given: dispose_savepoint(self._begun().env, given.get("path")),
                "savepoint": self._savepoint_before,
                "query": lambda given: query_state(self._begun(), self._pool.queries, given),
                "profile": lambda given: take_profile(self._begun(), self._pool.queries, given),
                "owners": self._owners,
                "rows": lambda given: query_keys(self._begun(), self._pool.queries, given),
                "changes": lambda given: find_changes(self._begun(), self._pool.queries, given),
                "scan": lambda given: scan_state(
                    self._begun(), self._pool.queries, self._scans, given
                ),
            },
        )

    async def _owners(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return describe_owners(self._begun(), self.server.token, given)

    async def _on_hello(self, hello: Hello, link: ControlLink) -> None:
        if hello.role == "worker":
            await self._pool.serve(hello, link)
        elif hello.role == "pulse":
            await self._pool.serve_pulse(hello, link)

    def _on_stuck(self, worker_id: str, stuck: StepStuck) -> None:
        if self._context is not None:
            publish_stuck(self._context.env, worker_id, stuck)

    def note(self, text: str) -> None:
        """Log and publish what the cluster waits for."""
        if self._context is not None:
            self._context.env.publish("waiting", text)

    def _describe(self) -> dict[str, Any]:
        if self._context is None:
            found = {"name": self.spec.name, "run": self.spec.run, "status": "INITIALIZING"}
            return {**found, **_ending(self._over), "rest": self.rest_url}
        return {**describe(self._context), "rest": self.rest_url}

    async def _savepoint_before(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of a savepoint that was requested before; None: it has to be taken."""
        if "trigger" not in given:
            return None
        return await savepoint_of_trigger(self._begun().env, given)

    def _begun(self) -> JobContext:
        if self._context is None:
            raise JobNotReady("the job has not begun yet", fix="try again in a moment")
        return self._context

    def _describe_lost(self) -> dict[str, Any]:
        attempt, options = self._begun().attempt, self._options
        return {
            "dropped": describe_dropped(attempt),
            "records": describe_lost(attempt),
            "kept": options.get(REST_LOST_RECORDS),
            "values": options.get(REST_LOST_VALUES),
        }

    def _describe_checkpoints(self, checkpoint_id: int | None) -> dict[str, Any]:
        history = (
            CheckpointHistory(0) if self._context is None else self._context.checkpoints.history
        )
        return describe_checkpoints(history, checkpoint_id)

    @property
    def generation(self) -> int:
        """The generation that it leads; 0: it does not lead yet, or has no job log."""
        log = self._leadership.log
        return 0 if log is None else log.generation

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The last failures, in the form that the status has."""
        records = [] if self._context is None else self._context.failures.history.records
        return [record.as_json() for record in records]

    async def run(self) -> JobOutcome:
        """Run the job and return how it ended; raise only if it could not begin, or was fenced.

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
            following: Transition | None = _first_transition(context, view)
            await self._prepare_output(context)
            while following is not None:
                state = state_after(following, context)
                following = await self._leadership.while_leading(state.run())
            outcome = _outcome(context)
            failure = (
                None
                if context.lifecycle.end is None
                else logged_failure(context.lifecycle.end.failure)
            )
        except _OverBefore as over:
            outcome = self._over = outcome_of_end(over.end)
            failure = over.end.failure
        except (HeadgateError, asyncio.CancelledError) as error:
            if isinstance(error, FencedError):
                self._leadership.lose(error)
                if self._context is not None:
                    await self._context.checkpoints.withdraw()
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
            await self._pool.close()
            if self._context is not None:
                await self._context.close()
            self._metrics.close()
            await self._spans.close()
            if store is not None:
                await store.close()
        self.clients.end(outcome.as_json(), failure)
        return outcome

    async def close(self) -> None:
        """Stop listening, once requests of clients in this process are answered."""
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
            if not self._takes_over:  # the coordinator that led this run before has tried it
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
        """Start this coordinator's generation; return the view of the log before its entry."""
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
            # The coordinator before may have gone on since the log was read: it may have rescaled the
            # job, or ended it.
            nonlocal before
            _check_not_over(spec, view)
            check_not_followed(spec.run, claimed, view)
            if view.run != seen and is_other_run(view, spec.run) and not spec.take_over:
                raise already_runs("another run has begun at the same moment")
            before = view
            # Within a run the parallelism in the log is newer than that in the job.
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

    async def _prepare_output(self, context: JobContext) -> None:
        """Let sinks handle the output of earlier runs, if this run begins without state."""
        spec, log = self.spec, context.env.log
        if log is None and self._takes_over:
            return  # the output is of this run, under the coordinator before
        if starts_without_state(spec, None if log is None else log.view, fresh=False):
            if log is None:
                await check_output(spec, spec.graph)
            await context.old_output.begin()

    def _make_context(
        self, store: CheckpointStore | None, log: JobLog | None, before: LogView | None
    ) -> JobContext:
        spec = self.spec
        env = JobEnvironment(
            spec=spec,
            options=self._options,
            clock=self._clock,
            events=self._events,
            open_at=self._open_at,
            log=log,
            store=store,
            checkpoint_directory=checkpoint_directory(spec) if log is not None else "",
            metrics_url=self.metrics_url,
            spans=self._spans,
        )
        env.listeners.append(self.clients.publish)
        if self.on_event is not None:
            env.listeners.append(self.on_event)
        context = JobContext(env, self._pool)
        if log is not None and store is not None:
            _announce_start(env, log, before)
            if self._former:
                env.publish("start", f"job {spec.name}: {self._former}")
            context.checkpoints.sweep(_sweep(store, log))
            if log.view.newest is not None:
                context.checkpoint_completed()
        return context

    async def _progress(self, context: JobContext) -> None:
        watchdog = Watchdog(context, int(1000 * PROGRESS_S))
        while True:
            await asyncio.sleep(PROGRESS_S)
            watchdog.look()
            if context.works:
                sample_curves(context)
            looks = self.on_event is not None or self.clients.followed
            if looks and context.works:  # the status of a large job takes time to make
                context.env.publish("progress", "", **describe(context))


def _first_transition(context: JobContext, before: LogView | None) -> Transition:
    """Return how the job begins under this coordinator.

    It deploys, or adopts what an earlier coordinator left running. If a coordinator of this run recorded
    the end of the job and then died, the job ends in that way. It also ends if one coordinator after the
    other dies, because something in the job kills them.
    """
    end = _end_of(context.env.spec, before)
    if end is not None:
        return end_from_log(context, end)
    options, log = context.env.options, context.env.log
    allowed, window_ms = options.get(TAKEOVERS_MAX), options.get(TAKEOVERS_WINDOW)
    since_ms = context.env.clock.now_ms() - window_ms
    if log is None or log.view.takeovers_since(since_ms) <= allowed:
        return ToDeploying() if _nothing_runs(log) else ToAdopting()
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
    return EndOfJob(JobStatus.FAILED, reason, failure)


def _nothing_runs(log: JobLog | None) -> bool:
    """Return True if the log has no deployment that an earlier coordinator left running."""
    return log is None or log.view.deployment is None


def _ending(outcome: JobOutcome | None) -> dict[str, Any]:
    """Return the part of the status of an ended run that its entry in the log has."""
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
    """Return the end of this run, which may then not run again; None if it has not ended."""
    # It need not be the last entry: another coordinator may have taken over since, and died too.
    end = before.last_end if before is not None else None
    return end if end is not None and end.run == spec.run else None


def _check_not_over(spec: JobSpec, before: LogView) -> None:
    end = _end_of(spec, before)
    if end is not None and before.run != spec.run:
        raise _OverBefore(end)


def _check_begins_with_something(spec: JobSpec, before: LogView) -> None:
    """Raise UsageError if a new run would start empty although the run before began with a savepoint.

    That run ended without a checkpoint of its own.
    """
    new = not before.empty and before.run != spec.run
    if new and before.restore_from and not (spec.fresh or spec.restore_from or _finished(before)):
        raise UsageError(
            f"the last run began with {before.restore_from} and completed no checkpoint",
            fix=f"say again what to begin with: --from {before.restore_from}, or --fresh",
        )


def _starts_fresh(spec: JobSpec, before: LogView) -> bool:
    """Return True for a new run that restores nothing: the user wants that, or the last run finished."""
    if before.empty or before.run == spec.run:
        return False  # the log is empty, or this is a takeover within the run
    return spec.fresh or bool(spec.restore_from) or _finished(before)


async def _sweep(store: CheckpointStore, log: JobLog) -> None:
    """Delete files of older coordinators that no retained checkpoint needs."""
    await sweep_orphans(store, log.view.files, log.generation)


def _finished(before: LogView) -> bool:
    return before.ended is not None and before.ended.status is JobStatus.FINISHED


def _announce_start(env: JobEnvironment, log: JobLog, before: LogView | None) -> None:
    """Publish what the job starts from."""
    name = env.spec.name
    newest = log.view.newest
    left = before.newest if before is not None else None
    if _end_of(env.spec, before) is not None:
        env.publish("start", f"job {name} had ended, but its coordinator died before it said so")
    elif not _nothing_runs(log):
        text = f"job {name} has a new coordinator, generation {env.generation}"
        env.publish("start", text)
    elif newest is not None:
        text = f"job {name} resumes from checkpoint {newest.checkpoint_id}"
        env.publish("start", text, checkpoint=newest.checkpoint_id)
    elif env.spec.restore_from:
        env.publish("start", f"job {name} is a new run from {env.spec.restore_from}")
    elif before is not None and _finished(before):
        env.publish("start", f"job {name} had finished; this is a new run")
    elif left is not None:
        text = f"job {name} starts fresh, as asked; checkpoint {left.checkpoint_id} is ignored"
        env.publish("start", text)
    else:
        env.publish("start", f"job {name} starts fresh: no checkpoint in its storage")


def _failure_of(error: HeadgateError) -> JobFailure:
    """Return the failure of a coordinator that does not lead its job to an end."""
    return JobFailure.of(FailureKind.of(error).value, error.message, "coordinator", error)


def _outcome(context: JobContext) -> JobOutcome:
    env, lifecycle, checkpoints = context.env, context.lifecycle, context.checkpoints
    log, end = env.log, lifecycle.end
    if lifecycle.handed_over:
        return JobOutcome(
            STATUS,
            REASON,
            checkpoint=checkpoints.last_completed,
            dropped=context.attempt.dropped.totals,
            run=env.spec.run,
            began_ms=lifecycle.began_ms,
            restarts=lifecycle.restarts if log is None else log.view.history.restarts,
        )
    if end is None:
        raise HeadgateError("the job ended without an end")
    logged = None if log is None else log.view.last_end
    return JobOutcome(
        lifecycle.status,
        end.reason,
        end.failure.error if end.failure is not None else None,
        checkpoints.last_completed,
        context.attempt.dropped.totals,
        run=env.spec.run,
        began_ms=lifecycle.began_ms,
        ended_ms=lifecycle.ended_ms,
        restarts=lifecycle.restarts if logged is None else logged.history.restarts,
    )
