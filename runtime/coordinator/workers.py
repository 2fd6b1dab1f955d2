"""The workers of one job: started, connected, watched and replaced.

A *spare* is a worker that is started before it is needed (`slotmanager.redundant-taskmanager-num`). It is
started and connected, and has its imports done, but it has no subtasks, so that it can take over those of a
worker that dies at once. Its own replacement is started when the job runs again. Without spares the workers
that a restart needs are started during the pause before it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import msgspec

from ...errors import ClusterError, HeadgateError, JobError
from ...operators.clock import Clock
from ..control.cluster import Cluster, ControlEndpoint, WorkerHandle
from ..control.link import ControlLink
from ..control.messages import (
    BusyStep,
    Cancel,
    Heartbeat,
    Hello,
    Leaving,
    LogLines,
    Messages,
    ProfileAnswer,
    Shutdown,
    StateAnswer,
    StepStuck,
    Superseded,
    Warm,
    Watching,
    Welcome,
)
from ..exchange.hub import WorkerAddress, this_host
from ..observe.recent_logs import RecentLogs
from ..options.monitoring import (
    CANCELLATION_INTERVAL,
    CANCELLATION_TIMEOUT,
    HEARTBEAT_INTERVAL,
    HEARTBEAT_TIMEOUT,
    STUCK_AFTER,
    UNREACHABLE_AFTER,
)
from ..options.recovery import (
    REDUNDANT_WORKERS,
    REGISTRATION_TIMEOUT,
    START_FAILURES_MAX,
    START_RETRY,
)
from ..options.registry import Options
from ..protocol.ids import WorkerId
from ..protocol.liveness import HeartbeatMonitor
from ..protocol.restart import StartFailures
from .attempt import Attempt
from .environment import FromWorker, PutEvent, WorkerLost
from .failures import SILENT
from .leadership import Leadership
from .pending_queries import PendingQueries

_log = logging.getLogger("headgate.coordinator")


@final
class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a pool of workers.

    Attributes:
        job_name: the name of the job.
        name_prefix: the beginning of the ids of the workers that it starts.
        heartbeat_interval_ms: the time between two heartbeats.
        heartbeat_timeout_ms: a worker without a heartbeat for this long is lost.
        watching: how workers watch their own calls.
        spares: the number of workers beyond those that have subtasks, for each slot sharing group.
        start_timeout_ms: the time in which a worker that was started must connect.
        start_failures_max: the number of failed starts in a minute after which none is tried.
        start_retry_ms: the pause after a failed start.
    """

    job_name: str
    name_prefix: str
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    watching: Watching = msgspec.field(default_factory=Watching)
    spares: int = 0
    start_timeout_ms: int = REGISTRATION_TIMEOUT.default
    start_failures_max: float = 10
    start_retry_ms: int = 3_000

    @classmethod
    def of(cls, job_name: str, name_prefix: str, options: Options) -> PoolSettings:
        """Return the settings that the options of a job have."""
        return cls(
            job_name=job_name,
            name_prefix=name_prefix,
            heartbeat_interval_ms=options.get(HEARTBEAT_INTERVAL),
            heartbeat_timeout_ms=options.get(HEARTBEAT_TIMEOUT),
            watching=Watching(
                unreachable_after=options.get(UNREACHABLE_AFTER),
                stuck_after_ms=options.get(STUCK_AFTER),
                cancellation_interval_ms=options.get(CANCELLATION_INTERVAL),
                cancellation_timeout_ms=options.get(CANCELLATION_TIMEOUT),
            ),
            spares=options.get(REDUNDANT_WORKERS),
            start_timeout_ms=options.get(REGISTRATION_TIMEOUT),
            start_failures_max=options.get(START_FAILURES_MAX),
            start_retry_ms=options.get(START_RETRY),
        )


class OnStuck(Protocol):
    """Is called when a worker reports that a call does not return."""

    def __call__(self, worker_id: str, stuck: StepStuck, /) -> None: ...


