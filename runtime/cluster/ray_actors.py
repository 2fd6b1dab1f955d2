"""The two Ray actors: a worker and a coordinator, each a process with an event loop of our own.

Ray starts them, kills them and reports their deaths. Everything else travels on our own connections,
because calls to a busy actor are slow and not ordered (docs/design/0003-ray-places-processes.md).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import uvloop
from ray.exceptions import RayActorError

from ...errors import FencedError, HeadgateError, JobError
from ...operators.clock import SystemClock
from ...operators.private_directory import own_directory
from ..control.cluster import ControlEndpoint
from ..control.link import ControlLink, connect
from ..coordinator.job import JobCoordinator
from ..exchange.hub import ExchangeHub
from ..listening import Listener, ListenerLimits, worker_metrics_port
from ..observe.endpoint import open_endpoint
from ..observe.logs import configure_logging, process_tapped
from ..observe.metrics import MetricsRegistry
from ..observe.recent_logs import UnsentLogs
from ..options.monitoring import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from ..options.registry import Options
from ..plan import JobSpec
from ..protocol.job_result import JobOutcome
from ..protocol.standby import Turn
from ..protocol.worker_nodes import NodeRules
from ..shipping import unship
from ..storage.open_store import open_store
from ..worker.heartbeats import HeartbeatThreads
from ..worker.worker import Worker
from .host import CoordinatorPlace, host_coordinator
from .process import attach, die_of_sigterm, on_sigterm, tune_process
from .ray_nodes import actor_options, ask, until_placed
from .standby import Standby, StandbyAnswer

_log = logging.getLogger("headgate.cluster")
NAMESPACE = "headgate"
"""The Ray namespace of all actors."""
STANDBY_SUFFIX = ":standby"
WORKER_CALLS = 8
"""The number of calls that an actor takes at once: its run, and coordinators that wait or reconnect."""
WAIT_S = 20.0
"""The longest time that one call waits for a worker's end, since it holds a thread."""
ANSWER_S = 5.0
"""The longest time that one coordinator's process waits for an answer of the other."""
LOG_LINES_MAX = 500
"""Lines of its log that a worker keeps until it sends them, which is about once a second."""
LEAVE_S = 30.0
"""A worker's process ends this long after its worker, if it is not killed before."""


def actor_names(job: str) -> list[str]:
    """The actors of a job's coordinator: the one that the job begins with, and the one that stands by."""
    name = f"headgate-{job}"
    return [name, f"{name}{STANDBY_SUFFIX}"]


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The settings that a process of the cluster takes over from the one that started the job."""

    directory: str
    """The working directory, so that relative paths mean the same everywhere; may not exist."""
    python_path: tuple[str, ...]
    console: str | None
    """The pipes to which a worker sends what it prints (`process.py`); None: Ray keeps it."""
    unix_dir: str
    """The directory below which each worker makes one for its Unix socket."""
    host: str
    """The machine's address among the peers; loopback on an embedded Ray; empty: that of the Ray node."""
    log_level: int
    metrics_port: int | None
    metrics_host: str
    cluster_name: str
    limits: ListenerLimits
    grace_s: float
    """A worker that gets SIGTERM ends after this time at the latest."""
    detached: bool
    """The coordinator outlives the process that started it, and so ends by itself."""
    data: Listener
    """The data port of each worker."""
    nodes: NodeRules | None
    """The nodes on which workers may run; None: the embedded Ray has one node only."""

    def own_host(self) -> str:
        """The address of this process's machine among the peers."""
        return self.host or str(ray.util.get_node_ip_address())

    def enter(self) -> None:
        """Give this process the settings of the process of the user."""
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        for path in self.python_path:
            if path not in sys.path and os.path.isdir(path):
                sys.path.append(path)


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=WORKER_CALLS)
class WorkerActor:
    """Hosts one worker; `run` returns when the worker has to exit.

    The actor is detached: it does not die with the coordinator that started it, so it ends by itself.
    """

    def __init__(self) -> None:
        self._hosted = HostedWorker()
        on_sigterm(self._hosted.leave)

    def run(self, worker_id: str, addresses: list[str], token: str, setup: ProcessSetup) -> None:
        """Connect to the coordinator and serve it. Ray never retries this call."""
        setup.enter()
        self._hosted.grace_s = setup.grace_s
        self._hosted.limits = setup.limits
        if setup.console is not None:
            attach(setup.console)
        tune_process()
        # What every worker does routinely is of interest to those who look for something only.
        routine = setup.log_level > logging.DEBUG
        configure_logging(max(setup.log_level, logging.WARNING) if routine else logging.DEBUG)
        try:
            logs = UnsentLogs(LOG_LINES_MAX)
            with (
                process_tapped(logs.add),
                own_directory(Path(setup.unix_dir), "hg-worker-") as directory,
            ):
                arguments = (worker_id, addresses, token, setup, str(directory), logs)
                uvloop.run(_run_worker(self._hosted, *arguments))
        finally:
            self._hosted.over.set()
            last = threading.Timer(0.0 if self._hosted.leaving else LEAVE_S, os._exit, (0,))
            last.daemon = True
            last.start()

    def wait(self, seconds: float) -> bool:
        """Return True if `run` is over within that time."""
        return self._hosted.over.wait(seconds)

    def reconnect(self, addresses: list[str]) -> None:
        """Connect the worker to another coordinator."""
        self._hosted.reconnect(addresses)


