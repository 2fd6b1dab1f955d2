"""A worker: one process's (or one in-process) host of subtasks, obeying one coordinator.

It keeps one link to the coordinator. When the link ends, the coordinator is gone: the worker drops its
subtasks and exits, because only a coordinator may say what is committed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from ...errors import ExchangeError
from ...operators.clock import Clock
from ...state.snapshot import CommitPermit
from ..checkpoint_options import TRANSFERS_MAX
from ..control.link import Link
from ..control.messages import (
    Cancel,
    Cancelled,
    CheckpointAborted,
    CheckpointCompleted,
    Deploy,
    FinishSources,
    Heartbeat,
    Hello,
    LoopRoundOver,
    Messages,
    Shutdown,
    Start,
    Statistics,
    SubtaskAssignment,
    SubtaskStatistics,
    Terminate,
    TriggerCheckpoint,
    Warm,
    WatermarkLimit,
    Welcome,
)
from ..exchange.hub import ExchangeHub
from ..observe.metrics import MetricsRegistry
from ..options import Options
from ..shipping import unship
from ..storage.base import CheckpointStore, StoreOpener
from ..storage.open_store import open_store_at
from ..task.local_copies import LocalCopies
from ..task.tasks import all_of
from ..task.threads import to_the_end
from .backups import Backups
from .deployment import Deployment
from .failures import failure_of
from .local_directories import LocalDirectories
from .pulse import Pulse
from .regions import RunningRegions, deployed
from .settings import local_dirs
from .stores import SharedStores
from .warming import import_all
from .watch import StepWatch

IO_THREADS = 4
"""Threads for state files, pre-commits, commits and file reading."""
STATISTICS_S = 1.0
NO_ATTEMPT = -1
NO_REGION = -1
_log = logging.getLogger("headgate.worker")


class Worker:
    """Runs until the coordinator says Shutdown, or is gone."""

    def __init__(
        self,
        worker_id: str,
        link: Link,
        hub: ExchangeHub,
        *,
        token: str,
        clock: Clock,
        open_store: StoreOpener,
        metrics: MetricsRegistry,
        metrics_url: str = "",
        pulse: Pulse | None = None,
    ) -> None:
        """
        Args:
            pulse: the thread that beats in a process of its own; None: the event loop beats, and looks.
        """
        self.worker_id = worker_id
        self._link = link
        self._hub = hub
        self._token = token
        self._clock = clock
        self._open_store = open_store
        self._metrics = metrics
        self._metrics_url = metrics_url
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix=f"io-{worker_id}")
        self._transfers: asyncio.Semaphore | None = None
        self._store: tuple[str, CheckpointStore] | None = None
        self._directories: LocalDirectories | None = None
        self.backups = Backups(worker_id, clock)
        self._dismissed = False
        self._job_name = ""
        self._fields = {"worker": worker_id}
        self._log = logging.LoggerAdapter(_log, self._fields)
        self._pulse = pulse
        self._watch = StepWatch(worker_id, clock)
        self._regions = RunningRegions(hub, self._watch)
        self._silent = False
        """Nothing was heard of the coordinator for too long, at the last look."""
        self._heard: float | None = None
        """When the last message was done with; None: one is being worked on, and others may wait."""

    async def run(self, exchange_address: bytes) -> None:
        """Greet the coordinator and serve it. Returns when the worker is to exit."""
        hello = Hello(
            token=self._token,
            role="worker",
            worker_id=self.worker_id,
            pid=os.getpid(),
            address=exchange_address,
            metrics_url=self._metrics_url,
        )
        self._link.send(hello)
        try:
            welcome = await self._link.receive()
            if isinstance(welcome, Welcome):
                await self._serve(welcome)
            else:
                self._log.warning("the coordinator did not answer")
        finally:
            await self._close()

    async def _serve(self, welcome: Welcome) -> None:
        self._job_name = self._fields["job"] = welcome.job_name
        self._heard = self._clock.monotonic()
        self._watch.configure(welcome.job_name, welcome.watching)
        if self._pulse is not None:
            self._pulse.start(welcome, self._watch, self._link.close)
        beat = asyncio.get_running_loop().create_task(
            self._beat(welcome.heartbeat_interval_ms, welcome.heartbeat_timeout_ms),
            name="heartbeat",
        )
        try:
            while (message := await self._link.receive()) is not None:
                if isinstance(message, Shutdown):
                    self._dismissed = True
                    break
                self._heard = None
                await self._handle(message)
                self._heard = self._clock.monotonic()
        finally:
            beat.cancel()

    async def _close(self) -> None:
        await self._regions.drop_all()
        if self._pulse is not None:
            self._pulse.stop()
        self._link.close()
        if self._store is not None:
            await self._store[1].close()
        await self._hub.close()
        if self._directories is not None:
            await asyncio.to_thread(self._directories.close)
        await asyncio.to_thread(partial(self.backups.close, forget=self._dismissed))
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _beat(self, interval_ms: int, timeout_ms: int) -> None:
        """Heartbeats out; and if none comes in, the coordinator hangs: give it up."""
        while True:
            await asyncio.sleep(min(interval_ms / 1000, STATISTICS_S))
            steps = self._watch.steps() if self._pulse is None else ()
            self._link.send(Heartbeat(steps=steps))
            self._send_statistics()
            if self._pulse is None:
                for stuck in self._watch.look():
                    self._link.send(stuck)
            heard = self._heard
            silent = heard is not None and self._clock.monotonic() - heard > timeout_ms / 1000
            # Twice: when a call has held the loop for long, what was sent meanwhile is not read yet.
            if silent and self._silent:
                self._log.warning("no heartbeat from the coordinator")
                self._link.close()
            self._silent = silent

    def _send_statistics(self) -> None:
        attempts: dict[int, list[SubtaskStatistics]] = {}
        for deployment in self._regions:
            if deployment.started:
                attempts.setdefault(deployment.attempt, []).extend(deployment.statistics())
        for attempt, subtasks in attempts.items():
            self._link.send(Statistics(attempt=attempt, subtasks=tuple(subtasks)))

    # -- messages -----------------------------------------------------------------------------------

    async def _handle(self, message: Messages) -> None:
        if isinstance(message, Deploy):
            await self._begin(message)
        elif isinstance(message, Warm):
            self._regions.spawn([NO_REGION], self._warm_up(message), "warm up")
        elif isinstance(message, Cancel):
            await self._cancel(message)
        else:
            # Of an attempt that is over there are none, and of a heartbeat neither.
            deployments = self._regions.of_attempt(getattr(message, "attempt", NO_ATTEMPT))
            if deployments and isinstance(message, Terminate):
                self._send_statistics()  # all data is through: these are the final counts
            for deployment in deployments:
                self._obey(deployment, message)
            if deployments and isinstance(message, Start):
                regions = [deployment.region for deployment in deployments]
                self._regions.spawn(regions, self._settle(deployments), "settle copies")

    async def _begin(self, message: Deploy) -> None:
        if message.partial:
            await self._regions.stop([NO_REGION])
        else:
            await self._regions.drop_all()
        regions: dict[int, list[SubtaskAssignment]] = {}
        for data in message.subtasks:
            assignment = msgspec.msgpack.decode(data, type=SubtaskAssignment)
            regions.setdefault(assignment.region, []).append(assignment)
        self._regions.spawn(regions.keys(), self._deploy(message, regions), "deploy")

    async def _cancel(self, message: Cancel) -> None:
        def done() -> None:
            self._watch.cancelled(message.attempt)
            self._link.send(Cancelled(attempt=message.attempt, regions=message.regions))

        self._watch.cancelling(message.attempt)
        if message.regions is None:
            await self._regions.drop_all()
            done()
        else:  # the others go on meanwhile
            self._regions.drop(message.regions, done)

    def _obey(self, deployment: Deployment, message: Messages) -> None:
        match message:
            case Start():
                self._regions.spawn([deployment.region], self._start(deployment), "start")
            case TriggerCheckpoint(checkpoint_id=id_, trigger_ms=trigger_ms, options=options):
                deployment.trigger(id_, trigger_ms, options)
            case CheckpointCompleted(checkpoint_id=id_, generation=generation):
                deployment.completed(CommitPermit(self._job_name, generation, id_))
            case CheckpointAborted(checkpoint_id=id_):
                deployment.aborted(id_)
            case WatermarkLimit(group=group, limit=limit):
                deployment.limit(group, limit)
            case LoopRoundOver(loop=loop, number=number, records=records):
                deployment.loop_round_over(loop, number, records)
            case FinishSources():
                deployment.finish_sources()
            case Terminate():
                deployment.terminate()
            case _:
                self._log.warning("unexpected message kind=`%s`", type(message).__name__)

    async def _deploy(
        self, message: Deploy, regions: Mapping[int, Sequence[SubtaskAssignment]]
    ) -> None:
        try:
            store = await self._store_for(message)
            directories = await self._directories_for(message)
            copies = await self._copies_for(message)
            plan, stores = unship(message.job), SharedStores(open_store_at, message.settings)
            if self._transfers is None:
                self._transfers = asyncio.Semaphore(Options(message.settings).get(TRANSFERS_MAX))
            deployments = [
                Deployment(
                    message,
                    plan,
                    region,
                    assignments,
                    hub=self._hub,
                    clock=self._clock,
                    store=store,
                    stores=stores,
                    directories=directories,
                    io_threads=self._threads,
                    transfers=self._transfers,
                    metrics=self._metrics,
                    worker_id=self.worker_id,
                    send=self._link.send,
                    copies=copies,
                )
                for region, assignments in regions.items()
            ]
            for deployment in deployments:
                self._regions.add(deployment)
            await all_of([deployment.prepare() for deployment in deployments])
            self._link.send(deployed(message.attempt, deployments))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._link.send(failure_of(message.attempt, "deployment", error))

    async def _warm_up(self, message: Warm) -> None:
        """Be ready for a Deploy; what goes wrong here goes wrong there again, and is reported then."""
        try:
            loop = asyncio.get_running_loop()
            await to_the_end(loop.run_in_executor(self._threads, import_all, message))
            await self._store_for(message)
            await self._directories_for(message)
        except Exception as error:
            self._log.info("cannot warm up: %s: %s", type(error).__name__, error)

    async def _start(self, deployment: Deployment) -> None:
        try:
            await deployment.start()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failure = failure_of(deployment.attempt, "start", error, region=deployment.region)
            self._link.send(failure)

    async def _settle(self, deployments: Sequence[Deployment]) -> None:
        """All subtasks of the attempt have their state: copies that none of them has are not needed."""
        restored = [deployment.restored for deployment in deployments]
        handles = [handle for _, found in restored for handle in found]
        settle = partial(self.backups.settle, restored[0][0], handles)
        await asyncio.get_running_loop().run_in_executor(self._threads, settle)

    def exchange_failed(self, peer_id: str, error: Exception, region: int) -> None:
        """The hub lost its connection to a peer: the attempt of a region is over, whoever is to blame."""
        wrapped = ExchangeError(f"connection lost peer=`{peer_id}`: {error}")
        for deployment in self._regions:
            if deployment.region == region:
                failure = failure_of(deployment.attempt, "exchange", wrapped, region=region)
                self._link.send(failure)

    async def _store_for(self, message: Deploy | Warm) -> CheckpointStore | None:
        if not message.storage:
            return None
        if self._store is None or self._store[0] != message.storage:
            store = self._open_store(message.storage, self._job_name, message.settings)
            try:
                await store.open()
            except BaseException:
                await store.close()
                raise
            self._store = (message.storage, store)
        return self._store[1]

    async def _directories_for(self, message: Deploy | Warm) -> LocalDirectories:
        if self._directories is None:
            make = partial(LocalDirectories, local_dirs(Options(message.settings)), self.worker_id)
            loop = asyncio.get_running_loop()
            making = loop.run_in_executor(self._threads, make)
            try:
                self._directories = await to_the_end(making)
            except asyncio.CancelledError:
                if making.exception() is None:
                    self._directories = making.result()  # the next attempt, or the end, needs them
                raise
        return self._directories

    async def _copies_for(self, message: Deploy) -> LocalCopies | None:
        make = partial(
            self.backups.open,
            message.settings,
            self._job_name,
            message.storage,
            afresh=not message.partial,
        )
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, make))
