"""`headgate rescale`: another parallelism for a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import UsageError
from .jobs import request
from .load import OnCluster, Settings, Storage, TokenFile, where
from .stop import JobName


def rescale(
    job: JobName,
    parallelism: Annotated[
        int,
        typer.Option(
            "-p", "--parallelism", min=1, help="Subtasks of operators that set no own number."
        ),
    ],
    storage: Storage = None,
    cluster: OnCluster = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Stop a running job with a checkpoint and go on at another parallelism at once."""
    place = where(storage, cluster, token_file, settings)
    done = request(job, "rescale", place, parallelism=parallelism)
    if not done["pause_ms"]:
        # The REST API takes this for a request that the coordinator before has carried out already.
        raise UsageError(
            f"nothing would change parallelism=`{parallelism}`",
            fix="operators that set their own parallelism keep it",
        )
    typer.echo(
        f"job {job} runs at parallelism {done['parallelism']} from checkpoint {done['checkpoint']}; "
        f"it paused for {done['pause_ms']} ms"
    )
