"""Checks about errors and secrets, which hold for sources and sinks alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeAlias

from ...errors import HeadgateError
from ...operators.connections import check_connection
from ...operators.sink import Sink
from ...operators.source import Source
from .cases import Case
from .context import expect
from .reading import in_time

Connector: TypeAlias = Source | Sink
Wrong: TypeAlias = Mapping[str, tuple[Source, str]] | Mapping[str, tuple[Sink, str]]
"""Connectors that do not work, by a name, with a part of the reason to be told."""


async def refused(waiting: Awaitable[Any], what: str) -> HeadgateError:
    """Return the error that this ends with."""
    try:
        await waiting
    except HeadgateError as error:
        return error
    except Exception as error:
        raise AssertionError(
            f"{what}: {type(error).__name__} is not an error for users: {error}"
        ) from error
    raise AssertionError(f"{what}: nothing was refused")


async def check_connections(case: Case, good: Connector, wrong: Wrong) -> None:
    """Check what `check_connection` says about a connector that works, and about others that do not.

    Args:
        case: of the connector.
        good: it works.
        wrong: those that do not, by a name, with a part of the reason to be told.
    """
    found = await in_time(asyncio.to_thread(check_connection, good, {}), "a good connection")
    expect(bool(found), "nothing is said about a connection that can be used")
    expect_no_secrets(case, "the check of a connection", found)
    for name, (connector, reason) in wrong.items():
        if name in case.unseen:
            continue
        checked = asyncio.to_thread(check_connection, connector, {})
        error = await in_time(refused(checked, name), f"the error for {name}")
        expect(reason in str(error), f"{name}: the error does not say `{reason}`: {error}")
        expect_no_secrets(case, f"{name}: the error", str(error))


def expect_no_secrets(case: Case, what: str, text: str) -> None:
    """Raise AssertionError if a secret of the case is in the text."""
    for secret in case.secrets:
        expect(secret not in text, f"{what} shows a secret")
