"""The verbs, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from . import cancel, checkpoint, explain, list, options, run, stop, validate

app = typer.Typer(
    name="headgate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from ... import __version__

        typer.echo(f"headgate {__version__}")
        raise typer.Exit


@app.callback()
def _headgate(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A stateful stream processor for Python people, on Ray."""


app.command("run")(run.run)
app.command("validate")(validate.validate)
app.command("explain")(explain.explain)
app.command("list")(list.list_jobs)
app.command("stop")(stop.stop)
app.command("cancel")(cancel.cancel)
app.command("checkpoint")(checkpoint.checkpoint)
app.command("options")(options.options)