class HostedWorker:
    """The worker of this process, for calls from other threads."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.leaving = False
        """True once this process was asked to end."""
        self.grace_s = 0.0
        """The longest time that it then waits for its coordinator."""
        self.limits = ListenerLimits()
        """The bounds of the connections to its coordinators."""
        self._worker: Worker | None = None
        self._token = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    def began(self, worker: Worker, token: str) -> None:
        """It runs in this thread's event loop; `token` is the secret of all its coordinators."""
        self._loop, self._worker, self._token = asyncio.get_running_loop(), worker, token

    def reconnect(self, addresses: list[str]) -> None:
        """Connect it to another coordinator, if it has begun."""
        if self._worker is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._connect(self._worker, addresses), self._loop)

    def leave(self) -> None:
        """Let the coordinator move the subtasks; end this process when none runs here, or in time."""
        self.leaving = True
        if self._worker is None or self._loop is None or self.over.is_set():
            os._exit(0)
        last = threading.Timer(self.grace_s, os._exit, (128 + signal.SIGTERM,))
        last.daemon = True
        last.start()
        self._loop.call_soon_threadsafe(self._worker.leave)

    async def _connect(self, worker: Worker, addresses: list[str]) -> None:
        heartbeats = HeartbeatThreads(addresses, self._token, worker.worker_id, SystemClock())
        worker.reconnect(await _connect(addresses, self.limits), heartbeats)


async def _connect(addresses: list[str], limits: ListenerLimits) -> ControlLink:
    for address in addresses:
        try:
            return await connect(address, limits.message_size_max_bytes, limits.unsent_max_bytes)
        except OSError as error:
            _log.info("no coordinator address=`%s`: %s", address, error)
    raise JobError(f"no coordinator at {', '.join(addresses)}")


async def _run_worker(
    hosted: HostedWorker,
    worker_id: str,
    addresses: list[str],
    token: str,
    setup: ProcessSetup,
    directory: str,
    logs: UnsentLogs,
) -> None:
    hub = ExchangeHub(worker_id, token, limits=setup.limits, listener=setup.data)
    metrics = MetricsRegistry()
    port = worker_metrics_port(setup.metrics_port, addresses, setup.own_host())
    endpoint = open_endpoint(metrics, port, setup.metrics_host, setup.limits, setup.own_host())
    listening = await hub.start(directory, setup.own_host())
    # Last of all, because the coordinator does not wait long for the first message of a connection.
    link = await _connect(addresses, setup.limits)
    clock = SystemClock()
    worker = Worker(
        worker_id,
        link,
        hub,
        token=token,
        clock=clock,
        open_store=open_store,
        metrics=metrics,
        heartbeats=HeartbeatThreads(addresses, token, worker_id, clock),
        logs=logs,
    )
    worker.metrics_url = endpoint.url if endpoint is not None else ""
    hub.on_failure = worker.exchange_failed
    hosted.began(worker, token)
    await worker.run(listening.encode())