@final
class Spares:
    """Keeps the number of live workers of one slot sharing group at what is needed, in the background."""

    def __init__(
        self,
        count: int,
        failures: StartFailures,
        clock: Clock,
        *,
        live: Callable[[], int],
        start: Callable[[], Awaitable[None]],
    ) -> None:
        """Make the object; it starts no worker yet.

        Args:
            count: the number of workers beyond those that have subtasks.
            failures: decides when the next start may be.
            clock: the clock.
            live: returns the number of workers that are connected, or about to be.
            start: starts one worker; raises HeadgateError.
        """
        self.count = count
        self._failures = failures
        self._clock = clock
        self._live = live
        self._start = start
        self._wanted = 0
        self.with_spares = False
        self._task: asyncio.Task[None] | None = None
        self.starting: set[asyncio.Task[None]] = set()
        """Starts under way; they end without an error."""

    def want(self, workers: int, *, spares: bool) -> None:
        """Start workers until this number is live, and also the spares if `spares`.

        No spare is started while a job recovers: its imports would slow the restore down.
        """
        self.with_spares = spares
        self._wanted = workers + (self.count if spares else 0)
        if self._missing() > 0 and (self._task is None or self._task.done()):
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._fill(), name="spare workers")

    def lost(self, working: int) -> None:
        """Replace a spare that died. This counts as a failed start, or it could go on for ever."""
        self._failures.failed(self._now_ms())
        if self.with_spares:
            self.want(working, spares=True)

    def _missing(self) -> int:
        return self._wanted - self._live()

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while (missing := self._missing()) > 0:
            wait_ms = self._failures.wait_ms(self._now_ms())
            if wait_ms:
                await asyncio.sleep(wait_ms / 1000)
                continue
            self.starting = {
                loop.create_task(self._start_one(), name="spare worker") for _ in range(missing)
            }
            try:
                await asyncio.wait(self.starting)
            finally:
                for task in self.starting:
                    task.cancel()
                await asyncio.gather(*self.starting, return_exceptions=True)
                self.starting = set()

    async def _start_one(self) -> None:
        try:
            await self._start()
        except HeadgateError as error:
            self._failures.failed(self._now_ms())
            _log.warning("a worker did not start ahead of time: %s", error)

    def _now_ms(self) -> int:
        return int(1000 * self._clock.monotonic())

    async def close(self) -> None:
        """Start no further workers."""
        self._wanted = 0
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


_log = logging.getLogger("headgate.coordinator")
FIND_TIMEOUT_S = 10.0
"""A worker of an earlier coordinator that has not said Hello by then counts as lost."""


class PulseLine(msgspec.Struct):
    """The last heartbeat of a worker's watch thread, which has a link of its own."""

    link: ControlLink | None = None
    steps: tuple[BusyStep, ...] = ()
    """The steps that have been in one call for more than a second."""


class LiveWorker(msgspec.Struct):
    """One live worker as the coordinator sees it."""

    worker_id: str
    group: str
    """The slot sharing group that its slots belong to."""
    handle: WorkerHandle
    link: ControlLink
    pid: int
    address: bytes
    metrics_url: str = ""
    pulse: PulseLine = msgspec.field(default_factory=PulseLine)

    @property
    def host_id(self) -> str:
        """The machine that it runs on."""
        return WorkerAddress.decode(self.address).host_id

    def kill(self) -> None:
        """Kill the process, by its pid too if it runs on this host."""
        local = self.host_id == this_host()
        self.handle.kill(self.pid if local and self.pid != os.getpid() else 0)

    def send(self, message: Messages) -> None:
        """Send a control message."""
        self.link.send(message)
        if isinstance(message, Cancel) and self.pulse.link is not None:
            # Its watch thread gets the message even while a call blocks its event loop.
            self.pulse.link.send(message)


class Greeting(msgspec.Struct, frozen=True):
    """A worker that was started, or asked to connect again, and has not sent Hello yet."""

    group: str
    hello: asyncio.Future[tuple[Hello, ControlLink]]


