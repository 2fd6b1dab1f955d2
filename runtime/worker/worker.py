"""A worker: one process's (or one in-process) host of subtasks, obeying one coordinator.

It keeps one link to the coordinator (`LeaderLink`). When the link ends, the coordinator is gone: an attempt
that the job log has goes on for a while, until a newer coordinator asks for it. Nothing is committed
meanwhile, because only a coordinator may say what is; so if none comes the worker drops its subtasks and
exits.

A worker obeys the coordinator of the newest generation that has reached it. When a coordinator takes over,
`AttemptRecord` has the commands that the worker obeyed, and what it reported.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary

import msgspec

from ...errors import ExchangeError
from ...operators.clock import Clock
from ...operators.functions.per_worker import worker_begins, worker_ends
from ...state.snapshot import CommitPermit
from ..control.link import ControlLink
from ..control.messages import (
    Adopt,
    AskState,
    Cancel,
    Cancelled,
    CheckpointAborted,
    CheckpointAcked,
    CheckpointCompleted,
    Deploy,
    DeployCommon,
    EndScan,
    EndSource,
    FinishSources,
    Heartbeat,
    Hello,
    HistoryOver,
    Inventory,
    Leaving,
    LogLines,
    LoopRoundOver,
    Messages,
    ScanState,
    Shutdown,
    SplitsOffered,
    Start,
    Statistics,
    SubtaskAck,
    SubtaskAssignment,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskStatistics,
    SubtaskTerminated,
    Superseded,
    TakeProfile,
    Terminate,
    TriggerCheckpoint,
    Warm,
    WatermarkLimit,
    Welcome,
)
from ..exchange.hub import ExchangeHub
from ..observe.figures import StorageFigures
from ..observe.metrics import MetricsGroup, MetricsRegistry
from ..observe.recent_logs import UnsentLogs
from ..options.registry import Options
from ..options.state import GATHER_DELAY, STATE_BACKEND, TRANSFERS_MAX
from ..protocol.adoption import IN_PARTS, Subtask, WorkerReport
from ..shipping import unship
from ..storage.base import CheckpointStore, StoreOpener
from ..storage.open_store import SharedStores, counted, open_store_at
from ..task.accounting import LoopLoad
from ..task.concurrency import all_of, in_thread, to_the_end
from ..task.local_files import LocalCopies
from ..task.segments import SegmentWriter, segment_settings
from ..task.subtask import Subtask as Task
from .deployment import Deployment, RunningRegions, WorkerResources, deployed
from .direct_reads import DirectReads
from .heartbeats import HeartbeatThreads
from .kept_states import KeptStates
from .local_directories import Backups, LocalDirectories, local_dirs
from .profiler import Profiler
from .queries import StateQueries
from .reports import GatheredAcks, failure_of
from .watch import StepWatch

IO_THREADS = 4
"""Threads for state files, pre-commits, commits and file reading."""
STATISTICS_S = 1.0
GREETING_S = 10.0
"""A coordinator that has asked for this worker and does not answer within this time is ignored."""
NO_ATTEMPT = -1
NO_REGION = -1
_log = logging.getLogger("headgate.worker")


class Worker:
    """Runs until the coordinator says Shutdown, or is gone."""

    def __init__(
        self,
        worker_id: str,
        link: ControlLink,
        hub: ExchangeHub,
        *,
        token: str,
        clock: Clock,
        open_store: StoreOpener,
        metrics: MetricsRegistry,
        heartbeats: HeartbeatThreads | None = None,
        load: LoopLoad | None = None,
        logs: UnsentLogs | None = None,
    ) -> None:
        """
        Args:
            heartbeats: the threads of a process of its own; None: the event loop beats, and looks.
            load: of the event loop, if several workers share it.
            logs: the lines of this process's log; None: the coordinator has the same process.
        """
        self.worker_id = worker_id
        self._leader = LeaderLink(link, self._hello, clock)
        self._record: AttemptRecord | None = None
        self._hub = hub
        self._token = token
        self._clock = clock
        self._load = load or LoopLoad()
        self._logs = logs
        self._storage = StorageFigures()
        self._storage_metrics: MetricsGroup | None = None
        self._open_store = counted(open_store, self._storage)
        self._open_at = counted(open_store_at, self._storage)
        self._metrics = metrics
        self.metrics_url = ""
        """The address of this process's Prometheus endpoint, if it has one; set before `run`."""
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix=f"io-{worker_id}")
        self._transfers: asyncio.Semaphore | None = None
        self._store: tuple[str, CheckpointStore] | None = None
        self._directories: LocalDirectories | None = None
        self.backups = Backups(worker_id, clock)
        self._dismissed = False
        self._job_name = ""
        self._address = b""
        self._fields = {"worker": worker_id}
        self._log = logging.LoggerAdapter(_log, self._fields)
        self._heartbeats: HeartbeatThreads | None = None
        self._heartbeats_of: WeakKeyDictionary[ControlLink, HeartbeatThreads] = WeakKeyDictionary()
        """The heartbeat beside each link, while that is the link to the coordinator."""
        if heartbeats is not None:
            self._heartbeats_of[link] = heartbeats
        self._watch = StepWatch(worker_id, clock)
        self._regions = RunningRegions(hub, self._watch)
        self._acks = GatheredAcks(self._send, self._subtasks_of, clock)
        self._segments = SegmentWriter(worker_id, self._subtasks_of, self._threads)
        self._kept = KeptStates()
        self._queries = StateQueries(self._regions, self._leader.send, clock)
        self._reads = DirectReads(worker_id, self._regions, hub, token, clock)
        self._profiler = Profiler(self._regions, self._leader.send)
        self._silent = False
        """Nothing was heard of the coordinator for too long, at the last look."""
        self._heard: float | None = None
        """The time at which the last message was done with; None: one is worked on, and others may wait."""

    async def run(self, exchange_address: bytes) -> None:
        """Greet the coordinator and serve it, and those after it. Returns when the worker is to exit."""
        self._address = exchange_address
        worker_begins(self)
        try:
            welcome = await self._leader.begin()
            if welcome is None:
                self._log.warning("the coordinator did not answer")
            while welcome is not None and not await self._serve(welcome):
                found = await self._leader.successor(self._orphaned_ms())
                if found is None:
                    break
                welcome, orphaned_ms = found
                self._acks.flush()
                self._leader.send(Inventory(report=self._report(orphaned_ms)))
        finally:
            await self._close()

    def _orphaned_ms(self) -> int:
        """Return the time that subtasks here may go on without a coordinator; any thread may ask."""
        record = self._record
        return 0 if record is None else record.orphaned_ms

    def reconnect(self, link: ControlLink, heartbeats: HeartbeatThreads | None = None) -> None:
        """Another coordinator asks for this worker; `heartbeats` beat if it is the one to obey."""
        if heartbeats is not None:
            self._heartbeats_of[link] = heartbeats
        self._leader.offer(link)

    def leave(self) -> None:
        """This process has to end soon: ask the coordinator for Shutdown, once nothing runs here."""
        self._leader.send(Leaving())

    def _begin_heartbeats(self, welcome: Welcome, link: ControlLink) -> None:
        before, self._heartbeats = self._heartbeats, self._heartbeats_of.get(link)
        if before is not None:
            before.stop()
        if self._heartbeats is not None:
            self._heartbeats.start(welcome, self._watch, link.close, self._orphaned_ms)

    def _hello(self, generation: int) -> Hello:
        return Hello(
            token=self._token,
            role="worker",
            worker_id=self.worker_id,
            pid=os.getpid(),
            address=self._address,
            metrics_url=self.metrics_url,
            generation=generation,
        )

    def _report(self, orphaned_ms: int) -> WorkerReport:
        """The report of what runs here, for a coordinator that takes over."""
        if self._record is None:
            return WorkerReport(orphaned_ms=orphaned_ms)
        deployments = self._regions.of_attempt(self._record.attempt)
        subtasks = [subtask for deployment in deployments for subtask in deployment.subtasks]
        return self._record.report(subtasks, orphaned_ms)

    async def _serve(self, welcome: Welcome) -> bool:
        """Obey the coordinator until it is gone, or another leads; True if the worker is to exit."""
        link = self._leader.link
        self._job_name = self._fields["job"] = welcome.job_name
        self._heard = self._clock.monotonic()
        self._watch.configure(welcome.job_name, welcome.watching)
        self._begin_heartbeats(welcome, link)
        beat = asyncio.get_running_loop().create_task(
            self._beat(welcome),
            name="heartbeat",
        )
        try:
            while (message := await link.receive()) is not None:
                if link is not self._leader.link:
                    break
                if isinstance(message, Shutdown):
                    self._dismissed = True
                    return True
                self._heard = None
                await self._handle(message)
                self._heard = self._clock.monotonic()
            return False
        finally:
            beat.cancel()

    async def _close(self) -> None:
        try:
            await self._regions.drop_all()
            self._kept.take_all()
        finally:
            await worker_ends(self)
        if self._heartbeats is not None:
            self._heartbeats.stop()
        await self._leader.close()
        if self._store is not None:
            await self._store[1].close()
        if self._storage_metrics is not None:
            self._storage_metrics.close()
        await self._hub.close()
        if self._directories is not None:
            await asyncio.to_thread(self._directories.close)
        await asyncio.to_thread(partial(self.backups.close, forget=self._dismissed))
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _beat(self, welcome: Welcome) -> None:
        """Heartbeats out; and if none comes in, the coordinator hangs: give it up."""
        interval_ms, timeout_ms = welcome.heartbeat_interval_ms, welcome.heartbeat_timeout_ms
        while True:
            await asyncio.sleep(min(interval_ms / 1000, STATISTICS_S))
            steps = self._watch.steps() if self._heartbeats is None else ()
            self._leader.send(Heartbeat(steps=steps))
            self._send_statistics()
            self._send_logs(welcome.takes_logs)
            if self._heartbeats is None:
                for stuck in self._watch.look():
                    self._leader.send(stuck)
            heard = self._heard
            silent = heard is not None and self._clock.monotonic() - heard > timeout_ms / 1000
            # Twice: when a call has held the loop for long, what was sent meanwhile is not read yet.
            if silent and self._silent:
                self._log.warning("no heartbeat from the coordinator")
                self._leader.link.close()
            self._silent = silent

    def send(self, message: Messages) -> None:
        """Send news of the attempt. A coordinator that takes over gets it even if the message is lost."""
        self._acks.flush()
        self._send(message)

    def acked(self, attempt: int, checkpoint_id: int, ack: SubtaskAck) -> None:
        """Send the acknowledgement of a subtask, together with those of others that are ready soon."""
        self._acks.add(attempt, checkpoint_id, ack)

    def _subtasks_of(self, attempt: int) -> int:
        """Return the number of subtasks of an attempt here."""
        return sum(len(each.subtasks) for each in self._regions.of_attempt(attempt))

    def _send(self, message: Messages) -> None:
        if self._record is not None:
            self._record.said(message)
            if isinstance(message, SubtaskFailed):
                self._leader.give_up()
        self._leader.send(message)

    def _send_statistics(self) -> None:
        attempts: dict[int, list[SubtaskStatistics]] = {}
        for deployment in self._regions:
            if deployment.started:
                attempts.setdefault(deployment.attempt, []).extend(deployment.statistics())
        for attempt, subtasks in attempts.items():
            self._leader.send(Statistics(attempt=attempt, subtasks=tuple(subtasks)))

    def _send_logs(self, wanted: bool) -> None:
        if self._logs is None:
            return
        lines, skipped = self._logs.take()
        if wanted and (lines or skipped):
            self._leader.send(LogLines(lines=lines, skipped=skipped))

    # -- messages -----------------------------------------------------------------------------------

    async def _handle(self, message: Messages) -> None:
        if isinstance(message, Deploy):
            await self._begin(message)
        elif isinstance(message, Warm):
            self._regions.spawn([NO_REGION], self._warm_up(message), "warm up")
        elif isinstance(message, Cancel):
            await self._cancel(message)
        elif isinstance(message, AskState | ScanState):
            self._queries.ask(message)
        elif isinstance(message, EndScan):
            self._queries.end_scan(message)
        elif isinstance(message, TakeProfile):
            self._profiler.take(message)
        else:
            if self._record is not None:
                self._record.heard(message)
            # An attempt that is over has none, and neither has a heartbeat.
            deployments = self._regions.of_attempt(getattr(message, "attempt", NO_ATTEMPT))
            if deployments and isinstance(message, Terminate):
                self._send_statistics()  # all data is through: these are the final counts
            for deployment in deployments:
                self._obey(deployment, message)
            if deployments and isinstance(message, Start):
                regions = [deployment.region for deployment in deployments]
                self._regions.spawn(regions, self._drop_needless_copies(deployments), "drop copies")

    async def _begin(self, message: Deploy) -> None:
        if message.partial:
            if self._record is not None:
                self._record.broken_up()
            await self._regions.stop([NO_REGION])
        else:
            await self._drop_all()
            self._segments.ledger.clear()
            self._record = AttemptRecord(message)
        regions: dict[int, list[SubtaskAssignment]] = {}
        for data in message.subtasks:
            assignment = msgspec.msgpack.decode(data, type=SubtaskAssignment)
            regions.setdefault(assignment.region, []).append(assignment)
        self._regions.spawn(regions.keys(), self._deploy(message, regions), "deploy")

    async def _cancel(self, message: Cancel) -> None:
        def done() -> None:
            self._acks.flush()
            self._watch.cancelled(message.attempt)
            self._leader.send(Cancelled(attempt=message.attempt, regions=message.regions))

        self._watch.cancelling(message.attempt)
        if message.regions is None:
            await self._drop_all()
            self._record = None
            done()
        else:  # the others go on meanwhile
            if self._record is not None:
                self._record.broken_up()
            self._queries.refuse_waiting(message.regions)
            self._reads.refuse_waiting(message.regions)
            self._regions.drop(message.regions, done)

    async def _drop_all(self) -> None:
        """Cancel everything that runs here, and refuse what clients have asked of it."""
        self._queries.refuse_waiting(None)
        self._reads.refuse_waiting(None)
        await self._regions.drop_all()
        self._reads.refuse_waiting(None)  # what has come meanwhile

    def _obey(self, deployment: Deployment, message: Messages) -> None:
        match message:
            case Start():
                self._regions.spawn([deployment.region], self._start(deployment), "start")
            case Adopt():
                adopt(deployment.subtasks, self._leader.generation)
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
            case HistoryOver(vertex=vertex):
                deployment.history_over(vertex)
            case EndSource(vertex=vertex):
                deployment.end_source(vertex)
            case SplitsOffered(vertex=vertex) as offer:
                deployment.offer(vertex, offer)
            case FinishSources():
                deployment.finish_sources()
            case Terminate():
                deployment.terminate()
            case _:
                self._log.warning("unexpected message kind=`%s`", type(message).__name__)

    async def _deploy(
        self, message: Deploy, regions: Mapping[int, Sequence[SubtaskAssignment]]
    ) -> None:
        kept = self._kept.take_all()  # this attempt alone may use it
        try:
            common = DeployCommon.unpacked(message)
            store = await self._store_for(message.storage, common.settings)
            directories = await self._directories_for(common.settings)
            copies = await self._copies_for(message, common.settings)
            plan, stores = unship(common.job), SharedStores(self._open_at, common.settings)
            options = Options(common.settings)
            self._acks.delay_ms = options.get(GATHER_DELAY)
            self._segments.configure(segment_settings(options))
            if self._transfers is None:
                self._transfers = asyncio.Semaphore(options.get(TRANSFERS_MAX))
            resources = WorkerResources(
                worker_id=self.worker_id,
                hub=self._hub,
                clock=self._clock,
                store=store,
                stores=stores,
                directories=directories,
                copies=copies,
                io_threads=self._threads,
                transfers=self._transfers,
                segments=self._segments,
                kept=self._kept,
                metrics=self._metrics,
                sender=self,
                load=self._load,
            )
            deployments = [
                Deployment(message, common, plan, region, assignments, resources, kept)
                for region, assignments in regions.items()
            ]
            kept.clear()
            for deployment in deployments:
                self._regions.add(deployment)
            await all_of([deployment.prepare() for deployment in deployments])
            self._leader.send(deployed(message.attempt, deployments))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.send(failure_of(message.attempt, "deployment", error))

    async def _warm_up(self, message: Warm) -> None:
        """Be ready for a Deploy; what goes wrong here goes wrong there again, and is reported then."""
        try:
            await in_thread(self._threads, partial(import_all, message))
            await self._store_for(message.storage, message.settings)
            await self._directories_for(message.settings)
        except Exception as error:
            self._log.info("cannot warm up: %s: %s", type(error).__name__, error)

    async def _start(self, deployment: Deployment) -> None:
        try:
            await deployment.start()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failure = failure_of(deployment.attempt, "start", error, region=deployment.region)
            self.send(failure)

    async def _drop_needless_copies(self, deployments: Sequence[Deployment]) -> None:
        """Drop copies that no subtask of the attempt has, now that all have their state."""
        restored = [deployment.restored for deployment in deployments]
        handles = [handle for _, found in restored for handle in found]
        drop = partial(self.backups.drop_needless, restored[0][0], handles)
        await asyncio.get_running_loop().run_in_executor(self._threads, drop)

    def exchange_failed(self, peer_id: str, error: Exception, region: int) -> None:
        """The hub lost its connection to a peer: the attempt of a region is over, here as there."""
        wrapped = ExchangeError(f"connection lost peer=`{peer_id}`: {error}")
        for deployment in self._regions:
            if deployment.region == region:
                failure = failure_of(deployment.attempt, "exchange", wrapped, region=region)
                self.send(failure)

    async def _store_for(self, storage: str, settings: dict[str, str]) -> CheckpointStore | None:
        if not storage:
            return None
        if self._store is None or self._store[0] != storage:
            store = self._open_store(storage, self._job_name, settings)
            if self._storage_metrics is None:
                self._storage_metrics = self._metrics.group(job_name=self._job_name)
                self._storage.register(self._storage_metrics.add())
            try:
                await store.open()
            except BaseException:
                await store.close()
                raise
            self._store = (storage, store)
        return self._store[1]

    async def _directories_for(self, settings: dict[str, str]) -> LocalDirectories:
        if self._directories is None:
            make = partial(LocalDirectories, local_dirs(Options(settings)), self.worker_id)
            loop = asyncio.get_running_loop()
            making = loop.run_in_executor(self._threads, make)
            try:
                self._directories = await to_the_end(making)
            except asyncio.CancelledError:
                if making.exception() is None:
                    self._directories = making.result()  # the next attempt, or the end, needs them
                raise
        return self._directories

    async def _copies_for(self, message: Deploy, settings: dict[str, str]) -> LocalCopies | None:
        make = partial(
            self.backups.open,
            settings,
            self._job_name,
            message.storage,
            afresh=not message.partial,
        )
        return await in_thread(self._threads, make)


