"""`headgate run`: a job from its start to its end, shown as it goes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import HeadgateError, JobError, UsageError
from ...operators.drops import dropped_text
from .console import CANCELLED, FAILED, OK, report, say
from .load import File, Mode, Parallelism, Settings, load_file, with_mode

if TYPE_CHECKING:
    from ..control.interrupts import Interrupts
    from ..control.job_client import PublishedEvent
    from ..plan import JobSpec
    from ..protocol.job_result import JobOutcome
    from .progress import Reporter, RunProgress

_ENDS = {
    "FINISHED": "finished",
    "SUSPENDED": "stopped",
    "CANCELED": "cancelled",
    "FAILED": "failed",
    "HANDED_OVER": "handed over",
}
_EXIT_CODES = {"FINISHED": OK, "SUSPENDED": OK, "HANDED_OVER": OK, "CANCELED": CANCELLED}
Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="`local` (a Ray of its own), `in-process`, or the address of a Ray cluster.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start without the state of earlier runs.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="PATH",
        help="Begin a new run with this savepoint, or with the newest checkpoint in this directory "
        "of a job's checkpoints (number 7 with @7 behind it).",
    ),
]
AllowNonRestored = Annotated[
    bool,
    typer.Option(
        "--allow-non-restored-state",
        help="Drop checkpointed state that no operator of the job claims any more.",
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="If another run of the job still goes on: end it, and go on from its newest checkpoint. "
        "Without this such a run is left alone.",
    ),
]
RunId = Annotated[
    str | None,
    typer.Option(
        "--run-id",
        metavar="ID",
        help="Names this run of the job, for a supervisor that starts it again: another start with the "
        "same ID goes on with the run, and is never a second one.",
    ),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach", help="Return once the job has begun; it goes on without this command."
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option("--log-file", help="Where the process of a detached job logs."),
]


class ClaimMode(StrEnum):
    """The owner of a restored savepoint."""

    NO_CLAIM = "no_claim"
    CLAIM = "claim"


class Existing(StrEnum):
    """The treatment of output of earlier runs."""

    ERROR = "error"
    APPEND = "append"
    OVERWRITE = "overwrite"


class LogLevel(StrEnum):
    """The level from which lines of the engine's own log are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Claim = Annotated[
    ClaimMode | None,
    typer.Option(
        "--claim-mode",
        help="`claim`: delete the savepoint once the run has a checkpoint of its own. Not for "
        "checkpoints: their job deletes them itself.",
    ),
]
IfExists = Annotated[
    Existing | None,
    typer.Option(
        "--if-exists",
        help="For a run that starts without state while its file sinks hold output of earlier runs: "
        "`error` refuses it, `append` writes beside it, `overwrite` deletes it first. "
        "Without this each sink's own `ifExists` counts, which is `error` unless set.",
    ),
]
Level = Annotated[
    LogLevel, typer.Option("--log-level", help="How much of the engine's own log to show.")
]


def run(
    file: File,
    cluster: Cluster = "local",
    parallelism: Parallelism = None,
    settings: Settings = None,
    runtime_mode: Mode = None,
    fresh: Fresh = False,
    from_: From = None,
    claim_mode: Claim = None,
    allow_non_restored_state: AllowNonRestored = False,
    take_over: TakeOver = False,
    if_exists: IfExists = None,
    run_id: RunId = None,
    detach: Detach = False,
    log_file: LogFile = None,
    log_level: Level = LogLevel.WARNING,
) -> None:
    """Run a job to its end. It resumes from its newest checkpoint, unless told otherwise.

    Ctrl-C stops it with a final checkpoint, a second one at once. Exit codes: 0 finished or stopped,
    1 failed, 2 wrong usage, 130 cancelled.
    """
    from ..job import runnable

    configure_logging(logging.getLevelNamesMapping()[log_level.upper()])
    if claim_mode is not None:
        settings = [*(settings or ()), f"execution.state-recovery.claim-mode={claim_mode.upper()}"]
    job = runnable(load_file(file, parallelism, with_mode(settings, runtime_mode)))
    check_whole(list(job.problems()))
    spec = job.spec(
        fresh=fresh,
        allow_non_restored_state=allow_non_restored_state,
        restore_from=from_,
        claim=claim_mode is ClaimMode.CLAIM,
        take_over=take_over,
        if_exists=None if if_exists is None else if_exists.value,
        run_id=run_id,
    )
    _check_detached(detach, log_file, as_batch=job.as_batch)
    if job.as_batch:
        raise typer.Exit(_run_batch(spec))
    if detach:
        raise typer.Exit(_detach(spec, cluster, log_file))
    raise typer.Exit(run_spec(spec, cluster))


