"""`headgate history`: the failures of a job, what followed, and how long it was down."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import JobNotFound
from ...operators.durations import format_duration
from ..control import registry
from .jobs import request
from .load import OnCluster, Settings, Storage, where
from .runs import print_runs, runs_json, stored_job
from .stop import JobName

if TYPE_CHECKING:
    from ..finding import Where


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
    status = _status(job, place)
    if as_json:
        typer.echo(json.dumps(status.get("exceptions", []), indent=2))
    else:
        print_failures(job, status, details=details)


def print_failures(job: str, status: dict[str, Any], *, details: bool) -> None:
    """The failures of a job that runs, and the calls of it that do not return."""
    failures = status.get("exceptions", [])
    if not failures:
        typer.echo(f"job {job}: no failure since its coordinator began")
    for failure in failures:
        for line in _lines(failure, details=details):
            typer.echo(line)
    for step in status.get("busy_steps", []):
        operator = f" of `{step['operator']}`" if step["operator"] else ""
        typer.echo(
            f"now: {step['task']} on {step['worker']} has been in one call{operator} "
            f"for {format_duration(step['busy_ms'])}"
        )


def _status(job: str, place: Where) -> dict[str, Any]:
    try:
        return request(job, "status", place)
    except JobNotFound:
        failures = None if place.cluster else registry.left_failures(job)
        if failures is None:
            raise
        return {"exceptions": failures}


def _lines(failure: dict[str, Any], *, details: bool) -> list[str]:
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
        lines.append(f"  -> {failure['outcome']}{_times(failure)}")
    return lines


def _times(failure: dict[str, Any]) -> str:
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
    restored = f" from {failure['restored']}" if failure["restored"] else ""
    return f"; ran again{restored} after {format_duration(failure['down_ms'])} ({phases})"
