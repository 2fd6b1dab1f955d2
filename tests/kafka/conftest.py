"""A broker for the tests of a process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from headgate.testing.servers.kafka import KafkaServer, running
from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.support.skips import skip_or_fail

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A running broker."""
    try:
        with running(tmp_path_factory.mktemp("kafka") / "broker") as server:
            yield server
    except NotAvailableError as error:
        skip_or_fail(str(error))


@pytest.fixture
def new_topic(broker: KafkaServer) -> Callable[..., str]:
    """Creates a topic with a name of its own, and returns the name."""

    def create(partitions: int = 1, **config: str) -> str:
        name = f"topic-{next(_numbers)}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        broker.create_topic(name, partitions, settings)
        return name

    return create
