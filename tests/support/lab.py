"""Runs whole jobs in this event loop, with scripts that kill, stop and watch them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import pickle
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.errors import StorageError
from headgate.operators.clock import SystemClock
from headgate.runtime.cluster.launch import InProcessCluster, InProcessWorker
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.runtime.protocol.joblog import LogView
from headgate.runtime.storage.base import CheckpointStore, Created, Existed, StoreOpener
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import open_store
from headgate.tests.support.held import sources_held

DEADLINE_S = 240.0
"""Ends a test that hangs; no test is a matter of how fast the machine is."""
_stores = itertools.count()


class RunningJob:
    """A running job, with its events so far and the means to kill and stop parts of it."""

    def __init__(self, spec: Any, cluster: InProcessCluster, open_store: StoreOpener) -> None:
        self.spec = spec
        self.cluster = cluster
        self.events: list[PublishedEvent] = []
        self.over = asyncio.Event()
        """Set once the script has nothing more to do: sources do not end before that."""
        self._open_store = open_store
        self._news = asyncio.Event()
        self._seen = 0
        self.takeovers = 0
        self.begin()

    def begin(self) -> None:
        """Start a coordinator (the first, or the successor of one that crashed)."""
        self.coordinator = JobCoordinator(
            self.spec, cluster=self.cluster, clock=SystemClock(), open_store=self._open_store
        )
        self.coordinator.on_event = self._on_event
        self.task = asyncio.get_running_loop().create_task(self.coordinator.run())
        self.task.add_done_callback(lambda _: self._news.set())

    def _on_event(self, event: PublishedEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, kind: str, **body: Any) -> PublishedEvent:
        """Return the next event of this kind with these values that no earlier call has returned."""
        while True:
            while self._seen < len(self.events):
                event = self.events[self._seen]
                self._seen += 1
                if event.kind == kind and body.items() <= json.loads(event.body).items():
                    return event
            assert not self.task.done(), f"the job ended before {kind} {body}: {self.task}"
            self._news.clear()
            await self._news.wait()

    async def checkpoint(self) -> int:
        """Wait for the next completed checkpoint."""
        event = await self.until("checkpoint", status="COMPLETED")
        return int(json.loads(event.body)["id"])

    @property
    def completed(self) -> int:
        """The number of completed checkpoints."""
        return sum(
            json.loads(e.body)["status"] == "COMPLETED"
            for e in self.events
            if e.kind == "checkpoint"
        )

    def texts(self, kind: str) -> list[str]:
        """Return the texts of the events of a kind."""
        return [event.text for event in self.events if event.kind == kind]

    def live(self) -> list[InProcessWorker]:
        """Return the workers that have not died."""
        return [worker for worker in self.cluster.workers if worker.alive]

    def kill(self, rng: random.Random) -> str:
        """Kill a worker like a process, without any notice."""
        victim = rng.choice(self.live())
        victim.kill()
        return victim.worker_id

    async def tick(self) -> None:
        """Let the job run for a moment."""
        await asyncio.sleep(0.05)

    async def crash_coordinator(self) -> None:
        """End the coordinator without an end of the job, and start another on the same storage."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.takeovers += 1
        self.begin()

    def client(self) -> LocalClient:
        """Return a client of the current coordinator."""
        return LocalClient(self.coordinator.clients, asyncio.get_running_loop())

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send a request to the coordinator."""
        return await self.client().request(verb, **arguments)

    async def status(self) -> dict[str, Any]:
        return await self.request("status")


@dataclass
class Ran:
    """The result of a job that has ended."""

    outcome: JobOutcome
    job: RunningJob
    warnings: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return self.job.texts("failure")

    @property
    def restores(self) -> list[int]:
        """Return the ids of the checkpoints from which attempts started."""
        return [json.loads(e.body)["checkpoint"] for e in self.job.events if e.kind == "restored"]

    @property
    def completed(self) -> int:
        return self.job.completed


Script = Callable[[RunningJob], Awaitable[None]]


def stop_with_savepoint(
    directory: Path | str, taken: list[str], *, checkpoints: int = 1, **arguments: Any
) -> Script:
    """Return a script that stops a job with a savepoint after some checkpoints.

    Args:
        directory: the savepoint goes below it.
        taken: the address of the savepoint is added to this list.
        checkpoints: the number of checkpoints that are completed before.
        arguments: other arguments of the request.
    """

    async def script(job: RunningJob) -> None:
        for _ in range(checkpoints):
            await job.checkpoint()
        done = await job.request("stop", savepoint=str(directory), **arguments)
        taken.append(done["savepoint"])

    return script


class Lab:
    """The storage of one test, and the means to run jobs on it."""

    running = RunningJob
    held = staticmethod(sources_held)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = f"memory://integration-{next(_stores)}"
        self.loop_problems: list[dict[str, Any]] = []

    def objects(self, job: str) -> dict[str, bytes]:
        """Return the objects in the checkpoint store of a job."""
        return MemoryStore._shared.get(f"{self.storage.removeprefix('memory://')}/{job}", {})

    def state_files(self, job: str) -> set[str]:
        return {name for name in self.objects(job) if name.startswith("chk/")}

    def run(
        self,
        job: hg.Job,
        script: Script | None = None,
        *,
        slots_per_worker: int = 1,
        opener: StoreOpener = open_store,
        fresh: bool = False,
        allow_non_restored_state: bool = False,
        restore_from: str | None = None,
        claim: bool = False,
        unix: bool = False,
        batches: int | None = None,
    ) -> Ran:
        """Run `job` to its end, together with `script`.

        Until the script is over, or says so by `over`, no source ends; and each reader gives at most
        `batches` batches in that time, for scripts that stop a job in the middle of its data.
        """
        spec = replace(
            runnable(job).spec(
                fresh=fresh,
                allow_non_restored_state=allow_non_restored_state,
                restore_from=restore_from,
                claim=claim,
            ),
            slots_per_worker=slots_per_worker,
        )

        async def main() -> Ran:
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: self.loop_problems.append(context)
            )
            async with asyncio.timeout(DEADLINE_S):
                running = self.begin(spec, opener, str(self.path) if unix else None)
                return await self._main(running, script, batches)

        ran = asyncio.run(main())
        gc.collect()
        assert not self.loop_problems, self.loop_problems
        return ran

    def begin(self, spec: Any, opener: StoreOpener, unix_dir: str | None) -> RunningJob:
        """Return a job that has just begun."""
        cluster = InProcessCluster(clock=SystemClock(), open_store=opener, unix_dir=unix_dir)
        return RunningJob(spec, cluster, opener)

    async def _main(self, job: RunningJob, script: Script | None, batches: int | None) -> Ran:
        try:
            with sources_held(job.over, batches):
                if script is not None:
                    await script(job)
                job.over.set()
                outcome = await job.task
            await job.coordinator.close()
        finally:
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
            await job.cluster.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        return Ran(outcome, job)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    for root in [
        r for r in MemoryStore._shared if r.startswith(lab.storage.removeprefix("memory://"))
    ]:
        MemoryStore.forget(root)


class Faults:
    """Ready-made scripts."""

    @staticmethod
    def none(checkpoints: int) -> Script:
        """Only wait until this number of checkpoints has completed."""

        async def script(job: RunningJob) -> None:
            while job.completed < checkpoints:
                await job.checkpoint()

        return script

    @staticmethod
    def kills(seed: int, count: int) -> Script:
        """After each of `count` completed checkpoints kill a random worker at a random moment."""

        async def script(job: RunningJob) -> None:
            rng = random.Random(seed)
            for _ in range(count):
                await job.checkpoint()
                await asyncio.sleep(
                    rng.uniform(0, 0.03)
                )  # a random moment, not a wait for something
                job.kill(rng)
                await job.until("status", status="RUNNING")

        return script

    @staticmethod
    def takeovers(count: int) -> Script:
        """After each of `count` completed checkpoints the coordinator crashes."""

        async def script(job: RunningJob) -> None:
            for _ in range(count):
                await job.checkpoint()
                await job.crash_coordinator()
                await job.until("status", status="RUNNING")

        return script


@pytest.fixture
def faults() -> type[Faults]:
    return Faults


def raise_once(path: str, record: Any, marked: Any) -> Any:
    """Pass `record` on; the first time it equals `marked`, raise. `path` remembers, across processes."""
    if record == marked:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return record
        raise ValueError(f"the marked record {record!r}")
    return record


@pytest.fixture
def raising() -> Callable[[str, Any, Any], Any]:
    return raise_once


def portions(path: Path) -> dict[int, list[Any]]:
    """Return the records of a `collect(path=...)` sink by subtask, in the order of writing."""
    found: dict[int, list[Any]] = {}
    for file in sorted(path.glob("*.pickle")):
        _, subtask, _ = file.stem.split("-")
        found.setdefault(int(subtask), []).extend(pickle.loads(file.read_bytes()))
    return found


@pytest.fixture
def by_subtask() -> Callable[[Path], dict[int, list[Any]]]:
    return portions


class Trouble:
    """Makes the calls of checkpoint stores fail: `fail["write_file"] = 2` breaks the next two."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.fail_after: dict[str, int] = {}
        self.only = ""
        self.calls: list[tuple[str, str]] = []
        self.held: dict[str, asyncio.Event] = {}
        self.waiting: dict[str, asyncio.Event] = {}

    def hold(self, call: str) -> None:
        """Make calls of this kind wait until `release`; `read` are those of files and of parts of them."""
        self.held[call] = asyncio.Event()
        self.waiting[call] = asyncio.Event()

    def release(self, call: str) -> None:
        self.held.pop(call).set()

    async def before(self, call: str, name: str) -> None:
        self.calls.append((call, name))
        for kind in (call, "read") if call.startswith("read_") else (call,):
            if kind in self.held and self.only in name:
                self.waiting[kind].set()
                await self.held[kind].wait()
        self._fail(self.fail, call, name)

    def after(self, call: str, name: str) -> None:
        self._fail(self.fail_after, call, name)

    def _fail(self, counts: dict[str, int], call: str, name: str) -> None:
        if counts.get(call, 0) > 0 and self.only in name:
            counts[call] -= 1
            raise StorageError(f"injected call=`{call}` name=`{name}`")

    def open(self, uri: str, job_name: str, options: Any) -> CheckpointStore:
        """Open the store."""
        return TroubledStore(f"{uri.removeprefix('memory://')}/{job_name}", self)


