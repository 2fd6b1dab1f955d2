"""A handle of a running job: its status, its end, and commands to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from ..errors import HeadgateError, JobError, JobNotFound, UsageError
from .cluster.launch import launch
from .control.job_client import (
    BEGUN,
    ENDED,
    FENCED,
    Connect,
    ConnectListener,
    EventListener,
    HungUp,
    JobClient,
    ask_once,
    watch,
)
from .coordinator.ending import outcome_of_end
from .finding import Where, connect_to_job, end_of_run
from .job_settings import absolute
from .plan import JobSpec
from .protocol.job_result import JobOutcome
from .submission import Submitted
from .task.concurrency import run_blocking

T = TypeVar("T")
GONE_MAX_S = 240.0
"""If no coordinator leads a job for this time, and its end is unknown, `wait` gives up.

Ray may take this long to make a coordinator's process again (`cluster/leaders.py`).
"""
LOOK_EVERY_S = 0.1
BEGIN_MAX_S = 60.0
"""A job that does not run by then is still asked, and refuses."""
STARTING = frozenset({"INITIALIZING", "RECONCILING"})
LAST_ANSWER_S = 1.0


class _Job(Protocol):
    """The job that a handle is of."""

    async def connect(self) -> JobClient:
        """Connect to its coordinator. Raises JobNotFound if no coordinator leads it."""
        ...

    async def outcome(self) -> JobOutcome | None:
        """Return how it ended; None: it has not, or its end is unknown."""
        ...

    async def over(self) -> None:
        """Wait until nothing of the job is left that could answer; perhaps for ever."""
        ...


class JobHandle:
    """A running job. All methods block, and may be called from scripts, notebooks and other threads.

    As a context manager it stops the job at the end of the block, with a final checkpoint; if the job
    has failed, that error is raised there.

    Attributes:
        name: of the job.
        run_id: names this run of it.
        log_file: where the process of a detached job logs; empty: it logs elsewhere.
    """

    def __init__(self, name: str, run_id: str, job: _Job, log_file: str = "") -> None:
        """For headgate's own modules: use `Job.start`, `headgate.submit` or `headgate.attach`."""
        self.name = name
        self.run_id = run_id
        self.log_file = log_file
        self._job = job
        self._ended: JobOutcome | None = None

    def __repr__(self) -> str:
        return f"JobHandle(name={self.name!r}, run_id={self.run_id!r})"

    def status(self) -> dict[str, Any]:
        """Return the job's own report: `status`, `parallelism`, `restarts`, `last_checkpoint` and more.

        For a job that has ended it is the end, with the names of `JobOutcome`.

        Raises:
            JobNotFound: the job does not run, and its end is unknown.
            HeadgateError: it cannot be asked from here.
        """
        return run_blocking(self._status())

    def checkpoint(self) -> int:
        """Take a checkpoint now, and wait until it is complete; returns its number.

        Raises:
            HeadgateError: it failed, or the job does not run.
        """
        return int(self._ask_running("checkpoint")["checkpoint"])

    def savepoint(
        self, directory: str | os.PathLike[str] | None = None, *, native: bool = False
    ) -> str:
        """Take a savepoint while the job goes on; returns its address.

        Args:
            directory: a new directory is made below it; None: the one of the option
                `execution.checkpointing.savepoint-dir`.
            native: keep the files of the state backend: faster, but only this backend reads them.

        Raises:
            HeadgateError: it failed, or the job does not run.
        """
        return str(
            self._ask_running("savepoint", savepoint=_target(directory), native=native)["savepoint"]
        )

    def stop(
        self, *, savepoint: str | os.PathLike[str] | None = None, drain: bool = False
    ) -> JobOutcome:
        """Stop the job with a final checkpoint, and wait for its end. Run it again to go on from there.

        Of a job that has ended already it returns the end; then nothing is saved.

        Args:
            savepoint: take a savepoint first, in a new directory below this one.
            drain: sources end as if their data had, and windows fire; not for a job that goes on later.

        Raises:
            HeadgateError: the job goes on, because the checkpoint failed.
            JobError: it has failed, before or on the way.
        """
        wanted = {} if savepoint is None else {"savepoint": _target(savepoint)}
        if not self._has_ended():
            self._ask_to_end("stop", drain=drain, native=False, **wanted)
        return self.wait()

    def cancel(self) -> JobOutcome:
        """End the job at once, without a checkpoint.

        Raises:
            JobError: it has failed before.
        """
        if not self._has_ended():
            self._ask_to_end("cancel")
        return self.wait()

    def rescale(self, parallelism: int) -> None:
        """Stop the job with a checkpoint, and go on at another parallelism at once.

        Raises:
            HeadgateError: it goes on as it was, or the job does not run.
        """
        self._ask_running("rescale", parallelism=parallelism)

    def wait(self, timeout: float | None = None) -> JobOutcome:
        """Wait until the job has ended, and return how. Takeovers on the way are followed.

        Args:
            timeout: the longest time to wait, in seconds; None: as long as it takes.

        Raises:
            TimeoutError: the job goes on.
            JobError: the job failed; or no coordinator leads it, and its end is unknown.
        """
        outcome = run_blocking(self._wait(timeout))
        if outcome.status == "FAILED":
            raise outcome.error or JobError(f"the job failed: {outcome.reason}")
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except JobError:
            if kind is None:  # else the error of the block is what the user has to see
                raise

    def _ask_running(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send a command that only a running job accepts; wait for a job that has only begun."""

        async def ask() -> dict[str, Any]:
            loop = asyncio.get_running_loop()
            until = loop.time() + BEGIN_MAX_S
            while loop.time() < until:
                status = await self._request("status", {})
                if status["status"] not in STARTING:
                    break
                await asyncio.sleep(LOOK_EVERY_S)
            return await self._request(verb, arguments)

        return run_blocking(ask())

    def _has_ended(self) -> bool:
        return bool(self._ended or run_blocking(self._job.outcome()))

    def _ask_to_end(self, verb: str, **arguments: Any) -> None:
        try:
            self._ask(verb, **arguments)
        except (HungUp, JobNotFound):
            # It may have ended meanwhile, and its process died before it could say so.
            if run_blocking(self._job.outcome()) is None:
                raise
        except JobError as error:
            if error.message != ENDED:
                raise  # it refuses; else it was ending already, and `wait` knows how

    def _ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return run_blocking(self._request(verb, arguments))

    async def _request(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._ended is not None:
            # The coordinator may still answer for a moment, and would refuse in other words.
            raise JobNotFound(ENDED)
        return await _while_there(self._job, ask_once(self._job.connect, verb, **arguments))

    async def _status(self) -> dict[str, Any]:
        outcome = self._ended or await self._job.outcome()
        if outcome is None:
            try:
                return await self._request("status", {})
            except (HungUp, JobNotFound):
                # It may have ended meanwhile, without an answer.
                outcome = await self._job.outcome()
                if outcome is None:
                    raise
        return {"name": self.name, **outcome.as_json()}

    async def _wait(self, timeout: float | None) -> JobOutcome:
        async with asyncio.timeout(timeout):
            self._ended = self._ended or await self._follow()
        return self._ended

    async def _follow(self) -> JobOutcome:
        loop = asyncio.get_running_loop()
        until = loop.time() + GONE_MAX_S
        while True:
            outcome = await self._job.outcome()
            if outcome is not None:
                return outcome
            try:
                client = await self._job.connect()
            except UsageError:
                raise
            except HeadgateError as error:
                if loop.time() > until:
                    raise JobError(
                        f"nobody leads the job, and nobody knows how it ended: {error.message}",
                        fix=error.fix,
                    ) from error
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            try:
                outcome = await _while_there(self._job, watch(client))
            except JobNotFound:
                continue
            finally:
                await client.close()
            until = loop.time() + GONE_MAX_S
            if outcome is not None and outcome.reason != FENCED:
                return outcome


async def _while_there(job: _Job, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`.

    Raises:
        JobNotFound: the job ended, and there is no coordinator left to answer.
    """
    loop = asyncio.get_running_loop()
    working, over = loop.create_task(work), loop.create_task(job.over())
    try:
        await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
        # The last answer may be on its way.
        done, _ = await asyncio.wait({working}, timeout=LAST_ANSWER_S)
        if not done:
            raise JobNotFound(ENDED)
        return working.result()
    finally:
        for task in (working, over):
            task.cancel()
        await asyncio.gather(working, over, return_exceptions=True)


def _target(directory: str | os.PathLike[str] | None) -> str:
    """Return a directory as an address for the job, which runs elsewhere; empty: that of the option."""
    text = "" if directory is None else os.fspath(directory)
    return absolute(text) if text else ""


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that lives by itself."""

    name: str
    run: str
    where: Where
    storage: Where
    """The place of its log; without one its end is unknown."""
    end: JobOutcome | None = None
    """The end of a run that had ended already."""

    async def connect(self) -> JobClient:
        """Connect to the coordinator that leads the job now."""
        return await connect_to_job(self.name, self.where)

    async def outcome(self) -> JobOutcome | None:
        """Return the end of this run by the job log."""
        if self.end is not None or not self.storage.storage or not self.run:
            return self.end
        try:
            end = await end_of_run(self.name, self.run, self.storage)
        except JobNotFound:
            return None
        return None if end is None else outcome_of_end(end)

    async def over(self) -> None:
        """Wait for ever: a process that ends hangs up."""
        await asyncio.Event().wait()


class ThreadJob:
    """A job in a thread of this process, with an event loop of its own."""

    def __init__(self, run: Callable[[ConnectListener], Coroutine[Any, Any, JobOutcome]]) -> None:
        """Starts the thread. `run` runs the job, and tells what connects to its coordinator."""
        self._changed = threading.Condition()
        self._connect: Connect | None = None
        self._outcome: JobOutcome | None = None
        self._error: BaseException | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._thread = threading.Thread(target=self._main, args=(run,), name="job", daemon=True)
        self._thread.start()

    def _main(self, run: Callable[..., Coroutine[Any, Any, JobOutcome]]) -> None:
        try:
            outcome = asyncio.run(run(self._listening))
        except BaseException as error:
            self._set(error=error)
        else:
            self._set(outcome=outcome)

    def _listening(self, connect: Connect) -> None:
        with self._changed:
            self._connect = connect
            self._changed.notify_all()

    def _set(self, outcome: JobOutcome | None = None, error: BaseException | None = None) -> None:
        with self._changed:
            self._outcome, self._error = outcome, error
            self._changed.notify_all()
            for loop, over in self._waiting:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and its waiter gone
                    loop.call_soon_threadsafe(over.set)
            self._waiting.clear()

    async def over(self) -> None:
        """Wait until the job has ended."""
        over = asyncio.Event()
        with self._changed:
            if self._outcome is None and self._error is None:
                self._waiting.append((asyncio.get_running_loop(), over))
            else:
                over.set()
        await over.wait()

    def begin(self) -> None:
        """Wait until the job has begun.

        Raises:
            HeadgateError: it could not.
        """
        with self._changed:
            self._changed.wait_for(self._known)
        self._raise()
        with contextlib.suppress(JobError):
            run_blocking(_while_there(self, self._begun()))
        self._raise()

    def _known(self) -> bool:
        return self._connect is not None or self._outcome is not None or self._error is not None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    async def _begun(self) -> None:
        """Wait until the coordinator has announced that the job is its own, or this job is over."""
        client = await self.connect()
        try:
            async for event in client.events():
                if event.kind in BEGUN:
                    return
        finally:
            await client.close()
        await self.over()

    async def connect(self) -> JobClient:
        """Connect to the job's coordinator."""
        if self._connect is None or self._outcome is not None or self._error is not None:
            raise JobNotFound(ENDED)
        return await self._connect()

    async def outcome(self) -> JobOutcome | None:
        """Return how it ended. Raises the error that ended it before it was over."""
        self._raise()
        return self._outcome


def start(spec: JobSpec, cluster: str, on_event: EventListener | None) -> JobHandle:
    """Run the job in a thread of this process.

    Raises:
        HeadgateError: the job could not begin.
    """

    def run(listening: ConnectListener) -> Coroutine[Any, Any, JobOutcome]:
        return launch(spec, cluster, on_event=on_event, on_listening=listening)

    job = ThreadJob(run)
    job.begin()
    return JobHandle(spec.name, spec.run, job)


def handle_of(spec: JobSpec, submitted: Submitted) -> JobHandle:
    """Return the handle of a job that was submitted."""
    storage = Where()
    if spec.checkpoint is not None:
        storage = Where(storage=spec.checkpoint.storage, options=spec.options)
    end = None if submitted.end is None else outcome_of_end(submitted.end)
    found = FoundJob(spec.name, spec.run, submitted.where, storage, end)
    return JobHandle(spec.name, spec.run, found, submitted.log_file)


def attach(
    name: str,
    *,
    storage: str | os.PathLike[str] | None = None,
    cluster: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> JobHandle:
    """A handle of a job that runs already.

    It is found by its storage, by its Ray cluster, or, with neither, on this machine.

    Args:
        name: of the job.
        storage: where its checkpoints are, as in `job.checkpoint(storage=...)`.
        cluster: the address of the Ray cluster it runs on.
        token_file: a file with the token of the job; for a job that is found by its storage.
        options: those of the storage, such as `s3.endpoint`.

    Raises:
        JobNotFound: no such job runs there.
        HeadgateError: it cannot be asked from here.
    """
    where = Where(
        storage="" if storage is None else os.fspath(storage),
        cluster=cluster or "",
        token_file="" if token_file is None else os.fspath(token_file),
        options=dict(options or {}),
    )
    log = Where(storage=where.storage, options=where.options)
    status = run_blocking(ask_once(partial(connect_to_job, name, where), "status"))
    return JobHandle(name, str(status.get("run", "")), FoundJob(name, status["run"], where, log))
