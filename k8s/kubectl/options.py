"""The options that the verbs share."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, get_type_hints

import typer

from ...errors import UsageError

JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a StreamJob.")]
Timeout = Annotated[str, typer.Option(metavar="DURATION", help="The longest time to wait.")]
_ACCESS: Final = {
    "namespace": Annotated[
        str,
        typer.Option("--namespace", "-n", help="Namespace; default: that of the kubeconfig file."),
    ],
    "context": Annotated[
        str, typer.Option(help="Context in the kubeconfig file; default: the current one.")
    ],
    "kubeconfig": Annotated[
        str, typer.Option(help="The kubeconfig file; default: KUBECONFIG, or ~/.kube/config.")
    ],
}
"""The options of all verbs, by the fields of `Access` that they give."""


@dataclass(frozen=True, slots=True)
class Access:
    """The cluster and the namespace; empty: those of the kubeconfig file."""

    namespace: str = ""
    context: str = ""
    kubeconfig: str = ""


def of_cluster(verb: Callable[..., None]) -> Callable[..., None]:
    """Make a verb a command with the options that choose a cluster, which become its argument `access`."""

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        chosen = Access(**{name: given.pop(name) for name in _ACCESS})
        verb(access=chosen, **given)

    hints = get_type_hints(verb, include_extras=True)
    own = inspect.signature(verb).parameters.values()
    parameters = [
        *(each.replace(annotation=hints[each.name]) for each in own if each.name != "access"),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=option)
            for name, option in _ACCESS.items()
        ),
    ]
    # Typer makes the command line from the signature.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


class Output(StrEnum):
    """The format of the output."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputFormat = Annotated[Output, typer.Option("--output", "-o", help="Format of the output.")]


@contextlib.contextmanager
def extra_of(what: str) -> Iterator[None]:
    """Import packages of the extra `k8s`; without it the error says how to install it.

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
