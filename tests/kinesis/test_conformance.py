"""The sink and the source of Kinesis keep all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.testing.servers.kinesis import KinesisServer
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.kinesis_cases import KINESIS

pytestmark = TIMEOUT


@pytest.mark.parametrize(("kind", "check"), promises(KINESIS))
def test_it_keeps_the_promise(server: KinesisServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(server))
