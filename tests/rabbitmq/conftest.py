"""A broker for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.testing.servers.rabbitmq import RabbitServer, running
from headgate.tests.support.rabbitmq_cases import (
    SUPER_STREAM,
    RabbitStream,
    definitions,
    wait_for_partitions,
)
from headgate.tests.support.skips import available


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A running broker with a super stream.

    A broker makes the streams of its definitions after it has let its user in.
    """
    directory = tmp_path_factory.mktemp("rabbitmq")
    file = directory / "definitions.json"
    file.write_text(definitions(2))
    with available(running(directory / "server", f"load_definitions = {file}")) as running_server:
        wait_for_partitions(RabbitStream(running_server).direct_url, SUPER_STREAM, 2)
        yield running_server
