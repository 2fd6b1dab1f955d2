"""Checks about errors and secrets, which hold for sources and sinks alike."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ...errors import HeadgateError
from .cases import Case
from .context import expect


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


def expect_no_secrets(case: Case, what: str, text: str) -> None:
    """Raise AssertionError if a secret of the case is in the text."""
    for secret in case.secrets:
        expect(secret not in text, f"{what} shows a secret")
