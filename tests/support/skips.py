"""Skips tests whose programs cannot be had, where CI fails instead, and tests that take minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn, TypeVar

import pytest

from headgate.testing.servers.programs import NotAvailableError

S = TypeVar("S")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it where the variable `CI` is set: CI must not pass without having run it."""
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(reason)
    pytest.fail(f"{reason} (CI is set, so this is not skipped)", pytrace=False)


@contextmanager
def available(server: AbstractContextManager[S]) -> Iterator[S]:
    """Start a server for the time of the block; skip or fail the tests if its program cannot be had."""
    try:
        with server as started:
            yield started
    except NotAvailableError as error:
        skip_or_fail(str(error))


def thorough_only() -> None:
    """Skip the test unless the variable `HEADGATE_THOROUGH` is set, as `make test-all` sets it."""
    if not os.environ.get("HEADGATE_THOROUGH"):
        pytest.skip("it takes minutes: make test-all, or HEADGATE_THOROUGH=1")