class RayWorker:
    """A worker actor as the coordinator sees it."""

    def __init__(self, worker_id: str, actor: Any, running: Any = None) -> None:
        """`running` is the call of `run`, if this coordinator made it."""
        self._worker_id = worker_id
        self._actor = actor
        self._running: concurrent.futures.Future[Any] = (
            self._wait() if running is None else (running.future())
        )
        self._found = running is None

    def _wait(self) -> concurrent.futures.Future[Any]:
        waiting: concurrent.futures.Future[Any] = self._actor.wait.remote(WAIT_S).future()
        return waiting

    @property
    def worker_id(self) -> str:
        return self._worker_id

    async def died(self) -> str:
        try:
            while await asyncio.wrap_future(self._running) is False and self._found:
                self._running = self._wait()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return _one_line(error)
        return "exited"

    def kill(self, pid: int = 0) -> None:
        # One whose `run` has returned does nothing any more; killing it makes Ray complain on the terminal.
        if pid and not self._running.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        ray.kill(self._actor, no_restart=True)


def _one_line(error: Exception) -> str:
    """Return why a worker ended.

    Ray wraps an error of ours in a text that begins with the name of the actor.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, HeadgateError):
        return f"{cause.message} (fix: {cause.fix})" if cause.fix else cause.message
    return str(error).strip().splitlines()[0]


class RayCluster:
    """Starts workers as detached Ray actors, which the next coordinator finds by their names."""

    def __init__(self, setup: ProcessSetup) -> None:
        self._setup = setup
        self._workers: list[RayWorker] = []
        self.notify: Callable[[str], None] = _log.warning
        """Is told what workers wait for that have no room."""

    async def start_worker(self, worker_id: str, control: ControlEndpoint, group: str) -> RayWorker:
        """Start a worker actor; on an existing cluster, wait until Ray has room for it.

        Raises:
            JobError: there was no room in time.
        """
        rules = self._setup.nodes
        asked = None if rules is None else await ask(rules, group)
        actor = WorkerActor.options(  # type: ignore[attr-defined]
            name=worker_id,
            lifetime="detached",
            namespace=NAMESPACE,
            **({} if asked is None else actor_options(asked)),
        ).remote()
        running = actor.run.remote(worker_id, control.addresses, control.token, self._setup)
        worker = RayWorker(worker_id, actor, running)
        self._workers.append(worker)
        if rules is not None and asked is not None:
            try:
                await until_placed(actor, rules, asked, self.notify)
            except BaseException:
                worker.kill()  # else it would start when it is not expected any more
                raise
        return worker

    async def find_worker(self, worker_id: str, control: ControlEndpoint) -> RayWorker | None:
        """Look for the actor of that name, and connect it to this coordinator too."""
        try:
            actor = await asyncio.to_thread(ray.get_actor, worker_id, NAMESPACE)
        except ValueError:
            return None
        actor.reconnect.remote(control.addresses)
        worker = RayWorker(worker_id, actor)
        self._workers.append(worker)
        return worker

    def abandon(self) -> None:
        """Leave all workers to another coordinator."""
        self._workers.clear()

    async def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()


async def host_on_ray(
    spec: JobSpec,
    setup: ProcessSetup,
    *,
    token: str,
    on_listening: Callable[[JobCoordinator], None],
    takes_over: bool,
    on_ended: Callable[[JobOutcome], Awaitable[None]] | None = None,
) -> JobOutcome:
    """Run `spec` under a coordinator in this event loop, with workers on the Ray of this process.

    The arguments are those of `host_coordinator`.

    Raises:
        HeadgateError: the job could not begin, or was fenced by a newer coordinator.
    """
    cluster = RayCluster(setup)

    def listening(coordinator: JobCoordinator) -> None:
        cluster.notify = coordinator.note
        on_listening(coordinator)

    try:
        return await host_coordinator(
            spec,
            cluster,
            CoordinatorPlace(SystemClock(), setup.cluster_name, setup.own_host(), takes_over),
            open_store=open_store,
            token=token,
            on_listening=listening,
            on_ended=on_ended,
        )
    except FencedError:
        cluster.abandon()  # the workers obey another coordinator by now, or give up
        raise
    finally:
        await cluster.close()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two processes that take turns with one job."""

    other: str
    """The name of the other actor."""
    first: bool
    """Whether this is the one that the job begins with."""

    async def ask(self) -> StandbyAnswer:
        """Return what the other process does."""
        try:
            async with asyncio.timeout(ANSWER_S):
                actor = await asyncio.to_thread(ray.get_actor, self.other, NAMESPACE)
                answer: StandbyAnswer = await asyncio.wrap_future(actor.turn.remote().future())
        except (ValueError, RayActorError):
            return StandbyAnswer(Turn.GONE)
        except TimeoutError:
            return StandbyAnswer(Turn.SILENT)
        return answer


