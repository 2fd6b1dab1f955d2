"""`headgate explain`: what a job will really be."""

from __future__ import annotations

import typer

from .load import File, Parallelism, Settings, load_file


def explain(file: File, parallelism: Parallelism = None, settings: Settings = None) -> None:
    """Print the logical and physical graph, chains, parallelism, key groups and guarantees."""
    typer.echo(load_file(file, parallelism, settings).explain())