def _check_detached(detach: bool, log_file: Path | None, *, as_batch: bool) -> None:
    """Check that the options of detached jobs are given to one."""
    if log_file is not None and not detach:
        raise UsageError(
            "--log-file is for a detached job", fix="say --detach too, or redirect stderr"
        )
    if as_batch and detach:
        raise UsageError("a batch cannot be detached", fix="leave out --detach")


def _detach(spec: JobSpec, cluster: str, log_file: Path | None) -> int:
    from ..submission import Begun, submit_spec

    submitted = submit_spec(spec, cluster, log_file=log_file)
    if submitted.end is not None:
        end = submitted.end
        say(f"run {spec.run} of job {spec.name} has ended: {end.status.status_name}, {end.reason}")
        return _EXIT_CODES.get(end.status.status_name, FAILED)
    how = "has begun" if submitted.begun is Begun.NOW else "goes on already"
    say(f"job {spec.name} {how} on {cluster}, run {spec.run}")
    if submitted.log_file:
        say(f"its process {submitted.pid} logs to {submitted.log_file}")
    typer.echo(spec.run)
    return OK


def run_spec(
    spec: JobSpec,
    cluster: str,
    *,
    accepted: Callable[[], None] | None = None,
    progress_every_s: float | None = None,
) -> int:
    """Run a job to its end, shown as it goes; returns the exit code.

    Args:
        spec: the job.
        cluster: where it runs.
        accepted: called once the job has begun.
        progress_every_s: time between lines of progress where no terminal is; None: as usual.

    Raises:
        HeadgateError: the job could not begin, or another coordinator took over.
    """
    from ..cluster.launch import IN_PROCESS
    from ..cluster.process import tune_process

    if cluster == IN_PROCESS:
        tune_process()  # Ray's workers do it themselves, and a process of the user's is left as it is
    return asyncio.run(_run(spec, cluster, accepted, progress_every_s))


def _run_batch(spec: JobSpec) -> int:
    from ..batch.run import run_batch

    began = time.monotonic()
    say(f"job {spec.name} as a batch on Spark, parallelism {spec.parallelism}")
    try:
        outcome = run_batch(spec)
    except KeyboardInterrupt:
        say(f"job {spec.name} cancelled")
        return CANCELLED
    if outcome.error is not None:
        return max(FAILED, report(outcome.error))
    dropped = [f", DROPPED {dropped_text(d.kind, d.count)} in {d.step}" for d in outcome.dropped]
    say(f"job {spec.name} finished after {time.monotonic() - began:.1f} s{''.join(dropped)}")
    return OK


def check_whole(problems: list[HeadgateError]) -> None:
    """Raise UsageError with all mistakes of a job, if it has any."""
    if len(problems) > 1:
        lines = "\n".join(str(problem) for problem in problems)
        raise UsageError(f"{len(problems)} mistakes in the job:\n{lines}")
    for problem in problems:
        raise problem


def configure_logging(level: int) -> None:
    """Show the engine's own log from `level` on."""
    from ..observe.logs import configure_logging as configure

    configure(level, kept=logging.INFO)
    # What happens to the job is shown as events already.
    for handler in logging.getLogger("headgate").handlers:
        handler.addFilter(
            lambda record: record.name != "headgate.job" or not hasattr(record, "job")
        )


