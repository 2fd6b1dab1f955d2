"""The runs of a job as its storage remembers them, for `headgate history` and `headgate list`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ...errors import HeadgateError
from ...operators.durations import format_duration
from .console import make_console, print_table

if TYPE_CHECKING:
    from ..finding import Where
    from ..protocol.joblog import JobEnded
    from ..storage.stored_jobs import StoredJob


def stored_job(name: str, place: Where) -> StoredJob:
    """The job as its storage has it.

    Raises:
        JobNotFound: there is no such job.
        HeadgateError: the storage cannot be read.
    """
    from ..finding import stored_job as find

    return asyncio.run(find(name, place))


def stored_jobs(place: Where) -> list[tuple[StoredJob, str]]:
    """All jobs that have checkpoints there, and their status.

    Raises:
        HeadgateError: the storage cannot be read.
    """
    from ...operators.clock import SystemClock
    from ..storage.open_store import open_store_at
    from ..storage.stored_jobs import find_jobs

    async def find() -> list[tuple[StoredJob, str]]:
        jobs = await find_jobs(open_store_at, place.storage, place.options, SystemClock())
        statuses = await asyncio.gather(*(_status(job, place) for job in jobs))
        return list(zip(jobs, statuses, strict=True))

    return asyncio.run(find())


async def _status(job: StoredJob, place: Where) -> str:
    """How the newest run ended; of one that goes on what its coordinator says, or that it listens."""
    from ..coordinator.former import ask_leader
    from ..finding import found_in_storage
    from ..rest.client import RestClient
    from .jobs import status_of

    if job.ended is not None:
        return job.ended.status.shown
    try:
        found = found_in_storage(job, place)
        status = await status_of(await RestClient.connect(found.addresses, found.token))
    except HeadgateError:
        status = None
    if status is not None:
        return str(status["status"])
    if job.leader is None:
        return "NOT ENDED"
    reach = await ask_leader(job.leader)
    return {"ANSWERS": "ALIVE", "GONE": "DEAD"}.get(reach.name, "UNREACHABLE")


def stored_row(job: StoredJob, status: str) -> dict[str, Any]:
    """A job as `headgate list --storage` shows it."""
    leader = None if job.ended else job.leader
    return {
        "name": job.name,
        **runs_json(job)[-1],
        "status": status,
        "host": leader.host if leader is not None else None,
        "pid": leader.pid if leader is not None else None,
        "address": job.address,
    }


def print_stored(rows: list[dict[str, Any]]) -> None:
    """A table of the jobs of a storage."""
    titles = ("job", "status", "run", "began", "ended", "restarts", "checkpoint", "coordinator")
    print_table(titles, map(_stored_cells, rows), right=("restarts", "checkpoint"), fold=True)


def _stored_cells(row: dict[str, Any]) -> tuple[str, ...]:
    run, _, began, ended, _, restarts, checkpoint, _ = _cells(row)
    where = f"{row['pid']} on {row['host']}" if row["host"] else "-"
    return (row["name"], row["status"], run, began, ended, restarts, checkpoint, where)


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
    from rich.text import Text

    titles = ("run", "status", "began", "ended", "lasted", "restarts", "checkpoint", "reason")
    print_table(titles, map(_cells, runs), right=("lasted", "restarts", "checkpoint"), fold=True)
    console = make_console()
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
