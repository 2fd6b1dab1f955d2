"""The options that the verbs share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer

from ...errors import UsageError

JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a StreamJob.")]
Namespace = Annotated[
    str,
    typer.Option("--namespace", "-n", help="Namespace; default: that of the kubeconfig file."),
]
Context = Annotated[str, typer.Option(help="Context of the kubeconfig file; default: the current.")]
Kubeconfig = Annotated[
    str, typer.Option(help="The kubeconfig file; default: KUBECONFIG, or ~/.kube/config.")
]
Timeout = Annotated[str, typer.Option(metavar="DURATION", help="The longest time to wait.")]


class Output(StrEnum):
    """How something is shown."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputFormat = Annotated[Output, typer.Option("--output", "-o", help="How it is shown.")]


@contextlib.contextmanager
def extra_of(what: str) -> Iterator[None]:
    """Imports of what the extra `k8s` installs: without it the error says how to get it.

    Raises:
        UsageError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "headgate":
            raise
        raise UsageError(
            f"{what} needs the package {error.name}: pip install 'headgate[k8s]'"
        ) from None
