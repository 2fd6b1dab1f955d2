"""A server for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.testing.servers.nats import NatsServer, running
from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.support.skips import skip_or_fail
from headgate.tests.support.stream_cases import NATS_USERS


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A running server."""
    try:
        with running(tmp_path_factory.mktemp("nats") / "server", NATS_USERS) as running_server:
            yield running_server
    except NotAvailableError as error:
        skip_or_fail(str(error))
