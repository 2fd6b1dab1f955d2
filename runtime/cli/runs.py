"""The runs of a job as its storage remembers them, for `headgate history` and `headgate list`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ...operators.durations import format_duration
from .console import make_console

if TYPE_CHECKING:
    from ..coordinator.former import Reach
    from ..protocol.joblog import JobEnded
    from ..storage.stored_jobs import StoredJob


def stored_job(storage: str, name: str, options: Mapping[str, str]) -> StoredJob:
    """The job as its storage has it.

    Raises:
        JobNotFound: there is no such job.
        HeadgateError: the storage cannot be read.
    """
    from ...operators.clock import SystemClock
    from ..storage.open_store import open_store_at
    from ..storage.stored_jobs import find_job

    return asyncio.run(find_job(open_store_at, storage, name, options, SystemClock()))


def stored_jobs(storage: str, options: Mapping[str, str]) -> list[tuple[StoredJob, Reach | None]]:
    """All jobs that have checkpoints there, and whether the coordinators of open runs can be reached.

    Raises:
        HeadgateError: the storage cannot be read.
    """
    from ...operators.clock import SystemClock
    from ..coordinator.former import ask_leader
    from ..storage.open_store import open_store_at
    from ..storage.stored_jobs import find_jobs

    async def look(job: StoredJob) -> Reach | None:
        return None if job.ended or job.leader is None else await ask_leader(job.leader)

    async def find() -> list[tuple[StoredJob, Reach | None]]:
        jobs = await find_jobs(open_store_at, storage, options, SystemClock())
        return list(zip(jobs, await asyncio.gather(*map(look, jobs)), strict=True))

    return asyncio.run(find())


def stored_row(job: StoredJob, reach: Reach | None) -> dict[str, Any]:
    """A job as `headgate list --storage` shows it."""
    run = runs_json(job)[-1]
    leader = job.leader
    return {
        "name": job.name,
        **run,
        "status": run["status"] or _status_text(reach),
        "host": leader.host if leader is not None and not job.ended else None,
        "pid": leader.pid if leader is not None and not job.ended else None,
        "address": job.address,
    }


def _status_text(reach: Reach | None) -> str:
    """The state of a run that has not ended, as seen from here."""
    if reach is None:
        return "NOT ENDED"
    return {"ANSWERS": "ALIVE", "GONE": "DEAD"}.get(reach.name, "UNREACHABLE")


def print_stored(rows: list[dict[str, Any]]) -> None:
    """A table of the jobs of a storage."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (
        "job",
        "status",
        "run",
        "began",
        "ended",
        "restarts",
        "checkpoint",
        "coordinator",
    ):
        right = title in ("restarts", "checkpoint")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for row in rows:
        run, _, began, ended, _, restarts, checkpoint, _ = _cells(row)
        where = f"{row['pid']} on {row['host']}" if row["host"] else "-"
        cells = (row["name"], row["status"], run, began, ended, restarts, checkpoint, where)
        table.add_row(*map(Text, cells))
    make_console().print(table)


def runs_json(job: StoredJob) -> list[dict[str, Any]]:
    """The runs of a job, the oldest first; the last one may go on."""
    found = [_ended_json(end) for end in job.ends]
    if job.ended is None:
        found.append(_open_json(job))
    return found


def _ended_json(end: JobEnded) -> dict[str, Any]:
    failure = end.failure
    return {
        "run": end.run,
        "status": end.status.shown,
        "reason": end.reason,
        "began_ms": end.history.began_ms or None,
        "ended_ms": end.ended_ms,
        "restarts": end.history.restarts,
        "checkpoint": end.checkpoint or None,
        "failure": None
        if failure is None
        else {
            "kind": failure.kind,
            "where": failure.vertex,
            "text": failure.text,
            "message": failure.message,
            "fix": failure.fix,
            "detail": failure.detail,
        },
    }


def _open_json(job: StoredJob) -> dict[str, Any]:
    """A run that has not ended, as far as the storage knows."""
    newest = job.view.newest
    return {
        "run": job.view.run,
        "status": None,
        "reason": "",
        "began_ms": job.view.history.began_ms or None,
        "ended_ms": None,
        "restarts": job.view.history.restarts,
        "checkpoint": None if newest is None else newest.checkpoint_id,
        "failure": None,
    }


def print_runs(runs: list[dict[str, Any]], *, details: bool) -> None:
    """A table of runs, and below it why the failed ones failed."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "status", "began", "ended", "lasted", "restarts", "checkpoint", "reason"):
        right = title in ("lasted", "restarts", "checkpoint")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for run in runs:
        table.add_row(*map(Text, _cells(run)))  # as they are: brackets in a reason are no markup
    console = make_console()
    console.print(table)
    for run in runs:
        for line in _failure_lines(run, details=details):
            console.print(Text(line), soft_wrap=True)


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    began, ended = run["began_ms"], run["ended_ms"]
    lasted = format_duration((ended - began) // 1000 * 1000) if began and ended else "-"
    return (
        run["run"] or "-",
        run["status"] or "not ended",
        date_text(began),
        date_text(ended),
        lasted,
        str(run["restarts"]),
        str(run["checkpoint"] or "-"),
        run["reason"] or "-",
    )


def date_text(at_ms: int | None) -> str:
    """A time in UTC, to the second."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}" if at_ms else "-"


def _failure_lines(run: dict[str, Any], *, details: bool) -> list[str]:
    failure = run["failure"]
    if failure is None:
        return []
    lines = [f"{run['run']} failed in {failure['where']}: {failure['text']} ({failure['kind']})"]
    lines += [f"  {failure['fix']}"] if failure["fix"] else []
    if details:
        lines += [f"    {line}" for line in failure["detail"].rstrip().splitlines()]
    return lines