class WorkerPool:
    """Keeps workers, and turns what they do into events for the coordinator."""

    def __init__(
        self,
        cluster: Cluster,
        control: ControlEndpoint,
        clock: Clock,
        settings: PoolSettings,
        put_event: PutEvent,
        *,
        on_stuck: OnStuck = lambda worker_id, stuck: None,
        logs: RecentLogs | None = None,
        leadership: Leadership | None = None,
    ) -> None:
        self._settings = settings
        self._logs = logs or RecentLogs(0)
        self._leadership = leadership or Leadership()
        self._killing: dict[asyncio.Task[None], Callable[[], None]] = {}
        self._cluster = cluster
        self._control = control
        self._clock = clock
        self._put_event = put_event
        self._welcome = Welcome(
            job_name=settings.job_name,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
            watching=settings.watching,
            takes_logs=self._logs.lines_max > 0,
        )
        self._on_stuck = on_stuck
        self.queries = PendingQueries()
        """The queries of state that workers here are asked."""
        self._monitor = HeartbeatMonitor(
            settings.heartbeat_interval_ms, settings.heartbeat_timeout_ms
        )
        self._start_failures = StartFailures(settings.start_failures_max, settings.start_retry_ms)
        self._started = 0
        self._greetings: dict[str, Greeting] = {}
        self._pulses: dict[str, PulseLine] = {}
        self._stillborn: dict[str, str] = {}
        """The reasons why workers were lost before they were live."""
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.live: dict[str, LiveWorker] = {}
        self._retired: list[LiveWorker] = []
        self.leaving: set[str] = set()
        """Workers whose processes are about to end; they get no more subtasks."""
        self._working: dict[str, str] = {}
        """The groups of the workers that have subtasks; the others are spares."""
        self.last_lost = ("", 0)
        """The worker that was lost last, and the ms since its last sign of life then."""
        self.warm_up: Warm | None = None
        """The message that prepares a worker without subtasks for some."""
        self._spares: dict[str, Spares] = {}
        """The spares of each slot sharing group: a worker of another group cannot replace one of it."""

    @property
    def staying(self) -> dict[str, LiveWorker]:
        """The live workers that are not about to leave."""
        return {key: worker for key, worker in self.live.items() if key not in self.leaving}

    def _spares_of(self, group: str) -> Spares:
        if group not in self._spares:
            self._spares[group] = Spares(
                self._settings.spares,
                self._start_failures,
                self._clock,
                live=lambda: len(self._staying_in(group)) + self._greeted_by(group),
                start=lambda: self._start_one(group),
            )
        return self._spares[group]

    def _staying_in(self, group: str) -> list[LiveWorker]:
        """The workers of a group that are not about to leave, the oldest first."""
        found = [worker for worker in self.staying.values() if worker.group == group]
        return sorted(found, key=lambda worker: worker.worker_id)

    def _greeted_by(self, group: str) -> int:
        return sum(greeting.group == group for greeting in self._greetings.values())

    async def ensure(self, groups: Sequence[str]) -> list[LiveWorker]:
        """Start workers until there is one for each entry; return these, the oldest of each group.

        Args:
            groups: the slot sharing group of each worker that is needed, with equal ones in a row.

        Raises:
            ClusterError: a worker could not be started.
        """
        needed = Counter(groups)
        while missing := self._missing(needed):  # one may die while others start
            ahead = {
                group: {start for start in self._spares_of(group).starting if not start.done()}
                for group in missing
            }
            starting = [
                self._start_one(group)
                for group, count in missing.items()
                for _ in range(count - len(ahead[group]))
            ]
            if not starting:
                under_way = set[asyncio.Task[None]]().union(*ahead.values())
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                continue
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if type(outcome) is JobError:  # a cluster raises it when it has no room
                    raise ClusterError(
                        outcome.message, where=outcome.where, fix=outcome.fix
                    ) from outcome
                if outcome is not None:
                    raise outcome
        return [worker for group in needed for worker in self._staying_in(group)[: needed[group]]]

    def _missing(self, needed: Counter[str]) -> Counter[str]:
        """Return the number of missing workers, by group."""
        return needed - Counter(worker.group for worker in self.staying.values())

    def lead(self, generation: int) -> None:
        """Tell workers from now on that this generation leads."""
        self._welcome = msgspec.structs.replace(self._welcome, generation=generation)

    async def find(self, groups: Mapping[str, str]) -> list[LiveWorker]:
        """Find workers of an earlier coordinator; return those that obey this one from now on.

        Args:
            groups: the slot sharing group of each worker, by its id.
        """
        finding = [
            self._join(
                each,
                group,
                self._cluster.find_worker(each, self._control),
                FIND_TIMEOUT_S,
                ours=False,
            )
            for each, group in groups.items()
        ]
        for outcome in await asyncio.gather(*finding, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, JobError):
                raise outcome
        return [self.live[each] for each in groups if each in self.live]

    async def _start_one(self, group: str) -> None:
        worker_id = f"{self._settings.name_prefix}-{self._started:04d}"
        self._started += 1
        starting = self._cluster.start_worker(worker_id, self._control, group)
        await self._join(
            worker_id, group, starting, self._settings.start_timeout_ms / 1000, ours=True
        )

    async def _join(
        self,
        worker_id: str,
        group: str,
        getting: Awaitable[WorkerHandle | None],
        timeout_s: float,
        *,
        ours: bool,
    ) -> None:
        greeting = asyncio.get_running_loop().create_future()
        self._greetings[worker_id] = Greeting(group, greeting)
        pulse = self._pulses[worker_id] = PulseLine()
        handle: WorkerHandle | None = None
        try:
            handle = await _from_cluster(getting, worker_id)
            if handle is None:
                self._pulses.pop(worker_id, None)
                return
            hello, link = await self._greeted(handle, greeting, timeout_s)
        except BaseException as error:
            self._pulses.pop(worker_id, None)
            if handle is not None and ours:
                handle.kill()
            elif handle is not None and isinstance(error, JobError):
                self._kill_later(handle.kill)
            raise
        finally:
            self._greetings.pop(worker_id, None)
        self.live[worker_id] = LiveWorker(
            worker_id, group, handle, link, hello.pid, hello.address, hello.metrics_url, pulse
        )
        self._monitor.watch(WorkerId(worker_id), self._now_ms())
        if self.warm_up is not None:
            link.send(self.warm_up)
        _log.info("worker ready pid=`%s`", hello.pid, extra=self._fields(worker_id))

    async def _greeted(
        self,
        handle: WorkerHandle,
        greeting: asyncio.Future[tuple[Hello, ControlLink]],
        timeout_s: float,
    ) -> tuple[Hello, ControlLink]:
        worker_id = handle.worker_id
        death = asyncio.get_running_loop().create_task(
            self._watch(handle), name=f"watch {worker_id}"
        )
        self._watchers[worker_id] = death
        try:
            async with asyncio.timeout(timeout_s):
                events: set[asyncio.Future[Any]] = {greeting, death}
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise ClusterError(
                f"worker did not report within {timeout_s:.0f} s worker=`{worker_id}`",
                fix="look at the cluster's logs; the machine may be out of memory or processes",
            ) from None
        reason = self._stillborn.pop(worker_id, None)
        if reason is not None or not greeting.done():
            raise ClusterError(f"worker died while starting worker=`{worker_id}`: {reason}")
        return greeting.result()

    async def _watch(self, handle: WorkerHandle) -> None:
        reason = await handle.died()
        self.lose(handle.worker_id, f"the process died: {reason}")
        self._watchers.pop(handle.worker_id, None)
        for worker in [w for w in self._retired if w.worker_id == handle.worker_id]:
            worker.link.close()
            self._retired.remove(worker)

    async def serve(self, hello: Hello, link: ControlLink) -> None:
        """Serve the link of a worker until it ends (called by the control server)."""
        greeting = self._greetings.get(hello.worker_id)
        if greeting is None or greeting.hello.done():
            return
        if hello.generation > self._welcome.generation:
            self._leadership.superseded(hello.worker_id, hello.generation)
            greeting.hello.set_exception(ClusterError("the worker obeys a newer coordinator"))
            return
        link.send(self._welcome)
        greeting.hello.set_result((hello, link))
        while (message := await link.receive()) is not None:
            self._monitor.beat(WorkerId(hello.worker_id), self._now_ms())
            if isinstance(message, StepStuck):
                self._on_stuck(hello.worker_id, message)
            elif isinstance(message, Superseded):
                self._leadership.superseded(hello.worker_id, message.generation)
            elif isinstance(message, StateAnswer | ProfileAnswer):
                self.queries.answered(message)
            elif isinstance(message, LogLines):
                self._logs.add(hello.worker_id, message.lines, message.skipped)
            elif not isinstance(message, Heartbeat):
                if isinstance(message, Leaving):
                    self.leaving.add(hello.worker_id)
                self._put_event(FromWorker(hello.worker_id, message))
            elif (pulse := self._pulses.get(hello.worker_id)) is not None and pulse.link is None:
                pulse.steps = message.steps  # it has no watch thread that reports them
        self.lose(hello.worker_id, "its connection ended")

    async def serve_pulse(self, hello: Hello, link: ControlLink) -> None:
        """Serve the link of a worker's thread until it ends (called by the control server)."""
        pulse = self._pulses.get(hello.worker_id)
        if pulse is None:
            return  # the worker was given up
        pulse.link = link
        link.send(Heartbeat())
        while (message := await link.receive()) is not None:
            self._monitor.beat(WorkerId(hello.worker_id), self._now_ms())
            match message:
                case Heartbeat(steps=steps):
                    pulse.steps = steps
                case StepStuck():
                    self._on_stuck(hello.worker_id, message)
        if pulse.link is link:
            pulse.link, pulse.steps = None, ()

    def lose(self, worker_id: str, reason: str) -> None:
        """Remove a worker, kill what may be left of it, and tell the coordinator; once."""
        worker = self.live.pop(worker_id, None)
        self.leaving.discard(worker_id)
        if worker is None:
            if worker_id in self._greetings:
                self._stillborn.setdefault(worker_id, reason)
            return
        silent_ms = self._monitor.silent_ms(WorkerId(worker_id), self._now_ms())
        self.last_lost = (worker_id, silent_ms)
        self.queries.lost(worker_id)
        self._monitor.forget(WorkerId(worker_id))
        self._forget_pulse(worker_id)
        worker.link.close()
        if self._leadership.lost:
            return  # it is not lost: it has another coordinator
        self._kill_later(worker.kill)
        _log.warning("worker lost pid=`%s`: %s", worker.pid, reason, extra=self._fields(worker_id))
        self._put_event(WorkerLost(worker_id, reason))
        if worker_id not in self._working:
            self._spares_of(worker.group).lost(self._working_in(worker.group))

    def _working_in(self, group: str) -> int:
        return list(self._working.values()).count(group)

    def prepare(self, groups: Sequence[str]) -> None:
        """Start missing workers in the background, before `ensure` is called for them."""
        for group, count in Counter(groups).items():
            self._spares_of(group).want(count, spares=False)

    def refill(self) -> None:
        """Start missing spares in the background, as the job runs."""
        for group, count in Counter(self._working.values()).items():
            self._spares_of(group).want(count, spares=True)

    def _kill_later(self, kill: Callable[[], None]) -> None:
        """Kill what may be left of a lost worker, unless another coordinator has it by now."""
        task = asyncio.get_running_loop().create_task(self._kill(kill), name="kill worker")
        self._killing[task] = kill
        task.add_done_callback(lambda _: self._killing.pop(task, None))

    async def _kill(self, kill: Callable[[], None]) -> None:
        if await self._leadership.confirmed():
            kill()

    def describe(self) -> list[dict[str, Any]]:
        """Return the live workers, for clients."""
        workers = sorted(self.live.values(), key=lambda worker: worker.worker_id)
        return [
            {"worker": each.worker_id, "pid": each.pid, "group": each.group} for each in workers
        ]

    def abandon(self) -> None:
        """Give up all workers without a message to them: another coordinator leads."""
        workers, self.live, self._retired = [*self.live.values(), *self._retired], {}, []
        self.queries.lost()
        for worker in workers:
            worker.link.close()
            self._forget_pulse(worker.worker_id)

    def retire(self, keep: Collection[LiveWorker]) -> None:
        """Shut all other workers down, except for spares: the job does not need them."""
        self._working = {worker.worker_id: worker.group for worker in keep}
        kept = set(self._working)
        for group in {worker.group for worker in self.live.values()}:
            spares, there = self._spares_of(group), self._staying_in(group)
            spare = [each.worker_id for each in there if each.worker_id not in self._working]
            kept.update(spare[: spares.count])
            spares.want(self._working_in(group), spares=spares.with_spares)
        for worker_id, worker in list(self.live.items()):
            if worker_id not in kept:
                del self.live[worker_id]
                self.leaving.discard(worker_id)
                self._monitor.forget(WorkerId(worker_id))
                self._pulses.pop(
                    worker_id, None
                )  # its watch thread sends heartbeats until it exits
                worker.send(Shutdown())
                self.queries.lost(worker_id)
                self._retired.append(worker)

    def _forget_pulse(self, worker_id: str) -> None:
        pulse = self._pulses.pop(worker_id, None)
        if pulse is not None and pulse.link is not None:
            pulse.link.close()

    def _now_ms(self) -> int:
        """Return a time for heartbeats, which a change of the wall clock does not affect."""
        return int(1000 * self._clock.monotonic())

    def _fields(self, worker_id: str) -> dict[str, str]:
        """Return the fields of a log record about a worker."""
        return {"job": self._welcome.job_name, "worker": worker_id}

    async def beat(self) -> None:
        """Send heartbeats and look for silent workers, until it is cancelled."""
        while True:
            await asyncio.sleep(self._welcome.heartbeat_interval_ms / 1000)
            for worker in self.live.values():
                worker.send(Heartbeat())
                if worker.pulse.link is not None:
                    worker.pulse.link.send(Heartbeat())
            for worker_id in self._monitor.tick(self._now_ms()):
                timeout = self._welcome.heartbeat_timeout_ms
                self.lose(worker_id, f"{SILENT} for {timeout} ms")

    async def close(self) -> None:
        """Ask all workers to exit, then kill those that did not, unless another coordinator has them."""
        for spares in self._spares.values():
            await spares.close()
        if not await self._leadership.not_lost():
            self.abandon()
            self._killing_no_more()
        workers, self.live = [*self.live.values(), *self._retired], {}
        self.queries.lost()
        for worker in workers:
            worker.send(Shutdown())
        watchers = [self._watchers[w.worker_id] for w in workers if w.worker_id in self._watchers]
        if watchers:
            await asyncio.wait(watchers, timeout=5.0)
        for worker in workers:
            worker.link.close()
            worker.kill()
        for kill in self._killing.values():
            kill()
        self._killing_no_more()
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    def _killing_no_more(self) -> None:
        for killing in self._killing:
            killing.cancel()
        self._killing.clear()


