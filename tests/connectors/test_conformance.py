"""The connectors of files, memory and HTTP keep all promises of the conformance kit."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from headgate.testing.connectors import Case, Check, SourceCase, sink_checks, source_checks
from headgate.tests.support.connector_cases import FILES_AND_MEMORY
from headgate.tests.support.http_cases import HTTP

THOROUGH = pytest.mark.skipif(
    not os.environ.get("HEADGATE_THOROUGH"), reason="make test-all, or HEADGATE_THOROUGH=1"
)
SLOW = {
    ("write_ahead_sink", "once_after_any_two_crashes"),
    ("http_sink", "once_after_any_two_crashes"),
    ("http_sink", "a_process_may_be_killed"),
    ("files_sink (text)", "once_after_any_two_crashes"),
    ("files_sink (text)", "a_process_may_be_killed"),
}
"""These take seconds, and what they try is tried by others with the same writer."""


def checks_of(cases: dict[str, type[Case]]) -> list[Any]:
    return [
        pytest.param(
            kind,
            check,
            id=f"{name}-{check.name}",
            marks=[THOROUGH] if (name, check.name) in SLOW else [],
        )
        for name, kind in cases.items()
        for check in (source_checks() if issubclass(kind, SourceCase) else sink_checks())
        if check.applies_to(kind)
    ]


@pytest.mark.parametrize(("kind", "check"), checks_of({**FILES_AND_MEMORY, **HTTP}))
def test_it_keeps_the_promise(kind: type[Any], check: Check[Any]) -> None:
    asyncio.run(check.run(kind()))
