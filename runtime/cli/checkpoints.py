"""`headgate checkpoints`: how the checkpoints of a running job went, and why some were slow or failed."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from ...operators.durations import format_duration
from .console import FAILED, print_table
from .jobs import request
from .load import OnCluster, Settings, Storage, TokenFile, where
from .stop import JobName


def checkpoints(
    job: JobName,
    number: Annotated[
        int | None, typer.Argument(metavar="[ID]", help="One checkpoint, with all its subtasks.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Show the last checkpoints of a running job: durations, sizes, and a sentence about each."""
    place = where(storage, cluster, token_file, settings)
    found = request(job, "checkpoints", place)
    if number is not None:
        if number not in (row["id"] for row in found["history"]):
            typer.echo(
                f"job {job}: checkpoint {number} is not remembered (web.checkpoints.history)"
            )
            raise typer.Exit(FAILED)
        found = request(job, "checkpoints", place, id=number)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif number is not None:
        print_one(found)
    elif not found["history"]:
        typer.echo(f"job {job}: no checkpoint yet")
    else:
        print_history(found)


def print_history(found: dict[str, Any]) -> None:
    """The checkpoints that are remembered: a table, and a sentence about each."""
    titles = (
        "id", "kind", "status", "age", "duration", "written", "state", "on the way", "unaligned"
    )  # fmt: skip
    print_table(titles, map(_history_row, found["history"]), right=titles[1:])
    spread = found["summary"]["end_to_end_duration"]
    if spread:
        quantiles = "  ".join(
            f"{name} {_ms(spread[name])}" for name in ("p50", "p90", "p99", "max")
        )
        typer.echo(f"duration: {quantiles}")
    for row in found["history"]:
        typer.echo(f"{row['id']}: {row['explanation']}")


def _history_row(row: dict[str, Any]) -> tuple[str, ...]:
    age_ms = max(0, time.time_ns() // 1_000_000 - row["trigger_timestamp"])
    return (
        str(row["id"]),
        "savepoint" if row["is_savepoint"] else "checkpoint",
        row["status"],
        format_duration(age_ms // 1000 * 1000),
        _ms(row["end_to_end_duration"]),
        _bytes(row["checkpointed_size"]),
        _bytes(row["state_size"]),
        _bytes(row["persisted_data"]),
        f"{row['unaligned_subtasks']}/{row['num_subtasks']}",
    )


def print_one(row: dict[str, Any]) -> None:
    """One checkpoint, with the parts of its subtasks."""
    typer.echo(f"{row['id']}: {row['status']}: {row['explanation']}")
    titles = (
        "subtask", "acknowledged", "start delay", "alignment", "sync", "async", "written",
        "on the way", "unaligned",
    )  # fmt: skip
    print_table(titles, map(_part_row, row["subtasks"]), right=titles[1:])


def _part_row(part: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{part['task']} ({part['index']})",
        _ms(part["end_to_end_duration"]),
        _ms(part["start_delay"]),
        _ms(part["alignment"]["duration"]),
        _ms(part["sync_duration"]),
        _ms(part["async_duration"]),
        _bytes(part["checkpointed_size"]),
        _bytes(part["alignment"]["persisted"]),
        "yes" if part["unaligned_checkpoint"] else "no",
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else format_duration(round(value))


def _bytes(value: int) -> str:
    return f"{value:,} B"
