"""The command line application, with all verbs registered."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from .checkpoints import checkpoint_app, checkpoints, savepoint_app
from .listing import history, list_jobs
from .load import Settings, Storage, TokenFile, where
from .run import run
from .verbs import cancel, explain, logs, options, query, rescale, stop, top, validate

app = typer.Typer(
    name="headgate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as version_of

        typer.echo(f"headgate {version_of('headgate')}")
        raise typer.Exit


@app.callback()
def _headgate(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A stateful stream processor for Python people, on Ray."""


app.command("run")(run)
app.command("validate")(validate)
app.command("explain")(explain)
app.command("list")(list_jobs)
app.command("top")(top)
app.command("logs")(logs)
app.command("stop")(stop)
app.command("cancel")(cancel)
app.add_typer(checkpoint_app, name="checkpoint")
app.command("checkpoints")(checkpoints)
app.command("history")(history)
app.command("query")(query)
app.command("rescale")(rescale)
app.add_typer(savepoint_app, name="savepoint")
app.command("options")(options)


@app.command("ui")
def _ui(
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="The TCP port; 0: the system chooses one."),
    ] = 0,
    storage: Storage = None,
    token_file: TokenFile = None,
    settings: Settings = None,
) -> None:
    """Show all jobs in a browser: those of this machine, and with --storage those of a storage.

    The command prints a link, and serves the page until Ctrl-C. It listens on this machine only.
    """
    # It needs an HTTP server, which takes a while to load; no other verb waits for it.
    from .ui import show

    show(port, where(storage, None, token_file, settings))


@app.command(
    "k8s",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _k8s(context: typer.Context) -> None:
    """Run StreamJobs on Kubernetes: `headgate k8s --help`."""
    # The room k8s is above this one, and is loaded only here: no other verb waits for it.
    importlib.import_module("headgate.k8s.cli").app(context.args, prog_name="headgate k8s")
