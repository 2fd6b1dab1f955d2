"""`headgate stop`: a final checkpoint, then the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .jobs import request
from .load import OnCluster, Settings, Storage, TokenFile, where

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of a running job.")]


Native = Annotated[
    bool,
    typer.Option(
        "--native",
        help="Keep the files of the state backend: faster, but only this backend reads them.",
    ),
]


def stop(
    job: JobName,
    savepoint: Annotated[
        str | None,
        typer.Option(
            "--savepoint",
            metavar="DIR",
            help="Take a savepoint first, in a new directory below DIR (`default`: the one of the "
            "option execution.checkpointing.savepoint-dir).",
        ),
    ] = None,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain",
            help="Sources end as if their data had: windows fire. Not for a job that goes on later.",
        ),
    ] = False,
    native: Native = False,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Stop a running job with a final checkpoint; run it again to resume from there."""
    place = where(storage, cluster, token_file, settings)
    arguments: dict[str, Any] = {"drain": drain, "native": native}
    if savepoint is not None:
        arguments["savepoint"] = target(savepoint)
    done = request(job, "stop", place, **arguments)
    if done.get("savepoint"):
        typer.echo(f"savepoint: {done['savepoint']}")
    if done.get("checkpoint"):
        taken = f"checkpoint {done['checkpoint']} ({done['duration_ms']} ms)"
        typer.echo(f"job {job} stopped with {taken}; run it again to resume from there")
    else:
        typer.echo(f"job {job} stopped without a checkpoint")


def target(directory: str) -> str:
    """A directory as the job is to understand it, which runs elsewhere; empty: that of the option."""
    if directory == "default":
        return ""
    if "://" in directory:
        return directory
    return os.path.abspath(Path(directory).expanduser())
