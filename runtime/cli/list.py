"""`headgate list`: the jobs that run on this machine."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...operators.drops import dropped_text, how_to_keep
from ...operators.durations import format_duration
from .console import make_console, print_table
from .load import OnCluster, Settings, Storage, TokenFile, where
from .runs import print_stored, stored_jobs, stored_row

if TYPE_CHECKING:
    from ..control.registry import JobRecord
    from ..finding import Where


HELD_SHOWN_MS = 10_000
"""The table is followed by a line about each step whose watermark has stood for so long."""


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
    from .jobs import statuses, statuses_on_cluster

    found = statuses_on_cluster(place) if place.cluster else statuses()
    rows = [_row(record, status) for record, status in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif not rows:
        typer.echo("no job runs on the cluster" if place.cluster else "no job runs on this machine")
    else:
        _print(rows)


def _list_stored(place: Where, *, as_json: bool) -> None:
    rows = [stored_row(job, status) for job, status in stored_jobs(place)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif not rows:
        typer.echo(f"no job has checkpoints in {place.storage}")
    else:
        print_stored(rows)


def _row(record: JobRecord, status: dict[str, Any] | None) -> dict[str, Any]:
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


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    titles = (
        "job", "status", "uptime", "parallelism", "restarts", "checkpoint", "cluster", "pid"
    )  # fmt: skip
    print_table(titles, map(_cells, rows), right=("uptime", "parallelism", "restarts", "pid"))
    console = make_console()
    for line in (
        line for row in rows for line in (*_held(row), *_backpressure(row), *_dropped(row))
    ):
        console.print(Text(line))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
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
    """Who has been holding event time back for long."""
    return [
        f"{row['name']}: event time of {step['step']} is held by {_holder(holder)} "
        f"for {format_duration(holder['for_ms'] // 1000 * 1000)}"
        for step in row.get("event_time", ())
        if (holder := step["held_by"]) is not None and holder["for_ms"] >= HELD_SHOWN_MS
    ]


def _backpressure(row: dict[str, Any]) -> list[str]:
    """Who is slow, and makes others wait."""
    return [f"{row['name']}: {each['sentence']}" for each in row.get("backpressure", ())]


def _dropped(row: dict[str, Any]) -> list[str]:
    """What steps have dropped, and how to keep it."""
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
