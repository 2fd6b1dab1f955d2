"""The connectors of Pulsar keep all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.testing.servers.pulsar import PulsarServer
from headgate.tests.support.conformance import SLOW, TIMEOUT, keep, promises
from headgate.tests.support.pulsar_cases import PULSAR

pytestmark = TIMEOUT
RESTARTS = ("a_server_may_die", "nothing_is_lost_if_the_server_dies")
"""A broker takes long to start. `test_kills.py` kills it once, while a job reads and writes."""


@pytest.mark.parametrize(("kind", "check"), promises(PULSAR))
def test_it_keeps_the_promise(server: PulsarServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(server), (*SLOW, *RESTARTS))
