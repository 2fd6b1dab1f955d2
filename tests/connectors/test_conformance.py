"""The connectors of files, memory, sockets and HTTP keep all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.tests.support.conformance import keep, promises
from headgate.tests.support.connector_cases import FILES_AND_MEMORY
from headgate.tests.support.http_cases import HTTP
from headgate.tests.support.made_cases import MADE
from headgate.tests.support.unrepeated_cases import UNREPEATED

CASES = {**FILES_AND_MEMORY, **MADE, **HTTP, **UNREPEATED}
SLOW = {
    ("write_ahead_sink", "once_after_any_two_crashes"),
    ("http_sink", "once_after_any_two_crashes"),
    ("http_sink", "a_process_may_be_killed"),
    ("files_sink (text)", "once_after_any_two_crashes"),
    ("files_sink (text)", "a_process_may_be_killed"),
}
"""These take seconds, and what they try is tried by others with the same writer."""


@pytest.mark.parametrize(("kind", "check"), promises(CASES))
def test_it_keeps_the_promise(kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(), [name for case, name in SLOW if CASES[case] is kind])