@final
class AttemptWorkers:
    """The workers of the present attempt, which are told the same."""

    def __init__(self, pool: WorkerPool, attempt: Attempt) -> None:
        self._pool = pool
        self._attempt = attempt

    def broadcast(self, message: Messages) -> None:
        """Send a message to all workers, once for each attempt that some region is in."""
        for attempt in self._attempt.executions.attempts:
            own = msgspec.structs.replace(message, attempt=attempt)
            for worker in self._pool.live.values():
                worker.send(own)


async def _from_cluster(
    getting: Awaitable[WorkerHandle | None], worker_id: str
) -> WorkerHandle | None:
    """Turn errors of the cluster into a ClusterError, for which the job restarts."""
    try:
        return await getting
    except HeadgateError:
        raise
    except Exception as error:
        raise ClusterError(
            f"the cluster gave no answer worker=`{worker_id}` "
            f"cause=`{type(error).__name__}: {error}`",
            fix="look at the cluster's logs",
        ) from error


def busy_steps(workers: Iterable[LiveWorker]) -> list[dict[str, Any]]:
    """Return the steps that have been in one call for more than a second, the longest first."""
    found = [
        {
            "worker": worker.worker_id,
            "vertex": step.vertex,
            "task": step.task_name,
            "operator": step.operator,
            "subtask": step.index,
            "busy_ms": step.busy_ms,
            "attempt": step.attempt,
        }
        for worker in workers
        for step in worker.pulse.steps
    ]
    return sorted(found, key=lambda each: -int(str(each["busy_ms"])))
