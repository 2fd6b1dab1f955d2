"""`headgate cancel`: the end, at once."""

from __future__ import annotations

import typer

from .jobs import request
from .load import OnCluster, Settings, Storage, TokenFile, where
from .stop import JobName


def cancel(
    job: JobName,
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Cancel a running job at once, without a checkpoint."""
    place = where(storage, cluster, token_file, settings)
    done = request(job, "cancel", place)
    last = f"its last checkpoint is {done['checkpoint']}" if done["checkpoint"] else "no checkpoint"
    typer.echo(f"job {job} cancelled; {last}")
