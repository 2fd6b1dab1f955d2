"""`headgate rescale`: another parallelism for a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from .jobs import request
from .stop import JobName


def rescale(
    job: JobName,
    parallelism: Annotated[
        int,
        typer.Option(
            "-p", "--parallelism", min=1, help="Subtasks of operators that set no own number."
        ),
    ],
) -> None:
    """Stop a running job with a checkpoint and go on at another parallelism at once."""
    done = request(job, "rescale", parallelism=parallelism)
    typer.echo(
        f"job {job} runs at parallelism {done['parallelism']} from checkpoint {done['checkpoint']}; "
        f"it paused for {done['pause_ms']} ms"
    )
