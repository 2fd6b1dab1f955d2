"""The connectors of MQTT keep all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.testing.servers.mosquitto import MosquittoServer
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.queue_cases import QUEUES

pytestmark = TIMEOUT


@pytest.mark.parametrize(("kind", "check"), promises(QUEUES))
def test_it_keeps_the_promise(server: MosquittoServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(server))