@dataclass(frozen=True, slots=True)
class Lead:
    """The addresses of the REST API of a coordinator that leads."""

    addresses: tuple[str, ...]
    pid: int
    generation: int
    """The generation that it leads; 0: it has none yet."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=4)
class CoordinatorActor:
    """Hosts one coordinator in a thread. If the process dies Ray makes a new one, which goes on.

    It holds no state of its own, so the arguments of its constructor and the job log are all it needs.
    """

    def __init__(
        self, job: bytes, run: str, token: str, setup: ProcessSetup, pair: Pair | None = None
    ) -> None:
        die_of_sigterm()  # whatever is under way, a successor settles as after a crash
        setup.enter()
        configure_logging(setup.log_level, kept=logging.INFO)
        self._setup = setup
        self._run_id = run
        self._token = token
        self._pair = pair
        self._self = ray.get_runtime_context().current_actor
        self._turn = Turn.LEADS if pair is None else Turn.STANDS_BY
        # A coordinator has led before, but for the very first time.
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._takes_over = self._restarted or not (pair is None or pair.first)
        self._outcome: JobOutcome | None = None
        self._listening: concurrent.futures.Future[JobCoordinator] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._main, args=(job,), name="coordinator", daemon=True
        )
        self._thread.start()

    def _main(self, job: bytes) -> None:
        over = Turn.OVER
        # Nobody listens behind the end. Who asks for the leader then is told why it failed, if it did.
        listening: concurrent.futures.Future[JobCoordinator] = concurrent.futures.Future()
        try:
            uvloop.run(self._run(unship(job)))
        except Exception as error:
            if isinstance(error, FencedError):
                over = Turn.GONE  # the job goes on elsewhere
            if self._listening.done() and not isinstance(error, HeadgateError):
                _log.exception("the coordinator broke")
            listening.set_exception(error)
        finally:
            self._turn, self._listening = over, listening
            if self._setup.detached:
                self._leave_later()

    def _leave_later(self) -> None:
        """End this process, once clients have had the time to hear how the job ended."""
        last = threading.Timer(LEAVE_S, ray.kill, (self._self,), {"no_restart": True})
        last.daemon = True
        last.start()

    async def _run(self, spec: JobSpec) -> None:
        if self._pair is None:
            await self._lead(spec)
            return
        standby = self._standby(self._pair, Options(spec.options))
        while await standby.wait():
            self._turn = Turn.LEADS
            try:
                await self._lead(spec)
            except FencedError:
                if not await standby.is_fenced_by_other():
                    raise
                self._turn, self._listening = Turn.STANDS_BY, concurrent.futures.Future()
            else:
                return

    def _standby(self, pair: Pair, options: Options) -> Standby:
        return Standby(
            pair.ask,
            self._token,
            SystemClock(),
            first=pair.first,
            restarted=self._restarted,
            interval_ms=options.get(HEARTBEAT_INTERVAL),
            silent_max_ms=options.get(HEARTBEAT_TIMEOUT),
        )

    async def _lead(self, spec: JobSpec) -> None:
        try:
            self._outcome = await host_on_ray(
                spec,
                self._setup,
                token=self._token,
                on_listening=self._listens,
                takes_over=self._takes_over,
            )
        finally:
            self._takes_over = True

    def _listens(self, coordinator: JobCoordinator) -> None:
        self._listening.set_result(coordinator)

    def turn(self) -> StandbyAnswer:
        """Answer the other process of a pair."""
        listening, turn = self._listening, self._turn
        listens = turn is Turn.LEADS and listening.done()
        return StandbyAnswer(turn, listening.result().rest_addresses if listens else ())

    def lead(self) -> Lead | None:
        """Return where this coordinator can be found; None: it is not its turn, or it does not listen yet.

        Raises:
            HeadgateError: it could not start, or failed.
        """
        listening = self._listening
        if not listening.done():
            return None
        coordinator = listening.result()
        return Lead(coordinator.rest_addresses, os.getpid(), coordinator.generation)

    def ended(self) -> JobOutcome | None:
        """Return how the job ended under this coordinator; None: it did not, or the coordinator failed."""
        return self._outcome

    def run_id(self) -> str:
        """The id of the run that this coordinator is for."""
        return self._run_id

    def credentials(self) -> str:
        """Return the token of the job: Ray has let the caller in."""
        return self._token

    def alive(self) -> bool:
        """Return False once the coordinator's thread has ended."""
        return self._thread.is_alive()
