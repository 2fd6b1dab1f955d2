"""Job: what users write, check, explain and run; and how a run ends by Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from ..api.written_job import WrittenJob, definition_of
from ..errors import HeadgateError, InternalError, JobError, UsageError
from .control.interrupts import Interrupts
from .control.job_client import WARNINGS, EventListener, PublishedEvent
from .explain import describe_node, explain_plan
from .job_checks import sources_without_replay
from .job_spec import JobSpec
from .plan_svg import svg_plan
from .protocol.job_result import JobOutcome
from .runnable_job import RunnableJob, cause_of

if TYPE_CHECKING:
    from .handle import JobHandle

_log = logging.getLogger("headgate.run")
F = TypeVar("F", bound=Callable[..., Any])


class HowToRun(TypedDict, total=False):
    """The arguments of `Job.run` that say how a run begins; it documents them."""

    fresh: bool
    allow_non_restored_state: bool
    restore_from: str | os.PathLike[str] | None
    claim: bool
    take_over: bool
    if_exists: Literal["error", "append", "overwrite"] | None
    run_id: str | None


def _shows_how_to_run(function: F) -> F:
    """Show the arguments of `HowToRun` one by one, as those of `run`, where Python is asked for them."""
    own = inspect.signature(function)
    fixed = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    asked = inspect.signature(RunnableJob.spec).parameters.values()
    how = [each for each in asked if each.kind is each.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*fixed, *how])  # type: ignore[attr-defined]
    return function


class Job(WrittenJob):
    """A job: build it with `read`, the methods of the streams and `write`, then `run` it."""

    _definition_class = RunnableJob

    def run(
        self,
        *,
        cluster: str = "in-process",
        fresh: bool = False,
        allow_non_restored_state: bool = False,
        restore_from: str | os.PathLike[str] | None = None,
        claim: bool = False,
        take_over: bool = False,
        if_exists: Literal["error", "append", "overwrite"] | None = None,
        run_id: str | None = None,
    ) -> JobOutcome:
        """Run the job to its end, in this process or on a cluster, and return how it ended.

        It resumes from its newest checkpoint if there is one, unless the run before had finished. In batch
        mode (`execution.runtime-mode`) it runs on Spark instead, from the beginning, whatever the cluster.

        In the main thread Ctrl-C stops the job with a final checkpoint, and this returns; a second one
        cancels the job at once, and this raises KeyboardInterrupt. SIGTERM counts as one Ctrl-C.

        Args:
            cluster: `in-process`, `local` (an embedded Ray), or the address of a Ray cluster.
            fresh: start without the state of earlier runs.
            allow_non_restored_state: drop checkpointed state that no operator claims any more.
            restore_from: begin a new run with this savepoint, or with the newest checkpoint in this
                directory of a job's checkpoints (number 7 with `@7` behind it).
            claim: delete that savepoint once the run has a checkpoint of its own.
            take_over: end another run of the job that still goes on, and go on from its newest checkpoint.
                Without it such a run is left alone, and this one is refused.
            if_exists: what happens when the run starts without state, and its file sinks hold output of
                earlier runs: refuse to start (`error`), write beside it (`append`), or replace it once the
                run has committed its own (`overwrite`). None: what each sink says.
            run_id: names this run, for a supervisor that starts it again: another start with the same id
                goes on with the run, and is never a second one; SIGTERM leaves the run to that, with a
                checkpoint and status `HANDED_OVER`. None: a new run.

        Raises:
            UsageError: the job is wrong as written, it runs already, output of earlier runs is in the way,
                or an event loop runs in this thread; nothing was started.
            JobError: the job failed, and restarting did not help.
        """
        if _in_event_loop():
            raise UsageError(
                "job.run() was called where an event loop runs, as in a notebook",
                fix="write `await job.run_async(...)`, or `handle = job.start(...)` to do something else "
                "while the job runs",
            )
        try:
            spec = checked_spec(
                self,
                fresh=fresh,
                allow_non_restored_state=allow_non_restored_state,
                restore_from=restore_from,
                claim=claim,
                take_over=take_over,
                if_exists=if_exists,
                run_id=run_id,
            )
            if runnable(self).as_batch:
                from .batch.run import run_batch

                return _succeeded(run_batch(spec))

            return _succeeded(run_in_foreground(spec, cluster, _on_event(cluster)))
        except HeadgateError as error:
            raise _bare(error) from cause_of(error)

    @_shows_how_to_run
    async def run_async(
        self,
        *,
        cluster: str = "in-process",
        **how: Unpack[HowToRun],
    ) -> JobOutcome:
        """`run` for an event loop that runs already, as in a notebook: `await job.run_async()`.

        Cancelling the task that awaits it ends the job at once, as a crash would. The arguments and errors
        are those of `run`.
        """
        try:
            spec = checked_spec(self, **how)
            if runnable(self).as_batch:
                from .batch.run import run_batch

                return _succeeded(await asyncio.to_thread(run_batch, spec))
            from .cluster.launch import launch

            return _succeeded(await launch(spec, cluster, on_event=_on_event(cluster)))
        except HeadgateError as error:
            raise _bare(error) from cause_of(error)

    @_shows_how_to_run
    def start(
        self,
        *,
        cluster: str = "in-process",
        **how: Unpack[HowToRun],
    ) -> JobHandle:
        """Start the job beside what this program does next; returns its handle once it has begun.

        The job lives in this process, and goes with it: `wait` for it, or `stop` it, before the program
        ends. `headgate.submit` starts one that lives by itself. The arguments are those of `run`.

        Raises:
            UsageError: as `run`, also if the job is a batch.
            HeadgateError: the job could not begin.
        """
        from .handle import start

        try:
            spec = checked_spec(self, **how)
            if runnable(self).as_batch:
                raise UsageError("a batch has no handle", fix="run it: job.run()")
            return start(spec, cluster, _on_event(cluster))
        except HeadgateError as error:
            raise _bare(error) from cause_of(error)

    def explain(self) -> str:
        """The logical and the physical graph, chains, key groups and guarantees, as text.

        Of a job that runs as a batch: Spark's plan, for which Spark is started.

        Raises:
            UsageError: the job is wrong as written.
        """
        try:
            spec = runnable(self).spec()
        except UsageError as error:
            raise error.with_traceback(None) from error.__cause__
        if not runnable(self).as_batch:
            return explain_plan(spec)
        from .batch.run import explain_batch

        return explain_batch(spec)

    def __repr__(self) -> str:
        """The steps as they are written so far; `explain` says how they will run."""
        definition = definition_of(self)
        checkpoint = definition.checkpoint_settings
        stores = f"checkpoints in {checkpoint.storage}" if checkpoint else "no checkpoints"
        head = f"Job {self.name}: parallelism {self.parallelism}, {stores}"
        steps = [f"  {describe_node(node)}" for node in definition.graph.nodes]
        return "\n".join([head, *(steps or ["  no steps yet"])])

    def _repr_html_(self) -> str:
        """The plan as a drawing, which notebooks show; as text while the job cannot run yet."""
        try:
            spec = runnable(self).spec()
        except UsageError as error:
            text = f"{self!r}\n\nit cannot run yet: {error}"
            return f"<pre>{escape(text)}</pre>"
        return f'<div style="overflow-x: auto">{svg_plan(spec)}</div>'


def runnable(job: Job) -> RunnableJob:
    """The inside of a job, for headgate's own modules: its definition, plan and specification."""
    definition = definition_of(job)
    assert isinstance(definition, RunnableJob)
    return definition


