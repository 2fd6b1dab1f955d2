"""Job: what users write, check, explain and run; and how a run ends by Ctrl-C and SIGTERM.

`Job` is the public face. Inside it is a `RunnableJob`: the definition of the job with its options taken
into account, ready for a coordinator.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, Unpack

from ..api.job_definition import JobDefinition, WrittenJob, definition_of
from ..api.node_output import NodeOutput
from ..errors import (
    HeadgateError,
    InternalError,
    JobError,
    PlanError,
    UsageError,
    UserCodeError,
    UserTraceback,
)
from ..operators.durations import format_duration
from ..operators.graph import Graph
from ..operators.origin import Origin
from ..operators.signatures import signature_with
from ..operators.sink import IfExistsLike, parse_if_exists
from .control.interrupts import Interrupts
from .control.job_client import WARNINGS, EventListener, PublishedEvent
from .explain import describe_node, explain_plan
from .job_checks import (
    batch_problems,
    check_pickles,
    missing_packages,
    runs_as_batch,
    sinks_that_cannot_wait,
    sinks_without_alignment,
    sources_without_checkpoints,
    sources_without_replay,
    steps_apart_from_source,
)
from .job_settings import absolute, checkpoint_rules, checkpoint_settings, restart_settings
from .options.execution import (
    CHAINING,
    MAX_PARALLELISM,
    PARALLELISM,
    RUNTIME_MODE,
    WORKER_SLOTS,
)
from .options.registry import Options, current_key
from .options.state import (
    CHECKPOINT_MODE,
    RECOVERY_CLAIM_MODE,
    RECOVERY_IGNORE_UNCLAIMED,
    RECOVERY_PATH,
    SAVEPOINT_DIR,
)
from .plan import JobSpec, make_plan
from .plan_svg import svg_plan
from .protocol.job_result import JobOutcome
from .shipping import unshippable

if TYPE_CHECKING:
    from .handle import JobHandle

_log = logging.getLogger("headgate.run")
RUN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
F = TypeVar("F", bound=Callable[..., Any])


class RunnableJob(JobDefinition):
    """A definition that can be checked as a whole, previewed, and handed to a coordinator."""

    def override(self, options: Mapping[str, str]) -> None:
        """Put `options`, under their current keys, in the place of the job's own."""
        kept = {key: text for key, text in self.options.items() if current_key(key) not in options}
        self.options = {**kept, **options}

    def problems(self) -> Iterator[PlanError]:
        """Every reason why the job cannot run as a whole, with its options taken into account."""
        options = self._apply_options()
        yield from super().problems()
        storage = None if self.checkpoint_settings is None else self.checkpoint_settings.storage
        yield from missing_packages(self.graph, options, storage, self.as_batch)
        yield from unshippable(self.graph)
        yield from steps_apart_from_source(self.graph)
        if self.as_batch:
            yield from batch_problems(self.graph)
            return
        if options.get(CHECKPOINT_MODE) != "EXACTLY_ONCE":
            yield from sinks_without_alignment(self.graph)
        rules = checkpoint_rules(self.checkpoint_settings, options)
        yield from sinks_that_cannot_wait(self.graph, rules)
        yield from sources_without_checkpoints(self.graph, rules)

    def _apply_options(self) -> Options:
        """Check the options, and put those explicitly set in the place of what the program says."""
        options = Options(self.options)
        if options.is_set(PARALLELISM):
            self.parallelism = options.get(PARALLELISM)
        if options.is_set(MAX_PARALLELISM):
            self.max_parallelism = options.get(MAX_PARALLELISM)
        self.checkpoint_settings = checkpoint_settings(self.checkpoint_settings, options)
        checkpoint_rules(self.checkpoint_settings, options)  # raises here, and not on the cluster
        self.as_batch = runs_as_batch(self.graph, options)
        return options

    def _check_run_id(self, run_id: str) -> None:
        if not RUN_ID.fullmatch(run_id):
            raise UsageError(
                f"not a run id run id=`{run_id[:200]}`",
                fix="write 1 to 128 letters, digits, `.`, `_`, `:` and `-`, such as a uid and a revision",
            )
        if self.as_batch or self.checkpoint_settings is None:
            raise UsageError(
                "a run id needs checkpoints: without a job log nobody can tell a restart from a second run",
                fix="give the job checkpoint storage, or leave the run id out",
            )

    def spec(
        self,
        *,
        fresh: bool = False,
        allow_non_restored_state: bool = False,
        restore_from: str | os.PathLike[str] | None = None,
        claim: bool = False,
        take_over: bool = False,
        if_exists: IfExistsLike | None = None,
        run_id: str | None = None,
    ) -> JobSpec:
        """Return the checked job for a coordinator; the arguments are those of `run`.

        Raises:
            UsageError: the job is wrong as written.
        """
        options = self._apply_options()
        path = options.get(RECOVERY_PATH) if restore_from is None else os.fspath(restore_from)
        if fresh and path:
            raise UsageError(
                "a run cannot both start fresh and restore something",
                fix="leave out --fresh: a run that restores a savepoint is a new one anyway",
            )
        if self.as_batch and path:
            raise UsageError(
                "a batch begins with nothing, and cannot restore something",
                fix=f"leave out the savepoint, or {RUNTIME_MODE.key}=BATCH",
            )
        if run_id is not None:
            self._check_run_id(run_id)
        if claim and not path:
            raise UsageError(
                "there is nothing to claim", fix="name a savepoint with --from, or restore_from="
            )
        graph = self.plan()
        plan = make_plan(
            graph,
            job_name=self.name,
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
            chaining=options.get(CHAINING),
        )
        check_pickles(plan, graph, options)
        return JobSpec(
            name=self.name,
            plan=plan,
            parallelism=self.parallelism,
            checkpoint=self.checkpoint_settings,
            restart=restart_settings(
                self.restart_settings, options, self.checkpoint_settings is not None
            ),
            options=_travelling(options),
            graph=graph,
            labels=dict(self.labels),
            resources=dict(self.resources),
            max_parallelism=self.max_parallelism,
            chaining=options.get(CHAINING),
            slots_per_worker=options.get(WORKER_SLOTS),
            run=secrets.token_hex(8) if run_id is None else run_id,
            outside_run=run_id is not None,
            fresh=fresh,
            allow_non_restored_state=(
                allow_non_restored_state or options.get(RECOVERY_IGNORE_UNCLAIMED)
            ),
            restore_from=absolute(path) if path else "",
            take_over=take_over,
            claim=claim or options.get(RECOVERY_CLAIM_MODE) == "CLAIM",
            if_exists=None if if_exists is None else parse_if_exists(if_exists),
        )

    def show(self, output: NodeOutput, rows: int, within_ms: int, origin: Origin) -> None:
        from .preview import preview, print_table

        try:
            found = preview(
                self.graph, self.options, self._part, output.as_input(), rows, within_ms, origin
            )
        except InternalError:
            raise
        except HeadgateError as error:
            raise error.with_traceback(None) from cause_of(error)
        print_table(found, output.schema, format_duration(within_ms))

    def _part(self, graph: Graph, options: dict[str, str]) -> JobSpec:
        """A part of this job as a job of its own, without checkpoints and with parallelism 1."""
        part = copy.copy(self)
        part.graph, part.options = graph, options
        part.parallelism, part.checkpoint_settings, part.restart_settings = 1, None, None
        part.resources = {}
        return part.spec()


def _travelling(options: Options) -> dict[str, str]:
    """The options for other processes, whose working directory may be another."""
    texts = options.explicit()
    if directory := options.get(SAVEPOINT_DIR):
        texts[SAVEPOINT_DIR.key] = absolute(directory)
    return texts


def cause_of(error: HeadgateError) -> BaseException | None:
    """The exception a user's function raised, if that is what the error reports; else its own cause."""
    if isinstance(error, UserCodeError) and error.detail:
        return UserTraceback(error.detail)
    return error.__cause__


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
    shown = signature_with(function, HowToRun, RunnableJob.spec)
    function.__signature__ = shown  # type: ignore[attr-defined]
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
