"""`headgate explain`: what a job will really be."""

from __future__ import annotations

from typing import Annotated

import typer

from .load import File, Mode, Parallelism, Settings, load_file, with_mode


def explain(
    file: File,
    parallelism: Parallelism = None,
    settings: Settings = None,
    runtime_mode: Mode = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print the plan as a Mermaid flowchart instead.")
    ] = False,
) -> None:
    """Print the logical and physical graph, chains, parallelism, key groups and guarantees.

    Of a job in batch mode, print Spark's plan.
    """
    from ..job import runnable
    from ..mermaid import mermaid_plan

    job = load_file(file, parallelism, with_mode(settings, runtime_mode))
    typer.echo(mermaid_plan(runnable(job).spec()) if mermaid else job.explain())