def checked_spec(job: Job, **how: Unpack[HowToRun]) -> JobSpec:
    """A job as it is handed to a coordinator, for all ways to run it.

    Raises:
        UsageError: the job is wrong as written.
    """
    spec = runnable(job).spec(**how)
    for text in sources_without_replay(spec.graph):
        _log.warning("%s", text)
    return spec


@_shows_how_to_run
def submit(
    job: Job,
    *,
    cluster: str = "local",
    log_file: str | os.PathLike[str] | None = None,
    **how: Unpack[HowToRun],
) -> JobHandle:
    """Start a job that lives by itself: it goes on when this process ends. Returns once it has begun.

    On this machine it is a process of its own; on a Ray cluster it is a detached actor. With a `run_id`
    that was submitted before, nothing is started if that run goes on or has ended, and the handle is of
    that one. If its coordinator died, the run goes on.

    Args:
        job: what to run.
        cluster: `local` (a Ray of its own), `in-process` (one process), or the address of a Ray cluster.
        log_file: where the process of the job logs; None: a new file below the user's state directory.
        fresh, allow_non_restored_state, restore_from, claim, take_over, if_exists, run_id: as in `Job.run`.

    Raises:
        UsageError: the job is wrong as written, or it runs already; nothing was started.
        HeadgateError: the job could not begin.
    """
    from .handle import handle_of
    from .submission import submit_spec

    try:
        spec = checked_spec(job, **how)
        if runnable(job).as_batch:
            raise UsageError("a batch cannot be detached", fix="run it: job.run()")
        path = None if log_file is None else Path(log_file)
        return handle_of(spec, submit_spec(spec, cluster, log_file=path))
    except HeadgateError as error:
        raise _bare(error) from cause_of(error)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _bare(error: HeadgateError) -> HeadgateError:
    """The error without headgate's own frames, unless it is a bug."""
    return error if isinstance(error, InternalError) else error.with_traceback(None)


