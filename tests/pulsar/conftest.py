"""A broker for the tests of a process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from headgate.testing.servers.authority import Authority
from headgate.testing.servers.pulsar import PulsarServer, running
from headgate.tests.support.skips import available

_numbers = itertools.count()
NewTopic = Callable[..., str]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that has signed the certificate of the broker."""
    return Authority(tmp_path_factory.mktemp("pulsar") / "authority")


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[PulsarServer]:
    """A running broker. Messages of the namespace `public/short` are kept for subscriptions only."""
    directory = tmp_path_factory.mktemp("pulsar") / "server"
    certificate = authority.issue("127.0.0.1")
    with available(running(directory, certificate=certificate)) as broker:
        retention = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
        policies = {"replication_clusters": ["standalone"], "retention_policies": retention}
        broker.ask("PUT", "namespaces/public/short", policies)
        yield broker


@pytest.fixture
def new_topic(server: PulsarServer) -> NewTopic:
    """Creates topics."""

    def create(partitions: int = 0, namespace: str = "default") -> str:
        topic = f"public/{namespace}/topic-{next(_numbers)}"
        server.create(topic, partitions)
        return topic

    return create