async def _run(
    spec: JobSpec,
    cluster: str,
    accepted: Callable[[], None] | None,
    progress_every_s: float | None,
) -> int:
    from ..cluster.launch import launch
    from ..control.interrupts import Interrupts

    reporter = make_reporter(spec.name, progress_every_s)
    outcome: JobOutcome | None = None
    with reporter:
        reporter.note(f"job {spec.name} on {cluster}, parallelism {spec.parallelism}")
        interrupts = Interrupts(
            reporter.note, checkpoints=spec.checkpoint is not None, hands_over=spec.outside_run
        )
        with interrupts:
            watch = _Watch(reporter, interrupts, accepted)
            try:
                outcome = await launch(
                    spec,
                    cluster,
                    on_event=watch.event,
                    on_listening=interrupts.listening,
                    on_connected=interrupts.connected,
                )
            except asyncio.CancelledError:
                if not interrupts.cancelled:
                    raise
    if outcome is None:
        say(f"job {spec.name} cancelled before it began")
        return CANCELLED
    reporter.note(_summary(spec, outcome, reporter.progress, watch.seconds))
    if outcome.status not in _EXIT_CODES:
        return max(FAILED, report(outcome.error or JobError(f"the job failed: {outcome.reason}")))
    return _EXIT_CODES[outcome.status]


class _Watch:
    """Hands events to the reporter, and knows for how long the job ran: starting a Ray is no work."""

    def __init__(
        self, reporter: Reporter, interrupts: Interrupts, accepted: Callable[[], None] | None
    ) -> None:
        self._reporter = reporter
        self._accepted = accepted
        self._interrupts = interrupts
        self._began: float | None = None

    def event(self, event: PublishedEvent) -> None:
        """One event of the coordinator."""
        from ..control.job_client import BEGUN

        if self._accepted is not None and event.kind in BEGUN:
            self._accepted()
            self._accepted = None
        status = json.loads(event.body)["status"] if event.kind == "status" else ""
        if self._began is None and status == "RUNNING":
            self._began = time.monotonic()
        # The coordinator's own word on a stop is for those who did not ask for it.
        if event.kind != "stopping" or not self._interrupts.stopping:
            self._reporter.event(event)

    @property
    def seconds(self) -> float:
        """Time since the job began to run."""
        return 0.0 if self._began is None else time.monotonic() - self._began


def _summary(spec: JobSpec, outcome: JobOutcome, progress: RunProgress, seconds: float) -> str:
    """Return how the job ended, in one line."""
    end = _ENDS.get(outcome.status, outcome.status)
    rate = f" ({progress.read / seconds:,.0f}/s)" if seconds else ""
    since = " since the last restart" if progress.restarts else ""
    parts = [
        f"job {spec.name} {end} after {seconds:.1f} s: read {progress.read:,} records{rate}, "
        f"wrote {progress.written:,}{since}"
    ]
    parts += [f"DROPPED {dropped_text(d.kind, d.count)} in {d.step}" for d in outcome.dropped]
    if outcome.checkpoint:
        parts.append(f"last checkpoint {outcome.checkpoint}")
    if outcome.checkpoint and outcome.status != "FINISHED":
        parts.append("run it again to resume from there")
    return ", ".join(parts)


def make_reporter(job: str, progress_every_s: float | None = None) -> Reporter:
    """A live table on a terminal; lines otherwise, and those of progress in such intervals."""
    from ..observe.logs import FORMAT_VARIABLE
    from .progress import PROGRESS_EVERY_S, LineReporter

    as_json = os.environ.get(FORMAT_VARIABLE) == "json"
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not as_json:
        from .live import LiveReporter

        return LiveReporter(job)
    return LineReporter(job, every_s=progress_every_s or PROGRESS_EVERY_S)
