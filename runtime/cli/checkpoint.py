"""`headgate checkpoint`: one more, now."""

from __future__ import annotations

import typer

from .jobs import request
from .load import OnCluster, Settings, Storage, TokenFile, where
from .stop import JobName


def checkpoint(
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
