"""`headgate run`: a job from its start to its end, shown as it goes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import HeadgateError, JobError, UsageError
from ...operators.drops import dropped_text
from .console import CANCELLED, FAILED, OK, report, say
from .load import File, Mode, Parallelism, Settings, load_file, with_mode

if TYPE_CHECKING:
    from ..control.messages import Event
    from ..job_spec import JobSpec
    from ..protocol.job_result import JobOutcome
    from .interrupts import Interrupts
    from .progress import Reporter
    from .rates import Progress

_ENDS = {
    "FINISHED": "finished",
    "SUSPENDED": "stopped",
    "CANCELED": "cancelled",
    "FAILED": "failed",
}
_EXIT_CODES = {"FINISHED": OK, "SUSPENDED": OK, "CANCELED": CANCELLED}


class ClaimMode(StrEnum):
    """Whose a restored savepoint is."""

    NO_CLAIM = "no_claim"
    CLAIM = "claim"


class Existing(StrEnum):
    """What happens to output of earlier runs."""

    ERROR = "error"
    APPEND = "append"
    OVERWRITE = "overwrite"


class LogLevel(StrEnum):
    """How much of the engine's own log is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run(
    file: File,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="CLUSTER",
            help="`local` (a Ray of its own), `in-process`, or the address of a Ray cluster.",
        ),
    ] = "local",
    parallelism: Parallelism = None,
    settings: Settings = None,
    runtime_mode: Mode = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start without the state of earlier runs.")
    ] = False,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Begin a new run with this savepoint, or with the newest checkpoint in this directory "
            "of a job's checkpoints (number 7 with @7 behind it).",
        ),
    ] = None,
    claim_mode: Annotated[
        ClaimMode | None,
        typer.Option(
            "--claim-mode",
            help="`claim`: delete the savepoint once the run has a checkpoint of its own. Not for "
            "checkpoints: their job deletes them itself.",
        ),
    ] = None,
    allow_non_restored_state: Annotated[
        bool,
        typer.Option(
            "--allow-non-restored-state",
            help="Drop checkpointed state that no operator of the job claims any more.",
        ),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="If another run of the job still goes on: end it, and go on from its newest checkpoint. "
            "Without this such a run is left alone.",
        ),
    ] = False,
    if_exists: Annotated[
        Existing | None,
        typer.Option(
            "--if-exists",
            help="For a run that starts without state while its file sinks hold output of earlier runs: "
            "`error` refuses it, `append` writes beside it, `overwrite` deletes it first. "
            "Without this each sink's own `ifExists` counts, which is `error` unless set.",
        ),
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", help="How much of the engine's own log to show.")
    ] = LogLevel.WARNING,
) -> None:
    """Run a job to its end. It resumes from its newest checkpoint, unless told otherwise.

    Ctrl-C stops it with a final checkpoint, a second one at once. Exit codes: 0 finished or stopped,
    1 failed, 2 wrong usage, 130 cancelled.
    """
    from ..job import runnable

    _configure_logging(log_level)
    if claim_mode is not None:
        settings = [*(settings or ()), f"execution.state-recovery.claim-mode={claim_mode.upper()}"]
    job = runnable(load_file(file, parallelism, with_mode(settings, runtime_mode)))
    _check_whole(list(job.problems()))
    spec = job.spec(
        fresh=fresh,
        allow_non_restored_state=allow_non_restored_state,
        restore_from=from_,
        claim=claim_mode is ClaimMode.CLAIM,
        take_over=take_over,
        if_exists=None if if_exists is None else if_exists.value,
    )
    if job.as_batch:
        raise typer.Exit(_run_batch(spec))
    raise typer.Exit(asyncio.run(_run(spec, cluster)))


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


def _check_whole(problems: list[HeadgateError]) -> None:
    if len(problems) > 1:
        lines = "\n".join(str(problem) for problem in problems)
        raise UsageError(f"{len(problems)} mistakes in the job:\n{lines}")
    for problem in problems:
        raise problem


def _configure_logging(level: LogLevel) -> None:
    from ..observe.logs import configure_logging

    configure_logging(logging.getLevelNamesMapping()[level.upper()])
    # What happens to the job is shown as events already.
    logging.getLogger("headgate.job").addFilter(lambda record: not hasattr(record, "job"))


async def _run(spec: JobSpec, cluster: str) -> int:
    from ..cluster.launch import launch
    from .interrupts import Interrupts
    from .progress import make_reporter

    reporter = make_reporter(spec.name)
    outcome: JobOutcome | None = None
    with reporter:
        reporter.note(f"job {spec.name} on {cluster}, parallelism {spec.parallelism}")
        with Interrupts(reporter.note, checkpoints=spec.checkpoint is not None) as interrupts:
            watch = _Watch(reporter, interrupts)
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

    def __init__(self, reporter: Reporter, interrupts: Interrupts) -> None:
        self._reporter = reporter
        self._interrupts = interrupts
        self._began: float | None = None

    def event(self, event: Event) -> None:
        """One event of the coordinator."""
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


def _summary(spec: JobSpec, outcome: JobOutcome, progress: Progress, seconds: float) -> str:
    """How it ended, in one line."""
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
