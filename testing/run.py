"""Runs a job on virtual time: coordinator, worker and subtasks in one event loop, a step at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import HeadgateError, JobError
from ..runtime.cluster.inprocess import InProcessCluster
from ..runtime.control.job_client import Event
from ..runtime.coordinator.clients import LocalClient
from ..runtime.coordinator.job import JobCoordinator
from ..runtime.job_spec import JobSpec
from ..runtime.protocol.job_result import JobOutcome
from ..runtime.storage.base import CheckpointStore
from ..runtime.storage.memory import MemoryStore
from .loop import VirtualClock, VirtualLoop
from .waiting import waiting_tasks

END_MAX_S: Final = 3_600.0
"""Virtual time a job gets to finish once its data has ended, and to go down when it is closed."""
_PERIODIC: Final = frozenset({"heartbeat", "heartbeats", "progress"})
"""Tasks that only watch: a day that passes without them is a matter of milliseconds."""


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

    def _on_event(self, event: Event) -> None:
        self._running |= event.kind == "status" and event.text.endswith("is RUNNING")
        self._failing |= event.kind == "failure"

    # -- steps --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Until the job runs.

        Raises:
            HeadgateError: it cannot.
        """
        self.settle()
        if not self._running:
            raise self._hung("the job does not start")
        for task in asyncio.all_tasks(self._loop):
            if task.get_name() in _PERIODIC:
                task.cancel()

    def soon(self, call: Callable[[], None]) -> None:
        """Have `call` run in the event loop, with the next step."""
        self._loop.call_soon(call)

    def settle(self) -> None:
        """Until everything under way has come to rest, at the present moment.

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
            HeadgateError: it failed, or does not end.
        """
        self._drive_until(self._job)
        self._raise_failure()
        if not self._job.done():
            raise self._hung("the job does not end, though its data has")

    def request(self, verb: str, what: str, **arguments: Any) -> dict[str, Any]:
        """Ask the coordinator for something.

        Raises:
            HeadgateError: it refused, or the job failed.
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
        """Everything in memory is lost; a new coordinator begins with what the store has.

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
            task.remove_done_callback(stop)  # or it would cut a later drive short
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
    """The error of a job that failed, with the traceback it had in the job."""
    error = outcome.error
    if error is None and outcome.status == "FAILED":
        error = JobError(f"the job failed: {outcome.reason}")
    detail = getattr(error, "detail", "")
    if error is not None and detail and detail not in getattr(error, "__notes__", ()):
        error.add_note(detail)
    return error