def import_all(message: Warm) -> None:
    """Import what the job's functions need, by making them once, and its state backend. Blocking."""
    unship(message.job)
    if Options(message.settings).get(STATE_BACKEND) == "rocksdb":
        from ...state.rocksdb import backend  # noqa: F401  imports take longer than all the rest


class LeaderLink:
    """The link to the coordinator in charge, and those that come after it.

    Messages of a coordinator count only while `link` is the one to it: from the moment at which a newer
    one has said Welcome, nothing of the old one is obeyed any more, not even what has arrived already.
    """

    def __init__(self, link: ControlLink, hello: Callable[[int], Hello], clock: Clock) -> None:
        """`hello` makes our first message, given the generation that we obey."""
        self.link = link
        self.generation = 0
        self._hello = hello
        self._clock = clock
        self._next: Welcome | None = None
        self._changed = asyncio.Event()
        self._greeting: set[asyncio.Task[None]] = set()

    def send(self, message: Messages) -> None:
        """Send a message to the coordinator in charge; without one it is dropped."""
        self.link.send(message)

    async def begin(self) -> Welcome | None:
        """Greet the coordinator that had this worker started; None: it does not want us."""
        self.link.send(self._hello(self.generation))
        welcome = await self.link.receive()
        if not isinstance(welcome, Welcome):
            return None
        self.generation = welcome.generation
        return welcome

    def offer(self, link: ControlLink) -> None:
        """A coordinator asks for this worker, over a new link. It must lead a newer generation."""
        task = asyncio.get_running_loop().create_task(self._greet(link), name="another coordinator")
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, link: ControlLink) -> None:
        link.send(self._hello(self.generation))
        try:
            async with asyncio.timeout(GREETING_S):
                welcome = await link.receive()
        except BaseException:
            link.close()
            raise
        if not isinstance(welcome, Welcome) or welcome.generation <= self.generation:
            _log.warning("refused a coordinator that does not lead any more")
            link.close()
            return
        self.generation = welcome.generation
        before, self.link = self.link, link
        before.send(Superseded(generation=welcome.generation))
        before.close()
        self._next = welcome
        self._changed.set()

    async def successor(self, within_ms: int) -> tuple[Welcome, int] | None:
        """Wait for the next coordinator; return it and the ms without one, or None if none came in time."""
        lost = self._clock.monotonic()
        if self._next is None:
            self._changed.clear()
        if self._next is None and within_ms:
            _log.warning("the coordinator is gone; working on for up to %s ms without", within_ms)
            try:
                async with asyncio.timeout(within_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                _log.warning("no coordinator within %s ms", within_ms)
        welcome, self._next = self._next, None
        if welcome is None:
            return None
        return welcome, round(1000 * (self._clock.monotonic() - lost))

    def give_up(self) -> None:
        """Stop waiting: there is nothing left that a successor could go on with."""
        self._changed.set()

    async def close(self) -> None:
        """Hang up."""
        tasks = list(self._greeting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.link.close()


class AttemptRecord:
    """One attempt on one worker, by the messages that were obeyed and sent.

    What was sent may never have arrived: its coordinator was perhaps dead already.
    """

    def __init__(self, deploy: Deploy) -> None:
        self._deploy = deploy
        self._finished: set[Subtask] = set()
        self._uncommitted: set[int] = set()
        self._last = 0
        self._completed = 0
        self._running = False
        self._ending = ""
        self._failure = ""
        self._orphaned_ms = 0

    @property
    def attempt(self) -> int:
        """The number of the attempt."""
        return self._deploy.attempt

    @property
    def orphaned_ms(self) -> int:
        """The time that the attempt may go on without a coordinator; 0: there is nothing to wait for."""
        return 0 if self._ending or self._failure else self._orphaned_ms

    def broken_up(self) -> None:
        """Note that some of its regions end, here or elsewhere, and begin again as another attempt."""
        self._ending = self._ending or IN_PARTS

    def heard(self, message: Messages) -> None:
        """Take note of a message of the coordinator; those of other attempts do not count."""
        if not self._is_ours(message):
            return
        match message:
            case Start(orphaned_ms=orphaned_ms):
                self._running = True
                self._orphaned_ms = orphaned_ms
            case TriggerCheckpoint(checkpoint_id=id_, options=options):
                self._last = max(self._last, id_)
                if options.stop:
                    self._ending = f"its sources stopped at checkpoint {id_}"
            case CheckpointCompleted(checkpoint_id=id_):
                self._completed = max(self._completed, id_)
                self._uncommitted = {other for other in self._uncommitted if other > id_}
            case CheckpointAborted(checkpoint_id=id_):
                self._uncommitted.discard(id_)
            case FinishSources():
                self._ending = "its sources were drained"
            case Terminate():
                self._ending = "its subtasks were leaving"

    def said(self, message: Messages) -> None:
        """Take note of a report of a subtask; those of other attempts do not count."""
        if not self._is_ours(message):
            return
        match message:
            case CheckpointAcked(checkpoint_id=id_) if id_ > self._completed:
                self._uncommitted.add(id_)
            case SubtaskFinished(vertex=vertex, index=index):
                self._finished.add((vertex, index))
            case SubtaskFailed(task_name=task_name, text=text):
                self._failure = self._failure or f"{task_name}: {text}"
            case SubtaskTerminated():
                self._ending = "its subtasks were leaving"

    def _is_ours(self, message: Messages) -> bool:
        return getattr(message, "attempt", None) == self.attempt

    def report(self, subtasks: Sequence[Task], orphaned_ms: int) -> WorkerReport:
        """Return the report on `subtasks`, which were without a coordinator for `orphaned_ms`."""
        deploy = self._deploy
        return WorkerReport(
            attempt=deploy.attempt,
            plan=deploy.plan,
            restored_checkpoint=deploy.restored_checkpoint,
            running=self._running,
            subtasks=tuple((task.env.vertex.id, task.env.index) for task in subtasks),
            finished=tuple(sorted(self._finished)),
            failure=self._failure,
            ending=self._ending,
            last_checkpoint=self._last,
            completed_checkpoint=self._completed,
            uncommitted_checkpoints=tuple(sorted(self._uncommitted)),
            orphaned_ms=orphaned_ms,
        )


def adopt(subtasks: Sequence[Task], generation: int) -> None:
    """Another coordinator goes on with the attempt.

    Files of its checkpoints must bear its generation: those of older ones are swept away.
    """
    for task in subtasks:
        task.env.generation = generation
