"""Secrets that a job names and does not hold: files and variables are read where the secret is used."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError


def is_reference(value: str) -> bool:
    """Return True if the value says where the secret is, `file:/path` or `env:NAME`."""
    return value.startswith(("file:", "env:"))


def read_secret(name: str, value: str) -> str:
    """Return what `file:/path` or `env:NAME` stands for on this machine; any other value is itself.

    Args:
        name: of the setting, for errors.
        value: what the user has given.

    Raises:
        UsageError: the file cannot be read, or the variable is not set.
    """
    if not is_reference(value):
        return value
    kind, _, where = value.partition(":")
    if kind == "file":
        try:
            return Path(where).read_text().rstrip("\n")
        except OSError as error:
            raise UsageError(
                f"the file of a secret cannot be read property=`{name}` file=`{where}`: {error}",
                fix="it must be there on all machines of the cluster",
            ) from None
    if where not in os.environ:
        raise UsageError(
            f"the environment variable of a secret is not set property=`{name}` variable=`{where}`",
            fix="set it on all machines of the cluster",
        )
    return os.environ[where]
