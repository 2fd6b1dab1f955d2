"""The workers of one job: started, greeted, watched, replaced."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import ClusterError, HeadgateError, JobError
from ...operators.clock import Clock
from ..control.cluster import Cluster, ControlEndpoint, WorkerHandle
from ..control.link import Link
from ..control.messages import (
    BusyStep,
    Cancel,
    Heartbeat,
    Hello,
    Leaving,
    Messages,
    Shutdown,
    StepStuck,
    Superseded,
    Warm,
    Watching,
    Welcome,
)
from ..exchange.hub import WorkerAddress, this_host
from ..options.recovery import REGISTRATION_TIMEOUT
from ..protocol.ids import WorkerId
from ..protocol.liveness import HeartbeatMonitor
from ..protocol.restart import StartFailures
from .leadership import Leadership
from .spares import Spares

_log = logging.getLogger("headgate.coordinator")
SILENT = "no heartbeat"
"""The beginning of the reason for losing a worker that stopped answering."""
FIND_TIMEOUT_S = 10.0
"""A worker of an earlier coordinator that has not said Hello by then counts as lost."""


@dataclass(slots=True)
class PulseLine:
    """The last heartbeat of a worker's thread, which comes on a link of its own."""

    link: Link | None = None
    steps: tuple[BusyStep, ...] = ()
    """The steps that have been in one call for more than a second."""


@dataclass(slots=True)
class Worker:
    """One live worker as the coordinator sees it."""

    worker_id: str
    group: str
    """The slot sharing group that its slots belong to."""
    handle: WorkerHandle
    link: Link
    pid: int
    address: bytes
    metrics_url: str = ""
    pulse: PulseLine = field(default_factory=PulseLine)

    @property
    def host_id(self) -> str:
        """The machine it runs on."""
        return WorkerAddress.decode(self.address).host_id

    def kill(self) -> None:
        """Kill the process, by its pid too if it runs on this host."""
        local = self.host_id == this_host()
        self.handle.kill(self.pid if local and self.pid != os.getpid() else 0)

    def send(self, message: Messages) -> None:
        """Send a control message."""
        self.link.send(message)
        if isinstance(message, Cancel) and self.pulse.link is not None:
            self.pulse.link.send(
                message
            )  # its thread hears of it while a call holds its event loop


