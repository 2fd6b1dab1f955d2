"""Servers for the tests of a process: moto's, which keeps queues in memory, and ElasticMQ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from headgate.testing.servers.elasticmq import ElasticMqServer, running
from headgate.tests.support.kinesis_cases import ENVIRONMENT
from headgate.tests.support.skips import available
from headgate.tests.support.sqs_cases import Queues


@pytest.fixture(scope="session")
def queues() -> Iterator[Queues]:
    """The queues of a running server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield Queues(f"http://{host}:{port}")
    server.stop()


@pytest.fixture(scope="session")
def elasticmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticMqServer]:
    """A running server whose queues survive its death."""
    with available(running(tmp_path_factory.mktemp("sqs") / "server")) as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials of the environment, which the server does not look at."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