def _succeeded(outcome: JobOutcome) -> JobOutcome:
    """The outcome of a job that did not fail."""
    if outcome.status == "FAILED":
        raise outcome.error or JobError(f"the job failed: {outcome.reason}")
    return outcome


def _on_event(cluster: str) -> EventListener | None:
    """In this process the coordinator's own log says it all."""
    return None if cluster == "in-process" else _log_event


def _log_event(event: PublishedEvent) -> None:
    """A job on a cluster runs in other processes: what it announces goes to the log of this one."""
    if event.kind not in ("progress", "ended"):
        level = logging.WARNING if event.kind in WARNINGS else logging.INFO
        _log.log(level, "%s", event.text)


def run_in_foreground(spec: JobSpec, cluster: str, on_event: EventListener | None) -> JobOutcome:
    """Run the job. Ctrl-C and SIGTERM stop it with a final checkpoint, unless the program handles them.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C a second time, or before the job had begun.
        HeadgateError: as `launch` raises it.
    """
    from .cluster.launch import launch

    if not _signals_are_free():
        return asyncio.run(launch(spec, cluster, on_event=on_event))
    outcome = asyncio.run(_run_in_foreground(spec, cluster, on_event))
    if outcome is None:
        raise KeyboardInterrupt
    return outcome


def _signals_are_free() -> bool:
    """True in the main thread of a program that has set no handlers of its own."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )


async def _run_in_foreground(
    spec: JobSpec, cluster: str, on_event: EventListener | None
) -> JobOutcome | None:
    """How the job ended; None: the user wanted it to end at once."""
    from .cluster.launch import launch

    interrupts = Interrupts(
        _say, checkpoints=spec.checkpoint is not None, hands_over=spec.outside_run
    )
    with interrupts:
        try:
            outcome = await launch(
                spec,
                cluster,
                on_event=on_event,
                on_listening=interrupts.listening,
                on_connected=interrupts.connected,
            )
        except asyncio.CancelledError:
            if not interrupts.cancelled:
                raise
            return None
    return None if interrupts.cancelled and outcome.status == "CANCELED" else outcome


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
