"""The connectors of SQS keep all promises of the conformance kit, on ElasticMQ, and on moto's server."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.testing.servers.elasticmq import ElasticMqServer
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.sqs_cases import SQS, SQS_ON_MOTO, Queues

pytestmark = TIMEOUT


@pytest.mark.parametrize(("kind", "check"), promises(SQS))
def test_it_keeps_the_promise(
    elasticmq: ElasticMqServer, kind: type[Any], check: Check[Any]
) -> None:
    keep(check, kind(Queues(elasticmq.url), elasticmq))


@pytest.mark.parametrize(("kind", "check"), promises(SQS_ON_MOTO))
def test_it_keeps_the_promise_on_moto(queues: Queues, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(queues))
