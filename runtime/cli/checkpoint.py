"""`headgate checkpoint`: one more, now."""

from __future__ import annotations

import typer

from .jobs import request
from .stop import JobName


def checkpoint(job: JobName) -> None:
    """Take a checkpoint of a running job now, and wait until it is complete."""
    done = request(job, "checkpoint")
    typer.echo(f"job {job}: checkpoint {done['checkpoint']} completed in {done['duration_ms']} ms")
