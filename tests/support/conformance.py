"""Tests that run the checks of the conformance kit, of which those on real servers take a while."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from typing import Any, Final

import pytest

from headgate.testing.connectors import Case, Check, SourceCase, sink_checks, source_checks
from headgate.tests.support.skips import thorough_only

SECONDS_MAX: Final = 1200 if os.environ.get("HEADGATE_THOROUGH") else 240
TIMEOUT: Final = pytest.mark.timeout(SECONDS_MAX + 60)
SLOW: Final = tuple(each.name for each in (*source_checks(), *sink_checks()) if each.thorough)


def promises(
    cases: Mapping[str, type[Case]], chosen: Mapping[str, Collection[str]] | None = None
) -> list[Any]:
    """Return each case with each of the checks that apply to it.

    Args:
        cases: by their names, which begin the ids of the tests.
        chosen: the names of the only checks of a case, by its name.
    """
    return [
        pytest.param(kind, check, id=f"{name}-{check.name}")
        for name, kind in cases.items()
        for check in (source_checks() if issubclass(kind, SourceCase) else sink_checks())
        if check.applies_to(kind) and check.name in (chosen or {}).get(name, (check.name,))
    ]


def keep(check: Check[Any], case: Case, slow: Collection[str] = SLOW) -> None:
    """Check that a case keeps a promise.

    Args:
        check: of the promise.
        case: on a server.
        slow: the checks that take minutes, which only `make test-all` runs.
    """
    if check.name in slow:
        thorough_only()

    async def guarded() -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await check.run(case)

    asyncio.run(guarded())
