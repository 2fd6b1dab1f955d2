"""`headgate stop`: a final checkpoint, then the end."""

from __future__ import annotations

from typing import Annotated

import typer

from .jobs import request

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of a running job.")]


def stop(job: JobName) -> None:
    """Stop a running job with a final checkpoint; run it again to resume from there."""
    done = request(job, "stop")
    if done.get("checkpoint"):
        taken = f"checkpoint {done['checkpoint']} ({done['duration_ms']} ms)"
        typer.echo(f"job {job} stopped with {taken}; run it again to resume from there")
    else:
        typer.echo(f"job {job} stopped without a checkpoint")
