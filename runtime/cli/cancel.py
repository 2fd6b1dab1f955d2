"""`headgate cancel`: the end, at once."""

from __future__ import annotations

import typer

from .jobs import request
from .stop import JobName


def cancel(job: JobName) -> None:
    """Cancel a running job at once, without a checkpoint."""
    done = request(job, "cancel")
    last = f"its last checkpoint is {done['checkpoint']}" if done["checkpoint"] else "no checkpoint"
    typer.echo(f"job {job} cancelled; {last}")