class TroubledStore(MemoryStore):
    """A store in memory that has trouble."""

    def __init__(self, root: str, trouble: Trouble) -> None:
        super().__init__(root)
        self._trouble = trouble

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        await self._trouble.before("create_if_absent", name)
        result = await super().create_if_absent(name, data)
        self._trouble.after("create_if_absent", name)
        return result

    async def write_file(self, name: str, data: bytes | memoryview) -> None:
        await self._trouble.before("write_file", name)
        await super().write_file(name, data)
        await asyncio.sleep(0)
        self._trouble.after("write_file", name)

    async def read_file(self, name: str) -> bytes:
        await self._trouble.before("read_file", name)
        return await super().read_file(name)

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        await self._trouble.before("read_range", name)
        return await super().read_range(name, start, length)

    async def delete_files(self, names: Any) -> None:
        for name in names:
            await self._trouble.before("delete_files", name)
        await super().delete_files(names)


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


def read_log(lab: Lab, job: str) -> LogView:
    """Return the content of the job log of a job."""
    store = MemoryStore(f"{lab.storage.removeprefix('memory://')}/{job}")
    return asyncio.run(JobLog(store, "reader", SystemClock()).load())


@pytest.fixture
def retained(lab: Lab) -> Callable[[str], LogView]:
    return lambda job: read_log(lab, job)