@dataclass(frozen=True, slots=True)
class Greeting:
    """A worker that was started, or asked to come back, and has not said Hello yet."""

    group: str
    hello: asyncio.Future[tuple[Hello, Link]]


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Event: a worker died, hung up, or stopped answering."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    """Event: a worker said something."""

    worker_id: str
    message: Messages


class WorkerPool:
    """Keeps workers and turns all they do into events for the coordinator."""

    def __init__(
        self,
        cluster: Cluster,
        control: ControlEndpoint,
        clock: Clock,
        put_event: Callable[[WorkerLost | FromWorker], None],
        *,
        job_name: str,
        name_prefix: str,
        heartbeat_interval_ms: int,
        heartbeat_timeout_ms: int,
        watching: Watching | None = None,
        on_stuck: Callable[[str, StepStuck], None] = lambda worker_id, stuck: None,
        spares: int = 0,
        start_failures: StartFailures | None = None,
        leadership: Leadership | None = None,
        start_timeout_ms: int = REGISTRATION_TIMEOUT.default,
    ) -> None:
        self._start_timeout_ms = start_timeout_ms
        self._leadership = leadership or Leadership()
        self._killing: dict[asyncio.Task[None], Callable[[], None]] = {}
        self._cluster = cluster
        self._control = control
        self._clock = clock
        self._put_event = put_event
        self._welcome = Welcome(
            job_name=job_name,
            heartbeat_interval_ms=heartbeat_interval_ms,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            watching=watching or Watching(),
        )
        self._on_stuck = on_stuck
        self._monitor = HeartbeatMonitor(heartbeat_interval_ms, heartbeat_timeout_ms)
        self._prefix = name_prefix
        self._started = 0
        self._greetings: dict[str, Greeting] = {}
        self._pulses: dict[str, PulseLine] = {}
        self._stillborn: dict[str, str] = {}
        """Why workers were lost before they were live."""
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.live: dict[str, Worker] = {}
        self._retired: list[Worker] = []
        self.leaving: set[str] = set()
        """Workers whose processes are about to end: they get no more subtasks."""
        self._working: dict[str, str] = {}
        """The groups of the workers that have subtasks; the others are spares."""
        self.last_lost = ("", 0)
        """The worker that was lost last, and for how many ms nothing had been heard of it."""
        self.warm_up: Warm | None = None
        """The message that prepares a worker without subtasks for some."""
        self._spares_wanted = spares
        self._start_failures = start_failures or StartFailures(10, 3_000)
        self._spares: dict[str, Spares] = {}
        """By slot sharing group: a worker of another one is of no use."""

    @property
    def staying(self) -> dict[str, Worker]:
        """The live workers that are not about to leave."""
        return {key: worker for key, worker in self.live.items() if key not in self.leaving}

    def _spares_of(self, group: str) -> Spares:
        if group not in self._spares:
            self._spares[group] = Spares(
                self._spares_wanted,
                self._start_failures,
                self._clock,
                live=lambda: len(self._staying_in(group)) + self._greeted_by(group),
                start=lambda: self._start_one(group),
            )
        return self._spares[group]

    def _staying_in(self, group: str) -> list[Worker]:
        """The workers of a group that are not about to leave, the oldest first."""
        found = [worker for worker in self.staying.values() if worker.group == group]
        return sorted(found, key=lambda worker: worker.worker_id)

    def _greeted_by(self, group: str) -> int:
        return sum(greeting.group == group for greeting in self._greetings.values())

    async def ensure(self, groups: Sequence[str]) -> list[Worker]:
        """Start workers until there is one for each entry; returns exactly those, the oldest of each group.

        Args:
            groups: the slot sharing group of each worker that is needed, those of a group side by side.

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
                if type(outcome) is JobError:  # so a cluster says that it has no room
                    raise ClusterError(
                        outcome.message, where=outcome.where, fix=outcome.fix
                    ) from outcome
                if outcome is not None:
                    raise outcome
        return [worker for group in needed for worker in self._staying_in(group)[: needed[group]]]

    def _missing(self, needed: Counter[str]) -> Counter[str]:
        """The number of workers that are missing, of the groups that miss some."""
        return needed - Counter(worker.group for worker in self.staying.values())

    def lead(self, generation: int) -> None:
        """From now on workers are told that this generation leads."""
        self._welcome = msgspec.structs.replace(self._welcome, generation=generation)

    async def find(self, groups: Mapping[str, str]) -> list[Worker]:
        """Those of an earlier coordinator's workers that obey this one from now on.

        Args:
            groups: the slot sharing group of each, by its id.
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
        worker_id = f"{self._prefix}-{self._started:04d}"
        self._started += 1
        starting = self._cluster.start_worker(worker_id, self._control, group)
        await self._join(worker_id, group, starting, self._start_timeout_ms / 1000, ours=True)

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
        self.live[worker_id] = Worker(
            worker_id, group, handle, link, hello.pid, hello.address, hello.metrics_url, pulse
        )
        self._monitor.watch(WorkerId(worker_id), self._now_ms())
        if self.warm_up is not None:
            link.send(self.warm_up)
        _log.info("worker ready pid=`%s`", hello.pid, extra=self._fields(worker_id))

    async def _greeted(
        self, handle: WorkerHandle, greeting: asyncio.Future[tuple[Hello, Link]], timeout_s: float
    ) -> tuple[Hello, Link]:
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

    async def serve(self, hello: Hello, link: Link) -> None:
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
            elif not isinstance(message, Heartbeat):
                if isinstance(message, Leaving):
                    self.leaving.add(hello.worker_id)
                self._put_event(FromWorker(hello.worker_id, message))
            elif (pulse := self._pulses.get(hello.worker_id)) is not None and pulse.link is None:
                pulse.steps = message.steps  # no thread tells of them
        self.lose(hello.worker_id, "its connection ended")

    async def serve_pulse(self, hello: Hello, link: Link) -> None:
        """Serve the link of a worker's thread until it ends (called by the control server)."""
        pulse = self._pulses.get(hello.worker_id)
        if pulse is None:
            return  # it was given up
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
        """Take a worker out, kill what may be left of it, and tell the coordinator; once."""
        worker = self.live.pop(worker_id, None)
        self.leaving.discard(worker_id)
        if worker is None:
            if worker_id in self._greetings:
                self._stillborn.setdefault(worker_id, reason)
            return
        silent_ms = self._monitor.silent_ms(WorkerId(worker_id), self._now_ms())
        self.last_lost = (worker_id, silent_ms)
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
        """Start in the background what is missing of these workers: `ensure` will be asked for them."""
        for group, count in Counter(groups).items():
            self._spares_of(group).want(count, spares=False)

    def refill(self) -> None:
        """The job runs: start in the background what is missing of the spares."""
        for group, count in Counter(self._working.values()).items():
            self._spares_of(group).want(count, spares=True)

    def _kill_later(self, kill: Callable[[], None]) -> None:
        """Kill what may be left of a lost worker, unless it is another coordinator's by now."""
        task = asyncio.get_running_loop().create_task(self._kill(kill), name="kill worker")
        self._killing[task] = kill
        task.add_done_callback(lambda _: self._killing.pop(task, None))

    async def _kill(self, kill: Callable[[], None]) -> None:
        if await self._leadership.confirmed():
            kill()

    def describe(self) -> list[dict[str, Any]]:
        """The live workers, for clients."""
        workers = sorted(self.live.values(), key=lambda worker: worker.worker_id)
        return [
            {"worker": each.worker_id, "pid": each.pid, "group": each.group} for each in workers
        ]

    def abandon(self) -> None:
        """Let go of all workers, without a word to them: another coordinator leads."""
        workers, self.live, self._retired = [*self.live.values(), *self._retired], {}, []
        for worker in workers:
            worker.link.close()
            self._forget_pulse(worker.worker_id)

    def retire(self, keep: Collection[Worker]) -> None:
        """Let all other workers go, but for the spares: the job runs at a lower parallelism."""
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
                self._pulses.pop(worker_id, None)  # its thread goes on beating until it exits
                worker.send(Shutdown())
                self._retired.append(worker)

    def _forget_pulse(self, worker_id: str) -> None:
        pulse = self._pulses.pop(worker_id, None)
        if pulse is not None and pulse.link is not None:
            pulse.link.close()

    def _now_ms(self) -> int:
        """Heartbeats are a matter of durations: a step of the wall clock must not count."""
        return int(1000 * self._clock.monotonic())

    def _fields(self, worker_id: str) -> dict[str, str]:
        """The fields of a log record about a worker."""
        return {"job": self._welcome.job_name, "worker": worker_id}

    async def beat(self) -> None:
        """Send heartbeats and look for silent workers, for ever."""
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
        """Ask all workers to exit, then kill what has not; but not what another coordinator has."""
        for spares in self._spares.values():
            await spares.close()
        if not await self._leadership.not_lost():
            self.abandon()
            self._killing_no_more()
        workers, self.live = [*self.live.values(), *self._retired], {}
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


async def _from_cluster(
    getting: Awaitable[WorkerHandle | None], worker_id: str
) -> WorkerHandle | None:
    """A cluster has errors of its own when it breaks: the job restarts for them like for any other."""
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
