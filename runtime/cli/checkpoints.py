"""`headgate checkpoint`, `checkpoints` and `savepoint`: take, show, compare, check and delete snapshots."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from ...operators.durations import format_duration
from .console import FAILED, print_table, say
from .jobs import request
from .load import (
    File,
    JobName,
    OnCluster,
    Parallelism,
    Settings,
    Storage,
    TokenFile,
    load_file,
    parse_settings,
    where,
)
from .verbs import Native, target

if TYPE_CHECKING:
    from ..savepoint.verify import Verification

T = TypeVar("T")
PROGRESS_EVERY_S = 5.0
savepoint_app = typer.Typer(
    help="Take, look at, compare, check and delete savepoints.", no_args_is_help=True
)
Path_ = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A savepoint, or the directory of a job's checkpoints (the newest, or 7 with @7).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON.")]
_COLUMNS = (
    "operator", "subtasks", "state", "kind", "key", "value", "rows", "bytes", "key groups", "version",
    "ttl",
)  # fmt: skip
_USUAL = {"version": "1", "ttl": "-"}


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


class _CheckpointGroup(TyperGroup):
    """`headgate checkpoint JOB` is short for `headgate checkpoint take JOB`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["take", *args]
        return super().parse_args(ctx, args)


checkpoint_app = typer.Typer(
    cls=_CheckpointGroup,
    help="Take a checkpoint, or verify the files of those that are kept.",
    no_args_is_help=True,
)


@checkpoint_app.command("take")
def take_checkpoint(
    job: JobName,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Take a checkpoint of a running job now, and wait until it is complete."""
    place = where(storage, cluster, token_file, settings)
    done = request(job, "checkpoint", place)
    typer.echo(f"job {job}: checkpoint {done['checkpoint']} completed in {done['duration_ms']} ms")


@checkpoint_app.command("verify")
def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A savepoint, or the directory of a job's checkpoints (all, or 7 with @7).",
        ),
    ],
    sizes_only: Annotated[
        bool, typer.Option("--sizes-only", help="Read no file: compare names and sizes only.")
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Verify the files of a savepoint, or of the checkpoints that a job keeps.

    The exit code is 1 if a file is missing, truncated or corrupt. Files that no checkpoint needs are shown,
    and count as no mistake. Nothing is started, stopped or changed.
    """
    import msgspec

    from ...operators.clock import SystemClock
    from ..savepoint.verify import verify_at
    from ..storage.open_store import open_store_at

    found = _run(
        verify_at(
            open_store_at,
            path,
            parse_settings(settings or ()),
            SystemClock(),
            read=not sizes_only,
            progress=_BytesRead().show,
        )
    )
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        _print_verification(found)
    if found.damaged:
        raise typer.Exit(FAILED)


class _BytesRead:
    """Writes lines about the progress of a long verification to stderr."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def show(self, done: int, total: int) -> None:
        """Say how much was read, if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_EVERY_S
            say(f"read {done:,} of {total:,} bytes ({done * 100 // total} %)")


def _print_verification(found: Verification) -> None:
    for id_ in found.checkpoints:
        damaged = sum(id_ in file.checkpoints for file in found.damaged)
        state = f"{_count(damaged)} damaged" if damaged else "ok"
        typer.echo(f"{found.kind} {id_}: {state}")
    for id_ in found.dropped:
        typer.echo(f"{found.kind} {id_}: dropped by the job meanwhile")
    if found.damaged:
        print_table(
            ("damage", "checkpoints", "state", "expected", "found", "file"),
            [
                (
                    file.damage,
                    ", ".join(map(str, file.checkpoints)),
                    ", ".join(file.states),
                    _bytes(file.expected_bytes),
                    "-" if file.found_bytes is None else _bytes(file.found_bytes),
                    file.file,
                )
                for file in found.damaged
            ],
            right=("expected", "found"),
            fold=True,
        )
    how = "read" if found.read else "compared by name and size"
    typer.echo(
        f"{found.files} files with {found.bytes:,} bytes, {how}; {len(found.damaged)} damaged"
    )
    if found.orphans:
        size = sum(found.orphans.values())
        typer.echo(f"no {found.kind} needs {_count(len(found.orphans))} with {size:,} bytes:")
        for name in found.orphans:
            typer.echo(f"  {name}")


def _count(files: int) -> str:
    return f"{files} {'file' if files == 1 else 'files'}"


@savepoint_app.command("take")
def take(
    job: JobName,
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A new directory is made below it; left out: that of the option "
            "execution.checkpointing.savepoint-dir.",
        ),
    ] = "default",
    native: Native = False,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Take a savepoint of a running job; the job goes on."""
    place = where(storage, cluster, token_file, settings)
    done = request(job, "savepoint", place, savepoint=target(directory), native=native)
    typer.echo(
        f"savepoint: {done['savepoint']} ({done['size_bytes']:,} bytes, {done['duration_ms']} ms)"
    )


@savepoint_app.command("dispose")
def dispose(
    path: Path_,
    settings: Settings = None,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished",
            help="Also one whose coordinator died before it was complete. Only if no job is writing it.",
        ),
    ] = False,
) -> None:
    """Delete a savepoint and all its files."""
    from ..savepoint import store
    from ..storage.open_store import open_store_at

    options = parse_settings(settings or ())
    gone = _run(store.dispose(open_store_at, path, options, unfinished=unfinished))
    what = "an unfinished savepoint" if gone is None else f"the savepoint of job {gone.job}"
    typer.echo(f"deleted {what} in {path}")


@savepoint_app.command("inspect")
def inspect(path: Path_, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show what is in a savepoint: jobs, operators, states, types, rows, bytes."""
    from ..savepoint.describe import describe

    found = describe(_locate(path, settings))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    _print_head(found)
    rows = [
        _state_row(operator, state, first=number == 0)
        for operator in found["operators"]
        for number, state in enumerate(operator["states"])
    ]
    # Most jobs have neither: the columns would only push the others out of the window.
    shown = [title for title in _COLUMNS if any(row[title] != _USUAL.get(title) for row in rows)]
    print_table(
        tuple(shown),
        [tuple(row[title] for title in shown) for row in rows],
        right=("subtasks", "rows", "bytes", "version"),
        fold=True,
    )


