"""The connectors of RabbitMQ keep all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.testing.servers.rabbitmq import RabbitServer
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.rabbitmq_cases import RABBITMQ

pytestmark = TIMEOUT


@pytest.mark.parametrize(("kind", "check"), promises(RABBITMQ))
def test_it_keeps_the_promise(server: RabbitServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(server))
