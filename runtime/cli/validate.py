"""`headgate validate`: everything that is wrong with a job, without starting anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ...errors import HeadgateError, ManifestErrors, UsageError
from .console import USAGE, say, texts
from .load import File, Parallelism, Settings, load_file

if TYPE_CHECKING:
    from ..job import Job


def validate(file: File, parallelism: Parallelism = None, settings: Settings = None) -> None:
    """Check a job and print all its mistakes. Starts nothing; exit code 2 if there are any."""
    try:
        job = load_file(file, parallelism, settings)
        problems = problems_of(job)
    except ManifestErrors as errors:
        problems = list(errors.problems)
    except UsageError as error:
        problems = [error]
    for problem in problems:
        for text in texts(problem):
            say(f"error: {text}")
    if problems:
        count = len(problems)
        say(f"{file}: {count} {'mistake' if count == 1 else 'mistakes'}")
        raise typer.Exit(USAGE)
    from ..job import runnable
    from ..pickled_state import pickled_states

    typer.echo(f"{file}: ok, job {job.name}")
    for found in pickled_states(runnable(job).graph):
        say(f"note: state is pickled, since its type is not known. {found}")


def problems_of(job: Job) -> list[HeadgateError]:
    """Every reason why a loaded job cannot run."""
    from ..job import runnable

    inside = runnable(job)
    found: list[HeadgateError] = list(inside.problems())
    if not found:
        inside.spec()
    return found
