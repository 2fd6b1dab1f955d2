"""Skips tests whose programs cannot be had, where CI fails instead, and tests that take minutes."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it where the variable `CI` is set: CI must not pass without having run it."""
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(reason)
    pytest.fail(f"{reason} (CI is set, so this is not skipped)", pytrace=False)


def thorough_only() -> None:
    """Skip the test unless the variable `HEADGATE_THOROUGH` is set, as `make test-all` sets it."""
    if not os.environ.get("HEADGATE_THOROUGH"):
        pytest.skip("it takes minutes: make test-all, or HEADGATE_THOROUGH=1")
