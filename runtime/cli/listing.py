"""`headgate list` and `headgate history`: jobs, their former runs, and their failures.

Jobs that run here or on a cluster are asked. Of jobs in a storage the job logs are read, so no process of
the job has to live.
"""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import HeadgateError, JobNotFound
from ...operators.drops import dropped_text, how_to_keep
from ...operators.durations import format_duration
from .console import FAILED, make_console, print_table, report
from .jobs import request, status_of, statuses, statuses_on_cluster
from .load import JobName, OnCluster, Settings, Storage, TokenFile, where

if TYPE_CHECKING:
    from ..control.registry import JobRecord
    from ..finding import Where
    from ..protocol.joblog import JobEnded
    from ..storage.stored_jobs import StoredJob

HELD_SHOWN_MS = 10_000
"""The table is followed by a line about each step whose watermark has stood for at least this time."""


def list_jobs(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """List the jobs that run on this machine or on a cluster, or all that have checkpoints in a storage."""
    place = where(storage, cluster, token_file, settings)
    if place.storage:
        _list_stored(place, as_json=as_json)
        return
    found, unread = (statuses_on_cluster(place), []) if place.cluster else statuses()
    rows = [_job_row(record, status) for record, status in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif rows:
        _print_jobs(rows)
    elif not unread:
        typer.echo("no job runs on the cluster" if place.cluster else "no job runs on this machine")
    for error in unread:
        report(error)
    if unread:
        raise typer.Exit(FAILED)


def _list_stored(place: Where, *, as_json: bool) -> None:
    rows = [stored_row(job, status) for job, status in stored_jobs(place)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif not rows:
        typer.echo(f"no job has checkpoints in {place.storage}")
    else:
        print_stored(rows)


def _job_row(record: JobRecord, status: dict[str, Any] | None) -> dict[str, Any]:
    known = status or {}
    return {
        "name": record.name,
        "status": known.get("status", "NOT ANSWERING"),
        "uptime_ms": max(0, time.time_ns() // 1_000_000 - record.started_ms),
        "parallelism": known.get("parallelism"),
        "restarts": known.get("restarts"),
        "last_checkpoint": known.get("last_checkpoint") or None,
        "last_checkpoint_ms": known.get("last_checkpoint_ms") or None,
        "last_checkpoint_at_ms": known.get("last_checkpoint_at_ms") or None,
        "event_time": known.get("event_time", []),
        "backpressure": known.get("backpressure", []),
        "dropped": known.get("dropped", []),
        "cluster": record.cluster,
        "pid": record.pid,
        "workers": known.get("workers", []),
        "metrics": known.get("metrics", []),
        "rest": known.get("rest") or None,
    }


def _print_jobs(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    titles = (
        "job", "status", "uptime", "parallelism", "restarts", "checkpoint", "cluster", "pid"
    )  # fmt: skip
    print_table(titles, map(_job_cells, rows), right=("uptime", "parallelism", "restarts", "pid"))
    console = make_console()
    for line in (
        line for row in rows for line in (*_held(row), *_backpressure(row), *_dropped(row))
    ):
        console.print(Text(line))


def _job_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        row["status"],
        format_duration(row["uptime_ms"] // 1000 * 1000),
        _text(row["parallelism"]),
        _text(row["restarts"]),
        _checkpoint(row),
        row["cluster"],
        str(row["pid"]),
    )


def _held(row: dict[str, Any]) -> list[str]:
    """Return a line about each step whose event time has been held back for long."""
    return [
        f"{row['name']}: event time of {step['step']} is held by {_holder(holder)} "
        f"for {format_duration(holder['for_ms'] // 1000 * 1000)}"
        for step in row.get("event_time", ())
        if (holder := step["held_by"]) is not None and holder["for_ms"] >= HELD_SHOWN_MS
    ]


def _backpressure(row: dict[str, Any]) -> list[str]:
    """Return a line about each task that is slow and makes others wait."""
    return [f"{row['name']}: {each['sentence']}" for each in row.get("backpressure", ())]


def _dropped(row: dict[str, Any]) -> list[str]:
    """Return a line about the records that each step has dropped, and how to keep them."""
    return [
        f"{row['name']}: step `{each['step']}` has dropped {dropped_text(each['kind'], each['count'])}"
        f"; to keep them: {how_to_keep(each['kind'])}"
        for each in row.get("dropped", ())
    ]


def _holder(holder: dict[str, Any]) -> str:
    split = f", {holder['split']}" if holder["split"] else ""
    return f"{holder['task']}{split}{' (waits to be read)' if holder['queued'] else ''}"


def _checkpoint(row: dict[str, Any]) -> str:
    if row["last_checkpoint"] is None:
        return "-"
    age_ms = max(0, time.time_ns() // 1_000_000 - (row["last_checkpoint_at_ms"] or 0))
    return f"{row['last_checkpoint']} ({format_duration(age_ms // 1000 * 1000)} ago)"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def stored_job(name: str, place: Where) -> StoredJob:
    """Return the job as its storage has it.

    Raises:
        JobNotFound: there is no such job.
        HeadgateError: the storage cannot be read.
    """
    from ..finding import stored_job as find

    return asyncio.run(find(name, place))


def stored_jobs(place: Where) -> list[tuple[StoredJob, str]]:
    """Return all jobs that have checkpoints there, each with its status.

    Raises:
        HeadgateError: the storage cannot be read.
    """
    return asyncio.run(find_stored(place))


async def find_stored(place: Where) -> list[tuple[StoredJob, str]]:
    """Return all jobs that have checkpoints there, each with its status.

    Raises:
        HeadgateError: the storage cannot be read.
    """
    from ...operators.clock import SystemClock
    from ..storage.open_store import open_store_at
    from ..storage.stored_jobs import find_jobs

    jobs = await find_jobs(open_store_at, place.storage, place.options, SystemClock())
    statuses = await asyncio.gather(*(_stored_status(job, place) for job in jobs))
    return list(zip(jobs, statuses, strict=True))


async def _stored_status(job: StoredJob, place: Where) -> str:
    """Return how the newest run ended; for a run that goes on, the status that its coordinator reports."""
    from ..coordinator.former import ask_leader
    from ..finding import found_in_storage
    from ..rest.client import RestClient

    if job.ended is not None:
        return job.ended.status.status_name
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
    """Return a job as `headgate list --storage` shows it."""
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
    """Print a table of the jobs of a storage."""
    titles = ("job", "status", "run", "began", "ended", "restarts", "checkpoint", "coordinator")
    print_table(titles, map(_stored_cells, rows), right=("restarts", "checkpoint"), fold=True)


def _stored_cells(row: dict[str, Any]) -> tuple[str, ...]:
    run, _, began, ended, _, restarts, checkpoint, _ = _run_cells(row)
    where = f"{row['pid']} on {row['host']}" if row["host"] else "-"
    return (row["name"], row["status"], run, began, ended, restarts, checkpoint, where)


def runs_json(job: StoredJob) -> list[dict[str, Any]]:
    """Return the runs of a job, the oldest first; the last one may go on."""
    found = [_ended_json(end) for end in job.ends]
    if job.ended is None:
        found.append(_open_json(job))
    return found


def _ended_json(end: JobEnded) -> dict[str, Any]:
    failure = end.failure
    return {
        "run": end.run,
        "status": end.status.status_name,
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
    """Return a run that has not ended, with the facts that the storage has."""
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
    """Print a table of runs, and below it why runs failed."""
    from rich.text import Text

    titles = ("run", "status", "began", "ended", "lasted", "restarts", "checkpoint", "reason")
    print_table(
        titles, map(_run_cells, runs), right=("lasted", "restarts", "checkpoint"), fold=True
    )
    console = make_console()
    for run in runs:
        for line in _failure_lines(run, details=details):
            console.print(Text(line), soft_wrap=True)


def _run_cells(run: dict[str, Any]) -> tuple[str, ...]:
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


def history(
    job: JobName,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="With the tracebacks of user functions.")
    ] = False,
    storage: Storage = None,
    cluster: OnCluster = None,
    settings: Settings = None,
) -> None:
    """Show why a job failed: root failures, what failed with them, what followed, and the time it took.

    Of a job that runs on this machine, or that ended here with failures. With --storage: how the runs of a
    job ended, read from its storage alone.
    """
    place = where(storage, cluster, None, settings)
    if place.storage:
        runs = runs_json(stored_job(job, place))
        if as_json:
            typer.echo(json.dumps(runs, indent=2))
        else:
            print_runs(runs, details=details)
        return
    status = _job_status(job, place)
    if as_json:
        typer.echo(json.dumps(status.get("exceptions", []), indent=2))
    else:
        print_failures(job, status, details=details)


def print_failures(job: str, status: dict[str, Any], *, details: bool) -> None:
    """Print the failures of a running job, and its calls that do not return."""
    failures = status.get("exceptions", [])
    if not failures:
        typer.echo(f"job {job}: no failure since its coordinator began")
    for failure in failures:
        for line in _exception_lines(failure, details=details):
            typer.echo(line)
    for step in status.get("busy_steps", []):
        operator = f" of `{step['operator']}`" if step["operator"] else ""
        typer.echo(
            f"now: {step['task']} on {step['worker']} has been in one call{operator} "
            f"for {format_duration(step['busy_ms'])}"
        )


def _job_status(job: str, place: Where) -> dict[str, Any]:
    try:
        return request(job, "status", place)
    except JobNotFound:
        from ..control import registry

        failures = None if place.cluster else registry.left_failures(job)
        if failures is None:
            raise
        return {"exceptions": failures}


def _exception_lines(failure: dict[str, Any], *, details: bool) -> list[str]:
    at = datetime.fromtimestamp(failure["time_ms"] / 1000, UTC)
    worker = f" on {failure['worker']}" if failure["worker"] not in ("", failure["where"]) else ""
    lines = [
        f"{at:%Y-%m-%d %H:%M:%S} attempt {failure['attempt']}: {failure['where']}{worker}: "
        f"{failure['text']} ({failure['kind']})"
    ]
    if failure["labels"]:
        shown = " ".join(f"{key}=`{value}`" for key, value in sorted(failure["labels"].items()))
        lines.append(f"  {shown}")
    if details and failure["detail"]:
        lines += [f"    {line}" for line in failure["detail"].rstrip().splitlines()]
    lines += [f"  also {also['where']}: {also['text']}" for also in failure["concurrent"]]
    if failure["concurrent_dropped"]:
        lines.append(f"  and {failure['concurrent_dropped']} more")
    if failure["outcome"]:
        lines.append(f"  -> {failure['outcome']}{_downtime(failure)}")
    return lines


def _downtime(failure: dict[str, Any]) -> str:
    if failure["down_ms"] is None:
        return ""
    phases = ", ".join(
        f"{name} {format_duration(failure[key])}"
        for name, key in (
            ("stopping", "cancelling_ms"),
            ("waiting", "waiting_ms"),
            ("deploying and restoring", "deploying_ms"),
        )
        if failure[key] is not None
    )
    restore = failure.get("restore") or {}
    if restore.get("local_bytes") or restore.get("storage_bytes"):
        local, remote = restore["local_bytes"], restore["storage_bytes"]
        phases += f"; state: {local:,} bytes from workers' disks, {remote:,} from storage"
    if restore.get("kept_bytes"):
        phases += f"; {restore['kept_bytes']:,} bytes of state were kept in memory"
    restored = f" from {failure['restored']}" if failure["restored"] else ""
    return f"; ran again{restored} after {format_duration(failure['down_ms'])} ({phases})"
