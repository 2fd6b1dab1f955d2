"""A broker for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.testing.servers.programs import NotAvailableError
from headgate.testing.servers.rabbitmq import RabbitServer, running
from headgate.tests.support.skips import skip_or_fail


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A running broker."""
    try:
        with running(tmp_path_factory.mktemp("rabbitmq") / "server") as running_server:
            yield running_server
    except NotAvailableError as error:
        skip_or_fail(str(error))
