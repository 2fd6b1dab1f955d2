"""The coordinator of one job: starts from the store, runs the states, answers to clients.

It holds no truth. Everything it needs to take over lies in the job log, so one that crashed is replaced
by another with the same arguments, and the log fences the old one should it still be alive.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import FencedError, HeadgateError, InternalError
from ...operators.clock import Clock
from ..control.cluster import Cluster
from ..control.link import Link
from ..control.messages import CheckpointAcked, Event, Hello
from ..job_spec import JobSpec
from ..observe.metrics import MetricsRegistry
from ..options import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Options
from ..protocol.checkpoint_settings import CheckpointSettings
from ..protocol.checkpoints import CheckpointCoordinator
from ..protocol.joblog import JobStatus, LogView
from ..protocol.restart import FixedDelayRestart
from ..storage.base import CheckpointStore, StoreOpener
from ..storage.joblog_store import JobLog
from .checkpointing import CheckpointDriver
from .clients import ClientServer
from .context import JobContext, JobEvent, Tick
from .job_metrics import register_job
from .server import ControlServer
from .states import State, deploying
from .workers import WorkerPool

PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended. `error` is set if it failed."""

    status: str
    reason: str
    error: HeadgateError | None = None
    checkpoint: int = 0


class JobCoordinator:
    """Runs one job to its end."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        cluster: Cluster,
        clock: Clock,
        open_store: StoreOpener,
        token: str | None = None,
        metrics: MetricsRegistry | None = None,
        metrics_url: str = "",
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._open_store = open_store
        self._options = Options(spec.options)
        self._metrics = (metrics or MetricsRegistry()).group(job_name=spec.name)
        self._metrics_url = metrics_url
        self._events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self._context: JobContext | None = None
        self._tick: asyncio.TimerHandle | None = None
        self.on_event: Callable[[Event], None] | None = None
        """Called for every event, for those in the same process."""
        self.server = ControlServer(token or secrets.token_hex(16), self._on_hello)
        self._clients = ClientServer(self._events.put_nowait, self._describe)
        self._pool = WorkerPool(
            cluster,
            self.server,
            clock,
            self._events.put_nowait,
            job_name=spec.name,
            name_prefix=f"{spec.name}-{os.getpid()}-{secrets.token_hex(2)}",
            heartbeat_interval_ms=self._options.get(HEARTBEAT_INTERVAL),
            heartbeat_timeout_ms=self._options.get(HEARTBEAT_TIMEOUT),
        )

    async def _on_hello(self, hello: Hello, link: Link) -> None:
        if hello.role == "worker":
            await self._pool.serve(hello, link)
        else:
            await self._clients.serve(link)

    def _describe(self) -> dict[str, Any]:
        if self._context is None:
            return {"name": self.spec.name, "status": "INITIALIZING"}
        return self._context.describe()

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
            store, log, view = await self._open_log()
            context = self._make_context(store, log, view)
            self._context = context
            register_job(self._metrics, context)
            loop = asyncio.get_running_loop()
            beat = loop.create_task(self._pool.beat(), name="heartbeats")
            progress = loop.create_task(self._progress(context), name="progress")
            state: State | None = deploying()
            while state is not None:
                state = await state.run(context)
            outcome = _outcome(context)
        except (HeadgateError, asyncio.CancelledError) as error:
            if isinstance(error, HeadgateError):
                kind = "fenced" if isinstance(error, FencedError) else "refused"
                self._clients.end({"status": "FAILED", "reason": kind}, error)
            raise
        except Exception as error:
            broken = InternalError(f"the coordinator broke: {type(error).__name__}: {error}")
            self._clients.end({"status": "FAILED", "reason": "internal"}, broken)
            raise broken from error
        finally:
            for task in (beat, progress):
                if task is not None:
                    task.cancel()
            if self._tick is not None:
                self._tick.cancel()
            await self._pool.close()
            self._metrics.close()
            if store is not None:
                await store.close()
        self._clients.end(
            {
                "status": outcome.status,
                "reason": outcome.reason,
                "checkpoint": outcome.checkpoint,
            },
            outcome.error,
        )
        return outcome

    async def close(self) -> None:
        """Stop listening, once clients have had their last word."""
        await self._clients.drain()
        await self.server.close()

    # -- the start ----------------------------------------------------------------------------------

    async def _open_log(self) -> tuple[CheckpointStore | None, JobLog | None, LogView | None]:
        checkpoint = self.spec.checkpoint
        if checkpoint is None:
            return None, None, None
        store = self._open_store(checkpoint.storage, self.spec.name, self.spec.options)
        await store.open()
        log = JobLog(store, secrets.token_hex(16), self._clock)
        before = await log.load()
        await log.start_generation(
            run=self.spec.run,
            fresh=_starts_fresh(self.spec, before),
            parallelism=self.spec.parallelism,
            max_parallelism=self.spec.plan.max_parallelism,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        return store, log, before

    def _make_context(
        self, store: CheckpointStore | None, log: JobLog | None, before: LogView | None
    ) -> JobContext:
        spec = self.spec
        generation = log.generation if log is not None else 0
        context = JobContext(
            spec=spec,
            options=self._options,
            clock=self._clock,
            pool=self._pool,
            events=self._events,
            strategy=FixedDelayRestart(spec.restart.attempts, spec.restart.delay_ms),
            log=log,
            store=store,
            checkpoints=None,
            generation=generation,
            plan_blob=JobContext.pickle_plan(spec),
            metrics_url=self._metrics_url,
            status_since_ms=self._clock.now_ms(),
        )
        context.subscribers.append(self._clients.publish)
        if self.on_event is not None:
            context.subscribers.append(self.on_event)
        if log is not None and store is not None:
            context.checkpoints = self._make_driver(context, log, store)
            _announce_start(context, log, before)
        return context

    def _make_driver(
        self, context: JobContext, log: JobLog, store: CheckpointStore
    ) -> CheckpointDriver:
        settings = self.spec.checkpoint
        if settings is None:
            raise HeadgateError("a checkpoint driver without checkpoint settings")
        protocol: CheckpointCoordinator[CheckpointAcked] = CheckpointCoordinator(
            CheckpointSettings(
                interval_ms=settings.every_ms,
                timeout_ms=settings.timeout_ms,
                min_pause_ms=settings.min_pause_ms,
                max_concurrent=settings.max_concurrent,
                tolerable_failures=settings.tolerable_failures,
            )
        )

        def broadcast(message: Any) -> None:
            for worker in self._pool.live.values():
                worker.send(message)

        return CheckpointDriver(
            protocol,
            plan=self.spec.plan,
            log=log,
            store=store,
            clock=self._clock,
            generation=context.generation,
            retain=settings.retain,
            broadcast=broadcast,
            put_event=self._events.put_nowait,
            wake_at=self._wake_at,
            announce=context.publish,
        )

    def _wake_at(self, at_ms: int) -> None:
        if self._tick is not None:
            self._tick.cancel()
        delay = max(0, at_ms - self._clock.now_ms()) / 1000
        self._tick = asyncio.get_running_loop().call_later(delay, self._events.put_nowait, Tick())

    async def _progress(self, context: JobContext) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            if context.status == "RUNNING":
                context.publish("progress", "", **context.describe())


def _starts_fresh(spec: JobSpec, before: LogView) -> bool:
    """True for a new run that is not to restore anything: as asked, or since the last one finished."""
    if before.empty or before.run == spec.run:
        return False  # nothing to leave behind, or a takeover within the run
    return spec.fresh or _finished(before)


def _finished(before: LogView) -> bool:
    return before.ended is not None and before.ended.status is JobStatus.FINISHED


def _announce_start(context: JobContext, log: JobLog, before: LogView | None) -> None:
    """Say where the job starts from."""
    name = context.spec.name
    newest = log.view.newest
    left = before.newest if before is not None else None
    if newest is not None:
        text = f"job {name} resumes from checkpoint {newest.checkpoint_id}"
        context.publish("start", text, checkpoint=newest.checkpoint_id)
    elif before is not None and _finished(before):
        context.publish("start", f"job {name} had finished; this is a new run")
    elif left is not None:
        text = f"job {name} starts fresh, as asked; checkpoint {left.checkpoint_id} is ignored"
        context.publish("start", text)
    else:
        context.publish("start", f"job {name} starts fresh: no checkpoint in its storage")


def _outcome(context: JobContext) -> JobOutcome:
    end = context.end
    if end is None:
        raise HeadgateError("the job ended without an end")
    error = end.failure.error if end.failure is not None else None
    last = context.checkpoints.last_completed if context.checkpoints else 0
    return JobOutcome(context.status, end.reason, error, last)
