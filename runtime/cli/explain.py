"""`headgate explain`: what a job will really be."""

from __future__ import annotations

import typer

from .load import File, Mode, Parallelism, Settings, load_file, with_mode


def explain(
    file: File,
    parallelism: Parallelism = None,
    settings: Settings = None,
    runtime_mode: Mode = None,
) -> None:
    """Print the logical and physical graph, chains, parallelism, key groups and guarantees.

    Of a job in batch mode, print Spark's plan.
    """
    typer.echo(load_file(file, parallelism, with_mode(settings, runtime_mode)).explain())