@savepoint_app.command("diff")
def diff(one: Path_, other: Path_, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show what differs between two savepoints: states added, removed, changed; rows and bytes."""
    from ..savepoint.compare import diff as compare

    rows = compare(_locate(one, settings), _locate(other, settings))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif not rows:
        typer.echo("no difference")
    else:
        print_table(
            ("operator", "state", "change", "rows", "bytes", "details"),
            [
                (
                    r["operator"],
                    r["state"],
                    r["change"],
                    f"{r['rows']:+,}",
                    f"{r['bytes']:+,}",
                    _details(r),
                )
                for r in rows
            ],
            right=("rows", "bytes"),
            fold=True,
        )


@savepoint_app.command("check")
def check(
    path: Path_,
    file: File,
    parallelism: Parallelism = None,
    settings: Settings = None,
    allow_non_restored_state: Annotated[
        bool,
        typer.Option("--allow-non-restored-state", help="State that nobody claims is no mistake."),
    ] = False,
) -> None:
    """Check whether a job can restore a savepoint. Starts and stops nothing; exit code 1 if it cannot."""
    from ..job import runnable
    from ..savepoint.compare import check as compare

    spec = runnable(load_file(file, parallelism, settings)).spec()
    found = compare(_locate(path, settings), spec)
    for title, texts in (
        ("unclaimed", found.unclaimed),
        ("incompatible", found.incompatible),
        ("wrong", found.other),
        ("migrated", found.migrated),
        ("new", found.new),
    ):
        for text in texts:
            typer.echo(f"{title}: {text}")
    allowed = allow_non_restored_state or spec.allow_non_restored_state
    if not found.ok(allow_non_restored=allowed):
        typer.echo(f"{file}: cannot restore {path}")
        raise typer.Exit(FAILED)
    typer.echo(f"{file}: ok, job {spec.name} can restore {path}")


def _locate(path: str, settings: list[str] | None) -> Any:
    from ...operators.clock import SystemClock
    from ..savepoint.locate import locate
    from ..storage.open_store import open_store_at

    return _run(locate(open_store_at, path, parse_settings(settings or ()), SystemClock()))


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def _print_head(found: dict[str, Any]) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found["created_ms"] / 1000))
    by = f", headgate {found['headgate']}" if found["headgate"] else ""
    typer.echo(f"{found['kind']} {found['id']} of job {found['job']}, {when} UTC{by}")
    typer.echo(
        f"format {found['format']}, {found['bytes']:,} bytes in {found['files']} files and the metadata, "
        f"{found['max_parallelism']} key groups"
    )


def _state_row(operator: dict[str, Any], state: dict[str, Any], *, first: bool) -> dict[str, str]:
    """The cells of a state by column; the first one of an operator has the operator's name."""
    return {
        "operator": operator["operator"] if first else "",
        "subtasks": str(operator["parallelism"]) if first else "",
        "state": state["state"],
        "kind": state["kind"],
        "key": _columns(state["keys"]),
        "value": _columns(state["values"]),
        "rows": f"{state['rows']:,}",
        "bytes": f"{state['bytes']:,}",
        "key groups": "-".join(map(str, state["key_groups"])) or "-",
        "version": str(state["version"]),
        "ttl": "-" if state["ttl_ms"] is None else format_duration(state["ttl_ms"]),
    }


def _columns(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {type_}" for name, type_ in columns.items()) or "-"


def _details(row: dict[str, Any]) -> str:
    if row["change"] != "changed":
        return "-"
    kept = {name: pair for name, pair in row["details"].items() if name not in ("rows", "bytes")}
    return "; ".join(f"{name}: {old} -> {new}" for name, (old, new) in kept.items()) or "-"
