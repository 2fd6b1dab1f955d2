"""A server for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.testing.servers.nats import NatsServer, running
from headgate.tests.support.skips import available
from headgate.tests.support.stream_cases import NATS_USERS


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A running server."""
    with available(
        running(tmp_path_factory.mktemp("nats") / "server", NATS_USERS)
    ) as running_server:
        yield running_server
