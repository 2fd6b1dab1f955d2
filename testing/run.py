"""Runs a job on virtual time: coordinator, worker and subtasks in one event loop, a step at a time.

If the job hangs, the error names what its tasks wait for. A `Playback` lets the job live through the
history of its world, and once more after a crash.
"""

from __future__ import annotations

import asyncio
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Final

from ..errors import HeadgateError, JobError
from ..operators.elements import Batch
from ..runtime.cluster.launch import InProcessCluster
from ..runtime.control.job_client import PublishedEvent
from ..runtime.coordinator.clients import LocalClient
from ..runtime.coordinator.job import JobCoordinator
from ..runtime.plan import JobSpec
from ..runtime.protocol.job_result import JobOutcome
from ..runtime.storage.base import CheckpointStore
from ..runtime.storage.memory import MemoryStore
from .loop import VirtualClock, VirtualLoop
from .world import Advance, EndOfRecords, HistoryEntry, Push, SourceBox, World

# --- what tasks wait for ---------------------------------------------------------------------------


TASKS_SHOWN: Final = 8
"""The number of tasks that are named. Those that wait in the user's code come first."""
_OURS: Final = str(Path(__file__).parent.parent)
_FRAMEWORK: Final = (str(Path(asyncio.__file__).parent),)
_ROOMS: Final = ("api", "operators", "state", "connectors", "runtime", "testing")


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Return one line per waiting task: its name, and the line of code at which it waits."""
    found = [_describe(task) for task in asyncio.all_tasks(loop)]
    lines = [text for _, text in sorted(found)]
    more = len(lines) - TASKS_SHOWN
    shown = lines[:TASKS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return "\n  ".join(shown) or "nothing"


def _describe(task: asyncio.Task[Any]) -> tuple[tuple[int, str], str]:
    """Return the line of the user's code if the task waits in it, otherwise the innermost line of
    headgate.
    """
    places = list(_places(task.get_coro()))
    users = [place for place in places if _is_users(place[0])]
    own = [place for place in places if not place[0].co_filename.startswith(_FRAMEWORK)]
    name = task.get_name()
    for rank, chosen in enumerate((users, own)):
        if chosen:
            code, line = chosen[-1]
            text = linecache.getline(code.co_filename, line).strip()
            return (rank, name), f"{name}: {code.co_filename}:{line}  {text}".rstrip()
    return (2, name), name


def _places(awaited: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield code and line of the coroutines, from the outermost to the innermost."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)


def _is_users(code: CodeType) -> bool:
    path = code.co_filename
    if path.startswith(_FRAMEWORK):
        return False
    # By room: tests and examples of this project lie in the same tree and are users.
    rest = Path(path).relative_to(_OURS).parts if path.startswith(_OURS) else ()
    return not rest or rest[0] not in _ROOMS


# --- the run ---------------------------------------------------------------------------------------


END_MAX_S: Final = 3_600.0
"""Virtual time a job gets to finish once its data has ended, and to go down when it is closed."""
_PERIODIC: Final = frozenset({"heartbeat", "heartbeats", "progress"})
"""Tasks that only watch. Without them a virtual day takes only milliseconds."""


class VirtualRun:
    """One job under way. Every method returns when there is nothing left to do at this moment."""

    def __init__(self, spec: JobSpec, seed: int) -> None:
        self._spec = spec
        self._loop = VirtualLoop(seed)
        self.clock = VirtualClock(self._loop)
        self._objects: dict[str, bytes] = {}
        self._running = False
        self._failing = False
        self._begin()

    def _begin(self) -> None:
        """Start a coordinator: the first, or the successor of one that crashed."""
        self._running = self._failing = False
        self._cluster = InProcessCluster(clock=self.clock, open_store=self._open_store)
        self._coordinator = JobCoordinator(
            self._spec, cluster=self._cluster, clock=self.clock, open_store=self._open_store
        )
        self._coordinator.on_event = self._on_event
        self._job = self._loop.create_task(self._coordinator.run(), name="coordinator")

    def _open_store(self, uri: str, job_name: str, options: Mapping[str, str]) -> CheckpointStore:
        return MemoryStore(uri, self._objects)

    def _on_event(self, event: PublishedEvent) -> None:
        self._running |= event.kind == "status" and event.text.endswith("is RUNNING")
        self._failing |= event.kind == "failure"

    # -- steps --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run until the job has started.

        Raises:
            HeadgateError: the job cannot start.
        """
        self.settle()
        if not self._running:
            raise self._hung("the job does not start")
        for task in asyncio.all_tasks(self._loop):
            if task.get_name() in _PERIODIC:
                task.cancel()

    def soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the event loop with the next step."""
        self._loop.call_soon(call)

    def settle(self) -> None:
        """Run until everything is at rest at the present moment.

        Raises:
            HeadgateError: the job failed.
        """
        self._loop.drive()
        self._raise_failure()

    def advance(self, by_ms: int) -> None:
        """Let time pass.

        Raises:
            HeadgateError: the job failed.
        """
        self._loop.drive(self._loop.time() + by_ms / 1000)
        self._raise_failure()

    def finish(self) -> None:
        """Let time pass until the job has ended by itself.

        Raises:
            HeadgateError: the job failed, or does not end.
        """
        self._drive_until(self._job)
        self._raise_failure()
        if not self._job.done():
            raise self._hung("the job does not end, though its data has")

    def request(self, verb: str, what: str, **arguments: Any) -> dict[str, Any]:
        """Send a request to the coordinator, and return its answer.

        Raises:
            HeadgateError: the coordinator refused, or the job failed.
        """
        asking = self._loop.create_task(self._ask(verb, arguments), name=f"harness {verb}")
        self._loop.drive()
        self._raise_failure()
        if asking.done():
            return asking.result()
        error = self._hung(
            f"{what} does not complete without time passing",
            "let it pass first, if something waits for a timer: h.advance_time(...)",
        )
        asking.cancel()
        self._loop.drive()
        raise error

    async def _ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        client = LocalClient(self._coordinator.clients, self._loop)
        return await client.request(verb, **arguments)

    def crash(self) -> None:
        """Lose everything in memory, and start a new coordinator on the content of the store.

        Raises:
            HeadgateError: the job cannot begin again.
        """
        self._go_down()
        self._begin()
        self.start()

    def close(self) -> None:
        """End everything. Safe in any state."""
        try:
            self._go_down()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.drive()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    @property
    def ended(self) -> bool:
        """True once the job is over."""
        return self._job.done()

    # -- inside -------------------------------------------------------------------------------------

    def _go_down(self) -> None:
        self._job.cancel()
        down = self._loop.create_task(self._down(), name="harness down")
        self._drive_until(down)
        down.result()

    async def _down(self) -> None:
        await asyncio.gather(self._job, return_exceptions=True)
        await self._coordinator.close()
        await self._cluster.close()

    def _drive_until(self, task: asyncio.Task[Any]) -> None:
        """Let time pass, at most `END_MAX_S`, until `task` is done and everything at rest."""
        if not task.done():

            def stop(_: asyncio.Task[Any]) -> None:
                self._loop.stop()

            task.add_done_callback(stop)
            self._loop.drive(self._loop.time() + END_MAX_S)
            task.remove_done_callback(stop)  # otherwise it would cut a later drive short
        self._loop.drive()

    def _raise_failure(self) -> None:
        if self._failing and not self._job.done():
            self._drive_until(self._job)
        if not self._job.done():
            return
        error = self._job.exception() or _error_of(self._job.result())
        if error is not None:
            raise error

    def _hung(self, problem: str, fix: str = "") -> JobError:
        return JobError(f"{problem}; it waits for\n  {waiting_tasks(self._loop)}", fix=fix)


def _error_of(outcome: JobOutcome) -> HeadgateError | None:
    """Return the error of a job that failed, with its traceback in the job."""
    error = outcome.error
    if error is None and outcome.status == "FAILED":
        error = JobError(f"the job failed: {outcome.reason}")
    detail = getattr(error, "detail", "")
    if error is not None and detail and detail not in getattr(error, "__notes__", ()):
        error.add_note(detail)
    return error


# --- the history of the world ----------------------------------------------------------------------


class Playback:
    """Adds to the history of a world, one entry at a time; the job comes to rest after each."""

    def __init__(self, world: World, run: VirtualRun) -> None:
        self._world = world
        self._run = run

    def push(self, box: SourceBox, batches: Sequence[Batch]) -> None:
        """Let a source produce these batches, all in one subtask."""
        if batches:
            split = box.next_split()
            log = box.logs.setdefault(split, [])
            for batch in batches:
                self._world.history.append(Push(box.name, split, len(log)))
                log.append((len(self._world.history) - 1, batch))
        self._release(len(self._world.history))

    def advance(self, box: SourceBox, timestamp: int) -> None:
        """Let the event time of a source advance to `timestamp`."""
        box.watermark = timestamp
        self._world.history.append(Advance(box.name, timestamp))
        self._declare(box, timestamp)

    def end(self, box: SourceBox) -> None:
        """End the data of a source."""
        box.closed = box.ended = True
        self._world.history.append(EndOfRecords(box.name))
        self._release(len(self._world.history))

    def catch_up(self) -> None:
        """Run the timers that became due while time passed and were put off."""
        for step in self._world.event_time_steps(sorted(self._world.steps)):
            self._run.soon(step.catch_up)
        self._run.settle()

    def replay(self) -> None:
        """Let a new attempt go through the events that its state does not contain, in their order."""
        declared: dict[str, int] = {}
        for place, entry in enumerate(self._world.history):
            if isinstance(entry, Advance):
                declared[entry.source] = (
                    entry.timestamp
                )  # only the last one before a record matters
            elif self._is_news(entry):
                self._declare_all(declared)
                if isinstance(entry, EndOfRecords):
                    self._world.sources[entry.source].ended = True
                self._release(place + 1)
        self._declare_all(declared)
        self._release(len(self._world.history))

    def _is_news(self, entry: HistoryEntry) -> bool:
        if isinstance(entry, Push):
            return self._world.sources[entry.source].is_unread(entry)
        return isinstance(entry, EndOfRecords)

    def _release(self, until: int) -> None:
        """Let the readers see history up to entry `until`."""
        self._world.released = until
        for box in self._world.sources.values():
            box.wake()
        self._run.settle()

    def _declare(self, box: SourceBox, timestamp: int) -> None:
        for step in self._world.event_time_steps(box.event_time_steps):
            self._run.soon(partial(step.declare, timestamp))
        self._run.settle()

    def _declare_all(self, declared: dict[str, int]) -> None:
        for source, timestamp in declared.items():
            self._declare(self._world.sources[source], timestamp)
        declared.clear()
